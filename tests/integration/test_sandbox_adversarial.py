"""Agents that try to break out, break in, or break down: real namespaces, as root with a uid each, and as a user would.

Each test ends with the sandbox alive, or gone with a named error; and what comes next is clean.
"""

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rljob.api.rljob_types import SandboxPool
from rljob.claimed_sandbox import ClaimedSandbox
from rljob.errors import SandboxError
from rljob.sandbox_client import SandboxClient
from rljob_sandbox_pool.manager import Manager
from rljob_sandbox_pool.runtimes.bubblewrap import FIRST_UID, BubblewrapRuntime
from tests.harness.local_sandboxes import KINDS, children_of, serving, wrappers

PYTHON = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the first two kinds need root")


@pytest.fixture(params=list(KINDS))
async def client(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SandboxClient]:
    async with serving(tmp_path, request.param) as client:
        yield client


@pytest.fixture
async def box(client: SandboxClient) -> AsyncIterator[ClaimedSandbox]:
    async with client.claim("p", timeout=30) as box:
        yield box


async def run_python(box: ClaimedSandbox, code: str, timeout: float = 30) -> str:
    """What a script prints in the sandbox."""
    result = await box.exec([PYTHON, "-c", code], timeout=timeout)
    assert result.exit_code == 0, result.stderr
    return result.stdout


async def processes(box: ClaimedSandbox) -> list[str]:
    """Command lines of what runs beside the guest and the question itself."""
    listing = "for p in /proc/[0-9]*; do [ $p = /proc/1 -o $p = /proc/$$ ] || tr '\\0' ' ' <$p/cmdline; echo; done"
    lines = (await box.exec(listing)).stdout.splitlines()
    return [line for line in lines if line.strip()]


async def assert_reused_clean(client: SandboxClient, box: ClaimedSandbox) -> None:
    """The same sandbox comes back, verified, and works."""
    await box.release()
    async with client.claim("p", timeout=30) as again:
        assert again.id == box.id
        assert (await again.exec("ls -A /workspace /tmp /dev/shm | grep -v :")).stdout.split() == []
        assert await processes(again) == []


# ── too much ──


async def test_a_fork_bomb_ends_with_its_timeout(
    client: SandboxClient, box: ClaimedSandbox
) -> None:
    result = await box.exec("bomb() { bomb | bomb & }; bomb; sleep 60", timeout=2)
    assert result.timed_out
    assert (await box.exec("echo alive")).stdout == "alive\n"
    await assert_reused_clean(client, box)


async def test_no_more_processes_than_the_limit(client: SandboxClient, box: ClaimedSandbox) -> None:
    code = """
import os, time
made = 0
try:
    for _ in range(1000):
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        made += 1
except OSError:
    pass
print(made)
os.kill(-1, 9)
"""
    (status,) = await client.pools()
    if status.limits["pids"] == "none":
        pytest.skip("root without a uid of its own and without cgroups is not held")
    result = await box.exec([PYTHON, "-uc", code], timeout=30)
    assert 10 < int(result.stdout) <= 48 + 4


async def test_a_memory_hog_goes_and_the_guest_stays(box: ClaimedSandbox) -> None:
    code = "b = [bytearray(b'x') * (1 << 20) for _ in range(4096)]"
    result = await box.exec([PYTHON, "-c", code], timeout=60)
    assert result.exit_code in (1, 137)
    assert (await box.exec("echo alive")).stdout == "alive\n"


async def test_cpu_time_ends(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, "own-uid", limits={"cpuSeconds": 1}) as client,
        client.claim("p", timeout=30) as box,
    ):
        result = await box.exec("while :; do :; done", timeout=60)
        assert (result.timed_out, result.exit_code) == (False, 128 + signal.SIGKILL)
        assert (await box.exec("echo alive")).stdout == "alive\n"


async def test_half_open_connections_and_floods_do_not_stop_the_owner(box: ClaimedSandbox) -> None:
    host, port = box.url.removeprefix("http://").split(":")
    held = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
    for _, writer in held:
        writer.write(b"POST /exec HTTP/1.1\r\ncontent-length: 1000\r\n\r\n{")
    reader, writer = held[0]
    writer.write(b" " * 999 + b"GET /healthz HTTP/1.1\r\n\r\n" * 5000)
    assert (await box.exec("echo alive")).stdout == "alive\n"
    assert (await reader.read(12)) == b"HTTP/1.1 429"
    for _, writer in held:
        writer.close()


@pytest.mark.parametrize("folder", ["/workspace", "/tmp", "/dev/shm"])
async def test_a_full_disk_is_the_commands_error(
    client: SandboxClient, box: ClaimedSandbox, folder: str
) -> None:
    result = await box.exec(f"head -c 100000000 /dev/zero > {folder}/big; stat -c %s {folder}/big")
    assert "No space left" in result.stderr
    assert int(result.stdout) <= 8 * 1024 * 1024
    await assert_reused_clean(client, box)


async def test_nothing_else_can_be_written(box: ClaimedSandbox) -> None:
    found = (
        await box.exec("find / -xdev -writable ! -type l; find /dev /run -writable ! -type l")
    ).stdout
    devices = {"null", "zero", "full", "random", "urandom", "tty", "pts", "pts/ptmx"}
    assert set(found.split()) - {f"/dev/{name}" for name in devices} == {
        "/workspace",
        "/tmp",
        "/dev/shm",
    }


async def test_endless_output_costs_no_memory(box: ClaimedSandbox) -> None:
    result = await box.exec("head -c 300000000 /dev/zero", timeout=60, max_output_bytes=1000)
    assert (result.exit_code, result.truncated, len(result.stdout)) == (0, True, 1000)
    result = await box.exec("yes", timeout=1, max_output_bytes=1000)
    assert result.timed_out


# ── what stays behind ──


async def test_a_command_that_closes_its_stdin_is_not_waited_for(box: ClaimedSandbox) -> None:
    result = await box.exec("exec <&-; echo ok", stdin=b"x" * 5_000_000)
    assert (result.stdout, result.exit_code) == ("ok\n", 0)


async def test_a_daemon_does_not_hold_its_exec_and_survives_it(box: ClaimedSandbox) -> None:
    result = await box.exec("(setsid sleep 1000 &) ; sleep 1000 & echo done", timeout=20)
    assert (result.stdout, result.timed_out) == ("done\n", False)
    await box.exec("sleep 0.3")
    assert await processes(box) == ["sleep 1000 ", "sleep 1000 "]


async def test_a_daemon_does_not_survive_a_reset(
    client: SandboxClient, box: ClaimedSandbox
) -> None:
    await box.exec("(setsid nohup sleep 1000 >/dev/null 2>&1 &); trap '' TERM; sleep 1000 &")
    await box.reset()
    assert await processes(box) == []
    await assert_reused_clean(client, box)


async def test_a_timeout_reaches_daemons_that_the_command_left_and_spares_earlier_ones(
    box: ClaimedSandbox,
) -> None:
    await box.exec("(setsid sleep 1111 &); sleep 0.3")
    result = await box.exec(
        "(setsid sh -c 'setsid sleep 2222 & sleep 3333' &) ; trap '' TERM; sleep 60", timeout=1
    )
    assert result.timed_out
    assert await processes(box) == ["sleep 1111 "]


async def test_files_of_any_kind_are_gone_after_a_reset(
    client: SandboxClient, box: ClaimedSandbox
) -> None:
    code = """
import os
for folder in ("/workspace", "/tmp", "/dev/shm"):
    os.chdir(folder)
    open(b"bad \\xff name\\n", "w").close()
    os.mkfifo("pipe"); os.symlink("/etc/passwd", "link"); os.link("pipe", "hard")
    os.makedirs("closed/inner"); open("closed/inner/file", "w").close()
    os.chmod("closed/inner", 0); os.chmod("closed", 0)
    for _ in range(400):
        os.mkdir("d" * 100); os.chdir("d" * 100)
    os.chdir(folder); os.chmod(folder, 0)
"""
    await run_python(box, code)
    await assert_reused_clean(client, box)


async def test_a_reset_that_cannot_be_verified_replaces_the_sandbox(
    client: SandboxClient, box: ClaimedSandbox
) -> None:
    await run_python(
        box, "import ctypes; assert ctypes.CDLL(None).shmget(0x1234, 4096, 0o1666) >= 0"
    )
    await box.release()
    async with client.claim("p", timeout=30) as other:
        assert other.id != box.id
    (status,) = await client.pools()
    assert status.started_total == 2


# ── the guest ──


async def test_killing_everything_kills_not_the_guest(box: ClaimedSandbox) -> None:
    await box.exec("kill -9 1; kill -STOP 1; kill -TERM 1")
    result = await box.exec("kill -9 -1; sleep 0.1; echo here")
    assert result.exit_code in (0, 137)
    assert (await box.exec("echo alive")).stdout == "alive\n"


async def test_the_guest_cannot_be_looked_into(box: ClaimedSandbox) -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(16, 1, 0, 0))
fd = os.pidfd_open(1)
print([libc.syscall(438, fd, number, 0) for number in range(3, 12)])
for path in ("/proc/1/mem", "/proc/1/environ", "/proc/1/fd/0", "/proc/1/fd/3", "/proc/1/root", "/proc/1/cwd"):
    try:
        os.stat(path) if "root" in path or "cwd" in path else open(path, "rb").read(1)
        print("open", path)
    except OSError:
        pass
"""
    output = (await run_python(box, code)).splitlines()
    assert output == ["-1", str([-1] * 9)]


async def test_the_file_api_does_not_show_the_guest_itself(box: ClaimedSandbox) -> None:
    links = {
        "mem": "/proc/self/mem",
        "env": "/proc/self/environ",
        "maps": "/proc/1/maps",
        "fd": "/proc/self/fd/0",
    }
    for name, target in links.items():
        await box.exec(["ln", "-s", target, name])
        with pytest.raises(OSError):
            await box.read_file(name)
        with pytest.raises(OSError):
            await box.read_file(target)


@pytest.mark.parametrize(
    "make", ["mkfifo x", "ln -s /dev/zero x", "ln -s x x", "ln -s /dev/pts/ptmx x"]
)
async def test_what_is_no_file_is_refused_at_once(box: ClaimedSandbox, make: str) -> None:
    await box.exec(make)
    with pytest.raises(OSError):
        await box.read_file("x")


async def test_a_link_is_replaced_not_followed(box: ClaimedSandbox) -> None:
    await box.exec("echo old > target; ln -s target link; ln -s /etc/passwd outside")
    await box.write_files({"link": b"new", "outside": b"mine"})
    assert await box.read_file("target") == b"old\n"
    assert b"mine" not in await box.read_file("/etc/passwd")


async def test_a_linked_folder_leads_no_further_than_a_command_gets(box: ClaimedSandbox) -> None:
    await box.exec("ln -s /usr/bin folder; ln -s /run/rljob/boot boot")
    for path in ("folder/evil", "boot/booted", "/run/rljob/boot/booted"):
        with pytest.raises(OSError):
            await box.write_file(path, b"")


async def test_keys_and_other_secrets_are_nowhere_in_the_sandbox(box: ClaimedSandbox) -> None:
    command = "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'"
    shown = (await box.exec(command, env={})).stdout
    assert "pool-key" not in shown
    assert box.headers["authorization"].removeprefix("Bearer ") not in shown


async def test_tampering_with_the_guests_limits_is_seen(tmp_path: Path) -> None:
    async with serving(tmp_path, "user-namespace") as client:
        box = await client.acquire("p", timeout=30)
        await run_python(
            box, "import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (64, 64))"
        )
        await box.release()
        async with client.claim("p", timeout=30) as other:
            assert other.id != box.id


async def test_lowering_the_guests_priority_is_seen_or_refused(
    client: SandboxClient, box: ClaimedSandbox
) -> None:
    result = await box.exec([PYTHON, "-c", "import os; os.setpriority(os.PRIO_PROCESS, 1, 19)"])
    await box.release()
    async with client.claim("p", timeout=30) as other:
        assert (other.id == box.id) == (result.exit_code != 0)


# ── the world ──


async def test_there_is_no_network(client: SandboxClient, box: ClaimedSandbox) -> None:
    port = int(client.url.rpartition(":")[2])
    code = f"""
import socket
here = [("127.0.0.1", {port}), ("127.0.0.1", {box.url.rpartition(":")[2]})]
for address in [*here, ("10.0.0.1", 80), ("169.254.169.254", 80)]:
    try:
        socket.create_connection(address, timeout=3)
        print("reached", address)
    except OSError:
        pass
"""
    assert await run_python(box, code) == ""


async def test_of_the_machine_only_usr_is_seen(box: ClaimedSandbox) -> None:
    here = str(Path(__file__).resolve().parents[2])
    paths = f"{here} /root/.ssh /home /var /sys /boot /etc/shadow /etc/hostname /proc/sysrq-trigger"
    result = await box.exec(
        f"for p in {paths}; do ls -d $p >/dev/null 2>&1 && head -c 1 $p; done; hostname; id -u"
    )
    assert result.stdout.split()[0] == "sandbox"
    assert result.stdout.split()[1] != "0"


@pytest.mark.parametrize(
    "command", ["mount -t tmpfs x /usr", "su -c id", "chroot / id", "mknod n b 8 0", "hostname x"]
)
async def test_no_privilege_is_to_be_had(box: ClaimedSandbox, command: str) -> None:
    result = await box.exec(command)
    assert result.exit_code != 0
    assert "uid=0" not in result.stdout


async def test_what_would_outlive_a_reset_or_reach_past_the_sandbox_is_refused(
    box: ClaimedSandbox,
) -> None:
    code = """
import ctypes, os, threading
libc = ctypes.CDLL(None, use_errno=True)
def refused(number, *arguments):
    return libc.syscall(number, *arguments) == -1 and ctypes.get_errno() in (1, 38)
calls = {"x86_64": (248, 250, 272, 425, 56), "aarch64": (217, 219, 97, 425, 220)}[os.uname().machine]
add_key, keyctl, unshare, io_uring, clone = calls
print(refused(add_key, b"user", b"name", b"secret", 6, -4), refused(keyctl, 0, -4, 1), refused(unshare, 0x10000000))
print(refused(io_uring, 4, 0), refused(clone, 0x10000000 | 17, 0, 0, 0, 0))
thread = threading.Thread(target=print, args=("threads run",))
thread.start(); thread.join()
"""
    assert await run_python(box, code) == "True True True\nTrue True\nthreads run\n"


async def test_neither_guest_nor_commands_are_anybody_on_this_machine(tmp_path: Path) -> None:
    async with serving(tmp_path, "own-uid") as client:
        box = await client.acquire("p", timeout=30)
        await box.exec("sleep 1000 &")
        pids = [guest_of(box), *children_of(guest_of(box))]
        status = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
        uids = [re.search(r"Uid:\t(\d+)\t(\d+)\t(\d+)\t(\d+)", text).groups() for text in status]
        assert all(int(uid) >= FIRST_UID for four in uids for uid in four)
        assert len({uid for four in uids for uid in four}) == 2
        assert [Path(f"/proc/{pid}/oom_score_adj").read_text().strip() for pid in pids[1:]] == [
            "1000"
        ]
        await box.release()


# ── sudden ends ──


async def test_a_sandbox_killed_in_the_middle_of_a_command_is_a_SandboxError(
    client: SandboxClient, box: ClaimedSandbox
) -> None:
    mine = wrappers()
    running = asyncio.create_task(box.exec("sleep 60"))
    await asyncio.sleep(0.3)
    for pid in mine:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxError):
        await running
    await box.release()
    async with client.claim("p", timeout=30) as other:
        assert other.id != box.id


def runs(pid: int) -> bool:
    """Whether it does; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("after_seconds", [0.0, 0.002, 0.005, 0.02, 0.05])
@pytest.mark.parametrize("kind", list(KINDS))
async def test_a_pool_that_ends_while_its_sandboxes_start_leaves_none(
    tmp_path: Path, kind: str, after_seconds: float
) -> None:
    runtime = BubblewrapRuntime(tmp_path, **KINDS[kind])
    pool = SandboxPool.model_validate({"name": "p", "warm": 4, "max": 4})
    manager = Manager([pool], {"bubblewrap": runtime}, token="t", pool_key="k")
    await manager.start("127.0.0.1", 0)
    await asyncio.sleep(after_seconds)
    outer = set(wrappers())
    inner = {pid for each in outer for pid in children_of(each)}
    await manager.close()
    assert [pid for pid in outer | inner if runs(pid)] == []
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_that_somebody_tidied_up_costs_no_place(tmp_path: Path) -> None:
    work = tmp_path / "work"
    pool = SandboxPool.model_validate({"name": "p", "warm": 1, "max": 1})
    runtime = BubblewrapRuntime(work)
    manager = Manager([pool], {"bubblewrap": runtime}, token="t", pool_key="k")
    client = SandboxClient(await manager.start("127.0.0.1", 0), "t")
    box = await client.acquire("p", timeout=30)
    shutil.rmtree(work)
    box.lost = True  # so it is replaced
    await box.release()
    again = await client.acquire("p", timeout=30)
    assert again.id != box.id
    await again.release()
    await client.aclose()
    await manager.close()
    assert list(work.iterdir()) == []


async def test_with_the_pool_everything_of_its_sandboxes_ends(tmp_path: Path) -> None:
    async with serving(tmp_path, "own-uid", returns=False) as client:
        box = await client.acquire("p", timeout=30)
        await box.exec("(setsid sleep 98765 &); sleep 0.5")
        assert is_running("sleep\0" + "98765")
    assert not is_running("sleep\0" + "98765")
    await box.release()


def is_running(command_line: str) -> bool:
    """Whether any process of this machine has it."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if command_line.encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False


async def test_many_commands_leave_neither_descriptors_nor_zombies(box: ClaimedSandbox) -> None:
    pid = guest_of(box)
    await box.exec("true")
    before = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    for number in range(100):
        await box.exec(f"(sleep 0.001 &); echo {number} > f")
    await box.exec("sleep 0.2")
    assert len(list(Path(f"/proc/{pid}/fd").iterdir())) <= before + 1
    assert await processes(box) == []


def guest_of(box: ClaimedSandbox) -> int:
    """The guest's pid on this machine: the grandchild that bwrap started."""
    (bwrap,) = wrappers()
    (guest,) = children_of(bwrap)
    return guest
