"""The component plan of a job: which processes there are, what each is told, what it waits for.

    store ─► prepare ─► sandbox-pool, engine-i, gateway-i, worker-i, trainer

`plan` is pure: the same job gives the same components, whatever drives them. Golden files in tests/golden hold it.
"""

from __future__ import annotations

from rljob.api.rljob_types import RLJob
from rljob_operator.render.component import Component, Kind, Port, Probe, Resources, literal
from rljob_operator.render.store import store

ENGINE_START_SECONDS = 600.0
"""vLLM takes 30–60 s on two quiet cores and five minutes on loaded ones."""
TRAINER_START_SECONDS = 300.0
"""Importing verl alone takes 13 s on a quiet machine."""


def plan(job: RLJob) -> list[Component]:
    """Components of a job, in the order in which they start."""
    own_store = [store(job)] if job.spec.store.redis.url is None else []
    rollouts = [part for index in range(job.spec.rollout.replicas) for part in rollout(job, index)]
    return [*own_store, prepare(job), sandbox_pool(job), *rollouts, trainer(job)]


def redis_url(job: RLJob) -> str:
    """Where the ledger lives: the person's own Redis, or the job's Valkey."""
    url = job.spec.store.redis.url
    return literal(url) if url else "redis://:${secret:redis}@${addr:store/redis}/0"


def prepare(job: RLJob) -> Component:
    """Fetches or builds model and rows; runs to its end."""
    return Component(
        role="prepare",
        name="prepare",
        kind=Kind.PREPARE,
        command=("python", "-m", "rljob_trainer.prepare"),
        env=_env(
            "prepare",
            RLJOB_CACHE_DIR="${path:cache}",
            RLJOB_MANIFEST_DIR="${path:manifest}",
            **_metrics("prepare"),
        ),
        ports=(Port("metrics"),),
        resources=Resources(cpu=1, memory_mib=_by_backend(job, simulated=256, real=1536)),
        depends=_after_store(job),
    )


def sandbox_pool(job: RLJob) -> Component:
    """Keeps sandboxes warm and hands them out."""
    real = sum(pool.max for pool in job.spec.sandbox_pools if pool.runtime != "simulated")
    return Component(
        role="sandbox-pool",
        name="sandbox-pool",
        kind=Kind.SERVICE,
        command=("python", "-m", "rljob_sandbox_pool.main"),
        env=_env(
            "sandbox-pool",
            **_broker(),
            RLJOB_TOKEN="${secret:token}",
            RLJOB_POOL_KEY="${secret:pool_key}",
            **_metrics("sandbox-pool"),
        ),
        ports=(Port("broker"), Port("metrics")),
        # a warm sandbox's guest is a Python process of about 20 MB
        resources=Resources(
            cpu=0.5, memory_mib=128 + 24 * min(real, job.spec.rollout.max_concurrent_episodes)
        ),
        depends=("prepare",),
        probe=Probe("http", "broker", "/healthz", deadline_seconds=120),
        makes_namespaces=True,
    )


def rollout(job: RLJob, index: int) -> tuple[Component, Component, Component]:
    """One rollout pod: the engine, the gateway beside it, and the worker that feeds them."""
    return _engine(job, index), _gateway(index), _worker(job, index)


def _engine(job: RLJob, index: int) -> Component:
    engine, name = job.spec.rollout.engine, f"engine-{index}"
    simulated = engine.kind == "simulated"
    return Component(
        role="engine",
        name=name,
        kind=Kind.SERVICE,
        command=("python", "-m", "rljob_rollout_worker.engine_process"),
        env={
            **_env(name, **_rollout_urls(index), RLJOB_TOKEN="${secret:token}"),
            **{key: literal(value) for key, value in engine.env.items()},
        },
        ports=(Port("http", None if engine.port is None else engine.port + index),),
        resources=Resources(cpu=1, memory_mib=128 if simulated else 3072),
        depends=("prepare",),
        probe=Probe(
            "http",
            "http",
            "/rljob/v1/status",
            deadline_seconds=60 if simulated else ENGINE_START_SECONDS,
        ),
        grace_seconds=5,
    )


def _gateway(index: int) -> Component:
    name = f"gateway-{index}"
    return Component(
        role="gateway",
        name=name,
        kind=Kind.SERVICE,
        command=("python", "-m", "rljob_services.gateway"),
        env=_env(name, **_rollout_urls(index), RLJOB_TOKEN="${secret:token}", **_metrics(name)),
        ports=(Port("data"), Port("control"), Port("metrics")),
        resources=Resources(cpu=0.5, memory_mib=192),
        depends=("prepare",),
        probe=Probe("http", "metrics", "/healthz"),
        grace_seconds=5,
    )


def _worker(job: RLJob, index: int) -> Component:
    name = f"worker-{index}"
    return Component(
        role="worker",
        name=name,
        kind=Kind.SERVICE,
        command=("python", "-m", "rljob_rollout_worker.main"),
        env=_env(
            name,
            **_rollout_urls(index),
            **_broker(),
            RLJOB_REDIS_URL=redis_url(job),
            RLJOB_TOKEN="${secret:token}",
            RLJOB_MANIFEST_DIR="${path:manifest}",
            **_metrics(name),
        ),
        ports=(Port("metrics"),),
        resources=Resources(cpu=0.5, memory_mib=256),
        depends=("prepare",),
        probe=Probe("http", "metrics", "/healthz"),
        grace_seconds=min(job.spec.rollout.deadlines.drain_seconds, 15),
    )


def trainer(job: RLJob) -> Component:
    """Takes batches, trains, publishes weights; its good end ends the job. Where nothing is trained, a collector."""
    trains = job.spec.mode == "train"
    name, module = ("trainer", "main") if trains else ("collector", "collect")
    memory_mib = _by_backend(job, simulated=256, real=2560) if trains else 512
    return Component(
        role="trainer",
        name=name,
        kind=Kind.JOB,
        command=("python", "-m", f"rljob_trainer.{module}"),
        env=_env(
            name,
            RLJOB_REDIS_URL=redis_url(job),
            RLJOB_MANIFEST_DIR="${path:manifest}",
            **_metrics(name),
        ),
        ports=(Port("metrics"),),
        resources=Resources(cpu=1 if trains else 0.5, memory_mib=memory_mib),
        depends=("prepare",),
        probe=Probe("http", "metrics", "/healthz", deadline_seconds=TRAINER_START_SECONDS),
    )


def _env(name: str, **more: str) -> dict[str, str]:
    shared = {
        "RLJOB_COMPONENT": name,
        "RLJOB_JOB_FILE": "${path:job_file}",
        "RLJOB_ARTIFACTS": "${path:artifacts}",
        "RLJOB_WORK_DIR": "${path:work}",
        "RLJOB_BIND_HOST": "${addr:bind}",
    }
    return {**shared, **more}


def _metrics(name: str) -> dict[str, str]:
    return {"RLJOB_METRICS_PORT": f"${{port:{name}/metrics}}"}


def _broker() -> dict[str, str]:
    return {"RLJOB_BROKER_URL": "http://${addr:sandbox-pool/broker}"}


def _rollout_urls(index: int) -> dict[str, str]:
    return {
        "RLJOB_ENGINE_URL": f"http://${{addr:engine-{index}/http}}",
        "RLJOB_GATEWAY_URL": f"http://${{addr:gateway-{index}/data}}",
        "RLJOB_GATEWAY_CONTROL_URL": f"http://${{addr:gateway-{index}/control}}",
    }


def _after_store(job: RLJob) -> tuple[str, ...]:
    return ("store",) if job.spec.store.redis.url is None else ()


def _by_backend(job: RLJob, *, simulated: int, real: int) -> int:
    """Where nothing is trained, the engine tells whether the model is a real one."""
    spec = job.spec
    kind = spec.trainer.backend if spec.mode == "train" else spec.rollout.engine.kind
    return simulated if kind == "simulated" else real
