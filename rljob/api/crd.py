"""The CustomResourceDefinitions, made from the models: `make crds`, or `python -m rljob.api.crd FOLDER`.

models ─ crd_schema ─► structural schema ─ crd_rules, crd_immutable ─► + CEL ─► one YAML file per kind
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import yaml

from rljob.api.crd_immutable import immutable_rules, item_rules
from rljob.api.crd_pools import JOB_POOL_RULES, POOL_RULES
from rljob.api.crd_rule import Rule
from rljob.api.crd_rules import ROOT_RULES, TASK_RULES, spec_rules
from rljob.api.crd_schema import Schema, structural
from rljob.api.rljob_types import API_VERSION, KIND, RLJob, RLJobSpec
from rljob.api.sandboxpool_types import SandboxPoolSpec
from rljob.api.status_types import RLJobStatus, SandboxPoolStatus

GROUP, VERSION = API_VERSION.split("/")
POOL_KIND: Final = "SandboxPool"

_Column = tuple[str, str, str, int]
"""Title, type, JSON path, priority: 1 is shown with `-o wide` only."""
_JOB_COLUMNS: Final[tuple[_Column, ...]] = (
    ("Phase", "string", ".status.phase", 0),
    ("Step", "integer", ".status.step", 0),
    ("Steps", "integer", ".status.steps", 0),
    ("Reward", "number", ".status.rewardMean", 0),
    ("Rollouts", "integer", ".status.rollouts.readyReplicas", 0),
    ("Warm", "integer", ".status.sandboxes.warm", 0),
    ("Staleness", "integer", ".status.staleness.max", 0),
    ("GPUs", "integer", ".status.gpus", 0),
    ("Version", "integer", ".status.policyVersion", 1),
    ("Validation", "number", ".status.validation.score", 1),
    ("Message", "string", ".status.message", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
_POOL_COLUMNS: Final[tuple[_Column, ...]] = (
    ("Warm", "integer", ".spec.warm", 0),
    ("Ready", "integer", ".status.ready", 0),
    ("Claimed", "integer", ".status.claimed", 0),
    ("Starting", "integer", ".status.starting", 0),
    ("Resetting", "integer", ".status.resetting", 0),
    ("Quarantined", "integer", ".status.quarantined", 1),
    ("Max", "integer", ".spec.max", 0),
    ("Message", "string", '.status.conditions[?(@.type=="Ready")].message', 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
_RLJOB_SCALE: Final = {
    "specReplicasPath": ".spec.rollout.replicas",
    "statusReplicasPath": ".status.rollouts.replicas",
    "labelSelectorPath": ".status.rollouts.selector",
}
_POOL_SCALE: Final = {
    "specReplicasPath": ".spec.warm",
    "statusReplicasPath": ".status.ready",
    "labelSelectorPath": ".status.selector",
}


def rljobs() -> Schema:
    """The CRD of RLJob."""
    spec = structural(RLJobSpec)
    tasks, pools = (spec["properties"][name]["items"] for name in ("tasks", "sandboxPools"))
    _judge(tasks, TASK_RULES)
    _judge(pools, (*JOB_POOL_RULES, *item_rules("sandboxPools", pools)))
    _judge(spec, (*spec_rules(), *immutable_rules(spec)))
    root = _root(RLJob.__doc__, spec, structural(RLJobStatus))
    _judge(root, ROOT_RULES)
    return _definition(KIND, "rlj", root, _RLJOB_SCALE, _JOB_COLUMNS)


def sandboxpools() -> Schema:
    """The CRD of SandboxPool."""
    spec = structural(SandboxPoolSpec)
    _judge(spec, POOL_RULES)
    root = _root(SandboxPoolSpec.__doc__, spec, structural(SandboxPoolStatus))
    return _definition(POOL_KIND, "rlpool", root, _POOL_SCALE, _POOL_COLUMNS)


def _judge(schema: Schema, rules: tuple[Rule, ...]) -> None:
    schema["x-kubernetes-validations"] = [rule.entry() for rule in rules]


def _root(description: str | None, spec: Schema, status: Schema) -> Schema:
    properties = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
        "spec": spec,
        "status": status,
    }
    return {
        "type": "object",
        "description": description,
        "properties": properties,
        "required": ["spec"],
    }


def _definition(
    kind: str, short: str, root: Schema, scale: dict[str, str], columns: tuple[_Column, ...]
) -> Schema:
    singular = kind.lower()
    names = {
        "kind": kind,
        "listKind": f"{kind}List",
        "plural": f"{singular}s",
        "singular": singular,
        "shortNames": [short],
        "categories": ["all", "rl"],
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}, "scale": scale},
        "additionalPrinterColumns": [_column(*column) for column in columns],
        "schema": {"openAPIV3Schema": root},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{singular}s.{GROUP}"},
        "spec": {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
    }


def _column(title: str, kind: str, path: str, priority: int) -> dict[str, Any]:
    column: dict[str, Any] = {"name": title, "type": kind, "jsonPath": path}
    return column | {"priority": priority} if priority else column


class _Dumper(yaml.SafeDumper):
    """Without anchors, which not every reader of manifests follows."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def render() -> dict[str, str]:
    """File name → YAML."""
    made = {"rljobs.yaml": rljobs(), "sandboxpools.yaml": sandboxpools()}
    first = "# Made from the models in rljob/api by `make crds`; do not edit.\n"
    return {
        name: first + yaml.dump(crd, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
        for name, crd in made.items()
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, text in render().items():
        (folder / file_name).write_text(text, encoding="utf-8")
