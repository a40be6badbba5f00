"""Jobs and how they are rendered, for the tests of the children."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljob.api.load import load
from rljob.api.rljob_types import RLJob
from rljob_operator.observed import ClusterConfig, Images, Object, Owner, Shape
from rljob_operator.render.children import children
from rljob_operator.render.context import Context
from rljob_operator.render.secrets import secret_values

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/children"
CASES = {
    "quickstart": ROOT / "examples/quickstart/rljob.yaml",
    "simulated": ROOT / "examples/simulated/rljob.yaml",
    **{name: GOLDEN / f"manifests/{name}.yaml" for name in ("gpu", "own-redis", "eval", "egress")},
}
UID = "4c1a5f2e-0000-4000-8000-000000000001"
CRDS = frozenset({"podmonitors.monitoring.coreos.com"})
UP = Shape(store=True, prepare_attempt=1, pools=True, rollouts=2, trainer_attempt=1)


def images(version: str = "1") -> Images:
    names = Images.__struct_fields__
    return Images(**{name: f"rljob/{name.replace('_', '-')}:{version}" for name in names})


def config(version: str = "1", **more: Any) -> ClusterConfig:
    return ClusterConfig(images=images(version), **more)


def owner(job: RLJob, uid: str = UID) -> Owner:
    return Owner(job.metadata.namespace or "default", job.name, uid)


def values(job: RLJob, existing: Mapping[str, str] | None = None) -> dict[str, str]:
    context = Context(job, owner(job), config())
    return secret_values(context, existing, token="default/job:mac", password="00c0ffee")


def render(job: RLJob, shape: Shape = UP, **more: Any) -> list[Object]:
    fields: dict[str, Any] = {"pinned": None, "crds": CRDS}
    fields |= {"config": config(), "owner": owner(job), "secrets": values(job)} | more
    return children(job, shape=shape, **fields)


def rendered(name: str, shape: Shape = UP, **more: Any) -> list[Object]:
    return render(load(CASES[name], plugins=False), shape, **more)


def child(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = (
        item for item in objects if (item["kind"], item["metadata"]["name"]) == (kind, name)
    )
    return found


def names(objects: list[Object], kind: str) -> list[str]:
    return [item["metadata"]["name"] for item in objects if item["kind"] == kind]


def container(workload: Object, name: str) -> dict[str, Any]:
    spec = workload["spec"]["template"]["spec"]
    (found,) = (
        item
        for item in (*spec.get("initContainers", []), *spec["containers"])
        if item["name"] == name
    )
    return found


def env(workload: Object, name: str) -> dict[str, Any]:
    """Variables of a container; a value from elsewhere as it is rendered."""
    items = container(workload, name)["env"]
    return {item["name"]: item.get("value", item.get("valueFrom", "")) for item in items}


# left: what a person writes; right: what an API server makes of it (tests/e2e/test_rendered.py asks one)
PRINTED = {
    "250m": "250m", "0.5": "500m", "1000m": "1", "1": "1", "1000": "1k", "2560Mi": "2560Mi", "1024Mi": "1Gi",
    "1.5Gi": "1536Mi", "0.5Mi": "512Ki", "0.5Ki": "512", "2000M": "2G", "1e3": "1e3", "1500m": "1500m", "0": "0",
    "0Gi": "0", "1E": "1E", "100n": "1m", "0.1": "100m", "1023": "1023", "1e-3": "1e-3", "5e4": "50e3", ".5": "500m",
    "0.0000000001": "1m", "1.0001Ki": "1024103m", "0.3Mi": "314572800m", "0.0005": "1m", "1.5e3": "1500",
    "1048576Ki": "1Gi", "1025Ki": "1025Ki", "123456789": "123456789",
}  # fmt: skip
