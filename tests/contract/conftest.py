"""Every runtime of the sandbox pool behind a real broker and the real client, in this process."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rljob.api.rljob_types import SandboxPool
from rljob.sandbox_client import SandboxClient
from rljob_sandbox_pool.manager import Manager
from rljob_sandbox_pool.runtimes.base import Runtime
from rljob_sandbox_pool.runtimes.bubblewrap import BubblewrapRuntime
from rljob_sandbox_pool.runtimes.simulated import SimulatedRuntime

RUNTIMES: dict[str, Callable[[Path], Runtime]] = {
    "simulated": lambda _: SimulatedRuntime(),
    "bubblewrap": BubblewrapRuntime,
    "bubblewrap-user-namespace": lambda work: BubblewrapRuntime(
        work, own_uids=False, use_cgroups=False
    ),
}

PoolOf = Callable[..., Awaitable[SandboxClient]]


@asynccontextmanager
async def _serving(runtime: Runtime, **spec: Any) -> AsyncIterator[SandboxClient]:
    kind = runtime.name
    pool = SandboxPool.model_validate(
        {"name": "default", "warm": 1, "max": 4, "runtime": kind, **spec}
    )
    manager = Manager([pool], {kind: runtime}, token="the-token", pool_key="the-pool-key")
    address = await manager.start("127.0.0.1", 0)
    client = SandboxClient(address, "the-token", "contract")
    client.manager = manager
    try:
        yield client
    finally:
        await client.aclose()
        await manager.close()


@pytest.fixture(params=list(RUNTIMES))
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Runtime:
    """Each runtime in turn."""
    return RUNTIMES[request.param](tmp_path / "sandboxes")


@pytest.fixture
async def pool_of(runtime: Runtime) -> AsyncIterator[PoolOf]:
    """`client = await pool_of(warm=1, max=2)`: a pool of this runtime; ended with the test."""
    async with AsyncExitStack() as stack:
        yield lambda **spec: stack.enter_async_context(_serving(runtime, **spec))


@pytest.fixture
async def client(pool_of: PoolOf) -> SandboxClient:
    """A client of a small pool."""
    return await pool_of()
