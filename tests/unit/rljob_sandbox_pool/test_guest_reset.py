"""What a reset notices that no folder shows."""

import os
import resource
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from rljob_sandbox_pool.guest.reset import Canary, Snapshot, survivors


@pytest.mark.parametrize("name", ["CORE", "DATA", "MEMLOCK", "MSGQUEUE", "NOFILE", "STACK"])
def test_any_limit_of_the_guest_that_was_changed_is_evidence(name: str) -> None:
    kind = getattr(resource, f"RLIMIT_{name}")
    soft, hard = before = resource.getrlimit(kind)
    pristine = Snapshot.take([])
    lower = {-1: 1 << 40, 0: min(hard, 1) if hard >= 0 else 1}.get(soft, soft - 1)
    try:
        resource.setrlimit(kind, (lower, hard))
        found = of_the_guest(pristine)
    finally:
        resource.setrlimit(kind, before)
    assert found == ["the guest's own limits, priority or scheduling have changed"]
    assert not of_the_guest(pristine)


def of_the_guest(pristine: Snapshot, sealed: Sequence[str] = ()) -> list[str]:
    """Ports come and go on this machine, which is no sandbox."""
    found = pristine.differences(Snapshot.take([], sealed=sealed))
    return [words for words in found if not words.startswith("somebody listens")]


def test_a_folder_whose_entries_alone_are_sealed(tmp_path: Path) -> None:
    below = tmp_path / "below"
    below.mkdir()
    sealed = [f"{tmp_path}/"]
    pristine = Snapshot.take([], sealed=sealed)
    (below / "x").touch()
    assert of_the_guest(pristine, sealed) == []
    (tmp_path / "left").touch()
    assert of_the_guest(pristine, sealed) == [f"{tmp_path}/ was touched"]
    (tmp_path / "left").unlink()
    below.chmod(0o700)
    assert of_the_guest(pristine, sealed) == [f"{tmp_path}/ was touched"]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_port_where_somebody_listens_is_evidence(family: int, kind: int) -> None:
    pristine = Snapshot.take([])
    with socket.socket(family, kind) as sock:
        sock.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            sock.listen()
        name = ("tcp" if kind == socket.SOCK_STREAM else "udp") + "6" * (family == socket.AF_INET6)
        port = sock.getsockname()[1]
        assert f"somebody listens: {name} port {port}" in pristine.differences(Snapshot.take([]))
    assert not any(f"port {port}" in words for words in pristine.differences(Snapshot.take([])))


def test_a_unix_socket_where_somebody_listens_is_evidence() -> None:
    pristine = Snapshot.take([])
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("\0rljob-test-left-behind")
        sock.listen()
        found = pristine.differences(Snapshot.take([]))
    assert "somebody listens: unix @rljob-test-left-behind" in found


def test_processes_that_do_not_end_are_named() -> None:
    words = survivors([os.getpid(), *range(2**22, 2**22 + 9)])
    assert words.startswith(f"10 processes do not end: {os.getpid()} {comm()}, 4194304 ,")


def comm() -> str:
    return Path("/proc/self/comm").read_text().strip()


def result(**differs: object) -> dict[str, object]:
    told = {"exit_code": 0, "stdout": "3.11\n", "stderr": "", "truncated": False}
    return {**told, "timed_out": False, "seconds": 0.1, **differs}


def test_a_canary_that_says_something_else_is_evidence() -> None:
    canary = Canary("python3 --version")
    assert canary.expect(result()) == ""
    assert canary.differences(result(seconds=5.0)) == []
    assert canary.differences(result(exit_code=1, stdout="")) == [
        "the canary's exit_code is 1, was 0",
        "the canary's stdout is '', was '3.11\\n'",
    ]
    assert canary.differences(result(timed_out=True)) == ["the canary does not end within 10 s"]


def test_a_canary_that_does_not_end_is_none() -> None:
    assert "does not end" in Canary("sleep 60").expect(result(timed_out=True))
    missing = result(exit_code=127, stderr="sh: python4: not found")
    assert Canary("python4").expect(missing) == "it does not run: sh: python4: not found"
    assert Canary("false").expect(result(exit_code=1)) == ""
