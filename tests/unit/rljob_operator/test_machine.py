"""What a machine lacks is told before anything starts."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from rljob.errors import MachineError
from rljob_operator.drivers import ports
from rljob_operator.drivers.folder import RunFolder, pid_start_time
from rljob_operator.drivers.wiring import Wiring
from rljob_operator.machine import Machine, lacks, observe
from rljob_operator.render.plan import plan
from tests.unit.rljob_operator.conftest import make_job


def machine(**fields: Any) -> Machine:
    base: dict[str, Any] = {
        "bwrap": "/usr/bin/bwrap", "cpus": 2, "memory_available_mib": 12_000, "disk_free_mib": 50_000, "valkey": "/v",
    }  # fmt: skip
    return Machine(**(base | fields))


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"bwrap": None}, "bubblewrap"),
        ({"contain_error": "No permissions to create new namespace"}, "user namespaces"),
        ({"sandbox_error": "Can't mount proc"}, "user namespaces"),
        ({"valkey": None}, "valkey-server"),
        ({"memory_available_mib": 100}, "memory"),
        ({"disk_free_mib": 10}, "disk"),
    ],
)
def test_each_lack_is_one_line_with_a_fix(fields: dict[str, Any], path: str) -> None:
    (problem,) = lacks(machine(**fields), plan(make_job()))
    assert problem.path == path
    assert problem.fix
    assert "\n" not in str(problem)


def test_a_machine_that_has_everything_lacks_nothing() -> None:
    assert lacks(machine(), plan(make_job())) == []


def test_a_job_with_a_redis_of_ones_own_needs_no_valkey() -> None:
    job = make_job(store={"redis": {"url": "redis://h/0"}})
    assert lacks(machine(valkey=None), plan(job)) == []


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    seen = observe(tmp_path / "not" / "there" / "yet")
    assert seen.memory_available_mib > 0
    assert seen.disk_free_mib > 0
    assert seen.valkey


def test_picked_ports_are_free_different_and_never_ephemeral() -> None:
    taken: set[int] = set()
    picked = [ports.pick(taken) for _ in range(50)]
    assert len(set(picked)) == 50
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < low or port > 60_999 for port in picked)
    assert all(ports.is_free(port) for port in picked[:5])


def test_a_pinned_port_in_use_is_refused() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        job = make_job(store={"redis": {"port": sock.getsockname()[1]}})
        with pytest.raises(MachineError, match="is in use"):
            Wiring(plan(job), {}, {}, {})


def test_a_wiring_fills_every_placeholder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLJOB_REDIS_URL", "from the person's shell")
    monkeypatch.setenv("RLJOB_SIM_STEP_SECONDS", "0.5")
    parts = plan(make_job())
    paths = {
        name: tmp_path / name
        for name in ("artifacts", "job_file", "store", "work", "cache", "manifest")
    }
    wiring = Wiring(
        parts,
        paths,
        {"token": "T", "pool_key": "P", "redis": "R"},
        {"valkey-server": "/bin/valkey"},
    )
    for part in parts:
        launch = wiring.launch(part)
        text = " ".join((*launch.argv, *launch.env.values(), *launch.files.values()))
        assert "${" not in text
        assert "person's shell" not in text
    trainer = wiring.launch(parts[-1])
    assert trainer.env["RLJOB_REDIS_URL"].startswith("redis://:R@127.0.0.1:")
    assert trainer.env["RLJOB_SIM_STEP_SECONDS"] == "0.5"


def test_a_run_folder_has_one_driver_at_a_time(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.claim()
    with pytest.raises(MachineError, match="is alive"):
        second.claim()
    first.release()
    second.claim()
    second.release()


def test_a_run_is_alive_only_while_the_same_process_lives(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.alive is None
    folder.mark_running(0.0, tmp_path)
    assert folder.alive == os.getpid()
    run = folder.read("run.json")
    folder.write("run.json", {**run, "pid_start_time": run["pid_start_time"] - 1})
    assert folder.alive is None


def test_runs_are_moved_aside_in_order(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / "run").mkdir()
        assert RunFolder(tmp_path / "run").move_aside() == tmp_path / f"run.{number}"
    assert RunFolder(tmp_path / "run").move_aside() is None


def test_a_process_that_is_gone_has_no_start_time() -> None:
    assert pid_start_time(os.getpid())
    assert pid_start_time(2**22 + 1) is None


def test_a_half_written_state_file_reads_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"step": ')
    assert RunFolder(tmp_path).read("status.json") == {}
    RunFolder(tmp_path).write("status.json", {"step": 1})
    assert RunFolder(tmp_path).read("status.json") == {"step": 1}
    assert not stat.S_ISLNK((tmp_path / "status.json").lstat().st_mode)
