"""A reconciler over an API server in memory, with copies that a test brings up to date when it wants to.

bench.sync()    the copies see what the server holds now
bench.go()      sync, then one pass
"""

from __future__ import annotations

import copy
from typing import Any

from rljob import labels
from rljob.kube.client import KubeClient
from rljob.kube.resources import Object, by_kind
from rljob.testing.clock import ManualClock
from rljob.testing.kube import FakeKube
from rljob_operator.copies import Children, Jobs, trim_child
from rljob_operator.events import EventPoster, Warnings
from rljob_operator.ledgers import Ledgers
from rljob_operator.observe import Observer
from rljob_operator.observed import ClusterConfig, Decision, Images, Observed, Owner, Shape
from rljob_operator.reconcile import Reconciler
from tests.unit.rljob_operator.conftest import manifest

CONFIG = ClusterConfig(
    images=Images(trainer="t", rollout_worker="w", services="s", engine="e", sandbox_pool="p", sandbox="b")
)  # fmt: skip
KINDS = ("ConfigMap", "Service", "StatefulSet", "Job", "SandboxPool", "PersistentVolumeClaim")
BROKER_KEY = b"0123456789abcdef"


def child(kind: str, name: str, owner: Owner, **spec: Any) -> Object:
    """A child as rendering makes it."""
    return {
        "apiVersion": by_kind(kind).api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": labels.labels(owner.name, owner.uid, "job"),
            "ownerReferences": [{"kind": "RLJob", "name": owner.name, "uid": owner.uid, "controller": True}],
        },
        "spec": spec,
    }  # fmt: skip


def render(_job: Any, owner: Owner, _config: Any, shape: Shape, **_: Any) -> list[Object]:
    """A handful of children by shape."""
    made = [
        child("ConfigMap", "j-job", owner, text="x"),
        child("Service", "j-store", owner, port=6379),
        child("StatefulSet", "j-store", owner, replicas=int(shape.store)),
    ]
    if shape.trainer_attempt:
        made.append(child("Job", f"j-trainer-{shape.trainer_attempt}", owner, completions=1))
    return made


class Bench:
    """See the module."""

    def __init__(self, fake: FakeKube | None = None, **spec: Any) -> None:
        self.fake = fake or FakeKube()
        self.clock = ManualClock()
        self.seen: list[Observed] = []
        self.woken: list[str] = []
        self.decision = Decision(
            shape=Shape(store=True, trainer_attempt=1),
            status={"phase": "Running", "observedGeneration": 1},
            requeue_seconds=None,
        )
        if fake is None:
            self.fake.put(manifest(**spec) | {"metadata": {"name": "j", "namespace": "ns"}})
        self.uid = self.job["metadata"]["uid"]
        self.owner = Owner("ns", "j", self.uid)
        self.restart()

    @property
    def job(self) -> Object:
        found = self.fake.get("RLJob", "j")
        assert found
        return found

    def restart(self, **client_options: Any) -> None:
        """A new process: nothing is remembered."""
        self.client: KubeClient = self.fake.client(**client_options)
        self.jobs, self.children = Jobs(self.woken.append), Children(self.woken.append)
        self._copied: dict[tuple[str, str], Object] = {}
        self.ledgers = Ledgers(self.clock)
        warnings = Warnings(self.client, self.clock)
        self.reconciler = Reconciler(
            self.client,
            CONFIG,
            BROKER_KEY,
            jobs=self.jobs,
            observer=Observer(self.client, self.children, self.ledgers, warnings, self.clock),
            ledgers=self.ledgers,
            poster=EventPoster(self.client, self.clock),
            decide=self._decide,
            render=render,
            crds=frozenset(),
            clock=self.clock,
        )

    def _decide(self, observed: Observed, _config: ClusterConfig) -> Decision:
        self.seen.append(observed)
        return self.decision

    def decide(self, **changed: Any) -> None:
        """From now on this is decided."""
        fields = {name: getattr(self.decision, name) for name in Decision.__struct_fields__}
        self.decision = Decision(**(fields | changed))

    def sync(self) -> None:
        """Bring the copies up to date."""
        for job in self.fake.all("RLJob"):
            self.jobs.hear("MODIFIED", copy.deepcopy(job))
        if not self.fake.get("RLJob", "j"):
            self.jobs.remove(self.uid)
        now: dict[tuple[str, str], Object] = {}
        for kind in KINDS:
            for obj in self.fake.all(kind):
                if labels.JOB_UID in (obj["metadata"].get("labels") or {}):
                    now[kind, obj["metadata"]["name"]] = trim_child(copy.deepcopy(obj))
        for key in self._copied.keys() | now.keys():
            old, new = self._copied.get(key), now.get(key)
            if old != new:
                self.children.change(old, new)
        self._copied = now

    async def go(self) -> float | None:
        """The copies catch up, then one pass."""
        self.sync()
        return await self.reconciler.reconcile(self.uid)

    def names(self) -> set[str]:
        """Children that the server holds."""
        return {
            f"{kind}/{obj['metadata']['name']}" for kind in KINDS for obj in self.fake.all(kind)
        }
