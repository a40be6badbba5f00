"""The table of good and bad manifests: `tests/e2e/manifests/table.yaml`."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rljob.api.source import KeyPath, Source, set_value

ROOT = Path(__file__).parents[2]
TABLE: dict[str, Any] = yaml.safe_load((ROOT / "tests/e2e/manifests/table.yaml").read_text())


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    manifest: dict[str, Any]
    refused: str | None
    """The path that both must name."""
    validate: str | None
    """The path that only `rljob validate` names."""


def base() -> dict[str, Any]:
    """The manifest that every case begins with."""
    return copy.deepcopy(TABLE["base"])


def cases(section: str) -> list[Case]:
    """`cases` or `updates`."""
    return [
        Case(row["case"], _changed(row), row.get("refused"), row.get("validate"))
        for row in TABLE[section]
    ]


def random_manifests(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Manifests in which a few keys have values of `random.yaml`."""
    chance = random.Random(seed)
    domain = yaml.safe_load((ROOT / "tests/e2e/manifests/random.yaml").read_text())
    for _ in range(count):
        keys = chance.sample(sorted(domain["values"]), chance.randint(1, 4))
        picked = {key: chance.choice(domain["values"][key]) for key in keys}
        values = chance.choice([{}, *domain["modes"]]) | picked
        yield _changed({"case": "random", "set": dict(sorted(values.items()))})


def pools() -> list[Case]:
    """SandboxPool objects."""
    head = {"apiVersion": "rljob.dev/v1alpha1", "kind": "SandboxPool", "metadata": {"name": "a"}}
    return [
        Case(row["case"], head | row["set"], row.get("refused"), None) for row in TABLE["pools"]
    ]


def _changed(row: dict[str, Any]) -> dict[str, Any]:
    source = Source(row["case"], base(), {})
    values = dict(row.get("set", {}))
    values |= {path: "x" * length for path, length in row.get("long", {}).items()}
    values |= {path: ["x"] * length for path, length in row.get("many", {}).items()}
    for path, value in values.items():
        set_value(source, f"{path}={json.dumps(value)}")
    for path in row.get("drop", ()):
        _drop(source, path)
    return source.data


def _drop(source: Source, path: str) -> None:
    marked = object()
    parts = path if path == "spec" else f"spec.{path}"
    here, key = _parent(source.data, _parts(parts))
    assert here.pop(key, marked) is not marked, f"there is no {path}"


def _parts(text: str) -> KeyPath:
    flat = text.replace("[", ".").replace("]", "").split(".")
    return tuple(int(part) if part.isdigit() else part for part in flat)


def _parent(data: Any, path: KeyPath) -> tuple[Any, Any]:
    for part in path[:-1]:
        data = data[part]
    return data, path[-1]
