"""What one reconcile passes from hand to hand: observed, decided, what should be up.

    observe ─► Observed ─ decide ─► Decision(shape, status, …) ─ children(job, owner, config, shape) ─► desired objects
    plan(desired, observed) ─► actions ─► apply;   Decision.status ─► written if it changed

Objects are plain JSON as the API server gives them. Everything here is data; `decide`, `children` and `plan` are pure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from rljob.ledger.types import LedgerSnapshot

Object = dict[str, Any]


class ChildKey(NamedTuple):
    """A child inside the job's namespace."""

    kind: str
    """Job, StatefulSet, Service, ConfigMap, Secret, ServiceAccount, PersistentVolumeClaim, NetworkPolicy,
    PodDisruptionBudget, SandboxPool, PodMonitor."""
    name: str


class LedgerView(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger as the operator saw it last."""

    snapshot: LedgerSnapshot | None = None
    """None: never answered, or not asked."""
    age_seconds: float = 0.0
    """Since `snapshot` was taken."""
    error: str = ""
    """Why the last look failed; empty: it did not."""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What the cluster holds of one job at one moment."""

    resource: Object
    """The RLJob, metadata, spec and status."""
    children: dict[ChildKey, Object] = {}
    """Everything of the job but pods, those being deleted included."""
    pods: tuple[Object, ...] = ()
    """Its pods: store, prepare, trainer, rollout (sandboxes belong to their pool)."""
    ledger: LedgerView = LedgerView()
    warnings: tuple[Object, ...] = ()
    """Warning Events of the job's children and pods (quota, FailedCreate, FailedScheduling, ProvisioningFailed)."""
    now_seconds: float = 0.0
    """Since the epoch."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What should be up. Children that exist whatever happens (volumes, secrets, policies) are not listed."""

    store: bool = False
    """The job's own Valkey has one replica, else none; its volume stays."""
    prepare_attempt: int | None = None
    """Number of the prepare Job; None: there is none (it is removed when its work is done)."""
    pools: bool = False
    rollouts: int | None = None
    """Rollout pods; 0 drains them; None: as before the job has any."""
    trainer_attempt: int | None = None
    """Number of the trainer Job (train) or collector Job (eval, rollout); None: none."""


class Event(msgspec.Struct, frozen=True):
    """Posted on the RLJob, on transitions only."""

    type: str
    """Normal or Warning."""
    reason: str
    message: str


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What `decide` says."""

    shape: Shape | None
    """None: leave the children as they are (rejected specs, finished jobs whose pods are kept)."""
    status: dict[str, Any]
    """The whole status that the RLJob should have."""
    requeue_seconds: float | None
    """Look again after so long even if nothing changes; None: only when woken."""
    events: tuple[Event, ...] = ()
    suspend_because: str = ""
    """Not empty: set spec.suspend, the roles could not be placed."""
    destroy_ledger: bool = False
    """Remove the job's Redis keys now (deletion)."""
    remove_finalizer: bool = False
    delete_job: bool = False
    """ttlSecondsAfterFinished is over."""


class Owner(msgspec.Struct, frozen=True):
    """The RLJob as its children name it."""

    namespace: str
    name: str
    uid: str


class Images(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Default images, where the manifest names none."""

    trainer: str
    """Also prepare and the collector."""
    rollout_worker: str
    services: str
    """Gateway and Valkey."""
    engine: str
    sandbox_pool: str
    """Brings the guest bundle into sandbox pods."""
    sandbox: str
    """What a sandbox shows where a pool names no image."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The operator's configuration file (YAML, written by the chart)."""

    images: Images
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: list[str] = []
    operator_namespace: str = "rljob-system"
    broker_url: str = "http://rljob-sandbox-pool.rljob-system.svc:8080"
    storage_class: str | None = None
    """None: the cluster's default."""
    artifacts_size: str = "20Gi"
    artifacts_access_mode: str = "ReadWriteMany"
    store_size: str = "4Gi"
    namespaces: list[str] = []
    """Empty: cluster-wide."""
    pod_monitors: bool = True
    """Where the CRD exists."""
    dns_namespace: str = "kube-system"
