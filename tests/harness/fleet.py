"""A fleet of pools on an API server in memory; its kubelet runs each pod as a guest on a loopback address."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rljob import labels
from rljob.kube.resources import Object
from rljob.testing.kube import FakeKube
from rljob_sandbox_pool import fleet as fleet_module
from rljob_sandbox_pool import pool_conditions, surroundings
from rljob_sandbox_pool.aserver import HttpServer
from rljob_sandbox_pool.cluster_config import PoolManagerConfig
from rljob_sandbox_pool.fleet import Fleet
from rljob_sandbox_pool.guest.app import Guest
from rljob_sandbox_pool.guest.pod import VARIABLE
from rljob_sandbox_pool.guest.wire import Request, Response
from rljob_sandbox_pool.leases import ClaimRequest
from rljob_sandbox_pool.pool import Pool
from rljob_sandbox_pool.runtimes.simulated import SimulatedBackend

BROKER_KEY = "the key of the broker"
CONFIG = PoolManagerConfig(guest_image="guest:1", sandbox_image="box:1", starts_per_second=1000)


class Kubelet:
    """Runs every pod that is created, unless told otherwise."""

    addresses = itertools.count(random.randrange(1 << 20))

    def __init__(self, fake: FakeKube) -> None:
        self.fake = fake
        self.servers: dict[str, HttpServer] = {}
        self.guests: dict[str, Guest] = {}
        self.unschedulable = False
        self.broken_images: set[str] = set()
        self.place: Callable[[Object], str] = lambda pod: "n"
        """The node of a pod."""
        self.bad_nodes: set[str] = set()
        """Nodes that cannot pull anything."""
        self.most: dict[str, int] = {}
        """Most pods at once, by pool."""
        self._store, self._gone = fake._store, fake._gone
        fake._store, fake._gone = self.store, self.gone

    def store(self, place: tuple[str, str, str, str], obj: Object) -> Object:
        is_new = place[1] == "pods" and place not in self.fake.objects
        stored = self._store(place, obj)
        if is_new:
            pool = stored["metadata"]["labels"][labels.POOL]
            num = sum(p["metadata"]["labels"][labels.POOL] == pool for p in self.fake.all("Pod"))
            self.most[pool] = max(self.most.get(pool, 0), num)
            asyncio.get_running_loop().call_soon(self.start, stored)
        return stored

    def gone(self, place: tuple[str, str, str, str]) -> None:
        if server := self.servers.pop(place[3], None):
            server.stop()
        self._gone(place)

    def start(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        if self.unschedulable:
            words = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes: no cpu"}
            self.say(pod, {"phase": "Pending", "conditions": [words]})
            return
        image = pod["spec"]["containers"][0]["image"]
        node = self.place(pod)
        pod = {**pod, "spec": {**pod["spec"], "nodeName": node}}
        if node in self.bad_nodes or image in self.broken_images:
            waiting = {"reason": "ImagePullBackOff", "message": "Back-off: ErrImagePull: not found"}
            self.say(pod, {"containerStatuses": [{"image": image, "state": {"waiting": waiting}}]})
            return
        number = next(self.addresses)
        address = f"127.{1 + number // 62500 % 250}.{1 + number // 250 % 250}.{1 + number % 250}"
        config = json.loads(pod["spec"]["containers"][0]["env"][0]["value"])
        assert pod["spec"]["containers"][0]["env"][0]["name"] == VARIABLE
        backend = SimulatedBackend(1000, lambda: self.fail(name))
        guest = Guest(config["id"], bytes.fromhex(config["key"]), backend)
        server = HttpServer(lambda request: handle(guest, request))
        server.bind(address, labels.GUEST_PORT)
        self.servers[name], self.guests[name] = server, guest
        asyncio.get_running_loop().create_task(server.listen())
        self.say(pod, {"phase": "Running", "podIP": address})

    def say(self, pod: Object, state: Object) -> None:
        if self.fake.get("Pod", pod["metadata"]["name"]):
            self.fake.put({**pod, "status": state})

    def fail(self, name: str) -> None:
        if (pod := self.fake.get("Pod", name)) is None:
            return
        ended = {"name": "sandbox", "state": {"terminated": {"exitCode": 3}}}
        self.servers.pop(name).stop()
        self.say(pod, {"phase": "Failed", "containerStatuses": [ended]})

    def close(self) -> None:
        for server in self.servers.values():
            server.stop()


async def handle(guest: Guest, request: Request) -> Response:
    reply: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
    guest.handle(request, lambda response: reply.done() or reply.set_result(response))
    return await reply


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "STATUS_SECONDS", 0.05)
    monkeypatch.setattr(surroundings, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(surroundings, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr(pool_conditions, "WRITE_SECONDS", 0.1)
    monkeypatch.setattr(pool_conditions, "COUNTS_SECONDS", 0.2)


@pytest.fixture
async def fake() -> FakeKube:
    return FakeKube()


@pytest.fixture
async def kubelet(fake: FakeKube) -> AsyncIterator[Kubelet]:
    kubelet = Kubelet(fake)
    yield kubelet
    kubelet.close()


@asynccontextmanager
async def leading(fake: FakeKube) -> AsyncIterator[Fleet]:
    """A pool manager for as long as it leads; its sandboxes stay."""
    client = fake.client()
    fleet = Fleet(client, CONFIG, broker_key=BROKER_KEY, pool_key="pool key")
    try:
        await fleet.start()
        running = asyncio.create_task(fleet.run())
        try:
            yield fleet
            assert not running.done(), running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    finally:
        await fleet.detach()
        await client.aclose()


def sandbox_pool(name: str = "p", *, job: str = "", **spec: Any) -> Object:
    metadata: Object = {"name": name, "namespace": "ns"}
    if job:
        metadata["labels"] = {labels.JOB: job}
    return {"kind": "SandboxPool", "metadata": metadata, "spec": {"warm": 2, "max": 4, **spec}}


def pool_of(fleet: Fleet, name: str = "p") -> Pool:
    return fleet.served["ns", name].pool


async def until(condition: Callable[[], bool], seconds: float = 15) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def claim(fleet: Fleet, claim_id: str, name: str = "p", **more: Any) -> dict[str, str]:
    request = ClaimRequest(id=claim_id, wait_seconds=10.0, **more)
    return json.loads(await pool_of(fleet, name).claim(request))


def degraded(fake: FakeKube, name: str = "p") -> tuple[str, str, str] | None:
    found = (fake.get("SandboxPool", name).get("status") or {}).get("conditions") or []
    condition = next((c for c in found if c["type"] == "Degraded"), None)
    return condition and (condition["status"], condition["reason"], condition["message"])
