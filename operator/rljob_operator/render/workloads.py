"""What runs the job's pods: StatefulSets for the store and the rollouts, Jobs for prepare and the trainer.

    J-store        one Valkey on its volume; scaled to 0 while nothing needs it
    J-prepare-N    runs to its end before the others start
    J-trainer-N    one Indexed Job per attempt: any pod failing fails it, and the operator starts the next attempt
    J-rollout      pods of engine and gateway (native sidecars, which outlive the worker while it drains) and worker

Jobs carry `ATTEMPT` in the place of their number until `children` knows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rljob import labels
from rljob_operator.observed import Object
from rljob_operator.render import plan, storage
from rljob_operator.render.component import Component
from rljob_operator.render.config import config_hash
from rljob_operator.render.context import Context
from rljob_operator.render.pods import bare, container, job_volumes, pod_template
from rljob_operator.render.settle import settled, with_templates
from rljob_operator.render.store import store as store_component

ATTEMPT = "ATTEMPT"
"""Stands for the number of an attempt in a rendered Job's name and labels."""
TRAINER_GRACE_SECONDS = 300
"""A trainer that is told to stop checkpoints the last committed step."""
DRAIN_MARGIN_SECONDS = 30
"""After `drainSeconds`: the worker hands back the rest, then its sidecars end."""
GRACE_SECONDS = 30
PREPARE_TAKES = (
    "containers",
    "volumes",
    "imagePullSecrets",
    "serviceAccountName",
    "dnsPolicy",
    "dnsConfig",
    "hostAliases",
)
"""Keys of the trainer's template that hold for the pod that prepares."""
EXTENSION_PATH = "/opt/rljob/extension"
"""Of the engine's container: what rljob adds to any vLLM image; in the worker's image the same folder is copied."""
INDEX_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def store(context: Context) -> list[Object]:
    """The job's own Valkey, if it has one."""
    if not context.own_store:
        return []
    component = store_component(context.job)
    mounts = [
        {"name": "store", "mountPath": labels.STORE_PATH},
        {"name": "secrets", "mountPath": labels.SECRETS_PATH, "readOnly": True},
    ]
    claim = {"claimName": context.name("store")}
    files = [{"key": name, "path": name} for name in component.files]
    volumes = [
        {"name": "store", "persistentVolumeClaim": claim},
        {"name": "secrets", "secret": {"secretName": context.name("secrets"), "items": files}},
    ]
    template = pod_template(
        context,
        "store",
        [container(context, component, context.config.images.services, mounts=mounts)],
        volumes=volumes,
        grace_seconds=GRACE_SECONDS,
    )
    return [_stateful_set(context, "store", settled(template, ""))]


def rollouts(context: Context) -> Object:
    """The rollout pods."""
    spec = context.job.spec.rollout
    engine, gateway, worker = plan.rollout(context.job, 0)
    init = [
        *_extension(context),
        _sidecar(_engine(context, engine)),
        _sidecar(container(context, gateway, context.config.images.services, numbered=True)),
    ]
    main = container(
        context,
        worker,
        worker_image(context),
        # a StatefulSet starts again whatever ends
        env={"RLJOB_STAY": "true"},
        resources=spec.worker.resources,
        path="spec.rollout.worker.resources",
        numbered=True,
    )
    template = pod_template(
        context,
        "rollout",
        [main],
        init=init,
        volumes=[
            *job_volumes(context),
            *([{"name": "extension", "emptyDir": {}}] if _extension(context) else []),
        ],
        grace_seconds=spec.deadlines.drain_seconds + DRAIN_MARGIN_SECONDS,
        spec={"topologySpreadConstraints": [_spread(context)]},
        annotations={labels.CONFIG_HASH: config_hash(context.job)},
    )
    overrides = (
        ("spec.rollout.engine.template", spec.engine.template),
        ("spec.rollout.worker.template", spec.worker.template),
    )
    return _stateful_set(context, "rollout", with_templates(template, overrides))


def worker_image(context: Context) -> str:
    """The image of the workers."""
    return context.job.spec.rollout.worker.image or context.config.images.rollout_worker


def _engine(context: Context, component: Component) -> dict[str, Any]:
    engine = context.job.spec.rollout.engine
    default = context.config.images.engine if engine.kind == "vllm" else worker_image(context)
    added = bool(_extension(context))
    mount = {"name": "extension", "mountPath": EXTENSION_PATH, "readOnly": True}
    made = container(
        context,
        component,
        engine.image or default,
        resources=engine.resources,
        path="spec.rollout.engine.resources",
        numbered=True,
        mounts=[mount] if added else [],
        env={"PYTHONPATH": EXTENSION_PATH} if added else {},
    )
    # a vLLM image need not have `python`
    return {**made, "command": ["python3", *made["command"][1:]]} if added else made


def _extension(context: Context) -> list[dict[str, Any]]:
    """Brings our code into any vLLM image; the simulated engine runs in the worker's image, which has it."""
    if context.job.spec.rollout.engine.kind != "vllm":
        return []
    return [
        {
            **bare(context, "engine-extension", worker_image(context)),
            "command": ["cp", "-R", f"{EXTENSION_PATH}/.", "/extension"],
            "resources": {"requests": {"cpu": "50m", "memory": "32Mi"}},
            "volumeMounts": [{"name": "extension", "mountPath": "/extension"}],
        }
    ]


def _sidecar(made: dict[str, Any]) -> dict[str, Any]:
    return {**made, "restartPolicy": "Always"}


def _spread(context: Context) -> dict[str, Any]:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": context.pods_of("rollout"),
    }


def prepare(context: Context) -> Object:
    """Model and rows."""
    volumes, mounts = storage.source_volumes(context)
    made = container(context, plan.prepare(context.job), trainer_image(context), mounts=mounts)
    template = pod_template(
        context,
        "prepare",
        [made],
        volumes=[*job_volumes(context), *volumes],
        grace_seconds=GRACE_SECONDS,
        spec={"restartPolicy": "Never"},
        extra_labels={labels.ATTEMPT: ATTEMPT},
    )
    path, given = "spec.trainer.template", context.job.spec.trainer.template
    return _job(context, "prepare", with_templates(template, [(path, _part(given, "prepare"))]), {})


def _part(given: Mapping[str, Any], role: str) -> dict[str, Any]:
    """What of the trainer's template is for the pod of a role.

    The trainer's pod takes all of it but a container named prepare. The pod that prepares takes that container, and
    what it needs to start at all: it has no GPU, and is not to wait for a node that has.
    """
    spec = given.get("spec")
    if not isinstance(spec, Mapping):
        return dict(given) if role == "trainer" else {}
    parts = dict(cast("Mapping[str, Any]", spec))
    if isinstance(found := parts.get("containers"), list):
        items = cast("list[Any]", found)
        mine = [item for item in items if (_name(item) == "prepare") == (role == "prepare")]
        parts["containers"] = mine
    if role == "trainer":
        return {**given, "spec": parts}
    return {"spec": {key: value for key, value in parts.items() if key in PREPARE_TAKES}}


def _name(item: object) -> object:
    return cast("Mapping[str, Any]", item).get("name") if isinstance(item, Mapping) else None


def trainer_image(context: Context) -> str:
    """The image of the trainer, of prepare and of the collector."""
    return context.job.spec.trainer.image or context.config.images.trainer


def trainer(context: Context) -> Object:
    """The trainer; where nothing is trained, the collector."""
    spec = context.job.spec.trainer
    made = container(
        context,
        plan.trainer(context.job),
        trainer_image(context),
        resources=spec.resources,
        path="spec.trainer.resources",
    )
    made["env"].insert(
        0,
        {
            "name": "RLJOB_RANK",
            "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": INDEX_FIELD}},
        },
    )
    template = pod_template(
        context,
        "trainer",
        [made],
        volumes=job_volumes(context),
        grace_seconds=TRAINER_GRACE_SECONDS,
        spec={"restartPolicy": "Never", "subdomain": context.name("trainer")},
        extra_labels={labels.ATTEMPT: ATTEMPT},
    )
    indexed = {
        "completionMode": "Indexed",
        "completions": spec.replicas,
        "parallelism": spec.replicas,
        "podReplacementPolicy": "Failed",
    }
    overrides = [("spec.trainer.template", _part(spec.template, "trainer"))]
    merged = with_templates(template, overrides)
    return _job(context, "trainer", merged, indexed)


def _job(
    context: Context, role: str, template: Mapping[str, Any], more: Mapping[str, Any]
) -> Object:
    numbered = {labels.ATTEMPT: ATTEMPT, **context.queue()}
    spec = {"backoffLimit": 0, **more, "template": template}
    return context.child("batch/v1", "Job", f"{role}-{ATTEMPT}", role, {"spec": spec}, numbered)


def _stateful_set(context: Context, role: str, template: Mapping[str, Any]) -> Object:
    spec = {
        "replicas": 0,
        "serviceName": context.name(role),
        "podManagementPolicy": "Parallel",
        "revisionHistoryLimit": 2,
        "selector": _own_pods(context, role),
        "template": template,
    }
    return context.child("apps/v1", "StatefulSet", role, role, {"spec": spec}, context.queue())


def _own_pods(context: Context, role: str) -> dict[str, Any]:
    mine: dict[str, str] = {labels.JOB_UID: context.owner.uid}
    selector = context.pods_of(role)["matchLabels"]
    return {"matchLabels": {**selector, **mine}}
