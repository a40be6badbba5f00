"""The CRDs: up to date, structural, bounded, and no rule where a default would be judged before its keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob.api.crd import render, rljobs, sandboxpools
from rljob.api.mutability import MUTABLE
from rljob.api.rljob_types import RLJobSpec
from tests.harness.manifests import TABLE, cases

FOLDER = Path(__file__).parents[4] / "charts/rljob/files/crds"
CRDS = {"rljobs": rljobs(), "sandboxpools": sandboxpools()}
Node = tuple[str, dict[str, Any]]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[Node]:
    """Every schema in a schema, with its path."""
    yield path, schema
    for key, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{key}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


def root(crd: dict[str, Any]) -> dict[str, Any]:
    (version,) = crd["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


ALL = [node for crd in CRDS.values() for node in nodes(root(crd)) if node[0].startswith(".s")]


@pytest.mark.parametrize("name", ["rljobs.yaml", "sandboxpools.yaml"])
def test_the_files_of_the_chart_are_what_the_models_give(name: str) -> None:
    assert (FOLDER / name).read_text() == render()[name], "run: make crds"
    assert yaml.safe_load(render()[name]) == CRDS[name.removesuffix(".yaml")]


def test_nothing_in_the_files_looks_like_a_template_of_helm() -> None:
    assert not [name for name, text in render().items() if "{{" in text or "}}" in text]


def test_every_list_text_map_and_number_has_a_bound() -> None:
    assert len(ALL) > 150
    for path, schema in ALL:
        kind = schema.get("type")
        if kind == "array":
            assert "maxItems" in schema, path
        elif kind == "string":
            assert "maxLength" in schema or "enum" in schema, path
        elif kind == "object" and "properties" not in schema:
            assert "maxProperties" in schema, path
        elif kind in {"integer", "number"} and path.startswith(".spec"):
            assert {"minimum", "maximum"} <= schema.keys() or "enum" in schema, path


def test_every_schema_is_structural() -> None:
    for path, schema in ALL:
        assert not {"$ref", "anyOf", "oneOf", "allOf", "nullable", "title"} & schema.keys(), path
        assert "type" in schema, path
        assert not ("properties" in schema and "additionalProperties" in schema), path


def test_only_what_rljob_hands_on_unread_may_hold_unknown_keys() -> None:
    free = {path for path, schema in ALL if schema.get("x-kubernetes-preserve-unknown-fields")}
    names = {path.rpartition(".")[2].removesuffix("[]") for path in free}
    assert names == {"egressRules", "options", "resources", "template", "tolerations"}


def test_no_rule_stands_where_a_default_is_judged_before_its_keys_have_theirs() -> None:
    for path, schema in ALL:
        if "x-kubernetes-validations" in schema:
            assert path in {".spec", ".spec.tasks[]", ".spec.sandboxPools[]"}, path


def rules(schema: dict[str, Any]) -> Iterator[dict[str, str]]:
    for _, node in nodes(schema):
        yield from node.get("x-kubernetes-validations", [])


def test_every_rule_says_what_is_wrong_and_what_to_do() -> None:
    found = [rule for crd in CRDS.values() for rule in rules(root(crd))]
    assert len(found) > 100
    for rule in found:
        assert rule["fieldPath"].startswith("."), rule
        assert re.search(r"[;:] ", rule["message"]), rule


def test_a_key_whose_meaning_hangs_on_another_has_no_default() -> None:
    schemas = dict(ALL)
    for path in (
        ".spec.trainer", ".spec.data.train", ".spec.rollout.schedule", ".spec.rollout.groupSize",
        ".spec.rollout.maxStaleness", ".spec.data.validation.everySteps",
        ".spec.store.redis.maxMemoryMib", ".spec.lifecycle.progressDeadlineSeconds",
    ):  # fmt: skip
        assert "default" not in schemas[path], path
    assert schemas[".spec.rollout"]["default"] == {}
    assert schemas[".spec.rollout.replicas"]["default"] == 1


def test_every_key_of_the_spec_is_mutable_or_has_a_rule_that_keeps_it() -> None:
    spec = dict(nodes(root(CRDS["rljobs"])))[".spec"]
    transitions = [rule["fieldPath"] for rule in rules(spec) if "oldSelf" in rule["rule"]]
    items = {
        f".sandboxPools{path}"
        for path in transitions
        if path.lstrip(".") in spec["properties"]["sandboxPools"]["items"]["properties"]
    }
    kept = [*transitions, *items, ".sandboxPools.name"]
    for path, _ in nodes(spec):
        key = path.replace("[]", "")
        mutable = any(
            key == f".{known}" or key.startswith(f".{known}.") or f".{known}.".startswith(f"{key}.")
            for known in MUTABLE
        )
        assert mutable or any(
            key == known or key.startswith(f"{known}.") or known.startswith(f"{key}.")
            for known in kept
        ), path


def test_every_mutable_key_exists_and_the_table_changes_it() -> None:
    paths = {path.replace("[]", "").removeprefix(".spec.") for path, _ in ALL}
    assert paths >= MUTABLE
    told = "\n".join(str(row) for row in TABLE["updates"] if "refused" not in row)
    assert all(known.rpartition(".")[2] in told for known in MUTABLE)


def test_every_rule_across_fields_is_broken_by_a_manifest_of_the_table() -> None:
    wanted = {case.refused for case in cases("cases") if case.refused}
    spec = dict(nodes(root(CRDS["rljobs"])))[".spec"]
    told = {
        f"spec{rule['fieldPath']}"
        for rule in spec["x-kubernetes-validations"]
        if "oldSelf" not in rule["rule"] and " in mode " not in rule["message"]
    }
    missing = {path for path in told if not any(path.startswith(known) for known in wanted)}
    assert not missing


def test_the_models_and_the_schema_have_the_same_keys() -> None:
    keys = {field.alias for field in RLJobSpec.model_fields.values()}
    assert keys == set(root(CRDS["rljobs"])["properties"]["spec"]["properties"])
