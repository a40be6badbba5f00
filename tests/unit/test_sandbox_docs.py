"""docs/sandboxes.md tells what the code does: every error and every metric, and an example that loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rljob import telemetry
from rljob.api.load_pools import load_pools
from rljob.api.sandboxpool_types import Recycle, SandboxPoolSpec
from rljob.sandbox_wire import FILE_ERRORS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/sandboxes.md").read_text()
ROOM = ROOT / "sandbox_pool/rljob_sandbox_pool"


def table(heading: str) -> list[list[str]]:
    """Cells of the rows of the table below a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]


def words(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def refusals() -> set[str]:
    """Every word with which guest or broker refuse."""
    text = "\n".join(path.read_text() for path in ROOM.rglob("*.py"))
    by_status = re.findall(r'\b[45]\d\d, "([a-z_]+)"', text)
    none_free = re.findall(r'NoSandboxError\(\s*"([a-z_]+)"', text)
    states = ["quarantined", "not_claimed"]  # the guest's state is the word
    return {*by_status, *none_free, *states, *FILE_ERRORS}


def test_every_refusal_is_in_the_table_of_errors_and_no_other() -> None:
    told = {word for _, errors, _, _ in table("Errors") for word in words(errors)}
    assert told == refusals()


def test_every_metric_of_sandboxes_is_in_the_table_with_its_labels() -> None:
    known = {
        metric.name: set(metric.labels)
        for metric in telemetry.METRICS
        if metric.name.startswith("rljob_sandbox")
    }
    assert {words(name).pop(): words(labels) for name, labels, _ in table("Metrics")} == known


@pytest.mark.parametrize(
    "name", [metric.name for metric in telemetry.METRICS if metric.name.startswith("rljob_sandbox")]
)
def test_every_value_of_a_label_is_told(name: str) -> None:
    """What the metric's own description lists."""
    (metric,) = (one for one in telemetry.METRICS if one.name == name)
    (told,) = (row[2] for row in table("Metrics") if name in row[0])
    listed = re.search(r"by (?:result|state): ([a-z_, ]+)\.", metric.doc)
    if listed:
        assert re.match(r"[a-z_, ]+", told)[0].strip() == listed[1]  # type: ignore[index]


def test_the_example_is_a_pool_for_one_machine_and_for_a_cluster() -> None:
    (pool,) = load_pools(ROOT / "examples/sandboxes/pool.yaml")
    assert pool.name == "shells"
    assert pool.warm < pool.max


@pytest.mark.parametrize("key", ["recycle", "egress", "writablePaths", "readOnlyRoot", "prePull"])
def test_the_keys_that_the_page_explains_exist(key: str) -> None:
    assert f"`{key}" in PAGE
    aliases = {field.alias for field in SandboxPoolSpec.model_fields.values()}
    assert key in aliases


def test_every_key_of_recycle_has_its_line() -> None:
    told = {row[0].strip("`").partition(":")[0] for row in table("Recycling and quarantine")}
    assert told == {field.alias for field in Recycle.model_fields.values()}
