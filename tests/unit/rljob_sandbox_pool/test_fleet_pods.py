"""A fleet of pools when its pods do not do as they should: deleted, relabelled, on nodes that do not work."""

import asyncio
import itertools
import json

import httpx
import pytest

from rljob import labels
from rljob.kube import calls
from rljob.kube.resources import Object
from rljob.testing.kube import FakeKube, status
from rljob_sandbox_pool import members
from rljob_sandbox_pool.runtimes import pod_status, pods
from tests.harness.fleet import (
    Kubelet,
    claim,
    degraded,
    fake,
    impatient,
    kubelet,
    leading,
    pool_of,
    sandbox_pool,
    until,
)

__all__ = ["fake", "impatient", "kubelet"]


async def test_pods_go_with_their_pool_even_if_the_server_does_not_delete_at_once(
    fake: FakeKube, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "END_SECONDS", 0.1)
    monkeypatch.setattr(pods, "DELETE_AGAIN_SECONDS", 0.2)
    monkeypatch.setattr(calls, "MAX_ATTEMPTS", 1)
    fake.put(sandbox_pool())
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 2)

        def busy(request: httpx.Request) -> httpx.Response | None:
            return status(503, "Busy") if request.method == "DELETE" else None

        fake.lasting.append(busy)
        pool = fake.get("SandboxPool", "p")
        fake.put({**(pool or {}), "spec": {"warm": 0, "max": 1, "runtime": "simulated"}})
        await until(lambda: pool_of(fleet).spec.runtime == "simulated")
        await asyncio.sleep(0.5)
        fake.lasting.clear()
        await until(lambda: not fake.all("Pod") and not fleet._closing)


async def test_a_pod_that_came_and_went_while_nobody_watched_frees_its_place(
    fake: FakeKube, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "MIND_SECONDS", 0.2)
    kubelet.unschedulable = True

    def unseen(request: httpx.Request) -> Exception | None:
        is_copy = "labelSelector" in request.url.params and request.url.path.endswith("/pods")
        return httpx.ConnectError("no") if is_copy else None

    async with leading(fake) as fleet:
        fake.lasting.append(unseen)
        fake.cut_watches()
        fake.put(sandbox_pool(warm=1, max=1))
        await until(lambda: len(fake.all("Pod")) == 1)
        await asyncio.sleep(0.5)
        assert pool_of(fleet).counts().starting == 1
        fake.remove("Pod", fake.all("Pod")[0]["metadata"]["name"])
        kubelet.unschedulable = False
        fake.compact()
        fake.lasting.clear()
        await until(lambda: pool_of(fleet).counts().ready == 1)
        assert len(fake.all("Pod")) == kubelet.most["p"] == 1


@pytest.mark.parametrize("lost", [labels.COMPONENT, labels.POOL])
async def test_a_pod_that_loses_a_label_goes_before_another_takes_its_place(
    fake: FakeKube, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setattr(pods, "DELETE_AGAIN_SECONDS", 0.2)
    fake.put(sandbox_pool(warm=1, max=1))
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 1)
        (pod,) = fake.all("Pod")
        metadata, refused = pod["metadata"], [True]

        def busy(request: httpx.Request) -> httpx.Response | None:
            return status(503, "Busy") if request.method == "DELETE" and refused[0] else None

        monkeypatch.setattr(calls, "MAX_ATTEMPTS", 1)
        fake.lasting.append(busy)
        kept = {name: value for name, value in metadata["labels"].items() if name != lost}
        fake.put({**pod, "metadata": {**metadata, "labels": kept}})
        await until(lambda: pool_of(fleet).counts().ending == 1)
        await asyncio.sleep(0.5)
        assert [each["metadata"]["name"] for each in fake.all("Pod")] == [metadata["name"]]
        refused[0] = False
        await until(lambda: pool_of(fleet).counts().ready == 1)
        (other,) = fake.all("Pod")
        assert other["metadata"]["name"] != metadata["name"]


async def test_pods_of_a_pool_that_needs_none_any_more_go_whoever_made_them(
    fake: FakeKube, kubelet: Kubelet
) -> None:
    made = fake.put(sandbox_pool(warm=2, max=4))
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 2)
    fake.put({**made, "spec": {"warm": 1, "max": 4, "runtime": "simulated"}})
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 1 and not fake.all("Pod"))


async def test_a_pool_comes_up_on_the_nodes_that_work(
    fake: FakeKube, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "MIND_SECONDS", 0.1)
    monkeypatch.setattr(pod_status, "NODE_SECONDS", 0.3)
    names = itertools.cycle(["bad", "good", "good"])
    kubelet.bad_nodes, kubelet.place = {"bad"}, lambda pod: next(names)
    fake.put(sandbox_pool(warm=4, max=8))
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 4)
        await asyncio.gather(*(claim(fleet, f"c{n}") for n in range(6)))
        await until(lambda: pool_of(fleet).counts().ready == 2)


async def test_a_node_that_failed_a_pod_is_the_last_choice_for_others(
    fake: FakeKube, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "MIND_SECONDS", 0.1)
    monkeypatch.setattr(pod_status, "NODE_SECONDS", 0.3)

    def emptiest(pod: Object) -> str:
        affinity = pod["spec"].get("affinity") or {"nodeAffinity": {}}
        return "good" if '"bad"' in json.dumps(affinity["nodeAffinity"]) else "bad"

    kubelet.bad_nodes, kubelet.place = {"bad"}, emptiest
    fake.put(sandbox_pool(warm=3, max=3))
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 3)
        assert pool_of(fleet).status().failed_total <= 3


async def test_where_no_node_works_one_pod_at_a_time_is_tried_ever_more_rarely(
    fake: FakeKube, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "MIND_SECONDS", 0.05)
    monkeypatch.setattr(pod_status, "NODE_SECONDS", 0.1)
    kubelet.bad_nodes = {"n"}
    fake.put(sandbox_pool(warm=3, max=4))
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).status().failed_total >= 3)
        await until(lambda: not fake.all("Pod"))
        kubelet.most.clear()
        before = pool_of(fleet).status().started_total
        await asyncio.sleep(3)
        # after 0.25 s, 0.5 s, 1 s, 2 s, …
        assert pool_of(fleet).status().started_total - before <= 4
        assert kubelet.most["p"] == 1
        await until(lambda: (degraded(fake) or ("", ""))[1] == "StartsFailing")
        assert "ErrImagePull: box:1: not found (node n)" in degraded(fake)[2]
        kubelet.bad_nodes.clear()
        await until(lambda: pool_of(fleet).counts().ready == 3)
