"""Callers that ask for nonsense, hang up, dawdle or flood, and sandboxes that die or freeze: the pool as a whole.

Every test ends with the pool back at its target and nothing left behind; `serving` looks.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rljob.errors import SandboxError
from rljob.http1 import Answer, HttpClient
from rljob.sandbox_client import ClaimedSandbox, SandboxClient
from rljob_sandbox_pool import member
from tests.harness.local_sandboxes import children_of, guests, serving, wrappers

BROKER = {"authorization": "Bearer t"}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes with a uid each need root")


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[SandboxClient]:
    async with serving(tmp_path) as client:
        yield client


@pytest.fixture
async def box(client: SandboxClient) -> AsyncIterator[ClaimedSandbox]:
    async with client.claim("p", timeout=30) as box:
        yield box


async def ask(url: str, method: str, target: str, body: object = b"", **headers: str) -> Answer:
    """One request on a connection of its own."""
    http = HttpClient(url)
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        return await http.request(
            method, target, sent, headers={n.replace("_", "-"): v for n, v in headers.items()}
        )
    finally:
        await http.aclose()


def words(answer: Answer) -> tuple[int, str, str]:
    """Status, error and message; the message is one line."""
    refusal = json.loads(answer.body)
    assert "\n" not in refusal["message"]
    return answer.status, refusal["error"], refusal["message"]


# ── nonsense ──

NONSENSE: dict[str, tuple[object, int, str]] = {
    "not JSON": (b"{", 400, "not JSON"),
    "not an object": ([], 400, "not a JSON object"),
    "deep": (b"[" * 100_000, 400, "not JSON"),
    "no id": ({"pool": "p"}, 400, "request_id"),
    "a long id": ({"request_id": "x" * 65, "pool": "p"}, 400, "request_id"),
    "a number as id": ({"request_id": 1, "pool": "p"}, 400, "request_id"),
    "an unknown pool": ({"pool": "q"}, 404, "no pool 'q'; there are p"),
    "no pool": ({}, 400, "pool"),
    "a time to live in words": ({"pool": "p", "ttl_seconds": "long"}, 400, "ttl_seconds"),
    "a time to live of NaN": ({"pool": "p", "ttl_seconds": float("nan")}, 400, "ttl_seconds"),
    "a wait that is a bool": ({"pool": "p", "wait_seconds": True}, 400, "wait_seconds"),
    "an idle time in words": ({"pool": "p", "idle_seconds": "long"}, 400, "idle_seconds"),
    "a priority in words": ({"pool": "p", "priority": "first"}, 400, "priority"),
    "an env that is a list": ({"pool": "p", "env": ["A=1"]}, 400, "env"),
    "an env of numbers": ({"pool": "p", "env": {"A": 1}}, 400, "env"),
    "a name with =": ({"pool": "p", "env": {"A=": "1"}}, 400, "env"),
    "a NUL": ({"pool": "p", "env": {"A": "\0"}}, 400, "env"),
    "a long env": ({"pool": "p", "env": {"A": "x" * 65_536}}, 400, "at most 65536"),
    "a long owner": ({"pool": "p", "owner": "x" * 129}, 400, "owner"),
}


async def test_a_claim_that_makes_no_sense_is_one_line_and_takes_nothing(
    client: SandboxClient,
) -> None:
    for name, (body, status, part) in NONSENSE.items():
        asked = body
        if isinstance(body, dict) and "id" not in name.split():
            asked = {"request_id": name, **body}
        answer = await ask(client.url, "POST", "/v1/claims", asked, **BROKER)
        code, _, message = words(answer)
        assert (code, part in message) == (status, True), (name, message)
    (status,) = await client.pools()
    assert status.claimed == 0


@pytest.mark.parametrize("number", [-1, 0, 1e308, -1e308, 10**30])
async def test_impossible_counts_are_brought_into_their_bounds(
    client: SandboxClient, number: float
) -> None:
    body = {"request_id": "a", "pool": "p", "wait_seconds": 20, "ttl_seconds": number}
    answer = await ask(client.url, "POST", "/v1/claims", body | {"priority": number}, **BROKER)
    assert answer.status == 200, answer.body
    assert await client.release_claim("a")


async def test_an_environment_that_no_process_can_have_is_the_commands_error(
    client: SandboxClient,
) -> None:
    async with client.claim("p", timeout=30, env={"A": "\N{BALLOON}" * 65_000}) as box:
        result = await box.exec("true")
        assert result.exit_code in (126, 127)
        assert "too long" in result.stderr
        assert await box.healthy()


# ── who is not allowed ──


async def test_a_claims_token_opens_its_own_sandbox_only(tmp_path: Path, capfd: Any) -> None:
    async with serving(tmp_path, warm=2, max=2) as client:
        mine, other = [await client.acquire("p", timeout=30) for _ in range(2)]
        token = mine.headers["authorization"]
        forged = [
            mine.headers,
            other.headers | {"authorization": token},
            other.headers | {"x-rljob-claim": mine.claim_id},
            other.headers | {"authorization": ""},
            other.headers | {"authorization": "Bearer " + "x" * 8000},
            other.headers | {"x-rljob-boot": ""},
            {"x-rljob-pool": "pool-key"},
            {},
        ]
        for headers in forged:
            http = HttpClient(other.url)
            for method, target in (("POST", "/exec"), ("GET", "/files?path=x"), ("POST", "/reset")):
                answer = await http.request(method, target, b"{}", headers=headers)
                assert answer.status in (401, 409), (headers, target)
            await http.aclose()
        assert (await other.exec("echo untouched")).stdout == "untouched\n"
        for box in (mine, other):
            await box.release()
    logged = "".join(capfd.readouterr())
    assert token.removeprefix("Bearer ") not in logged
    assert "pool-key" not in logged


@pytest.mark.parametrize("token", ["", "Bearer", "Bearer ", "Bearer x", "Basic t", "bearer t", "t"])
async def test_a_broker_opens_to_its_token_alone(client: SandboxClient, token: str) -> None:
    for method, target in (
        ("POST", "/v1/claims"),
        ("GET", "/v1/pools"),
        ("DELETE", "/v1/claims/a"),
    ):
        answer = await ask(client.url, method, target, b"{}", authorization=token)
        assert words(answer)[:2] == (401, "unauthorized")


# ── too much ──


async def test_a_huge_body_is_refused_before_it_is_read(box: ClaimedSandbox) -> None:
    host, port = box.url.removeprefix("http://").split(":")
    for length in ("40000000", "99999999999", "999999999999999999999", "-1", "0x10", "1 2"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"PUT /files HTTP/1.1\r\ncontent-length: {length}\r\n\r\n".encode())
        head = await asyncio.wait_for(reader.read(12), 10)
        assert head in (b"HTTP/1.1 413", b"HTTP/1.1 400"), length
        assert await reader.read() != b""  # the rest of the answer, and then the guest hangs up
        writer.close()
    assert (await box.exec("echo alive")).stdout == "alive\n"


async def test_large_bodies_are_not_kept_for_whoever_has_no_claim(box: ClaimedSandbox) -> None:
    host, port = box.url.removeprefix("http://").split(":")
    (guest,) = guests()
    before = resident_mb(guest)
    strangers = [await asyncio.open_connection(host, int(port)) for _ in range(12)]

    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(b"PUT /files HTTP/1.1\r\ncontent-length: 30000000\r\n\r\n" + b"x" * 20_000_000)
        with contextlib.suppress(OSError):
            await asyncio.wait_for(writer.drain(), 10)

    await asyncio.gather(*(send(writer) for _, writer in strangers))
    assert (await box.exec("echo alive")).stdout == "alive\n"
    assert resident_mb(guest) < before + 40
    for _, writer in strangers:
        writer.transport.abort()
    await box.write_file("/dev/shm/mine", b"x" * 3_000_000)


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def test_a_thousand_connections_to_a_guest_do_not_stop_its_owner(
    box: ClaimedSandbox,
) -> None:
    host, port = box.url.removeprefix("http://").split(":")
    await box.exec("true")
    (guest,) = guests()
    before = len(list(Path(f"/proc/{guest}/fd").iterdir()))
    held = []
    for _ in range(1000):
        with contextlib.suppress(OSError):
            held.append(await asyncio.open_connection(host, int(port)))
    for _, writer in held:
        writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
    assert (await box.exec("echo alive")).stdout == "alive\n"
    answers = await asyncio.gather(*(reader.read(12) for reader, _ in held), return_exceptions=True)
    assert answers.count(b"HTTP/1.1 200") > 10
    for _, writer in held:
        writer.close()
    for _ in range(100):
        if len(list(Path(f"/proc/{guest}/fd").iterdir())) <= before:
            break
        await asyncio.sleep(0.05)
    assert len(list(Path(f"/proc/{guest}/fd").iterdir())) <= before
    assert (await box.exec("echo alive")).stdout == "alive\n"


async def test_a_thousand_claims_at_once_are_each_answered(tmp_path: Path) -> None:
    async with serving(tmp_path, warm=2, max=4) as client:

        async def claim(number: int) -> int:
            body = {"request_id": f"c{number}", "pool": "p", "wait_seconds": 1}
            answer = await ask(client.url, "POST", "/v1/claims", body, **BROKER)
            if answer.status == 200:
                assert await client.release_claim(f"c{number}")
            return answer.status

        statuses = await asyncio.gather(*(claim(number) for number in range(1000)))
        assert set(statuses) <= {200, 429, 503}
        assert statuses.count(200) >= 4


async def test_slow_and_half_open_clients_keep_nobody_waiting(tmp_path: Path) -> None:
    async with serving(tmp_path, warm=2, max=2) as client:
        host, port = client.url.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
        begun = (
            b"POST /v1/claims HTTP/1.1\r\nauthorization: Bearer t\r\ncontent-length: 999\r\n\r\n"
        )

        async def drip(writer: asyncio.StreamWriter) -> None:
            for byte in begun + b"{" * 100:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.01)

        dripping = [asyncio.create_task(drip(writer)) for _, writer in held[:100]]
        for _ in range(10):
            async with client.claim("p", timeout=30) as box:
                assert (await box.exec("echo served")).stdout == "served\n"
        for task in dripping:
            task.cancel()
        await asyncio.gather(*dripping, return_exceptions=True)
        for _, writer in held:
            writer.close()


# ── what gets lost ──


async def test_a_claim_whose_answer_is_lost_is_the_same_when_asked_again(
    client: SandboxClient,
) -> None:
    host, port = client.url.removeprefix("http://").split(":")
    body = json.dumps({"request_id": "again", "pool": "p", "wait_seconds": 20}).encode()
    head = f"POST /v1/claims HTTP/1.1\r\nauthorization: Bearer t\r\ncontent-length: {len(body)}\r\n\r\n"
    for after_seconds in (0.0, 0.001, 0.005, 0.05):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        await writer.drain()
        await asyncio.sleep(after_seconds)
        writer.transport.abort()
        answers = []
        while not answers or answers[-1].status == 503:
            answers.append(await ask(client.url, "POST", "/v1/claims", body, **BROKER))
            assert len(answers) < 50
            await asyncio.sleep(0.02)
        answers.append(await ask(client.url, "POST", "/v1/claims", body, **BROKER))
        assert answers[-1].status == 200
        assert answers[-1].body == answers[-2].body
        (status,) = await client.pools()
        assert status.claimed == 1
        assert await client.release_claim("again")


async def test_a_command_whose_answer_is_lost_is_not_run_again(box: ClaimedSandbox) -> None:
    body = {"request_id": "once", "command": "sleep 0.2; echo ran >> log; cat log"}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(box.url, "POST", "/exec", body, **box.headers), 0.05)
    again = await ask(box.url, "POST", "/exec", body, **box.headers)
    assert json.loads(again.body)["stdout"] == "ran\n"


async def test_episodes_that_need_two_sandboxes_one_after_the_other_pass_a_pool_of_one(
    client: SandboxClient,
) -> None:
    async def episode() -> None:
        async with client.claim("p", timeout=60) as box:
            await box.write_file("answer", b"1")
            data = await box.read_file("answer")
        async with client.claim("p", timeout=60) as fresh:
            assert (await fresh.exec("ls")).stdout == ""
            await fresh.write_file("answer", data)

    await asyncio.wait_for(asyncio.gather(*(episode() for _ in range(8))), 60)


# ── sudden ends ──


async def test_sandboxes_killed_at_any_moment_are_named_errors_and_replaced(tmp_path: Path) -> None:
    dice = random.Random(3)
    async with serving(tmp_path, warm=2, max=2) as client:

        async def work(box: ClaimedSandbox) -> None:
            await box.exec("echo 1 > a; sleep 0.02")
            await box.write_file("big", b"x" * 2_000_000)
            await box.read_file("big")
            await box.reset()

        for _ in range(12):
            box = await client.acquire("p", timeout=30)
            working = asyncio.create_task(work(box))
            await asyncio.sleep(dice.uniform(0.0, 0.08))
            for pid in dice.choice([wrappers, guests])():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(SandboxError):
                await working
            await box.release()


async def test_a_guest_that_is_frozen_is_replaced_and_the_other_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "RESET_SECONDS", 0.5)
    async with serving(tmp_path, warm=2, max=2) as client:
        frozen, other = [await client.acquire("p", timeout=30) for _ in range(2)]
        os.kill(await guest_of(frozen), signal.SIGSTOP)
        assert (await other.exec("echo alive")).stdout == "alive\n"
        await frozen.release()
        async with client.claim("p", timeout=30) as fresh:
            assert fresh.id not in (frozen.id, other.id)
        await other.release()


async def guest_of(box: ClaimedSandbox) -> int:
    """The guest's pid on this machine: the parent of whoever has lost its own."""
    seconds = str(random.randrange(10**6, 10**7))
    await box.exec(f"(setsid sleep {seconds} &)")
    for _ in range(200):
        for guest in guests():
            if any(is_sleep(pid, seconds) for pid in children_of(guest)):
                return guest
        await asyncio.sleep(0.02)
    raise AssertionError(f"no guest of {box.id}")


def is_sleep(pid: int, seconds: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes() == f"sleep\0{seconds}\0".encode()
    return False
