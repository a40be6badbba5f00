"""What types alone cannot refuse: keys without effect, names that point nowhere, numbers that contradict each other.

Judged on the spec alone, so that the answer is the same on a laptop and in a cluster. Each rule is one function that
yields problems; `find_problems` runs them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rljob.api.engine_args import reserved
from rljob.api.modes import COLLECTED_EPISODES, drop_without_effect, mode_rules
from rljob.api.placement import sources
from rljob.api.plugin_names import unknown_plugins
from rljob.api.pool_effects import pool_problems
from rljob.api.problem import Problem
from rljob.api.rljob_types import RLJob, Sampling
from rljob.api.source import KeyPath

BYTES_PER_TOKEN = 5.1
"""A packed trajectory at most, see `rljob.codec`."""
STORE_FILL = 0.8
"""Leases stop when the store is filled beyond this share of maxmemory."""
LABEL_LENGTH = 63
"""Of a label's value: a pool's pods carry the name of their SandboxPool, which is JOB-POOL."""
STORE_BASE_MIB = 8
"""An empty Valkey plus the ledger's own records."""


Rule = Callable[[RLJob], Iterator[Problem]]


def find_problems(job: RLJob, plugin_dir: Path | None = None) -> list[Problem]:
    """Every problem of a job whose types are right; with `plugin_dir` plugins must resolve too."""
    found = [problem for rule in _RULES for problem in rule(job)]
    if plugin_dir is not None and not found:
        found.extend(unknown_plugins(job, plugin_dir))
    return found


def _model_source(job: RLJob) -> Iterator[Problem]:
    model = job.spec.model
    if model.revision is not None and not model.source.startswith("hf://"):
        yield Problem(
            ("spec", "model", "revision"),
            f"has no effect with {model.source}",
            "remove it, or use an hf:// source",
        )


def _sources(job: RLJob) -> Iterator[Problem]:
    for path, value in sources(job):
        if value.startswith("pvc://") and ".." in value.split("/"):
            yield Problem(path, f"{value} leaves its volume", "name a path without ..")


def _schedule(job: RLJob) -> Iterator[Problem]:
    rollout = job.spec.rollout
    if job.spec.mode != "train":
        return
    if rollout.schedule != "async":
        for key, value in (
            ("maxStaleness", rollout.max_staleness),
            ("onStale", rollout.on_stale),
            ("partialRollout", rollout.partial_rollout),
        ):
            if value is not None:
                yield Problem(
                    ("spec", "rollout", key),
                    f"has no effect with schedule {rollout.schedule}",
                    "remove it, or use schedule: async",
                )
    policy = rollout.stale_policy
    if rollout.max_evictions is not None and (policy != "evict" or rollout.schedule != "async"):
        yield Problem(
            ("spec", "rollout", "maxEvictions"),
            "has an effect only with schedule async and onStale evict",
            "remove it",
        )
    if rollout.wait_seconds is not None and policy != "wait":
        yield Problem(
            ("spec", "rollout", "waitSeconds"),
            "has an effect only with onStale wait",
            "remove it, or use onStale: wait",
        )


def _sampling(job: RLJob) -> Iterator[Problem]:
    sampling = job.spec.rollout.sampling
    if sampling.top_p < 1 and job.spec.mode == "train":
        yield Problem(
            ("spec", "rollout", "sampling", "topP"),
            f"{sampling.top_p} trains on another policy than the one that is scored",
            "leave it at 1; spec.data.validation.sampling may have it",
        )
    validation = job.spec.data.validation
    context = job.spec.model.max_context_length
    both: list[tuple[KeyPath, Sampling]] = [(("spec", "rollout", "sampling"), sampling)]
    if validation and validation.sampling.max_tokens_per_turn:
        both.append(
            (("spec", "data", "validation", "sampling"), validation.sampling.over(sampling))
        )
    for path, item in both:
        if item.max_tokens_per_turn >= context:
            yield Problem(
                (*path, "maxTokensPerTurn"),
                f"{item.max_tokens_per_turn} leaves no room for a prompt in maxContextLength {context}",
                "make it smaller",
            )


def _algorithm(job: RLJob) -> Iterator[Problem]:
    if job.spec.mode != "train":
        return
    algorithm, path = job.spec.trainer.algorithm, ("spec", "trainer", "algorithm")
    if algorithm.normalize_by_std is not None and algorithm.advantage != "grpo":
        yield Problem(
            (*path, "normalizeByStd"),
            f"has no effect with advantage {algorithm.advantage}",
            "remove it, or use advantage: grpo",
        )
    if algorithm.correction is not None and algorithm.old_logprobs != "recompute":
        yield Problem(
            (*path, "correction"),
            "has an effect only with oldLogprobs recompute",
            "remove it, or set oldLogprobs: recompute",
        )
    if job.spec.rollout.group_size < 2:
        yield Problem(
            ("spec", "rollout", "groupSize"),
            f"1 gives {algorithm.advantage} nothing to compare with",
            "use at least 2",
        )


def _names(job: RLJob) -> Iterator[Problem]:
    pools = [pool.name for pool in job.spec.sandbox_pools]
    yield from _duplicates(("spec", "sandboxPools"), pools)
    yield from _duplicates(("spec", "tasks"), [task.name for task in job.spec.tasks])
    for index, task in enumerate(job.spec.tasks):
        path = ("spec", "tasks", index)
        if task.sandbox.pool not in pools:
            yield Problem(
                (*path, "sandbox", "pool"),
                f"there is no pool {task.sandbox.pool}",
                f"spec.sandboxPools has {', '.join(pools)}",
            )
        yield from _duplicates((*path, "agent", "tools"), [tool.name for tool in task.agent.tools])
    used = {task.sandbox.pool for task in job.spec.tasks}
    for index, pool in enumerate(pools):
        if pool not in used:
            yield Problem(
                ("spec", "sandboxPools", index, "name"),
                f"no task uses the pool {pool}",
                "remove it, or name it in a task's sandbox.pool",
            )


def _reward_options(job: RLJob) -> Iterator[Problem]:
    for index, task in enumerate(job.spec.tasks):
        if "options" in task.reward.model_fields_set and task.reward.name is None:
            yield Problem(
                ("spec", "tasks", index, "reward", "options"),
                "has an effect only beside a reward's name",
                "name the reward, or put it into the task's own options",
            )


def _duplicates(path: KeyPath, names: Iterable[str], key: str = "name") -> Iterator[Problem]:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            yield Problem((*path, index, key), f"{name} is used twice", f"give each its own {key}")
        seen.add(name)


def _lengths(job: RLJob) -> Iterator[Problem]:
    for index, pool in enumerate(job.spec.sandbox_pools):
        if len(job.name) + len(pool.name) >= LABEL_LENGTH:
            yield Problem(
                ("spec", "sandboxPools", index, "name"),
                f"is too long beside metadata.name: {job.name}-{pool.name} must fit in {LABEL_LENGTH} characters",
                "shorten one of them",
            )


def _pools(job: RLJob) -> Iterator[Problem]:
    for index, pool in enumerate(job.spec.sandbox_pools):
        place: KeyPath = ("spec", "sandboxPools", index)
        for problem in pool_problems(pool):
            yield problem._replace(path=(*place, *problem.path))
        if pool.max_per_job is not None:
            fault = "has no effect in a job's own pool"
            yield Problem((*place, "maxPerJob"), fault, "remove it, or lower max")
        yield from _duplicates((*place, "images"), [item.image for item in pool.images], "image")
        images = {item.image for item in pool.images}
        for number, task in enumerate(job.spec.tasks):
            if (
                task.sandbox.pool == pool.name
                and task.sandbox.image
                and images
                and task.sandbox.image not in images
            ):
                yield Problem(
                    ("spec", "tasks", number, "sandbox", "image"),
                    f"is not an image of pool {pool.name}",
                    "add it to the pool's images",
                )


def _store(job: RLJob) -> Iterator[Problem]:
    redis = job.spec.store.redis
    if redis.url is not None and redis.secret_ref is not None:
        yield Problem(
            ("spec", "store", "redis", "secretRef"),
            "has no effect beside url",
            "remove one of them",
        )
    if redis.url is None and redis.secret_ref is None:
        if (need := store_need_mib(job)) > redis.max_memory_mib:
            yield Problem(
                ("spec", "store", "redis", "maxMemoryMib"),
                f"{redis.max_memory_mib} is too small for the work that may be outstanding",
                f"set at least {need}, or lower maxContextLength, groupsPerStep, maxStaleness or maxConcurrentEpisodes",
            )
        return
    for key in ("port", "max_memory_mib"):
        if key in redis.model_fields_set:
            alias = type(redis).model_fields[key].alias or key
            yield Problem(
                ("spec", "store", "redis", alias),
                "belongs to the job's own Valkey and has no effect beside url or secretRef",
                "remove one of them",
            )


def store_need_mib(job: RLJob) -> int:
    """MiB of `maxmemory` that the outstanding work may need: ready and running groups of every step up to the bound.

    Without a trainer, what runs and what waits to be collected: as much again, or a whole batch.
    """
    rollout = job.spec.rollout
    batch = max(COLLECTED_EPISODES, rollout.group_size) if job.spec.mode == "rollout" else 0
    episodes = rollout.max_concurrent_episodes + max(rollout.max_concurrent_episodes, batch)
    if job.spec.mode == "train":
        steps = (rollout.staleness_bound + 1) * job.spec.trainer.groups_per_step
        episodes = steps * rollout.group_size + rollout.max_concurrent_episodes
    outstanding = episodes * job.spec.model.max_context_length * BYTES_PER_TOKEN
    return int(outstanding / STORE_FILL / 2**20) + STORE_BASE_MIB


def resolved(job: RLJob) -> dict[str, Any]:
    """The manifest with every default written out, but those that have no effect beside another key."""
    values = job.model_dump(mode="json", exclude_none=True)
    redis, lifecycle = values["spec"]["store"]["redis"], values["spec"]["lifecycle"]
    if "url" in redis or "secretRef" in redis:
        redis.pop("maxMemoryMib")
    if lifecycle.get("activeDeadlineSeconds", math.inf) < lifecycle["progressDeadlineSeconds"]:
        lifecycle.pop("progressDeadlineSeconds")
    for task in values["spec"]["tasks"]:
        if "name" not in task["reward"]:
            del task["reward"]["options"]
    drop_without_effect(values)
    return values


def _training_numbers(job: RLJob) -> Iterator[Problem]:
    trainer, rollout = job.spec.trainer, job.spec.rollout
    if job.spec.mode != "train":
        return
    if trainer.optimizer.warmup_steps > trainer.steps:
        yield Problem(
            ("spec", "trainer", "optimizer", "warmupSteps"),
            f"{trainer.optimizer.warmup_steps} is more than steps {trainer.steps}",
            "lower it",
        )
    if trainer.weights.publish_every_steps > rollout.staleness_bound + 1:
        yield Problem(
            ("spec", "trainer", "weights", "publishEverySteps"),
            f"{trainer.weights.publish_every_steps} is too rare for a staleness bound of {rollout.staleness_bound}: "
            "rollouts would wait for ever",
            f"use at most {rollout.staleness_bound + 1}",
        )


def _replicas(job: RLJob) -> Iterator[Problem]:
    rollout = job.spec.rollout
    least, most = rollout.min_replicas, rollout.max_replicas
    if (least is None) != (most is None):
        given, missing = (
            ("maxReplicas", "minReplicas") if least is None else ("minReplicas", "maxReplicas")
        )
        yield Problem(
            ("spec", "rollout", given),
            f"has an effect only with {missing}",
            f"add {missing}, or remove it",
        )
    elif least is not None and most is not None and least > most:
        yield Problem(
            ("spec", "rollout", "minReplicas"), f"{least} is above maxReplicas {most}", "lower it"
        )
    if job.spec.mode != "eval" and rollout.max_concurrent_episodes < rollout.group_size:
        yield Problem(
            ("spec", "rollout", "maxConcurrentEpisodes"),
            f"{rollout.max_concurrent_episodes} is below groupSize {rollout.group_size}: no group could ever start",
            f"use at least {rollout.group_size}",
        )


def _deadlines(job: RLJob) -> Iterator[Problem]:
    lifecycle = job.spec.lifecycle
    if (
        lifecycle.active_deadline_seconds
        and lifecycle.active_deadline_seconds < lifecycle.progress_deadline_seconds
        and ("progress_deadline_seconds" in lifecycle.model_fields_set)
    ):
        yield Problem(
            ("spec", "lifecycle", "progressDeadlineSeconds"),
            "has no effect: activeDeadlineSeconds ends the job first",
            "lower it or remove it",
        )


def _engine_args(job: RLJob) -> Iterator[Problem]:
    engine, redis = job.spec.rollout.engine, job.spec.store.redis
    if engine.args and engine.kind == "simulated":
        yield Problem(
            ("spec", "rollout", "engine", "args"),
            "has no effect with kind simulated",
            "remove it; engine.env holds the knobs of the simulated engine",
        )
    if engine.port is not None and engine.port == redis.port:
        yield Problem(
            ("spec", "rollout", "engine", "port"),
            f"{engine.port} is the port of spec.store.redis too",
            "give one of them another port, or leave both out",
        )
    for index, name in reserved(job.spec.rollout.engine.args):
        yield Problem(
            ("spec", "rollout", "engine", "args", index),
            f"{name} is set by rljob itself",
            "remove it",
        )


_RULES: tuple[Rule, ...] = (
    mode_rules,
    _model_source,
    _sources,
    _schedule,
    _sampling,
    _algorithm,
    _names,
    _lengths,
    _reward_options,
    _pools,
    _store,
    _training_numbers,
    _replicas,
    _deadlines,
    _engine_args,
)
