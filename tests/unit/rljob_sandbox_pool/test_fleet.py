"""A fleet of pools: objects, claims, status, policies, lists."""

import asyncio
from typing import Any

import httpx
import pytest

from rljob import labels
from rljob.broker_token import job_token, pool_token
from rljob.kube import calls
from rljob.kube.resources import Object
from rljob.testing.kube import FakeKube, status
from rljob_sandbox_pool import fleet as fleet_module
from rljob_sandbox_pool import pod_marks
from rljob_sandbox_pool.fleet import Fleet
from rljob_sandbox_pool.leases import ClaimRequest, Owner
from rljob_sandbox_pool.pool import NoSandboxError
from rljob_sandbox_pool.runtimes import simulated
from tests.harness.fleet import (
    BROKER_KEY,
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


async def test_an_object_gets_its_pods_and_its_status(fake: FakeKube, kubelet: Kubelet) -> None:
    fake.put(sandbox_pool())
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 2)
        await until(lambda: (fake.get("SandboxPool", "p").get("status") or {}).get("ready") == 2)
        written = fake.get("SandboxPool", "p")["status"]
        assert [(c["type"], c["status"]) for c in written["conditions"]] == [
            ("Ready", "True"),
            ("Degraded", "False"),
        ]
        (owner,) = fake.all("Pod")[0]["metadata"]["ownerReferences"]
        assert owner["uid"] == fake.get("SandboxPool", "p")["metadata"]["uid"]


async def test_a_quiet_pool_writes_nothing(fake: FakeKube, kubelet: Kubelet) -> None:
    fake.put(sandbox_pool())
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 2)
        await until(lambda: (fake.get("SandboxPool", "p").get("status") or {}).get("ready") == 2)
        num = len(fake.writes)
        await asyncio.sleep(1)
        assert len(fake.writes) == num


async def test_a_pod_above_the_maximum_never_exists(fake: FakeKube, kubelet: Kubelet) -> None:
    fake.put(sandbox_pool(warm=3, max=3, recycle={"strategy": "recreate"}))
    async with leading(fake) as fleet:
        for round_number in range(10):
            names = [f"c{round_number}-{n}" for n in range(3)]
            await asyncio.gather(*(claim(fleet, name) for name in names))
            if round_number % 3 == 0:
                fake.cut_watches()
            await asyncio.gather(*(pool_of(fleet).release(name) for name in names))
        assert kubelet.most["p"] == 3


async def test_a_create_whose_answer_is_lost_makes_no_second_pod(
    fake: FakeKube, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "FIRST_PAUSE_SECONDS", 0.01)
    fake.lose_answer("POST", "pods")
    fake.put(sandbox_pool(warm=3, max=3))
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 3)
        assert len(fake.all("Pod")) == kubelet.most["p"] == 3


async def test_a_successor_keeps_claims_and_sandboxes(fake: FakeKube, kubelet: Kubelet) -> None:
    fake.put(sandbox_pool(job="j"))
    owner = Owner("worker-0", "boot-1")
    async with leading(fake) as fleet:
        first = await claim(fleet, "a", job="ns/j", owner=owner)
        await until(lambda: pool_of(fleet).counts().ready == 2)
    pods = {pod["metadata"]["name"] for pod in fake.all("Pod")}
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 2)
        assert pool_of(fleet).counts().claimed == 1
        assert {pod["metadata"]["name"] for pod in fake.all("Pod")} == pods
        assert await claim(fleet, "a", job="ns/j") == first
        assert not await pool_of(fleet).release("a", job="ns/other")
        assert await pool_of(fleet).release("a", job="ns/j")
        await until(lambda: pool_of(fleet).counts().claimed == 0)


async def test_a_restarted_owner_gives_back_what_it_held_before_the_broker_changed(
    fake: FakeKube, kubelet: Kubelet
) -> None:
    fake.put(sandbox_pool(job="j", warm=1, max=1))
    async with leading(fake) as fleet:
        await claim(fleet, "a", job="ns/j", owner=Owner("w", "1"))
    async with leading(fake) as fleet:
        await claim(fleet, "b", job="ns/j", owner=Owner("w", "2"))
        assert not await pool_of(fleet).release("a", job="ns/j")


async def test_a_successor_deletes_what_fails_the_challenge(
    fake: FakeKube, kubelet: Kubelet
) -> None:
    fake.put(sandbox_pool(warm=1, max=1))
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 1)
    (name,) = kubelet.guests
    kubelet.guests[name]._key = b"somebody else"
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 1)
        assert name not in {pod["metadata"]["name"] for pod in fake.all("Pod")}


async def test_a_claim_whose_time_is_over_ends_its_pod(fake: FakeKube, kubelet: Kubelet) -> None:
    fake.put(sandbox_pool(warm=1, max=1))
    async with leading(fake) as fleet:
        first = await claim(fleet, "a", ttl_seconds=0.2)
        second = await claim(fleet, "b")
        assert second["sandbox_id"] != first["sandbox_id"]


async def test_a_shared_sandbox_is_used_again_only_by_the_same_job(
    fake: FakeKube, kubelet: Kubelet
) -> None:
    fake.put(sandbox_pool(warm=1, max=1))
    async with leading(fake) as fleet:
        first = await claim(fleet, "a", job="ns/j")
        await pool_of(fleet).release("a", job="ns/j")
        again = await claim(fleet, "b", job="ns/j")
        await pool_of(fleet).release("b", job="ns/j")
        other = await claim(fleet, "c", job="ns/k")
        assert again["sandbox_id"] == first["sandbox_id"] != other["sandbox_id"]


async def test_an_object_that_goes_takes_its_pods(fake: FakeKube, kubelet: Kubelet) -> None:
    fake.put(sandbox_pool())
    async with leading(fake) as fleet:
        await claim(fleet, "a")
        fake.remove("SandboxPool", "p")
        await until(lambda: not fake.all("Pod") and not fleet.served)


async def test_another_spec_is_followed(fake: FakeKube, kubelet: Kubelet) -> None:
    made = fake.put(sandbox_pool())
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 2)
        before = {pod["metadata"]["name"] for pod in fake.all("Pod")}
        fake.put({**made, "spec": {"warm": 4, "max": 4}})
        await until(lambda: pool_of(fleet).counts().ready == 4)
        assert before <= {pod["metadata"]["name"] for pod in fake.all("Pod")}
        fake.put({**made, "spec": {"warm": 1, "max": 1}})
        await until(lambda: len(fake.all("Pod")) == 1)
        fake.put({**made, "spec": {"warm": 1, "max": 1, "limits": {"pids": 9}}})
        await until(
            lambda: (
                before.isdisjoint(pod["metadata"]["name"] for pod in fake.all("Pod"))
                and pool_of(fleet).counts().ready == 1
            )
        )


async def test_pods_that_no_node_takes_are_held_and_said(fake: FakeKube, kubelet: Kubelet) -> None:
    kubelet.unschedulable = True
    fake.put(sandbox_pool(warm=2, max=4))
    async with leading(fake) as fleet:
        await until(lambda: degraded(fake) == ("True", "CapacityLimited", "0/1 nodes: no cpu"))
        names = {pod["metadata"]["name"] for pod in fake.all("Pod")}
        with pytest.raises(NoSandboxError):
            await pool_of(fleet).claim(ClaimRequest(id="a", wait_seconds=0.5))
        assert {pod["metadata"]["name"] for pod in fake.all("Pod")} == names
        fake.put({**fake.get("SandboxPool", "p"), "spec": {"warm": 0, "max": 4}})
        await until(lambda: not fake.all("Pod"))


async def test_an_image_that_cannot_be_pulled_holds_only_itself(
    fake: FakeKube, kubelet: Kubelet
) -> None:
    kubelet.broken_images = {"bad:1"}
    fake.put(sandbox_pool(warm=4, max=8, images=[{"image": "bad:1"}, {"image": "good:1"}]))
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 2)
        words = ("True", "ImageUnavailable", "ErrImagePull: bad:1: not found")
        await until(lambda: degraded(fake) == words)
        answer = await claim(fleet, "a", image="good:1")
        assert answer["sandbox_id"] in kubelet.guests


async def test_images_are_kept_warm_by_weight(fake: FakeKube, kubelet: Kubelet) -> None:
    images = [{"image": "a:1", "weight": 3}, {"image": "b:1"}]
    fake.put(sandbox_pool(warm=4, max=8, images=images))
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 4)
        shown = sorted(pod["spec"]["containers"][0]["image"] for pod in fake.all("Pod"))
        assert shown == ["a:1", "a:1", "a:1", "b:1"]


async def test_a_quota_is_said_and_tried_again(fake: FakeKube, kubelet: Kubelet) -> None:
    quota = status(403, "Forbidden", 'pods "x" is forbidden: exceeded quota: q')
    fake.lasting.append(lambda r: quota if r.method == "POST" and "/pods" in r.url.path else None)
    fake.put(sandbox_pool(warm=1, max=1))
    async with leading(fake) as fleet:
        await until(lambda: (degraded(fake) or ("",))[0] == "True")
        assert "exceeded quota: q" in degraded(fake)[2]
        fake.lasting.clear()
        await until(lambda: pool_of(fleet).counts().ready == 1)


async def test_a_spec_that_makes_no_sense_is_said_with_its_path(
    fake: FakeKube, kubelet: Kubelet
) -> None:
    fake.put(sandbox_pool(warm="many"))
    async with leading(fake) as fleet:
        await until(lambda: degraded(fake) is not None)
        assert degraded(fake)[1] == "InvalidSpec"
        assert degraded(fake)[2].startswith("spec.warm: ")
        assert not fleet.served


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"writablePaths": ["/etc"]}, "spec.writablePaths[0]: /etc would cover"),
        ({"egress": "gateway"}, "spec.egress: gateway is for pools of an RLJob"),
        ({"egress": "custom", "egressRules": [{"too": []}]}, "spec.egressRules[0].too: unknown"),
    ],
)
async def test_what_only_the_pool_manager_can_judge_is_said(
    fake: FakeKube, kubelet: Kubelet, spec: dict[str, Any], path: str
) -> None:
    fake.put(sandbox_pool(**spec))
    async with leading(fake) as fleet:
        await until(lambda: degraded(fake) is not None)
        assert degraded(fake)[1] == "InvalidSpec"
        assert degraded(fake)[2].startswith(path)
        assert not fleet.served
    assert not fake.all("Pod")


async def test_a_missing_runtime_class_is_said_and_nothing_starts(
    fake: FakeKube, kubelet: Kubelet
) -> None:
    fake.put(sandbox_pool(runtimeClassName="gvisor"))
    async with leading(fake) as fleet:
        await until(lambda: (degraded(fake) or ("", ""))[1] == "RuntimeClassNotFound")
        assert "gvisor" in degraded(fake)[2]
        assert not fake.all("Pod")
        fake.put({"kind": "RuntimeClass", "metadata": {"name": "gvisor"}, "handler": "runsc"})
        await until(lambda: pool_of(fleet).counts().ready == 2)
        await until(lambda: degraded(fake)[0] == "False")


async def test_pods_show_who_holds_them_before_and_after_a_takeover(
    fake: FakeKube, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_marks, "SETTLE_SECONDS", 0.2)

    def shown() -> list[tuple[str, str, str]]:
        pods = [pod["metadata"] for pod in fake.all("Pod")]
        found = [(pod["labels"], pod["annotations"]) for pod in pods]
        return sorted(
            (tags[labels.STATE], tags.get(labels.HOLDER_JOB, ""), notes.get(labels.CLAIM, ""))
            for tags, notes in found
        )

    held = [("claimed", "j", "a"), ("ready", "", "")]
    fake.put(sandbox_pool(job="j", warm=1, max=2))
    async with leading(fake) as fleet:
        await claim(fleet, "a", job="ns/j")
        await until(lambda: shown() == held)
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().claimed == 1)
        writes = len([path for method, path in fake.writes if "/pods/" in path])
        await asyncio.sleep(0.5)
        assert shown() == held
        assert len([path for method, path in fake.writes if "/pods/" in path]) == writes
        await pool_of(fleet).release("a", job="ns/j")
        await until(lambda: all(state == "ready" for state, _, _ in shown()))


async def test_a_pools_token_opens_that_pool_alone(fake: FakeKube, kubelet: Kubelet) -> None:
    fake.put(sandbox_pool("swe", warm=0))
    fake.put(sandbox_pool("other", warm=0))
    fake.put(sandbox_pool("j-own", job="j", warm=0))
    async with leading(fake) as fleet:
        tenant = fleet.tenant(pool_token(BROKER_KEY.encode(), "ns", "swe"))
        assert set(tenant.pools) == {"swe"}
        assert not fleet.tenant(pool_token(BROKER_KEY.encode(), "ns", "j-own")).pools


async def test_simulated_pools_need_no_pods(fake: FakeKube, kubelet: Kubelet) -> None:
    fake.put(sandbox_pool(runtime="simulated", warm=3))
    async with leading(fake) as fleet:
        await claim(fleet, "a")
        assert fake.all("Pod") == []


async def test_simulated_sandboxes_of_all_pools_are_bounded(
    fake: FakeKube, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "MAX_LIVING", simulated.SimulatedSandbox.num_living + 5)
    fake.put(sandbox_pool("p", runtime="simulated", warm=3))
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet, "p").counts().ready == 3)
        fake.put(sandbox_pool("q", runtime="simulated", warm=300, max=300))
        await until(lambda: len(fleet.served) == 2 and pool_of(fleet, "q").counts().ready == 2)
        await asyncio.sleep(0.3)
        assert pool_of(fleet, "q").counts().total == 2
        fake.remove("SandboxPool", "p")
        await until(lambda: pool_of(fleet, "q").counts().ready == 5)


async def test_a_pool_without_the_name_of_a_jobs_own_is_not_taken_for_one(
    fake: FakeKube, kubelet: Kubelet
) -> None:
    """Anyone may write a label: without this a stranger's pool stands before the job's."""
    fake.put(sandbox_pool("j-shells", job="j", warm=0))
    fake.put(sandbox_pool("shells", job="j", warm=0))
    async with leading(fake) as fleet:
        tenant = fleet.tenant(job_token(BROKER_KEY.encode(), "ns", "j"))
        assert {name: pool.name for name, pool in tenant.pools.items()} == {"shells": "j-shells"}


async def test_a_create_that_arrived_and_was_refused_when_repeated_holds_its_place(
    fake: FakeKube, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one used the quota up, its answer was lost, and nobody watches."""
    monkeypatch.setattr(calls, "FIRST_PAUSE_SECONDS", 0.01)

    def full(request: httpx.Request) -> httpx.Response | None:
        is_create = request.method == "POST" and request.url.path.endswith("/pods")
        return status(403, "Forbidden", "exceeded quota") if is_create else None

    def unseen(request: httpx.Request) -> Exception | None:
        is_copy = "labelSelector" in request.url.params and request.url.path.endswith("/pods")
        return httpx.ConnectError("no") if is_copy else None

    async with leading(fake) as fleet:
        fake.lasting.append(unseen)
        fake.cut_watches()
        fake.lose_answer("POST", "pods")
        fake.faults.append(full)
        fake.put(sandbox_pool(warm=1, max=1))
        await until(lambda: kubelet.most.get("p") == 1)
        await asyncio.sleep(1)
        fake.lasting.clear()
        await until(lambda: pool_of(fleet).counts().ready == 1)
        assert kubelet.most["p"] == 1


async def test_a_deleted_pod_is_made_up_for(fake: FakeKube, kubelet: Kubelet) -> None:
    fake.put(sandbox_pool())
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 2)
        name = fake.all("Pod")[0]["metadata"]["name"]
        fake.remove("Pod", name)
        await until(lambda: len(fake.all("Pod")) == 2 and pool_of(fleet).counts().ready == 2)


async def test_who_sees_which_pools(fake: FakeKube, kubelet: Kubelet) -> None:
    fake.put(sandbox_pool("j-default", job="j", warm=0))
    fake.put(sandbox_pool("default", warm=0))
    fake.put(sandbox_pool("swe", warm=0))
    fake.put(sandbox_pool("k-own", job="k", warm=0))
    elsewhere = sandbox_pool("far", warm=0)
    elsewhere["metadata"]["namespace"] = "other"
    fake.put(elsewhere)
    async with leading(fake) as fleet:
        tenant = fleet.tenant(job_token(BROKER_KEY.encode(), "ns", "j"))
        assert tenant.job == "ns/j"
        assert set(tenant.pools) == {"default", "swe"}
        assert tenant.pools["default"] is pool_of(fleet, "j-default")
        assert fleet.tenant("ns/j:forged") is None
        assert set(fleet.tenant(job_token(BROKER_KEY.encode(), "other", "j")).pools) == {"far"}


async def test_an_api_server_that_is_away_for_a_while_costs_no_sandbox(
    fake: FakeKube, kubelet: Kubelet
) -> None:
    fake.put(sandbox_pool())
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 2)
        fake.down = True
        fake.cut_watches()
        answer = await claim(fleet, "a")
        assert await pool_of(fleet).release("a")
        await asyncio.sleep(0.5)
        fake.down = False
        assert answer["sandbox_id"] in {pod["metadata"]["name"] for pod in fake.all("Pod")}
        await until(lambda: len(fake.all("Pod")) <= 3)


async def test_sandboxes_of_a_pool_that_no_job_owns_start_only_behind_a_policy(
    fake: FakeKube, kubelet: Kubelet
) -> None:
    refused = [True]

    def fault(request: httpx.Request) -> httpx.Response | None:
        if refused[0] and "networkpolicies" in request.url.path:
            return status(403, "Forbidden", "networkpolicies: no")
        return None

    fake.lasting.append(fault)
    fake.put(sandbox_pool())
    async with leading(fake) as fleet:

        def degraded() -> Object:
            written = fake.get("SandboxPool", "p").get("status") or {"conditions": [{}, {}]}
            return written["conditions"][1]

        await until(lambda: degraded().get("reason") == "NotIsolated")
        assert "networkpolicies: no" in degraded()["message"]
        assert not fake.all("Pod")
        refused[0] = False
        await until(lambda: pool_of(fleet).counts().ready == 2)
        await until(lambda: degraded()["status"] == "False")
    (policy,) = fake.all("NetworkPolicy")
    selected = policy["spec"]["podSelector"]["matchLabels"].items()
    assert all(selected <= pod["metadata"]["labels"].items() for pod in fake.all("Pod"))
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["egress"] == []
    (owner,) = policy["metadata"]["ownerReferences"]
    assert owner["uid"] == fake.get("SandboxPool", "p")["metadata"]["uid"]


async def test_a_jobs_own_pool_is_left_to_the_policy_of_the_job(
    fake: FakeKube, kubelet: Kubelet
) -> None:
    pool = sandbox_pool(job="j")
    pool["metadata"]["ownerReferences"] = [{"kind": "RLJob", "name": "j", "uid": "u"}]
    fake.put(pool)
    async with leading(fake) as fleet:
        await until(lambda: pool_of(fleet).counts().ready == 2)
    assert not fake.all("NetworkPolicy")


async def test_a_list_that_cannot_be_taken_over_ends_the_start(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Fleet, "_add", broken)
    fake.put(sandbox_pool())
    with pytest.raises(RuntimeError, match="a fault of ours"):
        async with asyncio.timeout(15), leading(fake):
            pass


async def test_lists_that_are_refused_end_the_start_with_their_reason(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "SYNC_SECONDS", 0.5)
    fake.lasting.append(lambda request: status(403, "Forbidden", "pods: no"))
    with pytest.raises(TimeoutError, match="pods were not listed: pods: no"):
        async with leading(fake):
            pass


async def test_an_object_that_is_refused_again_under_its_old_name_is_told_so_again(
    fake: FakeKube, kubelet: Kubelet
) -> None:
    def reason() -> str:
        written = fake.get("SandboxPool", "p").get("status") or {"conditions": [{}]}
        return written["conditions"][0].get("reason", "")

    async with leading(fake):
        for _ in range(2):
            fake.put(sandbox_pool(warm=-1))
            await until(lambda: reason() == "InvalidSpec")
            fake.remove("SandboxPool", "p")
            await asyncio.sleep(0.2)
