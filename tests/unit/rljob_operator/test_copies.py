import asyncio
import contextlib

import pytest

from rljob.kube import resources
from rljob.testing.clock import ManualClock, ScaledClock
from rljob.testing.kube import FakeKube
from rljob_operator.copies import Children, Jobs, informers, trim_child
from rljob_operator.health import Health
from rljob_operator.observed import ChildKey, Owner
from rljob_operator.watch_audit import WatchAudit, WatchSilentError, watch_ages
from tests.unit.rljob_operator.reconcile_bench import child

OWNER = Owner("ns", "j", "u-j")


def job(version, uid="u", **more):
    return {
        "kind": "RLJob",
        "metadata": {"name": "j", "uid": uid, "resourceVersion": version},
        **more,
    }


@pytest.fixture
def woken():
    return []


@pytest.fixture
def jobs(woken):
    return Jobs(woken.append)


async def until(true, seconds=60.0):
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.001)


def test_an_older_event_does_not_undo_what_we_wrote(jobs, woken):
    jobs.hear(None, job("5"))
    jobs.wrote(job("7", status=1))
    jobs.hear("MODIFIED", job("6"))
    assert jobs.get("u")["metadata"]["resourceVersion"] == "7"
    jobs.hear("MODIFIED", job("8"))
    assert jobs.get("u")["metadata"]["resourceVersion"] == "8"
    assert woken == ["u", "u"], "our own writes wake nobody"


def test_a_late_answer_does_not_bring_back_a_job_that_is_gone(jobs, woken):
    jobs.hear(None, job("5"))
    jobs.hear("DELETED", job("6"))
    jobs.wrote(job("7"))
    assert jobs.get("u") is None
    assert woken == ["u", "u"]


def test_two_jobs_of_one_name_are_two(jobs):
    jobs.hear(None, job("5", "first"))
    jobs.hear("ADDED", job("9", "second"))
    assert len(jobs.all()) == 2


def test_children_are_found_by_the_uid_of_their_job_and_wake_it(woken):
    children = Children(woken.append)
    mine, pod, stray = (
        child("Service", "s", OWNER),
        child("Pod", "p", OWNER),
        child("Pod", "x", OWNER),
    )
    stray["metadata"]["labels"] = {}
    for obj in (mine, pod, stray):
        children.change(None, obj)
    assert children.of("u-j") == {ChildKey("Service", "s"): mine}
    assert children.pods("u-j") == (pod,)
    assert woken == ["u-j", "u-j"]
    children.change(mine, None)
    assert not children.of("u-j")
    assert children.told("u-j")[ChildKey("Service", "s")].endswith("gone")
    children.forget("u-j")
    assert not children.told("u-j")


def test_of_managed_fields_only_an_autoscalers_are_kept():
    scaler = {
        "manager": "kube-controller-manager",
        "subresource": "scale",
        "fieldsV1": {"f:spec": {"f:replicas": {}}},
    }
    kept = child("StatefulSet", "s", OWNER)
    kept["metadata"]["managedFields"] = [{"manager": "rljob-operator"}, scaler]
    assert trim_child(kept)["metadata"]["managedFields"] == [scaler]
    other = child("Service", "s", OWNER)
    other["metadata"]["managedFields"] = [scaler]
    assert "managedFields" not in trim_child(other)["metadata"]


@pytest.fixture
async def watched(woken):
    """A server and copies that follow it."""
    fake = FakeKube()
    children = Children(woken.append)
    copies = informers(fake.client(), children, (resources.SERVICE, resources.JOB), ["ns"])
    for copy in copies:
        copy._clock = ScaledClock(50)
    tasks = [asyncio.create_task(copy.run()) for copy in copies]
    await asyncio.gather(*(copy.synced.wait() for copy in copies))
    yield fake, children, copies
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_copies_follow_the_server_through_cuts_and_lost_versions(watched):
    fake, children, _ = watched
    await until(lambda: fake.watches == 3)
    fake.put(child("Service", "a", OWNER))
    await until(lambda: len(children.of("u-j")) == 1)
    fake.cut_watches()
    fake.put(child("Service", "b", OWNER))
    await until(lambda: len(children.of("u-j")) == 2)
    fake.down = True
    fake.cut_watches()
    fake.remove("Service", "a")
    fake.put(child("Job", "c", OWNER))
    fake.compact()
    await asyncio.sleep(0.02)
    fake.down = False
    await until(lambda: set(children.of("u-j")) == {ChildKey("Service", "b"), ChildKey("Job", "c")})


async def test_objects_of_other_namespaces_and_managers_are_not_copied(watched):
    fake, children, _ = watched
    fake.put(child("Service", "a", Owner("elsewhere", "j", "u-j")))
    other = child("Service", "b", OWNER)
    other["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "rljob-sandbox-pool"
    fake.put(other)
    fake.put(child("Service", "c", OWNER))
    await until(lambda: children.of("u-j"))
    assert set(children.of("u-j")) == {ChildKey("Service", "c")}


async def test_a_watch_that_stays_silent_ends_the_process():
    fake, health, clock = FakeKube(), Health(), ManualClock()
    (copy, _) = informers(fake.client(), Children(print), (resources.JOB,), ["ns"])
    copy._clock, copy._heard = clock, 0.0
    audit = WatchAudit(fake.client(), Jobs(print), (), clock)
    task = asyncio.create_task(watch_ages([copy], audit, health, clock))
    await clock.advance(290)
    assert not task.done()
    await clock.advance(20)
    with pytest.raises(WatchSilentError, match="Pod is silent"):
        await task
    assert "silent" in health.trouble()


@pytest.fixture
def audited(jobs):
    fake = FakeKube()
    fake.put({"kind": "RLJob", "metadata": {"name": "j", "namespace": "ns"}, "spec": {}})
    return fake, WatchAudit(fake.client(), jobs, (), ManualClock())


async def test_kopf_that_tells_of_everything_passes_the_audit(audited, jobs):
    fake, audit = audited
    for step in range(3):
        fake.put(fake.get("RLJob", "j") | {"spec": {"step": step}})
        jobs.hear("MODIFIED", fake.get("RLJob", "j"))
        await audit.look()


async def test_kopf_that_only_lags_passes_and_what_it_missed_is_caught_up(audited, jobs, woken):
    fake, audit = audited
    await audit.look()
    assert len(woken) == 1
    jobs.hear("MODIFIED", fake.get("RLJob", "j"))
    fake.put(fake.get("RLJob", "j") | {"spec": {"step": 1}})
    await audit.look()
    assert jobs.all()[0]["spec"] == {"step": 1}


async def test_a_dead_watch_of_kopf_ends_the_process(audited):
    _, audit = audited
    await audit.look()
    with pytest.raises(WatchSilentError, match="did not tell of RLJob j"):
        await audit.look()


async def test_a_job_whose_end_was_not_told_is_gone_after_two_looks(audited, jobs):
    fake, audit = audited
    jobs.hear(None, fake.get("RLJob", "j"))
    fake.remove("RLJob", "j")
    await audit.look()
    assert jobs.all()
    await audit.look()
    assert not jobs.all()


async def test_an_api_server_that_is_away_is_no_proof(audited):
    fake, _ = audited
    clock = ScaledClock(10_000)
    audit = WatchAudit(fake.client(deadline_seconds=0.02), Jobs(print), (), clock)
    fake.down = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.3):
            await audit.run()
