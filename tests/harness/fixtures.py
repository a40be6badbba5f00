"""Fixtures around `simulated_job`: a test folder's conftest imports what it uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.simulated_job import Job, make_model


@pytest.fixture(scope="session")
def simulated_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model directory for the whole test run."""
    return make_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def make_job(tmp_path: Path, simulated_model: Path) -> Iterator[Callable[..., Job]]:
    """Makes jobs, each in a folder of its own; at the end all are stopped and must have left nothing."""
    made: list[Job] = []

    def make(**changes: Any) -> Job:
        folder = tmp_path / f"job{len(made)}"
        folder.mkdir()
        made.append(Job(folder, simulated_model, **changes))
        return made[-1]

    yield make
    for job in made:
        job.close()
        assert job.processes() == []
