"""A disk that fills up while a job runs ends the job, leaves nothing running, and is one line."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from rljob_operator import local
from rljob_operator.render.component import Kind
from rljob_operator.run import Run
from tests.unit.rljob_operator.conftest import Harness, component, server


def full(*_: Any, **__: Any) -> None:
    """Stands in for a write."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_every_process_ends_when_the_driver_cannot_write(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    forever = "import time; time.sleep(600)"
    driver = harness.driver(server("gateway-0"), component("trainer", forever, kind=Kind.JOB))
    run = asyncio.create_task(driver.run())
    await harness.until(
        lambda: [s.state for s in driver.supervisors.values()] == ["ready", "running"]
    )
    monkeypatch.setattr(harness.folder, "write", full)
    with pytest.raises(OSError, match="No space left"):
        await asyncio.wait_for(run, 30)
    assert harness.audits == 1


def test_a_full_disk_is_one_line_that_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Run, "prepare", full)
    assert local.main(["job.yaml", "--runs-dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path}: the run was ended: No space left on device; ")
    assert said.count("\n") == 1
