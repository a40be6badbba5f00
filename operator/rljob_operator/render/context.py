"""What every child of a job is made from, and the metadata that all of them carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rljob import labels
from rljob.api.rljob_types import API_VERSION, KIND, RLJob
from rljob_operator.observed import ClusterConfig, Object, Owner

JOB_WIDE = "job"
"""`app.kubernetes.io/component` of what belongs to no single component."""


class Context(msgspec.Struct, frozen=True):
    """One job in one cluster."""

    job: RLJob
    owner: Owner
    config: ClusterConfig

    @property
    def own_store(self) -> bool:
        """Whether the job has a Valkey of its own."""
        redis = self.job.spec.store.redis
        return redis.url is None and redis.secret_ref is None

    def name(self, suffix: str = "") -> str:
        """Name of a child."""
        return f"{self.owner.name}-{suffix}" if suffix else self.owner.name

    def labels(self, component: str) -> dict[str, str]:
        """Labels of the children that belong to a component."""
        return labels.labels(self.owner.name, self.owner.uid, component)

    def queue(self) -> dict[str, str]:
        """The label by which Kueue admits a workload, where the job names a queue."""
        queue = self.job.spec.scheduling.queue_name
        return {labels.KUEUE_QUEUE: queue} if queue else {}

    def pods_of(self, *components: str) -> dict[str, Any]:
        """A label selector of the pods of some components of this job."""
        mine = {labels.JOB: self.owner.name}
        if len(components) == 1:
            return {"matchLabels": {**mine, labels.COMPONENT: components[0]}}
        anyone = {"key": labels.COMPONENT, "operator": "In", "values": list(components)}
        return {"matchLabels": mine, "matchExpressions": [anyone]}

    def child(
        self,
        api_version: str,
        kind: str,
        suffix: str,
        component: str,
        body: Mapping[str, Any],
        extra_labels: Mapping[str, str] | None = None,
    ) -> Object:
        """A child object: `body` below the metadata that lets it be found, and go with its job."""
        return {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": {
                "name": self.name(suffix),
                "namespace": self.owner.namespace,
                "labels": self.labels(component) | dict(extra_labels or {}),
                "ownerReferences": [owner_reference(self.owner)],
            },
            **body,
        }


def owner_reference(owner: Owner) -> dict[str, Any]:
    """The RLJob, as the controller of its children."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
