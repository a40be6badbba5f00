"""Copies of everything that belongs to jobs: RLJobs as kopf tells of them, children and pods by informers of our own.

    kopf event ─► Jobs ──────┐
                             ├─► wake(uid): something of this job has changed
    informers  ─► Children ──┘

kopf watches only RLJobs. One informer per kind (and namespace, where the operator has not the whole cluster) selects by
label what the operator manages; objects are found by the job's uid, so a new job of an old name has none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from rljob import labels
from rljob.kube import resources
from rljob.kube.client import KubeClient
from rljob.kube.informer import Informer
from rljob.kube.resources import Object, Resource, uid_of
from rljob_operator.expectations import gone, version
from rljob_operator.observed import ChildKey
from rljob_operator.plan import key_of, scaler_of

CHILD_KINDS: tuple[Resource, ...] = (
    resources.SERVICE_ACCOUNT,
    resources.CONFIG_MAP,
    resources.PVC,
    resources.SERVICE,
    resources.NETWORK_POLICY,
    resources.PDB,
    resources.SANDBOX_POOL,
    resources.STATEFUL_SET,
    resources.JOB,
)
"""Watched, besides pods; Secrets are read by name."""
OPTIONAL_KINDS: tuple[Resource, ...] = (resources.POD_MONITOR,)
"""Watched where the cluster knows them."""
SELECTOR = f"{labels.MANAGED_BY}={labels.FIELD_MANAGER}"
_NONE: Mapping[ChildKey, Object] = MappingProxyType({})

Wake = Callable[[str], None]


class Jobs:
    """RLJobs by uid, never older than what the operator itself has written."""

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._jobs: dict[str, Object] = {}
        self._told: dict[str, str] = {}
        """uid → the version that kopf told of last."""

    def get(self, uid: str) -> Object | None:
        """The job; None where it is gone."""
        return self._jobs.get(uid)

    def all(self) -> list[Object]:
        """Every job."""
        return list(self._jobs.values())

    def told(self, uid: str) -> str:
        """The version that kopf told of last; empty: never of this job."""
        return self._told.get(uid, "")

    def hear(self, kind: str | None, job: Object) -> None:
        """kopf tells: `kind` is None for a job that was listed, else ADDED, MODIFIED or DELETED."""
        uid = uid_of(job)
        self._told[uid] = _version(job)
        if kind == "DELETED":
            self.remove(uid)
        else:
            self.catch_up(job)

    def catch_up(self, job: Object) -> None:
        """The job as it was listed, since kopf has not told of it yet."""
        uid = uid_of(job)
        if not _is_newer(self._jobs.get(uid), job):
            self._jobs[uid] = _trim_job(job)
            self._wake(uid)

    def wrote(self, job: Object) -> None:
        """What the API server answered to a write of ours; it wakes nobody."""
        uid = uid_of(job)
        if uid in self._jobs and not _is_newer(self._jobs[uid], job):
            self._jobs[uid] = _trim_job(job)

    def remove(self, uid: str) -> None:
        """The job is gone."""
        self._told.pop(uid, None)
        if self._jobs.pop(uid, None) is not None:
            self._wake(uid)


class Children:
    """Children and pods of jobs, by the job's uid."""

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._children: defaultdict[str, dict[ChildKey, Object]] = defaultdict(dict)
        self._pods: defaultdict[str, dict[ChildKey, Object]] = defaultdict(dict)
        self._told: defaultdict[str, dict[ChildKey, str]] = defaultdict(dict)

    def told(self, uid: str) -> Mapping[ChildKey, str]:
        """The version that was told of last, per child, those that are gone included; see `Expectations.overlay`."""
        return self._told.get(uid, {})

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self._told.pop(uid, None)

    def of(self, uid: str) -> Mapping[ChildKey, Object]:
        """Everything of a job but its pods."""
        return self._children.get(uid, _NONE)

    def pods(self, uid: str) -> tuple[Object, ...]:
        """Its pods."""
        return tuple(self._pods.get(uid, _NONE).values())

    def change(self, old: Object | None, new: Object | None) -> None:
        """An informer tells."""
        if old is not None:
            self._forget(old)
        if new is not None and (uid := _job_of(new)):
            self._place(new)[uid][key_of(new)] = new
            self._told[uid][key_of(new)] = version(new)
        for uid in {_job_of(obj) for obj in (old, new) if obj is not None} - {""}:
            self._wake(uid)

    def _forget(self, obj: Object) -> None:
        place, uid = self._place(obj), _job_of(obj)
        if uid in place:
            place[uid].pop(key_of(obj), None)
            self._told[uid][key_of(obj)] = gone(obj)
            if not place[uid]:
                del place[uid]

    def _place(self, obj: Object) -> defaultdict[str, dict[ChildKey, Object]]:
        return self._pods if obj["kind"] == resources.POD.kind else self._children


def informers(
    client: KubeClient, children: Children, kinds: Iterable[Resource], namespaces: Sequence[str]
) -> list[Informer]:
    """One per kind, pods included; one per namespace too where these are named."""
    return [
        Informer(
            client,
            kind,
            namespace,
            label_selector=SELECTOR,
            on_change=children.change,
            trim=trim_child,
        )
        for kind in (resources.POD, *kinds)
        for namespace in (namespaces or (None,))
    ]


def trim_child(child: Object) -> Object:
    """Of who set which field keep only what says that an autoscaler decides the replicas."""
    metadata = child["metadata"]
    entries = metadata.pop("managedFields", None) or ()
    if child["kind"] == resources.STATEFUL_SET.kind:
        scalers = [
            entry for entry in entries if scaler_of({"metadata": {"managedFields": [entry]}})
        ]
        if scalers:
            metadata["managedFields"] = scalers
    return child


def _trim_job(job: Object) -> Object:
    metadata = {key: value for key, value in job["metadata"].items() if key != "managedFields"}
    return {**job, "metadata": metadata}


def _is_newer(held: Object | None, told: Object) -> bool:
    """Whether the held copy is newer. Versions of one object count up; anything else is taken at its word."""
    if held is None:
        return False
    one, other = _version(held), _version(told)
    return one.isdigit() and other.isdigit() and int(one) > int(other)


def _version(obj: Object) -> str:
    return str(obj["metadata"].get("resourceVersion", ""))


def _job_of(obj: Object) -> str:
    return str((obj["metadata"].get("labels") or {}).get(labels.JOB_UID, ""))
