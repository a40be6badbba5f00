"""Sandboxes that are used again, on real bubblewrap: nothing of one episode reaches the next, and what does not verify
is put aside with its evidence.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from rljob.errors import SandboxError
from rljob.sandbox_client import ClaimedSandbox, SandboxClient
from rljob.sandbox_shells import open_shell
from rljob.sandbox_tunnel import tunnel
from tests.harness.local_sandboxes import guests, serving

PYTHON = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
LEAVES_AN_OBJECT = [
    PYTHON,
    "-c",
    "import ctypes; assert ctypes.CDLL(None).shmget(0x1234, 4096, 0o1666) >= 0",
]
"""System V memory: no process holds it, and a reset cannot take it away."""
LEFT = "ls -A /workspace /tmp /dev/shm | grep -v : ; ls /proc | grep -c '^[0-9]'"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes with a uid each need root")


async def spoil(box: ClaimedSandbox) -> None:
    """Everything at once that an episode may leave behind."""
    await box.exec(
        "bomb() { bomb | bomb & }; (setsid sh -c 'trap \"\" TERM HUP INT; sleep 1000' &)"
    )
    await box.exec("(setsid sh -c 'while :; do echo x >> /tmp/grows; done' &)")
    await box.exec(
        "mkdir -p a/b && ln -s / a/b/root && ln -s ../.. a/up && chmod 0 a/b; mkfifo /dev/shm/pipe;"
        " head -c 100000000 /dev/zero > /tmp/full; umask 0; touch -d 1970-01-01 /tmp /workspace;"
        " chmod 1777 /workspace; chmod 700 /tmp"
    )
    await box.exec("b() { b | b & }; b & sleep 0.2", timeout=5)


async def test_nothing_of_forty_episodes_reaches_the_next(tmp_path: Path) -> None:
    async with serving(tmp_path, warm=2, max=2, recycle={"maxReuses": 1000}) as client:

        async def episodes() -> None:
            for _ in range(20):
                async with client.claim("p", timeout=60, env={"SECRET": "s3cret"}) as box:
                    before = await box.exec(LEFT)
                    # the shell, ls and grep of this line, and the guest
                    assert before.stdout.split() in (["3"], ["4"], ["5"]), before.stdout
                    await box.exec("echo $SECRET > secret; (setsid sleep 1000 &); env > /tmp/env")

        await asyncio.gather(episodes(), episodes())
        (status,) = await client.pools()
        assert (status.started_total, status.quarantined) == (2, 0)


async def test_whatever_an_episode_left_the_next_is_clean(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        for _ in range(3):
            async with client.claim("p", timeout=60) as box:
                assert len((await box.exec(LEFT)).stdout.split()) == 1
                await spoil(box)


async def test_shells_streams_and_tunnels_end_with_their_claim(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        box = await client.acquire("p", timeout=60)
        opened = [await open_shell(box, **PLAIN, pty=bool(n % 2)) for n in range(6)]
        for shell in opened:
            await shell.run("cd /tmp; sleep 1000 & sleep 1000", timeout=0.1, on_timeout="leave")
        held = [asyncio.create_task(hold_tunnel(box)), asyncio.create_task(hold_stream(box))]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in held)
        await client.release_claim(box.claim_id)
        ended = await asyncio.wait_for(asyncio.gather(*held, return_exceptions=True), 20)
        assert all(isinstance(error, SandboxError) for error in ended), ended
        async with client.claim("p", timeout=60) as again:
            assert again.id == box.id
            assert json.loads((await again.call("GET", "/shells")).body) == {"shells": []}
            assert len((await again.exec(LEFT)).stdout.split()) == 1
        await box.release()


PLAIN = {"cwd": None, "env": None, "rows": 24, "columns": 80}


async def hold_tunnel(box: ClaimedSandbox) -> None:
    async with tunnel(box, "http://127.0.0.1:9"):
        await box.exec("sleep 1000", timeout=1000)


async def hold_stream(box: ClaimedSandbox) -> None:
    body = json.dumps({"request_id": "s", "command": "yes", "timeout": 1000, "stream": True})
    async with box.stream("POST", "/exec", body.encode(), max_body_bytes=10**12) as pieces:
        async for _ in pieces:
            await asyncio.sleep(0.01)


async def test_recreate_uses_no_sandbox_twice(tmp_path: Path) -> None:
    async with serving(tmp_path, warm=2, max=3, recycle={"strategy": "recreate"}) as client:
        ids = set()
        for _ in range(6):
            async with client.claim("p", timeout=60) as box:
                ids.add(box.id)
        assert len(ids) == 6


# ── what does not verify ──


async def test_what_does_not_verify_is_put_aside_and_another_is_made(tmp_path: Path) -> None:
    async with serving(tmp_path, warm=1, max=3, returns=False) as client:
        box = await client.acquire("p", timeout=30)
        await box.exec(LEAVES_AN_OBJECT)
        await box.release()
        async with client.claim("p", timeout=30) as other:
            assert other.id != box.id
            assert (await other.exec("grep -c . /proc/sysvipc/shm")).stdout == "1\n"
        status = await quarantined(client, 1)
        assert status.failed_total == 0
        assert evidence_of(client, box.id) == ["1 System V objects are left"]


async def test_a_quarantined_sandbox_serves_nobody_and_runs_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, warm=0, max=2, returns=False) as client:
        box = await client.acquire("p", timeout=30)
        (guest,) = guests()
        await box.exec("(setsid sleep 1000 &)")
        await box.exec(LEAVES_AN_OBJECT)
        await client.release_claim(box.claim_id)
        await quarantined(client, 1)
        assert not await box.healthy()
        assert Path(f"/proc/{guest}/task/{guest}/children").read_text() == ""
        await box.release()


async def test_the_place_of_a_quarantined_sandbox_is_given_to_who_waits(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        ids = set()
        for _ in range(3):
            async with client.claim("p", timeout=30) as box:
                ids.add(box.id)
                await box.exec(LEAVES_AN_OBJECT)
        assert len(ids) == 3


async def test_without_a_quarantine_it_is_ended_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, max=2, recycle={"quarantineSeconds": 0}) as client:
        async with client.claim("p", timeout=30) as box:
            await box.exec(LEAVES_AN_OBJECT)
        async with client.claim("p", timeout=30) as other:
            assert other.id != box.id


async def test_one_that_is_put_aside_does_not_touch_its_neighbour(tmp_path: Path) -> None:
    async with serving(tmp_path, warm=2, max=5, returns=False) as client:
        bad, good = [await client.acquire("p", timeout=30) for _ in range(2)]
        await good.write_file("kept", b"1")
        await bad.exec(LEAVES_AN_OBJECT)
        await bad.release()
        await quarantined(client, 1)
        assert await good.read_file("kept") == b"1"
        await good.release()


# ── canary and writable folders ──


async def test_a_canary_that_changes_is_evidence(tmp_path: Path) -> None:
    # A thing that a reset does not bring back, for this test's sake: the machine's own clock.
    canary = {"canary": "date +%N; exit 3"}
    async with serving(tmp_path, max=2, recycle=canary, returns=False) as client:
        box = await client.acquire("p", timeout=30)
        await box.release()
        await quarantined(client, 1)
        (words,) = evidence_of(client, box.id)
        assert "canary" in words
    async with serving(tmp_path, recycle={"canary": "ls -A /workspace; exit 3"}) as client:
        ids = set()
        for _ in range(3):
            async with client.claim("p", timeout=30) as box:
                ids.add(box.id)
                await box.write_file("file", b"1")
        assert len(ids) == 1


ZONES = "/usr/share/zoneinfo/America"
SHOW = f"cd {ZONES} && find . -printf '%p %y %m %l\\n' | sort; cat * 2>/dev/null | cksum"
CHANGES = {
    "files": "rm Lima && echo x > Nome && mkdir new && mv Jamaica new/ && chmod 777 Panama && chmod 0 .",
    "links": "ln -s /usr new && ln -sf /tmp/victim Lima && ln -sf Lima Nome && ln Panama twice",
    "folders that are links": "rm -r Argentina && ln -s /workspace Argentina && mv Indiana /tmp/ && ln -s . Indiana",
    "everything gone": "rm -rf * && touch -d 1970-01-01 .",
    "full": "head -c 100000000 /dev/zero > full",
}


@pytest.mark.skipif(not Path(ZONES, "Argentina").is_dir(), reason="this machine has no time zones")
async def test_a_writable_folder_is_put_back_as_the_image_has_it(tmp_path: Path) -> None:
    limits = {"memoryMib": 256, "diskMib": 32, "pids": 48}
    async with serving(tmp_path, writablePaths=[ZONES], limits=limits) as client:
        async with client.claim("p", timeout=60) as box:
            pristine = (await box.exec(SHOW)).stdout
        assert len(pristine.splitlines()) > 100
        for change in CHANGES.values():
            async with client.claim("p", timeout=60) as again:
                assert again.id == box.id
                result = await again.exec(f"cd {ZONES} && {change}")
                assert "Read-only" not in result.stderr
                assert (await again.exec(SHOW)).stdout != pristine
            async with client.claim("p", timeout=60) as again:
                assert again.id == box.id
                assert (await again.exec(SHOW)).stdout == pristine
                assert (await again.exec("ls -A /workspace /tmp | grep -v :")).stdout.split() == []


async def quarantined(client: SandboxClient, number: int):
    """The pool's status once so many are put aside."""
    async with asyncio.timeout(20):
        while True:
            (status,) = await client.pools()
            if status.quarantined == number:
                return status
            await asyncio.sleep(0.02)


def evidence_of(client: SandboxClient, sandbox_id: str) -> list[str]:
    return list(client.manager.pools["p"]._members.by_id[sandbox_id].evidence)
