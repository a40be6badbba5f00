"""What pods show of their sandboxes: late, seldom, and never in anybody's way."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob import labels
from rljob.kube.resources import Object
from rljob.testing.kube import FakeKube, status
from rljob_sandbox_pool import pod_marks
from rljob_sandbox_pool.member import Member, MemberState
from rljob_sandbox_pool.pod_marks import Marks, PodMarks, marks_of, marks_on
from rljob_sandbox_pool.runtimes.pod_identity import Owner

OWNER = Owner(namespace="ns", name="p", uid="pool-uid")


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return 1_800_000_000.0 + self.seconds

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        await asyncio.sleep(0)


def member(name: str, state: MemberState, **more: Any) -> Member:
    found = object.__new__(Member)
    fields = {"job": "", "claim_id": "", "owner": "", "evidence": []}
    found.__dict__.update({"id": name, "state": state, **fields, **more})
    return found


def pod(fake: FakeKube, name: str) -> Object:
    tags = {labels.STATE: "starting", "mine": "kept"}
    return fake.put({"kind": "Pod", "metadata": {"name": name, "namespace": "ns", "labels": tags}})


def shown(fake: FakeKube, name: str) -> Marks:
    return marks_on(fake.get("Pod", name) or {})


@pytest.fixture
async def fake() -> FakeKube:
    return FakeKube()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def marks(fake: FakeKube, clock: Clock) -> AsyncIterator[PodMarks]:
    client = fake.client()
    writer = PodMarks(client, clock)
    yield writer
    await client.aclose()


async def run(writer: PodMarks, clock: Clock, seconds: float) -> None:
    end = clock.seconds + seconds
    loop = asyncio.create_task(writer.loop())
    while clock.seconds < end:
        await asyncio.sleep(0)
        assert not loop.done(), loop.result()
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


def patches(fake: FakeKube) -> list[str]:
    return [path for method, path in fake.writes if method == "PATCH"]


async def test_who_holds_what_is_shown_once_it_has_been_so_for_a_while(
    fake: FakeKube, marks: PodMarks, clock: Clock
) -> None:
    marks.seen(pod(fake, "a"))
    held = {"job": "ns/j", "claim_id": "c-1", "owner": "worker-0"}
    marks.note(OWNER, member("a", MemberState.CLAIMED, **held))
    await run(marks, clock, 1.5)
    assert patches(fake) == []
    await run(marks, clock, 2.0)
    assert shown(fake, "a") == Marks(state="claimed", holder_job="j", claim="c-1", owner="worker-0")
    assert fake.get("Pod", "a")["metadata"]["labels"]["mine"] == "kept"
    marks.note(OWNER, member("a", MemberState.READY, job="ns/j"))
    await run(marks, clock, 3.0)
    assert shown(fake, "a") == Marks(state="ready")
    assert labels.HOLDER_JOB not in fake.get("Pod", "a")["metadata"]["labels"]


async def test_what_changes_quickly_is_never_written(
    fake: FakeKube, marks: PodMarks, clock: Clock
) -> None:
    marks.seen(pod(fake, "a"))
    for _ in range(20):
        for state in (MemberState.CLAIMED, MemberState.RESETTING, MemberState.READY):
            marks.note(OWNER, member("a", state))
        await run(marks, clock, 1.0)
    assert patches(fake) == []
    await run(marks, clock, 3.0)
    assert len(patches(fake)) == 1


async def test_all_pools_together_write_ten_times_a_second(
    fake: FakeKube, marks: PodMarks, clock: Clock
) -> None:
    for number in range(100):
        marks.seen(pod(fake, f"p{number}"))
        marks.note(OWNER, member(f"p{number}", MemberState.READY))
    await run(marks, clock, pod_marks.SETTLE_SECONDS + 3.0)
    assert 25 <= len(patches(fake)) <= 32
    await run(marks, clock, 10.0)
    assert len(patches(fake)) == 100


async def test_what_a_pod_shows_already_is_not_written_again(
    fake: FakeKube, marks: PodMarks, clock: Clock
) -> None:
    marks.seen(pod(fake, "a"))
    marks.note(OWNER, member("a", MemberState.STARTING))
    await run(marks, clock, 5.0)
    assert patches(fake) == []


async def test_a_pod_that_is_gone_is_left(fake: FakeKube, marks: PodMarks, clock: Clock) -> None:
    marks.note(OWNER, member("gone", MemberState.READY))
    await run(marks, clock, 10.0)
    assert sum(method == "PATCH" for method, _ in fake.requests) == 1
    marks.note(OWNER, member("ending", MemberState.READY))
    marks.note(OWNER, member("ending", MemberState.ENDING))
    await run(marks, clock, 10.0)
    assert sum(method == "PATCH" for method, _ in fake.requests) == 1


async def test_an_api_server_that_refuses_is_asked_a_few_times(
    fake: FakeKube, marks: PodMarks, clock: Clock
) -> None:
    def refuse(request: httpx.Request) -> httpx.Response | None:
        return status(403, "Forbidden", "no") if request.method == "PATCH" else None

    fake.lasting.append(refuse)
    marks.seen(pod(fake, "a"))
    marks.note(OWNER, member("a", MemberState.READY))
    await run(marks, clock, 60.0)
    assert sum(method == "PATCH" for method, _ in fake.requests) == pod_marks.MAX_TRIES


async def test_a_quarantined_sandbox_shows_its_evidence_and_is_told_on_its_pool(
    fake: FakeKube, marks: PodMarks, clock: Clock
) -> None:
    marks.seen(pod(fake, "a"))
    evidence = ["port 8000 is open", "ü" * 2000]
    marks.note(OWNER, member("a", MemberState.QUARANTINED, job="ns/j", evidence=evidence))
    await run(marks, clock, 5.0)
    found = shown(fake, "a")
    assert (found.state, found.holder_job) == ("quarantined", "j")
    assert found.evidence.startswith("port 8000 is open; ü")
    assert len(found.evidence.encode()) <= 1024
    (event,) = fake.all("Event")
    assert event["reason"] == "Quarantined"
    assert event["involvedObject"]["uid"] == "pool-uid"
    assert len(event["message"]) <= 1024
    marks.note(OWNER, member("a", MemberState.QUARANTINED, job="ns/j", evidence=evidence))
    await run(marks, clock, 5.0)
    assert len(fake.all("Event")) == 1


NOTES = st.tuples(
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["READY", "CLAIMED", "RESETTING", "QUARANTINED", "gone"]),
    st.sampled_from([0.0, 0.5, 2.5]),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(NOTES, max_size=25))
def test_in_the_end_every_pod_that_is_left_shows_what_it_is(
    notes: list[tuple[str, str, float]],
) -> None:
    asyncio.run(end_up(notes))


async def end_up(notes: list[tuple[str, str, float]]) -> None:
    fake, clock = FakeKube(), Clock()
    client = fake.client()
    marks, last = PodMarks(client, clock), {name: Marks(state="starting") for name in "abc"}
    for name in last:
        marks.seen(pod(fake, name))
    for name, state, pause in notes:
        if name in last and state == "gone":
            marks.forget(fake.get("Pod", name) or {})
            fake.remove("Pod", name)
            del last[name]
        elif name in last:
            held = member(name, MemberState[state], job="ns/j", claim_id=str(pause))
            marks.note(OWNER, held)
            last[name] = marks_of(held)
        await run(marks, clock, pause)
    await run(marks, clock, 20.0)
    assert {name: shown(fake, name) for name in last} == last
    assert len(patches(fake)) <= len(notes)
    await client.aclose()


@pytest.mark.parametrize(
    ("job", "safe"), [("ns/j", "j"), ("ns/@swe.x", "swe.x"), ("", ""), ("ns/-a b-", "a-b")]
)
def test_a_holder_is_a_labels_value(job: str, safe: str) -> None:
    assert marks_of(member("a", MemberState.CLAIMED, job=job)).holder_job == safe


async def test_a_pool_whose_sandboxes_are_all_put_aside_makes_an_event_every_ten_seconds(
    fake: FakeKube, marks: PodMarks, clock: Clock
) -> None:
    for nth in range(30):
        marks.note(OWNER, member(f"a{nth}", MemberState.QUARANTINED, evidence=["unclean"]))
        await run(marks, clock, 1.0)
    assert len(fake.all("Event")) == 3
    other = Owner(namespace="ns", name="q", uid="other-uid")
    marks.note(other, member("b", MemberState.QUARANTINED, evidence=["unclean"]))
    await run(marks, clock, 1.0)
    assert len(fake.all("Event")) == 4
