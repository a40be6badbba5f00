import pytest

from rljob.testing.clock import ManualClock
from rljob.testing.kube import FakeKube
from rljob_operator.events import MOST_WARNINGS, EventPoster, Warnings, event_object
from rljob_operator.observed import ChildKey, Event

JOB = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "j", "namespace": "ns", "uid": "u", "resourceVersion": "3"},
}
EVENT = Event("Warning", "Failed", "why")


def warning(name, *, kind="Pod", uid="", last="2026-01-01T00:00:00Z", namespace="ns", **more):
    involved = {"kind": kind, "name": name} | ({"uid": uid} if uid else {})
    return {
        "kind": "Event", "type": "Warning", "reason": "R", "message": name, "involvedObject": involved,
        "metadata": {"name": f"{name}.{uid}.{last}", "namespace": namespace}, "lastTimestamp": last,
    } | more  # fmt: skip


@pytest.fixture
def fake():
    return FakeKube()


def test_another_message_is_another_event_and_the_same_is_the_same():
    names = [event_object(JOB, event, "now")["metadata"]["name"] for event in (EVENT, EVENT)]
    assert names[0] == names[1]
    other = event_object(JOB, Event("Warning", "Failed", "else"), "now")["metadata"]["name"]
    assert other != names[0]
    assert (
        event_object(JOB | {"metadata": JOB["metadata"] | {"uid": "v"}}, EVENT, "now")["metadata"][
            "name"
        ]
        != other
    )


def test_a_long_message_is_cut():
    assert len(event_object(JOB, Event("Normal", "R", "x" * 5000), "now")["message"]) <= 1024


async def test_a_repeat_counts_up_with_its_time(fake):
    clock = ManualClock()
    poster = EventPoster(fake.client(), clock)
    await poster.post(JOB, [EVENT])
    first = fake.all("Event")[0]["lastTimestamp"]
    await clock.advance(60)
    await poster.post(JOB, [EVENT])
    (event,) = fake.all("Event")
    assert event["count"] == 2
    assert event["lastTimestamp"] > first


async def test_warnings_are_those_of_the_jobs_own_objects_oldest_first(fake):
    fake.put(warning("p1", uid="mine", last="2026-01-01T00:00:02Z"))
    fake.put(warning("p1", uid="mine", last="2026-01-01T00:00:01Z"))
    fake.put(warning("p1", uid="an earlier pod of the name"))
    fake.put(warning("s", kind="StatefulSet"))
    fake.put(warning("p1", uid="mine", type="Normal", last="2026-01-01T00:00:03Z"))
    warnings = Warnings(fake.client(), ManualClock())
    found = await warnings.of("ns", {"mine"}, {ChildKey("StatefulSet", "s"), ChildKey("Pod", "p1")})
    assert [event["message"] for event in found] == ["s", "p1", "p1"]
    assert found[1]["lastTimestamp"] < found[2]["lastTimestamp"]


async def test_one_look_serves_every_job_of_a_namespace_for_a_while(fake):
    clock = ManualClock()
    warnings = Warnings(fake.client(), clock)
    for _ in range(5):
        await warnings.of("ns", set(), set())
    assert len(fake.requests) == 1
    await clock.advance(9)
    await warnings.of("ns", set(), set())
    assert len(fake.requests) == 2


async def test_warnings_that_cannot_be_read_are_none(fake):
    fake.denied.add(("list", "events"))
    assert await Warnings(fake.client(), ManualClock()).of("ns", set(), set()) == ()


async def test_a_flood_of_warnings_is_cut_to_the_newest(fake):
    for number in range(MOST_WARNINGS + 10):
        fake.put(warning("p", uid="mine", last=f"2026-01-01T00:{number:02}:00Z"))
    found = await Warnings(fake.client(), ManualClock()).of("ns", {"mine"}, set())
    assert len(found) == MOST_WARNINGS
    assert found[-1]["lastTimestamp"] == f"2026-01-01T00:{MOST_WARNINGS + 9:02}:00Z"
