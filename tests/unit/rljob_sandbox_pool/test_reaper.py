"""Pods whose SandboxPool is no more go, and no other."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from rljob.kube.resources import Object
from rljob.testing.kube import FakeKube, status
from rljob_sandbox_pool.reaper import GRACE_SECONDS, MAX_AT_ONCE, Reaper


class Clock:
    """Time that is set by hand."""

    seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


def pod(fake: FakeKube, name: str, owner: str = "gone", uid: str = "u-gone") -> Object:
    reference = {"kind": "SandboxPool", "name": owner, "uid": uid}
    owners = [reference] if owner else []
    metadata = {"name": name, "namespace": "ns", "ownerReferences": owners}
    return fake.put({"kind": "Pod", "metadata": metadata})


def pool(fake: FakeKube, name: str = "p") -> Object:
    return fake.put({"kind": "SandboxPool", "metadata": {"name": name, "namespace": "ns"}})


@pytest.fixture
async def fake() -> FakeKube:
    return FakeKube()


@pytest.fixture
async def make(fake: FakeKube) -> AsyncIterator[Callable[..., Reaper]]:
    client = fake.client()

    def made(mode: Any = "delete", *, leads: bool = True, known: set[str] | None = None) -> Reaper:
        def owners() -> set[str]:
            uids = {each["metadata"]["uid"] for each in fake.all("SandboxPool")}
            return uids if known is None else known

        return Reaper(
            client, mode, clock, pods=lambda: fake.all("Pod"), owners=owners, may=lambda: leads
        )

    yield made
    await client.aclose()


clock = Clock()


async def looks(reaper: Reaper) -> None:
    """Once when it is first seen, once when the grace is over."""
    for seconds in (0.0, GRACE_SECONDS - 1.0, GRACE_SECONDS + 1.0):
        clock.seconds = seconds
        await reaper.look()


def names(fake: FakeKube) -> set[str]:
    return {each["metadata"]["name"] for each in fake.all("Pod")}


async def test_only_pods_without_a_pool_go_and_only_after_a_while(
    fake: FakeKube, make: Callable[..., Reaper]
) -> None:
    uid = pool(fake)["metadata"]["uid"]
    pod(fake, "kept", "p", uid)
    pod(fake, "of-an-earlier-pool", "p", "another uid")
    pod(fake, "of-none", "")
    pod(fake, "lost")
    reaper = make()
    for seconds in (0.0, GRACE_SECONDS - 1.0):
        clock.seconds = seconds
        await reaper.look()
        assert len(names(fake)) == 4
    clock.seconds = GRACE_SECONDS + 1.0
    await reaper.look()
    assert names(fake) == {"kept"}


async def test_a_copy_that_lags_behind_ends_nobody(
    fake: FakeKube, make: Callable[..., Reaper]
) -> None:
    pod(fake, "kept", "p", pool(fake)["metadata"]["uid"])
    await looks(make(known=set()))
    assert names(fake) == {"kept"}


async def test_an_api_server_that_cannot_say_ends_nobody(
    fake: FakeKube, make: Callable[..., Reaper]
) -> None:
    def refuse(request: httpx.Request) -> httpx.Response | None:
        return status(403, "Forbidden") if "sandboxpools" in request.url.path else None

    fake.lasting.append(refuse)
    pod(fake, "a")
    await looks(make())
    assert names(fake) == {"a"}


async def test_a_dry_run_says_it_once_and_does_nothing(
    fake: FakeKube, make: Callable[..., Reaper], capsys: pytest.CaptureFixture[str]
) -> None:
    pod(fake, "a")
    reaper = make("dry-run")
    await looks(reaper)
    await reaper.look()
    assert names(fake) == {"a"}
    assert capsys.readouterr().out.count("mode=dry-run") == 1


async def test_who_does_not_lead_deletes_nothing(
    fake: FakeKube, make: Callable[..., Reaper]
) -> None:
    pod(fake, "a")
    await looks(make(leads=False))
    assert names(fake) == {"a"}


async def test_one_look_ends_a_bounded_number(fake: FakeKube, make: Callable[..., Reaper]) -> None:
    for number in range(MAX_AT_ONCE + 10):
        pod(fake, f"p{number}")
    reaper = make()
    await looks(reaper)
    assert len(names(fake)) == 10
    await reaper.look()
    assert names(fake) == set()


async def test_what_another_controller_made_is_left_to_it(
    fake: FakeKube, make: Callable[..., Reaper]
) -> None:
    """A person copied our labels into a Deployment: it would make the pod again, and we delete it again."""
    owners = [{"kind": "ReplicaSet", "name": "r", "uid": "r", "controller": True}]
    metadata = {"name": "copied", "namespace": "ns", "ownerReferences": owners}
    fake.put({"kind": "Pod", "metadata": metadata})
    pod(fake, "lost")
    await looks(make())
    assert names(fake) == {"copied"}
