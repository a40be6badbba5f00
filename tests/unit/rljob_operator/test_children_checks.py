"""What only rendering can know: one line per fault, path first."""

from __future__ import annotations

from typing import Any

import pytest

from rljob.api.load import load
from rljob.api.rljob_types import RLJob
from rljob_operator.render.checks import check
from tests.unit.rljob_operator.children_cases import CASES, config
from tests.unit.rljob_operator.conftest import make_job

ROLLOUT = {"groupSize": 4, "sampling": {"maxTokensPerTurn": 56}}
TRAINER = {"backend": "simulated", "steps": 3, "groupsPerStep": 2}


def engine(**fields: Any) -> dict[str, Any]:
    return {"rollout": ROLLOUT | {"engine": fields}}


def worker(**fields: Any) -> dict[str, Any]:
    return {"rollout": ROLLOUT | {"worker": fields}}


def trainer(**fields: Any) -> dict[str, Any]:
    return {"trainer": TRAINER | fields}


LOTS = {"limits": {"cpu": "lots"}}
GREEDY = {"spec": {"containers": [{"name": "trainer", "resources": LOTS}]}}
PATHS = {
    "spec.rollout.engine.resources.limits.cpu": engine(resources=LOTS),
    "spec.rollout.worker.resources.requests.memory": worker(resources={"requests": {"memory": "1gb"}}),
    "spec.trainer.resources.limit": trainer(resources={"limit": {}}),
    "spec.trainer.template.spec.restartPolicy": trainer(template={"spec": {"restartPolicy": "Always"}}),
    "spec.trainer.template.spec.containers[trainer].resources.limits.cpu": trainer(template=GREEDY),
    "spec.rollout.engine.template.kind": engine(template={"kind": "Pod"}),
    "spec.rollout.worker.template.metadata.name": worker(template={"metadata": {"name": "x"}}),
    "spec.rollout.engine.env.POD_INDEX": engine(env={"POD_INDEX": "1"}),
    "spec.trainer.resources.limits.memory": trainer(resources={"limits": {"memory": "1e999999999"}}),
    "spec.rollout.engine.env.PYTHONPATH": engine(env={"PYTHONPATH": "/x"}),
    "spec.store.artifacts": {"store": {"artifacts": "file:///tmp/x"}},
    "spec.data.train.source": {"data": {"train": {"source": "file://rows.jsonl"}}},
    "spec.sandboxPools[0].resources.limits.cpu": {"sandboxPools": [{"name": "shells", "resources": LOTS}]},
    "spec.sandboxPools[0].name": {"sandboxPools": [{"name": "s" * 53}]},
}  # fmt: skip


@pytest.mark.parametrize(("path", "spec"), PATHS.items())
def test_a_fault_is_one_line_that_begins_with_its_path(path: str, spec: dict[str, Any]) -> None:
    (line,) = check(make_job(**spec), config())
    assert line.startswith(f"{path}: ")


@pytest.mark.parametrize("name", CASES)
def test_what_can_be_rendered_has_no_fault(name: str) -> None:
    assert check(load(CASES[name], plugins=False), config()) == []


def test_every_fault_is_told_at_once() -> None:
    job = make_job(
        rollout=ROLLOUT | {"engine": {"resources": LOTS}, "worker": {"resources": LOTS}},
        trainer=TRAINER | {"resources": LOTS},
    )
    assert [line.split(": ")[0] for line in check(job, config())] == [
        f"spec.{part}.resources.limits.cpu"
        for part in ("rollout.engine", "rollout.worker", "trainer")
    ]


def test_a_name_that_grows_too_long_says_how_long_it_may_be() -> None:
    job = make_job()
    metadata = job.metadata.model_copy(update={"name": "j" * 50})
    (line, _) = check(RLJob.model_construct(**{**dict(job), "metadata": metadata}), config())
    assert line == f"metadata.name: {'j' * 50} is 50 characters long; at most 44 fit into pod names"


def test_a_job_too_large_for_one_object_is_refused() -> None:
    import random

    prompts = [random.Random(n).randbytes(30_000).hex() for n in range(40)]
    tasks = [
        {
            "name": f"t{n}",
            "type": "shell_files",
            "sandbox": {"pool": "shells"},
            "agent": {"systemPrompt": prompt},
        }
        for n, prompt in enumerate(prompts)
    ]
    assert any("KiB" in line for line in check(make_job(tasks=tasks), config()))


def test_a_manifest_that_no_config_map_holds_is_refused() -> None:
    agent = {"systemPrompt": "x" * 65_000}
    task = {"type": "shell_files", "sandbox": {"pool": "shells"}, "agent": agent}
    (line,) = check(make_job(tasks=[task | {"name": f"t{n}"} for n in range(20)]), config())
    assert line.startswith("spec: takes 1271 KiB, of 900 that fit")


def test_a_template_without_volumes_is_rendered() -> None:
    assert check(make_job(**trainer(template={"spec": {"volumes": None}})), config()) == []
