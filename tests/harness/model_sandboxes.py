"""Sandboxes that live in memory and in virtual time: the real guest behind a network and a runtime that misbehave.

    Pool ─► ModelRuntime ─► Box: pending ─► up ─► dying ─► gone          Pool ─► network ─► Guest of the Box

`World` is what is there, whichever pool manager looks at it. Each manager has a runtime and a network of its own; those
of a manager that was cut off do nothing more, and what it had sent may still arrive.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from rljob.api.rljob_types import SandboxPoolSpec
from rljob.errors import SandboxError
from rljob.http1 import HttpError
from rljob.http1_answer import Answer
from rljob_sandbox_pool.guest.app import Guest
from rljob_sandbox_pool.guest.wire import Request, Response
from rljob_sandbox_pool.runtimes.base import SandboxSpec, Trouble
from rljob_sandbox_pool.runtimes.simulated import SimulatedBackend

LATENCY_SECONDS = 0.002


class _Selector(selectors.SelectSelector):
    """Lets time pass where nothing else can happen."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found:
            assert timeout is not None, "everything waits for nothing"
            self.loop.now += max(0.0, timeout)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes at once. Also a `Clock`."""

    def __init__(self) -> None:
        self.now = 1000.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    monotonic = time

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass
class Faults:
    """What goes wrong from now on."""

    start_seconds: float = 0.1
    """From a start to an address."""
    end_seconds: float = 0.0
    """From a kill until nothing is left."""
    refused_starts: int = 0
    stillborn: int = 0
    """Starts whose sandbox dies before it has an address."""
    stillborn_images: set[str] = field(default_factory=set)
    no_room: bool = False
    """New sandboxes find no node."""
    broken_images: set[str] = field(default_factory=set)
    starts_at_once: int = 100


class Box:
    """One sandbox."""

    def __init__(self, world: "World", spec: SandboxSpec, revision: int) -> None:
        self.world, self.spec, self.id, self.image = world, spec, spec.id, spec.image
        self.revision = revision
        self.dead = self.gone = False
        self.is_foul = False
        """Its next reset must not verify."""
        self.silent_until = 0.0
        self.lose_answers_to: set[str] = set()
        self.dies_of: set[str] = set()
        """Calls that it answers with its last breath."""
        self.watchers: list[Callable[[], None]] = []
        self.backend = SimulatedBackend(1000, lambda: self.die("expired"))
        self.guest = Guest(spec.id, spec.key, self.backend)
        self.address_at = world.loop.now + world.faults.start_seconds
        world.boxes[self.id] = self
        if world.faults.stillborn > 0 or self.image in world.faults.stillborn_images:
            world.faults.stillborn -= 1
            self.die("stillborn")

    def trouble(self) -> Trouble | None:
        if self.address_at <= self.world.loop.now:
            return None
        if self.world.faults.no_room:
            return Trouble("CapacityLimited", "no node")
        if self.image in self.world.faults.broken_images:
            return Trouble("ImageUnavailable", f"no {self.image}")
        return None

    async def address(self) -> str:
        while self.trouble() or self.world.loop.now < self.address_at:
            if self.trouble():
                self.address_at = self.world.loop.now + self.world.faults.start_seconds + 0.5
            await asyncio.sleep(0.1)
        return f"http://{self.id}"

    def die(self, how: str) -> None:
        """Serve no more; a little later nothing is left."""
        if self.dead:
            return
        self.dead = True
        self.backend.stop()
        self.backend.end_claim_at(None)
        self.world.loop.call_later(self.world.faults.end_seconds, self._go)
        self._tell()

    def _go(self) -> None:
        self.gone = True
        del self.world.boxes[self.id]
        self._tell()

    def _tell(self) -> None:
        for watcher in list(self.watchers):
            watcher()

    def spoil(self) -> None:
        """Its resets leave something behind."""
        self.is_foul = True
        self.backend.reset = lambda done: done(["something is left"])

    def forget_key(self) -> None:
        """Somebody answers in its guest's place."""
        self.is_foul = True
        self.guest._key = b"another key"

    def ask(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Response:
        path, _, query = target.partition("?")
        found: list[Response] = []
        request = Request(method, path, dict(parse_qsl(query)), dict(headers), body)
        self.guest.handle(request, found.append)
        (response,) = found
        return response


class World:
    """All sandboxes of one pool, and what goes wrong with them."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.faults = loop, Faults()
        self.boxes: dict[str, Box] = {}
        """Those of which something is left."""
        self.in_flight: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        self.in_flight.add(task)
        task.add_done_callback(self.in_flight.discard)
        return task


class Link:
    """One pool manager's connection to the world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_cut = False

    def client(self, url: str, **_: Any) -> "_Client":
        """In place of `HttpClient`."""
        return _Client(self, url.removeprefix("http://"))


class _Client:
    def __init__(self, link: Link, box_id: str) -> None:
        self._link, self._box_id = link, box_id

    async def request(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str],
        timeout_seconds: float,
    ) -> Answer:
        # What was sent is heard, be it that nobody waits for the answer any more.
        arriving = self._link.world.spawn(self._arrive(method, target, headers, body))
        async with asyncio.timeout(timeout_seconds):
            response = await asyncio.shield(arriving)
            while self._link.is_cut:
                await asyncio.sleep(3600)
        if response is None:
            raise HttpError("connection refused")
        return Answer(response.status, {}, response.body)

    async def _arrive(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> Response | None:
        loop = self._link.world.loop
        await asyncio.sleep(LATENCY_SECONDS)
        box = self._link.world.boxes.get(self._box_id)
        while box is not None and not box.dead and loop.now < box.silent_until:
            await asyncio.sleep(box.silent_until - loop.now)
        if box is None or box.dead:
            return None
        response = box.ask(method, target, headers, body)
        path = target.partition("?")[0]
        if path in box.lose_answers_to:
            box.lose_answers_to.discard(path)
            return None
        await asyncio.sleep(LATENCY_SECONDS)
        if path in box.dies_of:
            box.die("its last breath")
        return response

    async def aclose(self) -> None:
        pass


class ModelSandbox:
    """One pool manager's view of a box. See `base.RunningSandbox`."""

    def __init__(self, link: Link, box: Box) -> None:
        loop = link.world.loop
        self.failed: asyncio.Future[str] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.box, self._link = box, link
        box.watchers.append(self._look)
        self._look()

    def _look(self) -> None:
        if self._link.is_cut:
            return
        if self.box.dead and not self.failed.done():
            self.failed.set_result("it died")
        if self.box.gone and not self.ended.done():
            self.ended.set_result("it died")

    async def locate(self) -> str:
        address = asyncio.ensure_future(self.box.address())
        try:
            await asyncio.wait({address, self.failed}, return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                raise SandboxError(f"sandbox {self.box.id}: it died")
            return address.result()
        finally:
            address.cancel()

    def trouble(self) -> Trouble | None:
        return self.box.trouble()

    def kill(self) -> None:
        if not self._link.is_cut:
            self.box.die("killed")


class ModelRuntime:
    """One pool manager's way to start boxes. See `base.Runtime`."""

    name = "model"
    max_starting = 4
    start_seconds = 30.0

    def __init__(self, link: Link, on_start: Callable[[], None]) -> None:
        self.link, self.revision = link, 0
        self._on_start = on_start

    def limits(self) -> dict[str, str]:
        return {}

    def images(self, spec: SandboxPoolSpec) -> dict[str, int]:
        return {each.image: each.weight for each in spec.images} or {"a": 1}

    def take_starts(self, wanted: int) -> int:
        return min(wanted, self.link.world.faults.starts_at_once)

    def start(self, spec: SandboxSpec) -> ModelSandbox:
        faults = self.link.world.faults
        if faults.refused_starts > 0:
            faults.refused_starts -= 1
            raise SandboxError("no memory")
        box = Box(self.link.world, spec, self.revision)
        self._on_start()
        return ModelSandbox(self.link, box)

    def adopt(self, box: Box) -> ModelSandbox:
        return ModelSandbox(self.link, box)

    def is_outdated(self, running: Any) -> bool:
        return running.box.revision != self.revision

    def close(self) -> None:
        pass
