"""A cluster as `decide` sees it: plain objects, a clock that a test turns, controllers as small as they can be.

cluster.step()      one pass of the operator: decide, bring the children to the shape, keep the status
cluster.kubelet()   Jobs and StatefulSets get and lose pods; pods that may become ready do
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rljob import labels
from rljob.api.status_types import RLJobStatus
from rljob.ids import PolicyVersion
from rljob.ledger.types import LedgerSnapshot, Policy, ReportView
from rljob_operator.decide import decide
from rljob_operator.decision.times import to_text
from rljob_operator.observed import (
    ChildKey,
    ClusterConfig,
    Decision,
    Event,
    Images,
    LedgerView,
    Object,
    Observed,
    Shape,
)
from tests.unit.rljob_operator.conftest import manifest

CONFIG = ClusterConfig(
    images=Images(
        trainer="t", rollout_worker="w", services="s", engine="e", sandbox_pool="p", sandbox="b"
    )
)
START = 1_800_000_000.0
_GONE = "deletionTimestamp"


def snapshot(step: int = 0, **fields: Any) -> LedgerSnapshot:
    """A ledger's state."""
    base: dict[str, Any] = {
        "step": step, "steps": 16, "incarnation": 1, "policy": Policy(version=PolicyVersion(1, step)), "phase": None,
        "message": "", "counts": {"completed": 8 * step, "failed": 0, "running": 4, "ready_groups": 0}, "reports": {},
        "reward_mean": 0.5, "reward_recent": 0.5, "turns_recent": 2.0, "validation": {}, "staleness": {},
        "progress": 10 * step, "stream_entries": 0, "stream_pending": 0, "memory_bytes": 0, "max_memory_bytes": 0,
    }  # fmt: skip
    return LedgerSnapshot(**(base | fields))


def report(waiting_for: str = "", age: float = 0.0, **facts: float) -> ReportView:
    """What a component says of itself."""
    return ReportView(waiting_for=waiting_for, facts=dict(facts), age_seconds=age)


class FakeCluster:
    """See the module. Keywords replace parts of the spec; those of `rollout` are added to it."""

    def __init__(self, **spec: Any) -> None:
        made = manifest()
        rollout = made["spec"]["rollout"] | spec.pop("rollout", {})
        made["spec"] |= {"rollout": rollout, **spec}
        made["metadata"] = {"name": "j", "namespace": "n", "uid": "u", "generation": 1}
        self.resource: Object = {**made, "status": {}}
        self.children: dict[ChildKey, Object] = {}
        self.pods: dict[str, Object] = {}
        self.warnings: list[Object] = []
        self.ledger = LedgerView()
        self.now = START
        self.may_be_ready: Callable[[Object], bool] = lambda _pod: True
        self.events: list[Event] = []
        self.last: Decision | None = None
        self.cleared = self.gone = False
        self.lost: set[str] = set()
        """Pods whose node does not answer: they are Running and cannot be removed."""
        self.most_attempts = 0
        """Trainer pods of different attempts that were alive at once."""

    # ── the operator ──

    @property
    def status(self) -> dict[str, Any]:
        return self.resource["status"]

    @property
    def phase(self) -> str:
        return self.status.get("phase", "")

    def condition(self, kind: str) -> dict[str, Any]:
        found = (c for c in self.status.get("conditions", []) if c["type"] == kind)
        return next(found, {})

    def reasons(self) -> list[str]:
        return [event.reason for event in self.events]

    def observe(self) -> Observed:
        return Observed(
            resource=self.resource,
            children=dict(self.children),
            pods=tuple(self.pods.values()),
            ledger=self.ledger,
            warnings=tuple(self.warnings),
            now_seconds=self.now,
        )

    def decide(self) -> Decision:
        return decide(self.observe(), CONFIG)

    def step(self, *, keep_status: bool = True) -> Decision:
        """One pass; without `keep_status` the operator was killed before it wrote the status."""
        made = self.last = self.decide()
        RLJobStatus.model_validate(made.status, strict=True)
        if made.shape is not None:
            self._bring(made.shape)
        if made.suspend_because:
            self.resource["spec"]["suspend"] = True
        self.cleared |= made.destroy_ledger
        self.gone |= made.remove_finalizer or made.delete_job
        if keep_status:
            self.resource = {**self.resource, "status": made.status}
            self.events.extend(made.events)
        return made

    def run(self, passes: int = 4, seconds: float = 1.0) -> None:
        """Some passes with the controllers between them."""
        for _ in range(passes):
            self.step()
            self.kubelet()
            self.now += seconds
        self.step()

    def _bring(self, shape: Shape) -> None:
        own = not self.resource["spec"].get("store", {}).get("redis", {}).get("url")
        if own:
            self._set("store", 1 if shape.store else 0)
            self.children.setdefault(*_object("PersistentVolumeClaim", "j-store", {}, "Bound"))
        self.children.setdefault(*_object("PersistentVolumeClaim", "j-artifacts", {}, "Bound"))
        if shape.rollouts is not None:
            self._set("rollout", shape.rollouts)
        else:
            self.children.pop(ChildKey("StatefulSet", "j-rollout"), None)
        self._jobs("prepare", shape.prepare_attempt)
        self._jobs("trainer", shape.trainer_attempt)
        if not shape.pools:
            self.children.pop(ChildKey("SandboxPool", "j-shells"), None)
        elif ChildKey("SandboxPool", "j-shells") not in self.children:
            self.children.update([_object("SandboxPool", "j-shells", {"warm": 4})])

    def _set(self, component: str, replicas: int) -> None:
        key, made = _object("StatefulSet", f"j-{component}", {"replicas": replicas})
        self.children.setdefault(key, made)["spec"]["replicas"] = replicas

    def _jobs(self, component: str, number: int | None) -> None:
        for attempt, job in self.jobs(component).items():
            if attempt != number:
                job["metadata"].setdefault(_GONE, to_text(self.now))
        if number is not None and number not in self.jobs(component):
            self.children.update([_object("Job", f"j-{component}-{number}", {"parallelism": 1})])

    def jobs(self, component: str) -> dict[int, Object]:
        found = {
            re.fullmatch(rf"j-{component}-(\d+)", key.name): child
            for key, child in self.children.items()
            if key.kind == "Job"
        }
        return {int(match[1]): job for match, job in found.items() if match}

    # ── the controllers ──

    def kubelet(self) -> None:
        """Everything that can happen by itself happens."""
        for component in ("prepare", "trainer"):
            for attempt, job in list(self.jobs(component).items()):
                self._job(component, attempt, job)
        for component in ("store", "rollout"):
            self._stateful(component)
        for pod in self.pods.values():
            if pod["status"]["phase"] == "Pending" and self.may_be_ready(pod):
                make_ready(pod)
        for key, child in self.children.items():
            if key.kind == "SandboxPool":
                child["status"] = {"ready": 4, "claimed": 0, "conditions": [_true("Ready")]}
        alive = {
            pod["metadata"]["labels"][labels.ATTEMPT]
            for pod in self.of("trainer")
            if pod["status"]["phase"] in {"Pending", "Running"}
        }
        self.most_attempts = max(self.most_attempts, len(alive))

    def _job(self, component: str, attempt: int, job: Object) -> None:
        name = f"j-{component}-{attempt}-0"
        if _GONE in job["metadata"]:  # in the foreground: the Job goes after its pod
            if name in self.lost:
                return
            self.pods.pop(name, None)
            del self.children[ChildKey("Job", f"j-{component}-{attempt}")]
        elif not job["status"].get("conditions") and name not in self.pods:
            self.pods[name] = _pod(name, component, [component], attempt)

    def _stateful(self, component: str) -> None:
        sts = self.children.get(ChildKey("StatefulSet", f"j-{component}"))
        wanted = sts["spec"]["replicas"] if sts else 0
        names = [f"j-{component}-{index}" for index in range(wanted)]
        for pod in self.of(component):
            if pod["metadata"]["name"] not in names:
                del self.pods[pod["metadata"]["name"]]
        containers = ["store"] if component == "store" else ["engine", "gateway", "worker"]
        for name in names:
            self.pods.setdefault(name, _pod(name, component, containers))

    def of(self, component: str) -> list[Object]:
        return [
            pod
            for pod in self.pods.values()
            if pod["metadata"]["labels"][labels.COMPONENT] == component
        ]

    def end_job(self, component: str, code: int = 0, said: str = "", **more: Any) -> None:
        """The pod of the newest Job ends."""
        attempt = max(self.jobs(component))
        job, name = self.jobs(component)[attempt], f"j-{component}-{attempt}-0"
        pod = self.pods.setdefault(name, _pod(name, component, [component], attempt))
        end_container(pod, component, code, said, **more)
        pod["status"]["phase"] = "Failed" if code else "Succeeded"
        pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
        kind = "Failed" if code else "Complete"
        moment = {"lastTransitionTime": to_text(self.now), "message": "BackoffLimitExceeded"}
        job["status"] = {"conditions": [_true(kind) | moment]}

    def finish(self, phase: str = "Succeeded", step: int = 16, message: str = "") -> None:
        """The trainer says that the job has ended, and ends."""
        self.ledger = LedgerView(snapshot=snapshot(step, phase=phase, message=message))
        self.end_job("trainer", 0 if phase == "Succeeded" else 1)

    def warn(self, kind: str, name: str, reason: str, message: str) -> None:
        """A Warning Event."""
        about = {"kind": kind, "name": name}
        self.warnings.append(
            {
                "metadata": {"name": "e"},
                "involvedObject": about,
                "reason": reason,
                "message": message,
                "lastTimestamp": to_text(self.now + 1),
            }
        )


def running(**spec: Any) -> FakeCluster:
    """A job whose every role is up, at step 1."""
    cluster = FakeCluster(**spec)
    cluster.run(3)
    cluster.end_job("prepare")
    cluster.run(3)
    cluster.ledger = LedgerView(snapshot=snapshot(1))
    cluster.run(2)
    assert cluster.phase == "Running"
    return cluster


# ── objects ──


def _object(kind: str, name: str, spec: dict[str, Any], phase: str = "") -> tuple[ChildKey, Object]:
    status = {"phase": phase} if phase else {}
    return ChildKey(kind, name), {
        "kind": kind,
        "metadata": {"name": name, "uid": f"uid-{name}"},
        "spec": spec,
        "status": status,
    }


def _pod(name: str, component: str, containers: list[str], attempt: int = 0) -> Object:
    marks = {labels.JOB: "j", labels.COMPONENT: component, labels.ATTEMPT: str(attempt)}
    if attempt:
        marks["batch.kubernetes.io/job-name"] = f"j-{component}-{attempt}"
    return {
        "metadata": {"name": name, "labels": marks},
        "spec": {"containers": [{"name": container} for container in containers]},
        "status": {
            "phase": "Pending",
            "conditions": [{"type": "Ready", "status": "False"}],
            "containerStatuses": [
                {"name": container, "ready": False, "restartCount": 0, "image": "i", "state": {}}
                for container in containers
            ],
        },
    }


def _true(kind: str) -> dict[str, str]:
    return {"type": kind, "status": "True"}


def make_ready(pod: Object) -> None:
    """All its containers are ready."""
    pod["status"]["phase"] = "Running"
    pod["status"]["conditions"] = [_true("Ready"), _true("PodScheduled")]
    for status in pod["status"]["containerStatuses"]:
        status.update(ready=True, state={"running": {}})


def container(pod: Object, name: str) -> dict[str, Any]:
    """The status of one container."""
    return next(s for s in pod["status"]["containerStatuses"] if s["name"] == name)


def end_container(pod: Object, name: str, code: int, said: str = "", reason: str = "Error") -> None:
    """A container ends for good."""
    end = {"exitCode": code, "reason": "Completed" if code == 0 else reason, "message": said}
    container(pod, name).update(ready=False, state={"terminated": end})


def restart_container(
    pod: Object, name: str, code: int, said: str = "", restarts: int = 1, reason: str = "Error"
) -> None:
    """A container has ended and waits for its next start."""
    end = {"exitCode": code, "reason": reason, "message": said}
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    container(pod, name).update(
        ready=False,
        restartCount=restarts,
        state={"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
        lastState={"terminated": end},
    )


def wait_container(pod: Object, name: str, reason: str, message: str) -> None:
    """A container cannot be started."""
    container(pod, name).update(
        ready=False, state={"waiting": {"reason": reason, "message": message}}
    )


def unschedulable(pod: Object, message: str, reason: str = "Unschedulable") -> None:
    """The scheduler finds no node."""
    no = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}, no]
