"""One pod as a sandbox, where the API server's answers and its watch cross each other."""

import asyncio
from typing import Any

import pytest

from rljob.api.rljob_types import SandboxLimits, SandboxPoolSpec
from rljob.kube.resources import Object
from rljob.labels import GUEST_PORT
from rljob_sandbox_pool.runtimes import pod_status
from rljob_sandbox_pool.runtimes.base import SandboxSpec
from rljob_sandbox_pool.runtimes.pod_identity import Owner
from rljob_sandbox_pool.runtimes.pod_status import Patience
from rljob_sandbox_pool.runtimes.pod_template import PodConfig
from rljob_sandbox_pool.runtimes.pods import PodRuntime
from rljob_sandbox_pool.starts import MAX_DELETIONS, StartBucket


class Busy:
    """Takes a while over each deletion."""

    at_once = most = deleted = 0

    async def delete(self, *place: Any, **more: Any) -> bool:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0.001)
        self.at_once -= 1
        self.deleted += 1
        return False


class SlowToAnswer:
    """Creates a pod, lets the watch tell that it runs, and only then answers the create."""

    runtime: PodRuntime

    async def call(self, method: str, path: str, *, body: Object, **more: Any) -> Object:
        made = {**body, "metadata": {**body["metadata"], "uid": "u"}}
        self.runtime.on_pod(None, made)
        self.runtime.on_pod(made, {**made, "status": {"phase": "Running", "podIP": "10.0.0.9"}})
        await asyncio.sleep(0)
        return made


async def test_many_pods_that_go_at_once_leave_connections_for_creates() -> None:
    kube: Any = Busy()
    owner = Owner(namespace="ns", name="p", uid="pool")
    config = PodConfig(guest_image="guest:1", sandbox_image="box:1")
    runtime = PodRuntime(kube, owner, SandboxPoolSpec(), config, StartBucket())
    pods = [{"metadata": {"name": f"p-{n}", "namespace": "ns", "uid": str(n)}} for n in range(50)]
    boxes = [runtime.adopt(pod)[2] for pod in pods]
    for box in boxes:
        box.kill()
    async with asyncio.timeout(10):
        await asyncio.gather(*(box.ended for box in boxes))
    assert (kube.deleted, kube.most) == (50, MAX_DELETIONS)
    runtime.close()


async def test_a_create_that_is_answered_late_takes_nothing_back_that_the_watch_has_told() -> None:
    kube: Any = SlowToAnswer()
    owner = Owner(namespace="ns", name="p", uid="pool")
    config = PodConfig(guest_image="guest:1", sandbox_image="box:1")
    runtime = PodRuntime(kube, owner, SandboxPoolSpec(), config, StartBucket())
    kube.runtime = runtime
    limits = SandboxLimits()
    box = runtime.start(SandboxSpec(id="p-1", key=b"k" * 32, index=0, limits=limits, image="box:1"))
    await asyncio.sleep(0.01)
    async with asyncio.timeout(2):
        assert await box.locate() == f"http://10.0.0.9:{GUEST_PORT}"
    runtime.close()


async def test_a_pod_that_its_node_cannot_make_is_a_trouble_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kube: Any = SlowToAnswer()
    owner = Owner(namespace="ns", name="p", uid="pool")
    config = PodConfig(guest_image="guest:1", sandbox_image="box:1")
    runtime = PodRuntime(kube, owner, SandboxPoolSpec(), config, StartBucket())
    pod: Any = {"metadata": {"name": "p-1", "namespace": "ns", "uid": "u"}, "spec": {}}
    _, _, box = runtime.adopt(pod)
    monkeypatch.setattr(pod_status, "SANDBOX_SECONDS", 0.0)
    assert box.trouble() is None
    placed = {**pod, "spec": {"nodeName": "n"}}
    box.seen(placed)
    trouble = box.trouble()
    assert trouble is not None
    assert trouble.reason == "PodNotMade"
    box.seen({**placed, "status": {"podIP": "10.0.0.9"}})
    assert box.trouble() is None
    runtime.close()


PLACED: dict[str, Any] = {"spec": {"nodeName": "n"}}
FULL = {"status": {"conditions": [{"type": "PodScheduled", "status": "False", "message": "full"}]}}


def failing(reason: str) -> Object:
    waiting = {"state": {"waiting": {"reason": reason, "message": "m"}}, "image": "i"}
    return {**PLACED, "status": {"podIP": "10.0.0.9", "containerStatuses": [waiting]}}


@pytest.mark.parametrize(
    ("pod", "seconds", "words"),
    [
        ({}, 600.0, "not up after 600 s: it does not run"),
        (PLACED, 65.0, "a pod has a node and no address for 30 s; its events say why (node n)"),
        (failing("ImagePullBackOff"), 65.0, "ErrImagePull: i: m (node n)"),
        (failing("CreateContainerError"), 65.0, "CreateContainerError: m (node n)"),
        (failing("ContainerCreating"), 600.0, "not up after 600 s: it does not run"),
    ],
)
def test_how_long_a_pod_is_waited_for_that_is_not_up(
    pod: Object, seconds: float, words: str
) -> None:
    patience, now = Patience(0.0), 0.0
    found = ""
    while not found and now < 10_000:
        now += 5.0
        found = patience.over(pod, now)
    assert (now, found) == (seconds, words)


def test_a_pod_that_no_node_has_room_for_is_waited_for_without_end() -> None:
    patience = Patience(0.0)
    assert not any(patience.over(FULL, 5.0 * n) for n in range(10_000))
    placed_at = 50_000.0
    assert not patience.over(PLACED, placed_at)
    assert not patience.over({**PLACED, "status": {"podIP": "10.0.0.9"}}, placed_at + 500)
    assert patience.over({**PLACED, "status": {"podIP": "10.0.0.9"}}, placed_at + 600)


def test_a_trouble_that_passes_is_forgiven() -> None:
    patience = Patience(0.0)
    for start in (0.0, 100.0):
        assert not patience.over(failing("ErrImagePull"), start)
        assert not patience.over(failing("ErrImagePull"), start + 55)
        assert not patience.over({**PLACED, "status": {"podIP": "10.0.0.9"}}, start + 60)
