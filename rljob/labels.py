"""Names that the rooms and a cluster share: labels, annotations, names of children, ports and paths inside pods.

Every object that belongs to a job carries `labels(...)`; watches and clean-up select by them, never by name.
"""

from __future__ import annotations

from typing import Final

GROUP: Final = "rljob.dev"
JOB: Final = "rljob.dev/job"
"""Name of the RLJob that an object belongs to."""
JOB_UID: Final = "rljob.dev/job-uid"
"""uid of that RLJob: a new job of the same name is another job."""
POOL: Final = "rljob.dev/pool"
"""SandboxPool of a sandbox pod."""
STATE: Final = "rljob.dev/state"
HOLDER_JOB: Final = "rljob.dev/holder-job"
"""Of a sandbox pod, a few seconds late: what it does, and for whom."""
CLAIM: Final = "rljob.dev/claim"
OWNER: Final = "rljob.dev/owner"
EVIDENCE: Final = "rljob.dev/evidence"
"""Annotations of a sandbox pod, as late: the claim that holds it and who made it; why it is quarantined."""
ATTEMPT: Final = "rljob.dev/attempt"
"""Attempt of a trainer or prepare Job, from 1."""
COMPONENT: Final = "app.kubernetes.io/component"
"""store, prepare, trainer, rollout, sandbox."""
APPLIED: Final = "rljob.dev/applied-hash"
"""Annotation of a child: hash of what the operator applied."""
CONFIG_HASH: Final = "rljob.dev/config-hash"
"""Annotation of a pod template: hash of the job file that its pods started with."""
FINALIZER: Final = "rljob.dev/ledger"
"""On an RLJob: its Redis keys are removed before it is."""
FIELD_MANAGER: Final = "rljob-operator"
POOL_FIELD_MANAGER: Final = "rljob-sandbox-pool"
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
KUEUE_QUEUE: Final = "kueue.x-k8s.io/queue-name"

ENGINE_PORT: Final = 8000
GATEWAY_PORT: Final = 8001
GATEWAY_CONTROL_PORT: Final = 8002
GUEST_PORT: Final = 8070
BROKER_PORT: Final = 8080
METRICS_PORT: Final = 9101
"""Of a pod's main container."""
GATEWAY_METRICS_PORT: Final = 9102
STORE_PORT: Final = 6379

ARTIFACTS_PATH: Final = "/artifacts"
JOB_FILE_PATH: Final = "/etc/rljob/job/job.json"
SECRETS_PATH: Final = "/etc/rljob/secrets"
WORK_PATH: Final = "/scratch"
"""emptyDir of the pod; a component's own folder lies in it."""
STORE_PATH: Final = "/store"
VOLUMES_PATH: Final = "/volumes"
"""`pvc://CLAIM/path` is /volumes/CLAIM/path inside the pods that read it."""


def labels(job: str, uid: str, component: str) -> dict[str, str]:
    """Labels of every object of a job."""
    return {
        "app.kubernetes.io/name": "rljob",
        "app.kubernetes.io/instance": job,
        COMPONENT: component,
        "app.kubernetes.io/part-of": "rljob",
        MANAGED_BY: FIELD_MANAGER,
        JOB: job,
        JOB_UID: uid,
    }


def pool_name(job: str, pool: str) -> str:
    """The SandboxPool object of a job's pool."""
    return f"{job}-{pool}"
