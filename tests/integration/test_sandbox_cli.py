"""`rljob sandbox` from the shell against real bubblewrap: serve, claim, exec, cp, ls, release; nothing stays behind."""

import os
import pty
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is missing")

Cli = Callable[..., subprocess.CompletedProcess[bytes]]
START_SECONDS = 60.0
END_SECONDS = 20.0


def env(state: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RLJOB_")}
    return {**kept, "RLJOB_SANDBOX_STATE": str(state)}


def argv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rljob.cli.main", "sandbox", *arguments]


def descendants(pid: int) -> set[int]:
    """Every process below `pid`."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        todo += children.get(todo.pop(), [])
        found |= set(todo)
    return found


def wait_until_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while left := {pid for pid in pids if state_of(pid) not in "ZX"}:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def serve(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Until it says that it serves."""
    process = subprocess.Popen(
        argv("serve", *arguments), env=env(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(b"serving "), process.communicate()[1].decode()
    return process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state folder in which `serve` runs, with the pools `default` (of `max` 3)."""
    folder = tmp_path_factory.mktemp("state")
    process = serve(folder, "--warm", "1", "--max", "3")
    yield folder
    below = descendants(process.pid)
    assert below
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0
    wait_until_gone(below)
    assert [path.name for path in folder.iterdir() if path.name.startswith("serve.json")] == []
    assert list((folder / "work").iterdir()) == []


@pytest.fixture(scope="module")
def cli(folder: Path) -> Cli:
    def run(
        *arguments: str, stdin: bytes = b"", **options: object
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            argv(*arguments), env=env(folder), input=stdin, capture_output=True, timeout=60
        )

    return run


@pytest.fixture(scope="module")
def claim(cli: Cli) -> Iterator[str]:
    """The name of a claim, which is given back."""
    done = cli("claim", "default", "--env", "GREETING=hello", "--timeout", str(START_SECONDS))
    assert done.returncode == 0, done.stderr.decode()
    name = done.stdout.decode().strip()
    yield name
    cli("release", name)


def test_pools_and_claims_are_listed(cli: Cli, claim: str) -> None:
    pools = cli("pools").stdout.decode().splitlines()
    assert pools[0].split()[:4] == ["POOL", "RUNTIME", "READY", "CLAIMED"]
    assert pools[1].split()[:2] == ["default", "bubblewrap"]
    assert int(pools[1].split()[3]) >= 1
    listed = [line.split() for line in cli("ls").stdout.decode().splitlines()]
    assert listed[0] == ["CLAIM", "POOL", "SANDBOX", "IMAGE", "OWNER", "LEFT"]
    assert [claim, "default"] in [line[:2] for line in listed]


def test_exec_passes_output_exit_code_environment_and_folder(cli: Cli, claim: str) -> None:
    script = "echo $GREETING; echo err >&2; pwd; exit 7"
    done = cli("exec", claim, "--cwd", "/tmp", "--", "sh", "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"hello\n/tmp\n", b"err\n")
    done = cli("exec", claim, "--env", "GREETING=bye", "--", "printenv", "GREETING")
    assert (done.returncode, done.stdout) == (0, b"bye\n")


def test_exec_is_binary_safe_both_ways(cli: Cli, claim: str) -> None:
    data = bytes(range(256)) * 1000
    done = cli("exec", claim, "-i", "--", "cat", stdin=data)
    assert (done.returncode, done.stdout == data) == (0, True)


def test_exec_passes_more_output_than_fits_into_an_answer(cli: Cli, claim: str) -> None:
    done = cli("exec", claim, "--", "head", "-c", "20000000", "/dev/zero")
    assert (done.returncode, len(done.stdout)) == (0, 20_000_000)


def test_without_i_a_command_reads_nothing(cli: Cli, claim: str) -> None:
    done = cli("exec", claim, "--", "cat", stdin=b"unread")
    assert (done.returncode, done.stdout) == (0, b"")


def test_exec_streams_output_as_it_comes(folder: Path, claim: str) -> None:
    command = argv("exec", claim, "--", "sh", "-c", "echo now; sleep 1000")
    process = subprocess.Popen(command, env=env(folder), stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"now\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130


def test_ctrl_c_ends_the_command_in_the_sandbox(cli: Cli, folder: Path, claim: str) -> None:
    command = argv("exec", claim, "--", "sh", "-c", "echo now; sleep 4321")
    process = subprocess.Popen(command, env=env(folder), stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    deadline = time.monotonic() + END_SECONDS
    while cli("exec", claim, "--", "pgrep", "-f", "sleep 4321").returncode != 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def read_until(descriptor: int, wanted: bytes) -> bytes:
    """What a terminal shows until it shows that."""
    shown, deadline = b"", time.monotonic() + START_SECONDS
    while wanted not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([descriptor], [], [], 0.1)[0]:
            shown += os.read(descriptor, 65_536)
    return shown


def test_t_talks_with_a_program_on_a_terminal(folder: Path, claim: str) -> None:
    ours, its = pty.openpty()
    script = "test -t 0 && read -p 'name? ' name; echo hello $name; read -p 'more? ' x || exit 5"
    command = argv("exec", claim, "-t", "--", "bash", "-c", script)
    process = subprocess.Popen(command, env=env(folder), stdin=its, stdout=its, stderr=its)
    os.close(its)
    read_until(ours, b"name? ")
    os.write(ours, b"you\n")
    assert b"hello you" in read_until(ours, b"more? ")
    os.write(ours, b"\x04")
    assert process.wait(timeout=30) == 5
    os.close(ours)


def test_ctrl_c_on_a_terminal_reaches_the_program(folder: Path, claim: str) -> None:
    ours, its = pty.openpty()
    script = "trap 'echo caught; exit 6' INT; echo ready; while true; do sleep 0.1; done"
    command = argv("exec", claim, "-t", "--", "bash", "-c", script)
    process = subprocess.Popen(command, env=env(folder), stdin=its, stdout=its, stderr=its)
    os.close(its)
    read_until(ours, b"ready")
    process.send_signal(signal.SIGINT)
    read_until(ours, b"caught")
    assert process.wait(timeout=30) == 6
    os.close(ours)


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGHUP])
def test_who_is_told_to_end_ends_the_program_on_its_terminal(
    cli: Cli, folder: Path, claim: str, ends: signal.Signals
) -> None:
    ours, its = pty.openpty()
    command = argv("exec", claim, "-t", "--", "sh", "-c", "trap '' HUP; echo ready; sleep 8765")
    process = subprocess.Popen(command, env=env(folder), stdin=its, stdout=its, stderr=its)
    os.close(its)
    read_until(ours, b"ready")
    process.send_signal(ends)
    assert process.wait(timeout=30) == 128 + ends
    os.close(ours)
    assert cli("exec", claim, "--", "pgrep", "-f", "sleep 876[5]").returncode == 1


def test_a_timeout_is_124_and_kills(cli: Cli, claim: str) -> None:
    done = cli("exec", claim, "--timeout", "0.5", "--", "sh", "-c", "echo a; sleep 1000")
    assert (done.returncode, done.stdout) == (124, b"a\n")


def test_files_are_copied_both_ways_with_their_modes(cli: Cli, claim: str, tmp_path: Path) -> None:
    there = tmp_path / "script"
    there.write_bytes(b"#!/bin/sh\necho ran \xff\n")
    there.chmod(0o755)
    assert cli("cp", str(there), f"{claim}:/workspace/script").returncode == 0
    assert cli("exec", claim, "--", "/workspace/script").stdout == b"ran \xff\n"
    back = tmp_path / "back"
    assert cli("cp", f"{claim}:script", str(back)).returncode == 0
    assert back.read_bytes() == there.read_bytes()
    assert stat.S_IMODE(back.stat().st_mode) == 0o755


def test_a_destination_that_ends_in_a_slash_is_a_folder(
    cli: Cli, claim: str, tmp_path: Path
) -> None:
    (tmp_path / "f").write_text("x")
    assert cli("cp", str(tmp_path / "f"), f"{claim}:/workspace/into/").returncode == 0
    assert cli("cp", str(tmp_path / "f"), f"{claim}:").returncode == 0
    assert cli("exec", claim, "--", "cat", "into/f", "f").stdout == b"xx"
    assert cli("cp", f"{claim}:into", f"{tmp_path}/new/").returncode == 0
    assert (tmp_path / "new" / "into" / "f").read_text() == "x"
    assert cli("cp", f"{claim}:into/f", str(tmp_path / "new")).returncode == 0
    assert (tmp_path / "new" / "f").read_text() == "x"


def test_folders_are_copied_both_ways(cli: Cli, claim: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "sub" / "empty").mkdir(parents=True)
    (here / "a").write_text("one")
    (here / "sub" / "b").write_bytes(b"\0" * 3_000_000)
    (here / "a").chmod(0o600)
    (here / "link").symlink_to("sub/b")
    done = cli("cp", str(here), f"{claim}:/workspace/there")
    assert done.returncode == 0, done.stderr
    back = tmp_path / "back"
    done = cli("cp", f"{claim}:/workspace/there", str(back))
    assert done.returncode == 0, done.stderr
    assert (back / "a").read_text() == "one"
    assert stat.S_IMODE((back / "a").stat().st_mode) == 0o600
    assert (back / "sub" / "b").read_bytes() == b"\0" * 3_000_000
    assert (back / "sub" / "empty").is_dir()
    assert (back / "link").readlink() == Path("sub/b")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["cp", "{}:/missing", "x"], "missing"),
        (["cp", "{}:/etc/shadow", "x"], "/etc/shadow"),
        (["cp", "/etc/hostname", "{}:/usr/x"], "/usr/x"),
        (["claim", "nothing"], "there is no pool 'nothing'; there are default"),
    ],
)
def test_what_the_sandbox_or_the_broker_refuses_is_one_line(
    cli: Cli, claim: str, arguments: list[str], line: str, tmp_path: Path
) -> None:
    done = cli(*(text.format(claim) for text in arguments))
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done.stderr
    assert line in done.stderr.decode()


def test_a_wrong_token_is_one_line(cli: Cli, folder: Path) -> None:
    import json

    url = json.loads((folder / "serve.json").read_text())["url"]
    done = cli("pools", "--url", url, "--token", "wrong")
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    assert b"the broker's token is missing or wrong" in done.stderr


def test_a_sandbox_is_reached_by_way_of_the_broker(cli: Cli, folder: Path, tmp_path: Path) -> None:
    import json

    served = json.loads((folder / "serve.json").read_text())
    where = ["--url", served["url"], "--token", served["token"]]
    name = cli("claim", "default", "--relay", *where).stdout.decode().strip()
    done = cli("exec", name, "-i", "--", "sh", "-c", "cat; exit 3", stdin=b"relayed")
    assert (done.returncode, done.stdout) == (3, b"relayed")
    (tmp_path / "f").write_text("f")
    assert cli("cp", str(tmp_path / "f"), f"{name}:f").returncode == 0
    assert cli("exec", name, "--", "cat", "f").stdout == b"f"
    assert cli("release", name).returncode == 0


def test_ctrl_c_while_a_claim_waits_claims_nothing(cli: Cli, folder: Path, claim: str) -> None:
    names = [cli("claim", "default").stdout.decode().strip() for _ in range(2)]
    waiting = subprocess.Popen(argv("claim", "default"), env=env(folder), stdout=subprocess.PIPE)
    deadline = time.monotonic() + START_SECONDS
    while cli("pools").stdout.decode().splitlines()[1].split()[7] != "1":
        assert time.monotonic() < deadline
    waiting.send_signal(signal.SIGINT)
    assert (waiting.communicate(timeout=30)[0], waiting.returncode) == (b"", 130)
    assert cli("release", *names).returncode == 0
    assert [line.split()[0] for line in cli("ls").stdout.decode().splitlines()[1:]] == [claim]


def test_claims_are_given_back_by_name_by_id_and_all_at_once(cli: Cli, folder: Path) -> None:
    cli("release", "--all")
    names = [cli("claim", "default").stdout.decode().strip() for _ in range(3)]
    assert cli("release", names[0]).returncode == 0
    (folder / "claims" / f"{names[1]}.json").unlink()
    by_id = cli("ls").stdout.decode().splitlines()[1:]
    (unknown_here,) = [line.split()[0] for line in by_id if names[2] not in line]
    assert cli("release", unknown_here).returncode == 0
    done = cli("exec", names[0], "--", "true")
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    assert cli("release", "--all").returncode == 0
    assert len(cli("ls").stdout.splitlines()) == 1
    assert cli("release", "--all").returncode == 0
    done = cli("release", names[1])
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    assert b"there is no claim" in done.stderr


def groups(pid: int) -> list[Path]:
    return list(Path("/sys/fs/cgroup").rglob(f"rljob-sandbox-*-{pid}-*"))


def test_it_tidies_up_when_its_terminal_is_closed(tmp_path: Path) -> None:
    process = serve(tmp_path, "--warm", "1", "--max", "1")
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert not (tmp_path / "serve.json").exists()
    assert list((tmp_path / "work").iterdir()) == []


def test_killed_it_leaves_no_process_and_reap_tidies_up(tmp_path: Path) -> None:
    process = serve(tmp_path, "--warm", "1", "--max", "1")

    def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            argv(*arguments), env=env(tmp_path), capture_output=True, timeout=60, check=False
        )

    name = run("claim", "default").stdout.decode().strip()
    below = descendants(process.pid)
    process.kill()
    process.communicate()
    wait_until_gone(below)
    done = run("exec", name, "--", "true")
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    told = run("reap", "--dry-run").stdout.decode()
    assert f"claim {name} would be removed\n" in told
    assert run("reap").returncode == 0
    assert groups(process.pid) == []
    assert list((tmp_path / "claims").iterdir()) == []
    again = serve(tmp_path, "--warm", "0")
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=30)
    assert again.returncode == 0
