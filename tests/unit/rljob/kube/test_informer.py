"""A copy that is never wrong for long: events, cut watches, lost history, silence, a server that was away."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rljob.kube import informer as module
from rljob.kube.informer import Informer, Key
from rljob.kube.resources import CONFIG_MAP, Object
from rljob.testing.kube import FakeKube

SELECTOR = "app=x"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.005)


@pytest.fixture
def fake() -> FakeKube:
    return FakeKube()


def config_map(name: str, value: str = "", app: str = "x") -> Object:
    metadata = {"name": name, "namespace": "ns", "labels": {"app": app}, "managedFields": [1]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"v": value}}


class Seen:
    """What `on_change` was told, and the copy that its words add up to."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, str]] = []
        self.copy: dict[str, Object] = {}

    def __call__(self, old: Object | None, new: Object | None) -> None:
        name = (new or old or {})["metadata"]["name"]
        kind = "gone" if new is None else "added" if old is None else "changed"
        assert (old is not None) == (name in self.copy)
        self.changes.append((kind, name))
        if new is None:
            del self.copy[name]
        else:
            self.copy[name] = new


@asynccontextmanager
async def watching(fake: FakeKube, **more: Any) -> AsyncIterator[tuple[Informer, Seen]]:
    seen = Seen()
    informer = Informer(
        fake.client(), CONFIG_MAP, "ns", label_selector=SELECTOR, on_change=seen, **more
    )
    task = asyncio.create_task(informer.run())
    try:
        async with asyncio.timeout(10):
            await informer.synced.wait()
        yield informer, seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def test_it_lists_then_follows(fake: FakeKube) -> None:
    fake.put(config_map("a"))
    fake.put(config_map("other", app="y"))
    async with watching(fake) as (informer, seen):
        assert list(informer.objects) == [Key("ns", "a")]
        fake.put(config_map("b"))
        fake.put(config_map("a", "2"))
        fake.remove("ConfigMap", "b")
        await until(lambda: len(seen.changes) == 4)
        assert seen.changes == [("added", "a"), ("added", "b"), ("changed", "a"), ("gone", "b")]
        assert informer.get("ns", "a")["data"] == {"v": "2"}
        assert "managedFields" not in informer.get("ns", "a")["metadata"]


async def test_a_cut_watch_goes_on_where_it_was_without_a_list(fake: FakeKube) -> None:
    async with watching(fake) as (informer, seen):
        await until(lambda: fake.watches == 1)
        fake.cut_watches()
        await until(lambda: len(fake.requests) == 3)
        fake.put(config_map("a"))
        await until(lambda: ("added", "a") in seen.changes)
        assert len(fake.requests) == 3
        assert informer.error == ""


async def test_after_410_everything_is_listed_and_what_vanished_is_reported(fake: FakeKube) -> None:
    fake.put(config_map("stays"))
    fake.put(config_map("goes"))
    async with watching(fake) as (_, seen):
        await until(lambda: fake.watches == 1)
        fake.down = True
        fake.cut_watches()
        await asyncio.sleep(0.02)
        fake.remove("ConfigMap", "goes")
        fake.put(config_map("comes"))
        fake.compact()
        fake.down = False
        await until(lambda: set(seen.copy) == {"stays", "comes"})
        assert ("gone", "goes") in seen.changes


async def test_an_object_of_the_same_name_is_another_object(fake: FakeKube) -> None:
    fake.put(config_map("a"))
    async with watching(fake) as (_, seen):
        await until(lambda: fake.watches == 1)
        fake.down = True
        fake.cut_watches()
        fake.remove("ConfigMap", "a")
        fake.put(config_map("a"))
        fake.compact()
        fake.down = False
        await until(lambda: len(seen.changes) == 3)
        assert seen.changes == [("added", "a"), ("gone", "a"), ("added", "a")]


async def test_a_silent_watch_is_given_up_and_everything_listed(fake: FakeKube) -> None:
    async with watching(fake, silence_seconds=0.1) as (informer, seen):
        fake.silent = True
        fake.put(config_map("a"))
        await until(lambda: "a" in seen.copy)
        assert informer.age_seconds() < 5


async def test_bookmarks_are_heard(fake: FakeKube) -> None:
    fake.bookmark_seconds = 0.01
    async with watching(fake, silence_seconds=0.2) as (informer, _):
        await asyncio.sleep(0.3)
        assert informer.age_seconds() < 0.1
        assert len([r for r in fake.requests if r[0] == "GET"]) == 2


async def test_a_server_that_is_away_is_an_error_that_passes(fake: FakeKube) -> None:
    async with watching(fake) as (informer, seen):
        fake.down = True
        fake.cut_watches()
        await until(lambda: "ConnectError" in informer.error)
        fake.down = False
        fake.put(config_map("a"))
        await until(lambda: "a" in seen.copy)
        await until(lambda: informer.error == "")


async def test_whatever_happens_the_copy_becomes_what_is_there(fake: FakeKube) -> None:
    chance = random.Random(7)
    async with watching(fake, silence_seconds=0.5) as (_, seen):
        for n in range(300):
            name = f"o{chance.randrange(8)}"
            act = chance.choice(["put", "put", "remove", "cut", "compact", "down", "up", "rest"])
            if act == "put":
                fake.put(config_map(name, str(n)))
            elif act == "remove" and fake.get("ConfigMap", name):
                fake.remove("ConfigMap", name)
            elif act == "cut":
                fake.cut_watches()
            elif act == "compact":
                fake.compact()
            elif act in ("down", "up"):
                fake.down = act == "down"
            else:
                await asyncio.sleep(0.002)
        fake.down = False
        there = {obj["metadata"]["name"]: obj["data"] for obj in fake.all("ConfigMap")}
        await until(lambda: {name: obj["data"] for name, obj in seen.copy.items()} == there)
