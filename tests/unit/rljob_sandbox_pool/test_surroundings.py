"""What a pool has beside its pods: made, changed, removed, and what keeps it from starting any."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from rljob import broker_token, labels
from rljob.api.rljob_types import SandboxPoolSpec
from rljob.clock import SystemClock
from rljob.kube.resources import Object
from rljob.testing.kube import FakeKube, status
from rljob_sandbox_pool import pool_objects, surroundings
from rljob_sandbox_pool.cluster_config import PoolManagerConfig
from rljob_sandbox_pool.runtimes.pod_identity import Owner
from rljob_sandbox_pool.surroundings import Surroundings

KEY = b"the key of the broker"
CONFIG = PoolManagerConfig(
    guest_image="guest:1", sandbox_image="box:1", broker_url="http://broker", dns_namespace="dns"
)


class World:
    """Pools, and what looks after them."""

    def __init__(self, fake: FakeKube) -> None:
        self.fake, self.client = fake, fake.client()
        self.around = Surroundings(self.client, CONFIG, KEY, SystemClock())
        self.pools: dict[str, tuple[Object, SandboxPoolSpec]] = {}
        self._loop = asyncio.create_task(self.around.loop(self.pools.values))

    def put(self, name: str = "p", *, job: str = "", **spec: Any) -> str:
        metadata: Object = {"name": name, "namespace": "ns", "labels": {labels.JOB: job}}
        if job:
            metadata["ownerReferences"] = [{"kind": "RLJob", "name": job, "uid": "ju"}]
        obj = self.fake.put({"kind": "SandboxPool", "metadata": metadata, "spec": spec})
        self.pools[name] = obj, SandboxPoolSpec.model_validate(spec)
        self.around.expect(*self.pools[name])
        return obj["metadata"]["uid"]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                assert not self._loop.done(), self._loop.result()
                await asyncio.sleep(0.01)

    async def aclose(self) -> None:
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        await self.client.aclose()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(surroundings, "RETRY_SECONDS", 0.1)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World(FakeKube())
    yield made
    await made.aclose()


async def test_a_runtime_class_that_is_not_there_keeps_its_pool_from_starting(world: World) -> None:
    uid, other = world.put(runtimeClassName="gvisor"), world.put("other")
    await world.until(lambda: world.around.trouble(uid))
    trouble = world.around.trouble(uid)
    assert trouble is not None
    assert trouble.reason == "RuntimeClassNotFound"
    assert "gvisor" in trouble.message
    assert not world.around.may_start(uid)
    await world.until(lambda: world.around.may_start(other))
    world.fake.put({"kind": "RuntimeClass", "metadata": {"name": "gvisor"}, "handler": "runsc"})
    await world.until(lambda: world.around.may_start(uid))
    assert world.around.trouble(uid) is None


async def test_another_runtime_class_is_looked_for_before_the_next_start(world: World) -> None:
    uid = world.put()
    await world.until(lambda: world.around.may_start(uid))
    assert world.put(runtimeClassName="kata") == uid
    assert not world.around.may_start(uid)
    await world.until(lambda: world.around.trouble(uid))


async def test_where_runtime_classes_cannot_be_looked_at_the_pods_are_tried(world: World) -> None:
    def refuse(request: httpx.Request) -> httpx.Response | None:
        return status(403, "Forbidden") if "runtimeclasses" in request.url.path else None

    world.fake.lasting.append(refuse)
    uid = world.put(runtimeClassName="gvisor")
    await world.until(lambda: world.around.may_start(uid))


async def test_a_pool_without_a_job_has_a_policy_that_follows_its_spec(world: World) -> None:
    def egress() -> Any:
        policies = world.fake.all("NetworkPolicy")
        return policies[0]["spec"].get("egress", []) if policies else None

    uid = world.put()
    await world.until(lambda: world.around.may_start(uid))
    assert egress() == []
    world.put(egress="dns")
    await world.until(lambda: len(egress()) == 1)
    (peer,) = egress()[0]["to"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "dns"}
    world.put(egress="public")
    await world.until(lambda: len(egress()) == 2)
    world.put()
    await world.until(lambda: egress() == [])


async def test_a_pool_without_a_job_has_a_secret_that_opens_it_alone(world: World) -> None:
    world.put("shared")
    world.put("j-own", job="j")
    await world.until(lambda: world.fake.all("Secret"))
    await asyncio.sleep(0.1)
    (secret,) = world.fake.all("Secret")
    assert secret["metadata"]["name"] == "shared-claims"
    assert secret["metadata"]["ownerReferences"][0]["kind"] == "SandboxPool"
    data = {key: base64.b64decode(text).decode() for key, text in secret["data"].items()}
    assert data["url"] == "http://broker"
    found = broker_token.job_of(KEY, data["token"])
    assert found is not None
    assert (found.namespace, found.pool) == ("ns", "shared")


async def test_a_secret_that_cannot_be_made_keeps_nobody_from_starting(world: World) -> None:
    def refuse(request: httpx.Request) -> httpx.Response | None:
        return status(422, "Invalid", "type") if "secrets" in request.url.path else None

    world.fake.lasting.append(refuse)
    uid = world.put()
    await world.until(lambda: world.around.may_start(uid))
    world.fake.lasting.clear()
    await world.until(lambda: world.fake.all("Secret"))
    assert world.around.trouble(uid) is None


async def test_images_are_pulled_by_one_daemon_set_for_as_long_as_that_is_wanted(
    world: World,
) -> None:
    images = [{"image": "a:1"}, {"image": "b:1"}]
    pod = {"nodeSelector": {"disk": "ssd"}, "imagePullSecrets": ["s"]}
    world.put("j-own", job="j", prePull=True, images=images, pod=pod)
    await world.until(lambda: world.fake.all("DaemonSet"))
    (made,) = world.fake.all("DaemonSet")
    template = made["spec"]["template"]
    selected = made["spec"]["selector"]["matchLabels"]
    assert selected.items() <= template["metadata"]["labels"].items()
    assert template["metadata"]["labels"][labels.COMPONENT] != "sandbox"
    spec = template["spec"]
    assert [each["image"] for each in spec["initContainers"]] == ["guest:1", "a:1", "b:1"]
    assert spec["nodeSelector"] == {"disk": "ssd"}
    assert spec["imagePullSecrets"] == [{"name": "s"}]
    assert spec["automountServiceAccountToken"] is False
    for container in (*spec["initContainers"], *spec["containers"]):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "/bin/sh" not in container["command"]
    world.put("j-own", job="j", images=images)
    await world.until(lambda: not world.fake.all("DaemonSet"))


async def test_somebody_elses_daemon_set_is_left(world: World) -> None:
    theirs = {"kind": "DaemonSet", "metadata": {"name": "p-pre-pull", "namespace": "ns"}}
    world.fake.put(theirs)
    uid = world.put()
    await world.until(lambda: world.around.may_start(uid))
    await asyncio.sleep(0.2)
    assert len(world.fake.all("DaemonSet")) == 1


async def test_what_is_there_is_not_written_again(world: World) -> None:
    uid = world.put(prePull=True)
    await world.until(lambda: world.fake.all("DaemonSet") and world.around.may_start(uid))
    writes = len(world.fake.writes)
    await asyncio.sleep(0.3)
    assert len(world.fake.writes) == writes


async def test_a_pool_that_goes_is_forgotten(world: World) -> None:
    uid = world.put()
    await world.until(lambda: world.around.may_start(uid))
    world.pools.clear()
    world.around.forget(uid)
    assert not world.around.may_start(uid)


async def test_a_policy_that_is_narrowed_is_waited_for(world: World) -> None:
    uid = world.put(egress="public")
    await world.until(lambda: world.around.may_start(uid))
    world.fake.denied.add(("patch", "networkpolicies"))
    world.put(egress="public", warm=2)
    assert world.around.may_start(uid)
    world.put(egress="none")
    assert not world.around.may_start(uid)
    await world.until(lambda: world.around.trouble(uid))
    asked = len(world.fake.requests)
    await asyncio.sleep(0.25)
    assert len(world.fake.requests) - asked < 5  # every RETRY_SECONDS, not at every look
    assert world.around.trouble(uid)
    assert not world.around.may_start(uid)
    world.fake.denied.clear()
    await world.until(lambda: world.around.may_start(uid))
    (policy,) = world.fake.all("NetworkPolicy")
    assert policy["spec"]["egress"] == []


def test_pools_whose_names_begin_alike_pull_ahead_by_themselves() -> None:
    begin = "a" * 60
    names = {
        pool_objects.pre_pull_name(Owner(namespace="ns", name=begin + end, uid="u"))
        for end in ("x", "y", "", "x" * 100, "x" * 99 + "y")
    }
    assert len(names) == 5
    assert all(len(name) <= 63 for name in names)
