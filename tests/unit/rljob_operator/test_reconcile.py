import asyncio
import base64
import contextlib

import httpx
import pytest

from rljob import labels
from rljob.kube.errors import KubeError
from rljob.kube.lease import LeaseLostError
from rljob.kube.resources import RLJOB
from rljob.testing.kube import status
from rljob_operator.observed import ChildKey, Event, Owner, Shape
from rljob_operator.wake import GONE
from tests.unit.rljob_operator.reconcile_bench import Bench, child

ALL = {"ConfigMap/j-job", "Service/j-store", "StatefulSet/j-store", "Job/j-trainer-1"}


@pytest.fixture
def bench():
    return Bench()


def created(bench):
    """How often each path was written by a create."""
    return [path for method, path in bench.fake.writes if method == "POST" and "events" not in path]


def quota(request):
    if request.method == "POST" and "/jobs" in request.url.path:
        return status(403, "Forbidden", 'jobs "x" is forbidden: exceeded quota: q')
    return None


async def test_finalizer_comes_before_the_first_child_and_status_last(bench):
    await bench.go()
    assert bench.names() == ALL
    methods = [path.rsplit("/", 2)[-2:] for _, path in bench.fake.writes]
    assert methods[0] == ["rljobs", "j"]
    assert methods[-1] == ["j", "status"]
    assert bench.job["metadata"]["finalizers"] == [labels.FINALIZER]
    assert bench.job["status"]["phase"] == "Running"


async def test_a_second_pass_writes_nothing_nor_does_one_of_a_new_process(bench):
    await bench.go()
    writes = list(bench.fake.writes)
    await bench.go()
    bench.restart()
    await bench.go()
    assert bench.fake.writes == writes


async def test_copies_that_lag_make_nothing_twice(bench):
    bench.sync()
    for _ in range(3):
        await bench.reconciler.reconcile(bench.uid)
    assert len(created(bench)) == 1
    assert ChildKey("Job", "j-trainer-1") in bench.seen[1].children, "our own write is seen at once"


async def test_a_new_attempt_replaces_the_old_one(bench):
    await bench.go()
    bench.decide(shape=Shape(store=True, trainer_attempt=2))
    await bench.go()
    assert bench.names() == ALL - {"Job/j-trainer-1"} | {"Job/j-trainer-2"}


async def test_a_child_that_somebody_removed_or_changed_is_brought_back(bench):
    await bench.go()
    bench.sync()
    bench.fake.remove("Service", "j-store")
    live = bench.fake.get("StatefulSet", "j-store")
    bench.fake.put(live | {"spec": {"replicas": 7}})
    await bench.go()
    assert bench.names() == ALL
    assert bench.fake.get("StatefulSet", "j-store")["spec"]["replicas"] == 1


async def test_a_lost_answer_to_a_create_does_not_make_another(bench):
    bench.fake.lose_answer("POST", "jobs")
    await bench.go()
    await bench.go()
    assert len(created(bench)) == 1
    assert bench.names() == ALL


@pytest.mark.parametrize("step", range(9))
async def test_an_operator_that_dies_anywhere_is_succeeded_by_one_that_finishes(bench, step):
    """Killed at its step-th request that is no read; the new one has no memory."""
    left = step

    def kill(request):
        nonlocal left
        if request.method == "GET":
            return None
        left -= 1
        return asyncio.CancelledError() if left < 0 else None

    bench.fake.lasting.append(kill)
    bench.sync()
    with contextlib.suppress(asyncio.CancelledError):
        await bench.reconciler.reconcile(bench.uid)
    bench.fake.lasting.clear()
    before = bench.fake.get("Job", "j-trainer-1")
    bench.restart()
    await bench.go()
    assert bench.names() == ALL
    assert bench.job["status"]["phase"] == "Running"
    assert len(created(bench)) == 1
    assert before in (None, bench.fake.get("Job", "j-trainer-1"))


async def test_what_quota_refuses_is_a_warning_for_the_next_decision_and_is_held(bench):
    bench.fake.lasting.append(quota)
    assert await bench.go() == pytest.approx(2.0, abs=0.2)
    await bench.go()
    (warning,) = bench.seen[1].warnings
    assert warning["reason"] == "ApplyFailed"
    assert "exceeded quota" in warning["message"]
    assert warning["involvedObject"]["name"] == "j-trainer-1"
    tries = [path for method, path in bench.fake.requests if method == "POST" and "/jobs" in path]
    assert len(tries) == 1, "held"
    bench.fake.lasting.clear()
    await bench.clock.advance(2.5)
    await bench.go()
    await bench.go()
    assert not bench.seen[-1].warnings
    assert bench.names() == ALL


async def test_a_missing_verb_is_named(bench):
    bench.fake.denied.add(("create", "jobs"))
    await bench.go()
    await bench.go()
    (warning,) = bench.seen[-1].warnings
    assert warning["reason"] == "PermissionDenied"
    assert "may not create jobs.batch in namespace ns" in warning["message"]


async def test_an_object_of_somebody_else_is_left_alone_and_named(bench):
    theirs = bench.fake.put(
        {
            "kind": "ConfigMap",
            "metadata": {"name": "j-job", "namespace": "ns"},
            "spec": {"theirs": 1},
        }
    )
    await bench.go()
    await bench.go()
    assert bench.fake.get("ConfigMap", "j-job") == theirs
    (warning,) = bench.seen[-1].warnings
    assert warning["reason"] == "NameCollision"
    assert "ConfigMap j-job exists and does not belong to this RLJob" in warning["message"]


async def test_a_child_that_lost_its_labels_is_known_by_its_owner(bench):
    await bench.go()
    bench.sync()
    live = bench.fake.get("ConfigMap", "j-job")
    bench.fake.put(live | {"metadata": live["metadata"] | {"labels": {}}})
    await bench.go()
    await bench.go()
    assert bench.fake.get("ConfigMap", "j-job")["metadata"]["labels"][labels.JOB_UID] == bench.uid
    assert not bench.seen[-1].warnings


async def test_children_of_an_earlier_job_of_the_name_are_not_taken_over(bench):
    old = child("Job", "j-trainer-1", Owner("ns", "j", "old"))
    bench.fake.put(old)
    await bench.go()
    await bench.go()
    assert bench.fake.get("Job", "j-trainer-1")["metadata"]["ownerReferences"][0]["uid"] == "old"
    assert bench.seen[-1].warnings[0]["reason"] == "NameCollision"


async def test_an_api_server_that_is_away_ends_the_pass_and_the_next_one_finishes(bench):
    bench.restart(deadline_seconds=0.2)
    bench.sync()
    bench.fake.down = True
    with pytest.raises(KubeError):
        await bench.reconciler.reconcile(bench.uid)
    bench.fake.down = False
    await bench.go()
    assert bench.names() == ALL


async def test_a_conflict_on_the_finalizer_is_read_again_and_leaves_those_of_others(bench):
    bench.sync()
    theirs = bench.job["metadata"] | {"finalizers": ["other/one"]}
    bench.fake.put(bench.job | {"metadata": theirs})
    await bench.reconciler.reconcile(bench.uid)
    assert bench.job["metadata"]["finalizers"] == ["other/one", labels.FINALIZER]


async def test_throttled_calls_are_repeated(bench):
    for _ in range(2):
        answer = status(429, "TooManyRequests", **{"retry-after": "0"})
        bench.fake.faults.append(lambda request, a=answer: a if request.method == "PATCH" else None)
    await bench.go()
    assert bench.names() == ALL


async def test_numbers_wait_and_a_phase_does_not(bench):
    await bench.go()
    bench.decide(status=bench.decision.status | {"step": 1})
    assert await bench.go() == pytest.approx(3.0)
    assert "step" not in bench.job["status"]
    await bench.clock.advance(3.1)
    await bench.go()
    assert bench.job["status"]["step"] == 1
    bench.decide(status={"phase": "Failed", "observedGeneration": 1})
    await bench.go()
    assert bench.job["status"] == {"phase": "Failed", "observedGeneration": 1}


async def test_a_status_that_the_server_prunes_is_not_written_for_ever(bench):
    def prune(request):
        if request.url.path.endswith("/status"):
            return httpx.Response(200, json=bench.job)
        return None

    bench.fake.lasting.append(prune)
    bench.decide(status={"unknown": 1})
    for _ in range(4):
        await bench.go()
        await bench.clock.advance(5)
    written = [path for method, path in bench.fake.requests if path.endswith("/status")]
    assert len(written) == 1


async def test_events_are_posted_once_the_status_says_so_and_counted_up(bench):
    bench.decide(events=(Event("Normal", "Started", "it began"),))
    await bench.go()
    await bench.go()
    (event,) = bench.fake.all("Event")
    assert (event["reason"], event["count"]) == ("Started", 2)
    assert event["involvedObject"]["uid"] == bench.uid


async def test_an_event_that_cannot_be_posted_is_no_failure(bench):
    bench.decide(events=(Event("Normal", "Started", "it began"),))
    bench.fake.denied.add(("create", "events"))
    await bench.go()
    assert bench.names() == ALL


async def test_deletion_ends_with_the_finalizer_and_its_state_is_dropped(bench):
    await bench.go()
    await bench.client.delete(RLJOB, "j", "ns")
    bench.decide(shape=Shape(), remove_finalizer=True)
    await bench.go()
    assert bench.fake.get("RLJob", "j") is None
    assert not bench.names(), "dependents go with the owner"
    assert await bench.go() == GONE


async def test_a_job_of_others_finalizers_is_left_to_them(bench):
    bench.fake.put(bench.job | {"metadata": bench.job["metadata"] | {"finalizers": ["o/o"]}})
    await bench.client.delete(RLJOB, "j", "ns")
    assert await bench.go() is None
    assert not bench.seen


async def test_a_redis_that_cannot_be_cleared_holds_up_no_deletion():
    bench = Bench(store={"redis": {"url": "redis://127.0.0.1:1/0"}})
    await bench.go()
    await bench.client.delete(RLJOB, "j", "ns")
    bench.decide(shape=Shape(), destroy_ledger=True, remove_finalizer=True)
    bench.ledgers.destroy = _cannot
    await bench.go()
    assert bench.fake.get("RLJob", "j") is None
    assert bench.fake.all("Event")[0]["reason"] == "LedgerNotCleared"


async def test_a_job_that_could_not_be_placed_is_suspended_and_one_that_is_over_deleted(bench):
    bench.decide(suspend_because="no GPUs")
    await bench.go()
    assert bench.job["spec"]["suspend"] is True
    bench.decide(suspend_because="", delete_job=True)
    await bench.go()
    assert "deletionTimestamp" in bench.job["metadata"]


async def test_a_manifest_that_is_refused_has_no_children_and_a_status():
    bench = Bench(trainer={"backend": "simulated", "steps": "many"})
    bench.decide(shape=None, status={"phase": "Rejected"})
    await bench.go()
    assert not bench.names()
    assert bench.job["status"] == {"phase": "Rejected"}
    assert "finalizers" not in bench.job["metadata"]


async def test_a_webhook_that_is_down_is_named_and_the_status_is_written(bench):
    def no_webhook(request):
        text = 'Internal error occurred: failed calling webhook "mjob.kb.io": connection refused'
        jobs = request.method == "POST" and request.url.path.endswith("/jobs")
        return status(500, "InternalError", text) if jobs else None

    bench.restart(deadline_seconds=0.3)
    bench.fake.lasting.append(no_webhook)
    await bench.go()
    await bench.go()
    assert bench.job["status"]["phase"] == "Running"
    (warning,) = bench.seen[-1].warnings
    assert "mjob.kb.io" in warning["message"]
    bench.fake.lasting.clear()
    await bench.clock.advance(70)
    await bench.go()
    assert bench.names() == ALL


async def test_a_fault_in_rendering_is_named_and_holds_up_no_deletion(bench, monkeypatch):
    await bench.go()

    def broken(*_, **__):
        raise KeyError("metadata")

    monkeypatch.setattr(bench.reconciler, "_render", broken)
    await bench.go()
    await bench.go()
    assert "cannot be rendered (KeyError)" in bench.seen[-1].warnings[0]["message"]
    await bench.client.delete(RLJOB, "j", "ns")
    bench.decide(shape=Shape(), remove_finalizer=True)
    await bench.go()
    assert bench.fake.get("RLJob", "j") is None


async def test_a_secret_that_was_removed_comes_back_as_it_was(bench, monkeypatch):
    made = []

    def render(*_, secrets, **__):
        made.append(secrets)
        return []

    for _ in range(2):
        monkeypatch.setattr(bench.reconciler, "_render", render)
        await bench.go()
        bench.restart()
    assert made[0] == made[1], "the Valkey that runs still has the first password"


async def test_the_secret_of_a_redis_url_may_hold_what_is_no_text():
    bench = Bench(store={"redis": {"secretRef": {"name": "mine"}}})
    values = {"url": b"http://nonsense", "store.p12": b"\xff\xfe"}
    data = {key: base64.b64encode(value).decode() for key, value in values.items()}
    bench.fake.put(
        {"kind": "Secret", "metadata": {"name": "mine", "namespace": "ns"}, "data": data}
    )
    await bench.go()
    assert "spec.store.redis.url" in bench.seen[-1].ledger.error


async def test_a_replica_that_leads_no_more_writes_nothing(bench):
    def fence():
        raise LeaseLostError("lost")

    bench.restart(before_write=fence)
    with pytest.raises(LeaseLostError):
        await bench.go()
    assert not bench.fake.writes


async def test_warnings_are_read_only_while_something_waits(bench):
    bench.decide(shape=Shape(store=True))
    await bench.go()
    live = bench.fake.get("StatefulSet", "j-store")
    bench.fake.put(
        {
            "kind": "Event", "type": "Warning", "reason": "FailedCreate", "message": "m",
            "metadata": {"name": "e", "namespace": "ns"},
            "involvedObject": {"kind": "StatefulSet", "name": "j-store", "uid": live["metadata"]["uid"]},
        }
    )  # fmt: skip
    await bench.clock.advance(10)
    await bench.go()
    assert [warning["reason"] for warning in bench.seen[-1].warnings] == ["FailedCreate"]
    bench.fake.put(live | {"status": {"readyReplicas": 1}})
    await bench.clock.advance(10)
    looks = bench.fake.requests.count(("GET", "/api/v1/namespaces/ns/events"))
    await bench.go()
    assert not bench.seen[-1].warnings
    assert bench.fake.requests.count(("GET", "/api/v1/namespaces/ns/events")) == looks


async def _cannot(_address):
    return "no answer"
