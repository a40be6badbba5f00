"""A job on the test cluster, made of simulated parts, and what a test asks of it."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.cluster import ROOT, Cluster, Object, wait_until

MANIFEST = ROOT / "examples" / "simulated" / "rljob.yaml"


def simulated(name: str, turn_seconds: float = 0.05, **spec: Any) -> Object:
    """examples/simulated with changes: `trainer__steps=4` sets spec.trainer.steps; None removes a key."""
    manifest = copy.deepcopy(yaml.safe_load(MANIFEST.read_text()))
    manifest["metadata"]["name"] = name
    spec.setdefault("rollout__engine__env", {"RLJOB_SIM_TURN_SECONDS": str(turn_seconds)})
    for path, value in spec.items():
        *parents, last = path.split("__")
        place = manifest["spec"]
        for key in parents:
            place = place.setdefault(key, {})
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return manifest


class ClusterJob:
    """One RLJob in its namespace."""

    def __init__(self, cluster: Cluster, namespace: str, manifest: Object) -> None:
        self.cluster, self.namespace, self.manifest = cluster, namespace, manifest
        self.name: str = manifest["metadata"]["name"]

    def apply(self) -> ClusterJob:
        """kubectl apply."""
        self.cluster.apply(self.manifest, self.namespace)
        return self

    def patch(self, **spec: Any) -> None:
        """Change keys of the spec."""
        self.cluster.patch("RLJob", self.name, self.namespace, {"spec": spec})

    @property
    def resource(self) -> Object:
        """The RLJob as it is now; empty where it is gone."""
        return self.cluster.get("RLJob", self.name, self.namespace) or {}

    @property
    def status(self) -> Object:
        """Its status."""
        return self.resource.get("status", {})

    @property
    def phase(self) -> str:
        """Its phase."""
        return self.status.get("phase", "")

    @property
    def step(self) -> int:
        """Steps that its status shows."""
        return self.status.get("step", 0)

    def condition(self, type_: str) -> Object:
        """A condition; empty where there is none."""
        return next((c for c in self.status.get("conditions", []) if c["type"] == type_), {})

    def pods(self, component: str = "", **labels: str) -> list[Object]:
        """Its pods, sandboxes included."""
        wanted = {"rljob.dev/job": self.name, **labels}
        if component:
            wanted["app.kubernetes.io/component"] = component
        selector = ",".join(f"{key}={value}" for key, value in wanted.items())
        return self.cluster.list("Pod", self.namespace, selector)

    def until(self, what: str, probe: Callable[[], Any], seconds: float = 120) -> Any:
        """Wait; the failure shows what the cluster knows."""
        try:
            return wait_until(f"{self.name}: {what}", probe, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def until_phase(self, phase: str, seconds: float = 180) -> None:
        """Wait for a phase; another end is a failure at once."""

        def reached() -> bool:
            now = self.phase
            assert now == phase or now not in {"Succeeded", "Failed", "Rejected"}, (
                f"{now}\n{self.story()}"
            )
            return now == phase

        self.until(f"phase {phase}", reached, seconds)

    def until_condition(
        self, type_: str, status: str, contains: str = "", seconds: float = 120
    ) -> Object:
        """Wait for a condition whose reason or message contains a text."""

        def seen() -> Object | None:
            found = self.condition(type_)
            text = f"{found.get('reason')} {found.get('message')}"
            return (
                found
                if found.get("status") == status and contains.lower() in text.lower()
                else None
            )

        return self.until(f"{type_}={status} with {contains!r}", seen, seconds)

    def story(self) -> str:
        """Everything a person would look at."""

        def show(*args: str) -> str:
            return self.cluster.kubectl(*args, "-n", self.namespace, check=False)

        pods = show("get", "pods", "-o", "wide")
        logs = [
            f"--- {pod['metadata']['name']}\n"
            + show("logs", pod["metadata"]["name"], "--all-containers", "--tail=15", "--prefix")
            for pod in self.pods()
            if pod["metadata"]["labels"].get("app.kubernetes.io/component") != "sandbox"
        ]
        events = show("get", "events", "--sort-by=.lastTimestamp")
        return "\n".join([json.dumps(self.status, indent=1), pods, events[-6000:], *logs])[-20_000:]

    def delete_pod(self, pod: Object) -> None:
        """kubectl delete --force: gone at once."""
        self.cluster.delete("Pod", pod["metadata"]["name"], self.namespace, gracePeriodSeconds=0)

    def artifacts(self) -> Path:
        """The folder of the job's volume on this machine (the test cluster's volumes are folders)."""
        claim = self.cluster.get("PersistentVolumeClaim", f"{self.name}-artifacts", self.namespace)
        assert claim, "no claim for artifacts"
        volume = self.cluster.get("PersistentVolume", claim["spec"]["volumeName"])
        assert volume, "the claim is not bound"
        if "hostPath" not in volume["spec"]:
            pytest.skip("the volumes of this cluster are not folders of this machine")
        root = Path(volume["spec"]["hostPath"]["path"])
        inner = root / self.namespace / self.name
        return inner if inner.exists() else root

    def assert_nothing_lost(self) -> None:
        """Workers' logs, archived batches and the saved facts agree."""
        from rljob.ledger.audit import audit

        report = asyncio.run(audit(self.artifacts(), None))
        assert report.ok, report
        assert report.trained > 0
