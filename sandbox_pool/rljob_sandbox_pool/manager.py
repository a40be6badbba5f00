"""The pool manager in one piece: pools, their loops, the broker's server.

manifest ─► pools (keep_warm_loop each) ◄─ broker ◄─ workers            close ─► every sandbox ended
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rljob.api.rljob_types import SandboxPool
from rljob_sandbox_pool.broker import OneJob, make_server
from rljob_sandbox_pool.pool import Pool
from rljob_sandbox_pool.runtimes.base import Runtime
from rljob_sandbox_pool.runtimes.bubblewrap import BubblewrapRuntime
from rljob_sandbox_pool.runtimes.simulated import SimulatedRuntime


def make_runtimes(pools: Sequence[SandboxPool], work_dir: Path) -> dict[str, Runtime]:
    """One runtime of each kind that the pools name. Raises MachineError."""
    makers: dict[str, Callable[[], Runtime]] = {
        "bubblewrap": lambda: BubblewrapRuntime(work_dir),
        "simulated": SimulatedRuntime,
    }
    return {kind: makers[kind]() for kind in sorted({pool.runtime for pool in pools})}


class Manager:
    """Owns everything that lives in this process; use from one event loop."""

    def __init__(
        self,
        specs: Sequence[SandboxPool],
        runtimes: Mapping[str, Runtime],
        *,
        token: str,
        pool_key: str,
    ) -> None:
        self.pools = {
            spec.name: Pool(spec, runtimes[spec.runtime], pool_key, name=spec.name)
            for spec in specs
        }
        self._runtimes = runtimes
        self._server = make_server(OneJob(self.pools, token))
        self._loops: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int) -> str:
        """Bring up the broker and the pools' loops; returns the broker's address. Raises MachineError."""
        port = self._server.bind(host, port)
        await self._server.listen()
        self._loops = [asyncio.create_task(pool.keep_warm_loop()) for pool in self.pools.values()]
        return f"http://{host}:{port}"

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. A loop that ends is an error and ends this too."""
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait(
                {stopped, *self._loops}, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done - {stopped}:
                task.result()
        finally:
            stopped.cancel()

    def problem(self) -> str:
        """What is wrong now, in a sentence; empty: nothing."""
        return "; ".join(problem for pool in self.pools.values() if (problem := pool.problem()))

    async def close(self) -> None:
        """End every sandbox, and wait until nothing of them is left."""
        self._server.stop()
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))
        for runtime in self._runtimes.values():
            runtime.close()
