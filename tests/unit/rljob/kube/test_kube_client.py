"""Calls to the API server: what is repeated, what is refused, what a deadline ends."""

import httpx
import pytest

from rljob.kube import calls
from rljob.kube import client as kube_client
from rljob.kube.client import KubeClient
from rljob.kube.config import KubeConfig
from rljob.kube.errors import (
    ConflictError,
    ExistsError,
    ForbiddenError,
    GoneError,
    InvalidError,
    KubeError,
    NotFoundError,
    error_of,
)
from rljob.kube.resources import CONFIG_MAP, POD, RLJOB, by_kind
from rljob.testing.kube import FakeKube, status


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "FIRST_PAUSE_SECONDS", 0.001)


def config_map(name: str = "a", **data: str) -> dict[str, object]:
    metadata = {"name": name, "namespace": "ns"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def test_paths() -> None:
    assert POD.path() == "/api/v1/pods"
    assert POD.path("ns", "a", "status") == "/api/v1/namespaces/ns/pods/a/status"
    assert RLJOB.path("ns") == "/apis/rljob.dev/v1alpha1/namespaces/ns/rljobs"
    assert by_kind("Node").path("ns", "n") == "/api/v1/nodes/n"
    assert by_kind("Event").group == "events.k8s.io"


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (404, "NotFound", NotFoundError),
        (409, "AlreadyExists", ExistsError),
        (409, "Conflict", ConflictError),
        (403, "Forbidden", ForbiddenError),
        (422, "Invalid", InvalidError),
        (410, "Expired", GoneError),
        (410, "Gone", GoneError),
        (500, "InternalError", KubeError),
    ],
)
def test_refusals_have_names(code: int, reason: str, kind: type[KubeError]) -> None:
    error = error_of(code, {"reason": reason, "message": "why", "details": {"kind": "pods"}})
    assert type(error) is kind
    assert (error.status, error.reason, str(error)) == (code, reason, "why")
    assert error.details == {"kind": "pods"}


def test_a_refusal_that_is_no_status_keeps_its_words() -> None:
    assert str(error_of(502, None, "bad gateway")) == "bad gateway"


async def test_what_was_written_is_read_changed_and_deleted() -> None:
    client = FakeKube().client()
    made = await client.create(CONFIG_MAP, config_map(k="1"), "ns")
    await client.patch(CONFIG_MAP, "a", {"data": {"k": "2"}}, "ns")
    assert (await client.get(CONFIG_MAP, "a", "ns"))["data"] == {"k": "2"}
    with pytest.raises(ExistsError):
        await client.create(CONFIG_MAP, config_map(), "ns")
    assert not await client.delete(CONFIG_MAP, "a", "ns", uid="another")
    assert await client.delete(CONFIG_MAP, "a", "ns", uid=made["metadata"]["uid"])
    assert not await client.delete(CONFIG_MAP, "a", "ns")
    assert await client.find(CONFIG_MAP, "a", "ns") is None


async def test_a_list_comes_in_pages_and_its_items_say_what_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kube_client, "PAGE", 2)
    fake = FakeKube()
    for name in "abcde":
        fake.put(config_map(name))
    items, version = await fake.client().list(CONFIG_MAP, "ns")
    assert [item["metadata"]["name"] for item in items] == list("abcde")
    assert {item["kind"] for item in items} == {"ConfigMap"}
    assert int(version) > 0
    assert len(fake.requests) == 3


async def test_a_page_that_is_too_old_starts_the_list_over_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kube_client, "PAGE", 2)
    fake = FakeKube()
    for name in "abc":
        fake.put(config_map(name))
    fake.faults.append(
        lambda request: status(410, "Expired") if "continue=2" in str(request.url) else None
    )
    assert len((await fake.client().list(CONFIG_MAP))[0]) == 3


@pytest.mark.parametrize("code", [429, 500, 503, 504])
async def test_what_time_may_cure_is_tried_again(code: int) -> None:
    fake = FakeKube()
    fake.faults += [lambda _: status(code, "Later", **{"retry-after": "0"})] * 3
    await fake.client().create(CONFIG_MAP, config_map(), "ns")
    assert len(fake.requests) == 4


async def test_tries_are_bounded() -> None:
    fake = FakeKube()
    fake.lasting.append(lambda _: status(503, "Unavailable", "try later"))
    with pytest.raises(KubeError, match="try later") as refused:
        await fake.client().get(CONFIG_MAP, "a", "ns")
    assert refused.value.status == 503
    assert len(fake.requests) == calls.MAX_ATTEMPTS


async def test_no_connection_is_tried_until_the_deadline() -> None:
    fake = FakeKube()
    fake.down = True
    with pytest.raises(KubeError, match="connection refused") as refused:
        await fake.client(deadline_seconds=0.2).get(CONFIG_MAP, "a", "ns")
    assert refused.value.status == 0
    assert len(fake.requests) > 1


async def test_a_create_whose_answer_was_lost_is_told_that_it_exists() -> None:
    fake = FakeKube()
    fake.lose_answer("POST", "configmaps")
    with pytest.raises(ExistsError):
        await fake.client().create(CONFIG_MAP, config_map(), "ns")
    assert len(fake.all("ConfigMap")) == 1


async def test_a_token_is_read_again_when_it_was_refused() -> None:
    tokens = iter(["old", "new"])
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        return httpx.Response(401) if seen == ["Bearer old"] else httpx.Response(200, json={})

    config = KubeConfig("https://fake", token=lambda: next(tokens))
    client = KubeClient(config, transport=httpx.MockTransport(answer))
    await client.get(CONFIG_MAP, "a", "ns")
    assert seen == ["Bearer old", "Bearer new"]


async def test_a_fence_ends_a_write_before_it_is_sent() -> None:
    def fence() -> None:
        raise RuntimeError("we lead no more")

    fake = FakeKube()
    client = fake.client(before_write=fence)
    with pytest.raises(RuntimeError, match="we lead no more"):
        await client.create(CONFIG_MAP, config_map(), "ns")
    assert fake.requests == []
    await client.list(CONFIG_MAP)


async def test_an_answer_that_is_not_json_is_an_error_with_its_beginning() -> None:
    fake = FakeKube()
    fake.faults.append(lambda _: httpx.Response(200, text="<html>"))
    with pytest.raises(KubeError, match="not JSON: b'<html>'"):
        await fake.client().get(CONFIG_MAP, "a", "ns")


@pytest.mark.parametrize(
    ("first", "is_doubtful"),
    [
        (None, False),
        (httpx.ConnectError("refused"), False),
        (status(429, "TooManyRequests"), False),
        (httpx.ReadError("reset"), True),
        (status(500, "InternalError"), True),
    ],
)
async def test_a_refusal_says_whether_an_earlier_attempt_may_have_arrived(
    first: httpx.Response | Exception | None, is_doubtful: bool
) -> None:
    fake = FakeKube()
    if first is not None:
        fake.faults.append(lambda request: first)
    fake.faults.append(lambda request: status(403, "Forbidden", "exceeded quota"))
    client = fake.client()
    with pytest.raises(ForbiddenError) as refused:
        await client.create(CONFIG_MAP, config_map(), "ns")
    assert refused.value.is_doubtful == is_doubtful
    await client.aclose()
