"""What a reset brings back, and what it does not forgive: real namespaces, as root with a uid each and as a user would.

A machine's folder is writable inside; each test does harm there or to the guest, gives the sandbox back, and looks.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rljob.claimed_sandbox import ClaimedSandbox
from rljob.sandbox import PoolStatus
from rljob.sandbox_client import SandboxClient
from rljob_sandbox_pool.runtimes import namespace
from tests.harness.local_sandboxes import KINDS, serving

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the first two kinds need root")
EMPTY = "/opt/rljob-test-none"
"""A folder that the machine does not have."""
FACTS = "find . -printf '%p %y %m %s %T@ %l %n\\n' | sort; cat a.py tool"


@pytest.fixture
def machine() -> Iterator[Path]:
    """A folder of this machine, such as an image would have; not in /tmp, which sandboxes have for themselves."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="rljob-test-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        (root / "a.py").write_text("a = 1\n")
        (root / "tool").write_text("#!/bin/sh\necho tool\n")
        (root / "tool").chmod(0o755)
        (root / "deep").mkdir()
        (root / "deep/link").symlink_to("../a.py")
        yield root


@pytest.fixture(params=list(KINDS))
async def client(
    request: pytest.FixtureRequest, tmp_path: Path, machine: Path
) -> AsyncIterator[SandboxClient]:
    spec = {"writablePaths": [str(machine), EMPTY]}
    async with serving(
        tmp_path, request.param, **spec, recycle={"canary": f"{machine}/tool; ls {machine}"}
    ) as client:
        yield client


async def facts(box: ClaimedSandbox, machine: Path) -> str:
    result = await box.exec(FACTS, cwd=str(machine))
    assert result.exit_code == 0, result.stderr
    return result.stdout


HARM = {
    "forged content": "t=$(stat -c %Y tool); sed -i s/tool/bad!/ tool; touch -d @$t tool",
    "a link to the machine": "rm -rf deep a.py; ln -s /usr deep; ln -s /etc/passwd a.py",
    "a folder for a file": "rm tool; mkdir -p tool/x; chmod 0 tool",
    "nothing left": "rm -rf * .[a-z]*",
    "a lot more": "mkdir -p $(seq -s/ 300); for n in 1 2 3; do mkfifo p$n; ln tool l$n; done",
    "closed": "chmod 0 a.py tool deep .",
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM.keys())
async def test_a_writable_path_is_as_the_machine_has_it_again(
    client: SandboxClient, machine: Path, harm: str
) -> None:
    async with client.claim("p", timeout=30) as box:
        was = await facts(box, machine)
        assert "echo tool" in was
        done = await box.exec(f"({harm}); touch {EMPTY}/new", cwd=str(machine))
        assert done.exit_code == 0, done.stderr
    async with client.claim("p", timeout=30) as again:
        assert again.id == box.id
        assert await facts(again, machine) == was
        assert (await again.exec(f"ls -A {EMPTY}")).stdout == ""
    assert (machine / "tool").read_text() == "#!/bin/sh\necho tool\n"
    assert sorted(path.name for path in machine.iterdir()) == ["a.py", "deep", "tool"]


async def test_times_and_flags_carry_no_message(client: SandboxClient, machine: Path) -> None:
    tell = f"cd {machine}; stat -c '%n %X %Y' /workspace /tmp /dev/shm . a.py tool deep/link; "
    tell += "lsattr -d /workspace /tmp . ./tool 2>/dev/null"
    harm = f"cd {machine}; touch -d 2033-01-01 /workspace /tmp /dev/shm; "
    harm += "touch -h -a -d 2044-01-01 . a.py tool deep/link; "
    harm += "chattr +d +A /workspace /tmp . ./tool"
    async with client.claim("p", timeout=30) as box:
        await box.reset()
        was = (await box.exec(tell)).stdout
        await box.exec(harm)
        assert (await box.exec(tell)).stdout != was
    async with client.claim("p", timeout=30) as again:
        assert again.id == box.id
        assert (await again.exec(tell)).stdout == was


async def test_its_owner_may_reset_it_and_goes_on(client: SandboxClient, machine: Path) -> None:
    async with client.claim("p", timeout=30) as box:
        was = await facts(box, machine)
        await box.exec("rm -rf *", cwd=str(machine))
        await box.reset()
        assert await facts(box, machine) == was


async def test_a_full_disk_is_named_and_gone_after_the_reset(client: SandboxClient) -> None:
    async with client.claim("p", timeout=30) as box:
        filled = await box.exec("cat /dev/zero > filler", cwd=EMPTY)
        assert "No space left" in filled.stderr
        with pytest.raises(OSError, match="No space left"):
            await box.write_file(f"{EMPTY}/file", b"x" * 10_000)
        assert (await box.exec("true")).exit_code == 0
    async with client.claim("p", timeout=30) as again:
        assert again.id == box.id
        await again.write_file(f"{EMPTY}/file", b"x" * 10_000)


async def quarantined(client: SandboxClient) -> PoolStatus:
    """The pool, once it has put a sandbox aside."""
    async with asyncio.timeout(30):
        while True:
            (status,) = await client.pools()
            if status.quarantined:
                return status
            await asyncio.sleep(0.02)


async def test_who_tampers_with_the_guest_is_put_aside_and_reaches_nobody_else(
    tmp_path: Path,
) -> None:
    async with (
        serving(tmp_path, "user-namespace", warm=2, max=5, returns=False) as client,
        client.claim("p", timeout=30) as other,
    ):
        async with client.claim("p", timeout=30) as box:
            assert (await box.exec("prlimit --pid 1 --nofile=64")).exit_code == 0
        assert (await quarantined(client)).quarantined == 1
        assert (await other.exec("true")).exit_code == 0
        async with client.claim("p", timeout=30) as third:
            assert third.id not in (box.id, other.id)


async def test_a_reset_that_does_not_verify_puts_the_sandbox_aside(
    tmp_path: Path, machine: Path
) -> None:
    spec = {"writablePaths": [str(machine)], "max": 2}
    async with serving(tmp_path, returns=False, **spec) as client:
        async with client.claim("p", timeout=30) as box:
            await box.exec("rm tool", cwd=str(machine))
            (machine / "tool").write_text("what it began with is no more")
        assert (await quarantined(client)).quarantined == 1


async def test_a_canary_that_sings_another_song_puts_the_sandbox_aside(
    tmp_path: Path, machine: Path
) -> None:
    # What the folder began with is seen as well, and is the machine's own.
    recycle = {"canary": f"cat {namespace.seed_path(0)}/a.py; touch {machine}/left /tmp/left"}
    spec = {"max": 2, "recycle": recycle, "writablePaths": [str(machine)]}
    async with serving(tmp_path, returns=False, **spec) as client:
        async with client.claim("p", timeout=30) as first:
            pass
        async with client.claim("p", timeout=30) as again:
            assert again.id == first.id
            assert "left" not in (await again.exec(f"ls {machine} /tmp")).stdout
            (machine / "a.py").write_text("la la la\n")
        assert (await quarantined(client)).quarantined == 1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"writablePaths": ["/usr/share"], "limits": {"diskMib": 1}}, "writable path /usr/share: "),
        ({"recycle": {"canary": "no-such-command"}}, "the canary: it does not run: "),
        ({"writablePaths": [sys.base_prefix]}, "would cover what the guest itself runs on"),
        ({"writablePaths": ["/usr"]}, "would cover what the guest itself runs on"),
    ],
    ids=["too large", "no canary", "the interpreter", "the loader"],
)
async def test_a_sandbox_that_cannot_begin_says_why(
    tmp_path: Path, spec: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tmp_path, returns=False, **spec) as client:
        async with asyncio.timeout(30):
            while words not in capsys.readouterr().out:
                await asyncio.sleep(0.1)
        (status,) = await client.pools()
        assert status.ready == 0
