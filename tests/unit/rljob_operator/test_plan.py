"""The plan of a job: golden files hold it (`RLJOB_WRITE_GOLDEN=1` rewrites them), and rules that no file shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from rljob.api.load import load
from rljob.settings import Settings
from rljob_operator.render.component import Component, Kind, fill, literal
from rljob_operator.render.plan import plan
from tests.unit.rljob_operator.conftest import make_job

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/plans"
CASES = {
    "quickstart": ("quickstart", []),
    "simulated": ("simulated", []),
    "eval": ("eval", []),
    "rollout": ("rollout", []),
    "two-rollouts-own-redis": (
        "quickstart",
        [
            "rollout.replicas=2",
            "store.redis.url=redis://:$ecret@host:6379/0",
            "rollout.engine.port=9000",
        ],
    ),
}


def planned(name: str) -> list[Component]:
    example, assignments = CASES[name]
    return plan(load(ROOT / "examples" / example / "rljob.yaml", assignments, plugins=False))


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_what_the_golden_file_says(name: str) -> None:
    text = yaml.safe_dump(msgspec.to_builtins(planned(name)), sort_keys=False, width=140)
    golden = GOLDEN / f"{name}.yaml"
    if os.environ.get("RLJOB_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", CASES)
def test_what_a_component_depends_on_comes_before_it(name: str) -> None:
    seen: set[str] = set()
    for part in planned(name):
        assert set(part.depends) <= seen
        seen.add(part.name)


@pytest.mark.parametrize("name", CASES)
def test_every_component_can_read_its_settings(name: str) -> None:
    for part in planned(name):
        if part.role != "store":
            env = {key: fill(value, lambda _kind, _name: "7") for key, value in part.env.items()}
            assert Settings.from_env(env).component == part.name


def test_only_the_pool_manager_gets_the_pool_key_and_the_trainer_no_token() -> None:
    secrets = {part.name: str(part.env) for part in planned("quickstart")}
    assert [name for name, env in secrets.items() if "secret:pool_key" in env] == ["sandbox-pool"]
    assert "secret:token" not in secrets["trainer"]
    assert [name for name, env in secrets.items() if "secret:redis" in env] == [
        "worker-0",
        "trainer",
    ]


def test_the_password_of_the_store_is_in_no_command_line() -> None:
    (store, *_) = planned("quickstart")
    assert "secret" not in " ".join(store.command)
    assert "requirepass ${secret:redis}" in store.files["valkey.conf"]
    assert "appendfsync always" in store.files["valkey.conf"]


def test_the_trainer_alone_ends_the_job_and_only_prepare_runs_to_its_end_first() -> None:
    kinds: dict[Kind, list[str]] = {}
    for part in planned("two-rollouts-own-redis"):
        kinds.setdefault(part.kind, []).append(part.name)
    assert kinds[Kind.JOB] == ["trainer"]
    assert kinds[Kind.PREPARE] == ["prepare"]


def test_a_users_dollar_signs_reach_the_engine_as_they_are() -> None:
    job = make_job(
        rollout={"groupSize": 4, "engine": {"kind": "simulated", "env": {"A": "${x:y} $1 $$"}}}
    )
    engine = next(part for part in plan(job) if part.role == "engine")
    lookup: Any = {}.__getitem__
    assert fill(engine.env["A"], lookup) == "${x:y} $1 $$"
    assert fill(literal("a$b"), lookup) == "a$b"
