"""The environment of a component reads back as it was written; anything else is one clear line."""

import asyncio
from pathlib import Path

import pytest

from rljob.clock import SystemClock
from rljob.errors import MachineError
from rljob.settings import Settings

NEEDED = {
    "RLJOB_COMPONENT": "trainer",
    "RLJOB_JOB_FILE": "job.json",
    "RLJOB_ARTIFACTS": "artifacts",
    "RLJOB_WORK_DIR": "work",
}


def test_the_environment_reads_back() -> None:
    settings = Settings.from_env(NEEDED | {"RLJOB_METRICS_PORT": "9100", "OTHER": "x"})
    assert (settings.component, settings.metrics_port) == ("trainer", 9100)
    assert Settings.from_env(settings.to_env()) == settings


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_variable_is_named(name: str) -> None:
    env = {key: value for key, value in NEEDED.items() if key != name}
    with pytest.raises(MachineError, match=name.removeprefix("RLJOB_").lower()):
        Settings.from_env(env)


def test_a_malformed_variable_is_named() -> None:
    with pytest.raises(MachineError, match="metrics_port"):
        Settings.from_env(NEEDED | {"RLJOB_METRICS_PORT": "many"})


async def test_the_system_clock_sleeps_and_never_goes_back() -> None:
    clock = SystemClock()
    before, wall = clock.monotonic(), clock.now()
    await clock.sleep(0.01)
    assert clock.monotonic() - before >= 0.009
    assert abs(clock.now() - wall) < 60
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_the_folders_of_a_pod_are_made_and_one_that_cannot_be_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "work" / "home"))
    settings = Settings.from_env(NEEDED | {"RLJOB_WORK_DIR": str(tmp_path / "work" / "trainer")})
    settings.make_folders()
    settings.make_folders()
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["home", "trainer"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(MachineError, match=r"HOME: .*cannot be made"):
        settings.make_folders()
