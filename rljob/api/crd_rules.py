"""The rules across fields in CEL, as the API server judges them: the twins of `rljob.api.effects`.

They stand at `spec`, at list items and at the root, where no default can lie above them: the API server judges a
default by itself, before the keys inside have theirs. A key with a default is always there, another is asked for
with `has`. The bounds in the models keep the estimated cost of each rule within the API server's budget.

What only rljob can know, and the operator answers with Accepted=False:

- names of task types, agents, tools and rewards (`effects.find_problems` with a folder);
- what stands inside `options`, `resources` and `template`, which the API server keeps unread;
- `file://` artifacts and `unix://` stores, which several machines cannot share (`placement.refused_in_cluster`);
- whatever lies behind a source: files, models, rows.
"""

from __future__ import annotations

from rljob.api.base import ENV_NAME, JOB_NAME
from rljob.api.crd_rule import Rule
from rljob.api.effects import (
    BYTES_PER_TOKEN,
    LABEL_LENGTH,
    STORE_BASE_MIB,
    STORE_FILL,
)
from rljob.api.engine_args import RESERVED_ARGS, SHORT_ARGS
from rljob.api.modes import REQUIRED, WITHOUT_EFFECT
from rljob.api.rljob_types import Redis, Rollout

_TRAIN = "self.mode == 'train'"
_SCHEDULE = "(has(self.rollout.schedule) ? self.rollout.schedule : 'async')"
_GROUP_SIZE = (
    "(has(self.rollout.groupSize) ? self.rollout.groupSize "
    f": {Rollout.model_fields['group_size'].default})"
)
_BOUND = (
    f"({_SCHEDULE} == 'sync' ? 0 : {_SCHEDULE} == 'one_step' ? 1 "
    ": has(self.rollout.maxStaleness) ? self.rollout.maxStaleness : 2)"
)
_EPISODES = (
    f"({_TRAIN} && has(self.trainer) ? ({_BOUND} + 1) * self.trainer.groupsPerStep * {_GROUP_SIZE} "
    "+ self.rollout.maxConcurrentEpisodes : 2 * self.rollout.maxConcurrentEpisodes)"
)
_OWN_STORE = "!has(self.store.redis.url) && !has(self.store.redis.secretRef)"
_REDIS = "self.store.redis"


def _absent(path: str) -> str:
    """`path`, whose parents may be missing too, is not there."""
    parts = path.split(".")
    optional = [end for end in range(1, len(parts) + 1) if ".".join(parts[:end]) not in _ALWAYS]
    return " || ".join(f"!has(self.{'.'.join(parts[:end])})" for end in optional)


_ALWAYS = frozenset({"data", "rollout", "store", "store.redis", "lifecycle", "model"})


def _modes() -> list[Rule]:
    rules: list[Rule] = []
    for mode, paths in REQUIRED.items():
        for path in map(_below_spec, paths):
            missing, fix = f"self.mode != '{mode}'", f"is required in mode {mode}; add it"
            has = f"{missing} || has(self.{path})"
            rules.append(Rule(has, fix, path, "FieldValueRequired"))
    for mode, paths in WITHOUT_EFFECT.items():
        for path in map(_below_spec, paths):
            rule = f"self.mode != '{mode}' || {_absent(path)}"
            rules.append(Rule(rule, f"has no effect in mode {mode}; remove it", path))
    return rules


def _below_spec(path: tuple[str, ...]) -> str:
    return ".".join(path[1:])


def _sources() -> list[Rule]:
    rules = [
        Rule(
            "!has(self.model.revision) || self.model.source.startsWith('hf://')",
            "has an effect only with an hf:// source; remove it, or use an hf:// source",
            "model.revision",
        )
    ]
    for path in ("model.source", "data.train.source", "data.validation.source", "store.artifacts"):
        guard = _absent(path.removesuffix(".source"))
        inside = f"!(self.{path}.startsWith('pvc://') && self.{path}.matches('/[.][.](/|$)'))"
        rule = f"{guard} || {inside}" if guard else inside
        rules.append(Rule(rule, "leaves its volume; name a path without ..", path))
    return rules


def _schedule() -> list[Rule]:
    rules = [
        Rule(
            f"{_SCHEDULE} == 'async' || !has(self.rollout.{key})",
            "has an effect only with schedule async; remove it, or use schedule: async",
            f"rollout.{key}",
        )
        for key in ("maxStaleness", "onStale", "partialRollout")
    ]
    policy = "(has(self.rollout.onStale) ? self.rollout.onStale : 'evict')"
    return [
        *rules,
        Rule(
            f"!has(self.rollout.maxEvictions) || ({_SCHEDULE} == 'async' && {policy} == 'evict')",
            "has an effect only with schedule async and onStale evict; remove it",
            "rollout.maxEvictions",
        ),
        Rule(
            f"!has(self.rollout.waitSeconds) || {policy} == 'wait'",
            "has an effect only with onStale wait; remove it, or use onStale: wait",
            "rollout.waitSeconds",
        ),
        Rule(
            f"self.mode == 'eval' || self.rollout.maxConcurrentEpisodes >= {_GROUP_SIZE}",
            "is below groupSize: no group could ever start; use at least groupSize",
            "rollout.maxConcurrentEpisodes",
        ),
        Rule(
            f"!({_TRAIN}) || {_GROUP_SIZE} >= 2",
            "1 gives the advantage nothing to compare with; use at least 2",
            "rollout.groupSize",
        ),
        Rule(
            f"!({_TRAIN}) || self.rollout.sampling.topP >= 1.0",
            "trains on another policy than the one that is scored; leave it at 1",
            "rollout.sampling.topP",
        ),
    ]


def _lengths() -> list[Rule]:
    too_long = "leaves no room for a prompt in maxContextLength; make it smaller"
    key = "sampling.maxTokensPerTurn"
    return [
        Rule(f"self.rollout.{key} < self.model.maxContextLength", too_long, f"rollout.{key}"),
        Rule(
            f"!has(self.data.validation) || !has(self.data.validation.{key}) || "
            f"self.data.validation.{key} < self.model.maxContextLength",
            too_long,
            f"data.validation.{key}",
        ),
        Rule(
            "!has(self.data.validation) || "
            "self.data.validation.passAt.all(k, k <= self.data.validation.samplesPerPrompt)",
            "needs samplesPerPrompt of at least as much; raise it, or lower passAt",
            "data.validation.passAt",
        ),
    ]


def _trainer() -> list[Rule]:
    return [
        Rule(f"!has(self.trainer) || {rule}", message, f"trainer.{field}")
        for rule, message, field in (
            (
                "!has(self.trainer.algorithm.normalizeByStd) || self.trainer.algorithm.advantage == 'grpo'",
                "has an effect only with advantage grpo; remove it, or use advantage: grpo",
                "algorithm.normalizeByStd",
            ),
            (
                "!has(self.trainer.algorithm.correction) || self.trainer.algorithm.oldLogprobs == 'recompute'",
                "has an effect only with oldLogprobs recompute; remove it, or set oldLogprobs: recompute",
                "algorithm.correction",
            ),
            (
                "self.trainer.optimizer.warmupSteps <= self.trainer.steps",
                "is more than steps; lower it",
                "optimizer.warmupSteps",
            ),
            (
                f"self.trainer.weights.publishEverySteps <= {_BOUND} + 1",
                "is too rare for the staleness bound: rollouts would wait for ever; use at most the bound + 1",
                "weights.publishEverySteps",
            ),
        )
    ]


def _names() -> list[Rule]:
    return [
        Rule(
            "self.tasks.all(t, self.sandboxPools.exists(p, p.name == t.sandbox.pool))",
            "a task's sandbox.pool is not there; name one of spec.sandboxPools",
            "tasks",
        ),
        Rule(
            "self.sandboxPools.all(p, self.tasks.exists(t, t.sandbox.pool == p.name))",
            "no task uses a pool; remove it, or name it in a task's sandbox.pool",
            "sandboxPools",
        ),
        Rule(
            "self.tasks.all(t, !has(t.sandbox.image) || self.sandboxPools.all(p, p.name != t.sandbox.pool || "
            "!has(p.images) || size(p.images) == 0 || p.images.exists(i, i.image == t.sandbox.image)))",
            "a task's sandbox.image is not an image of its pool; add it to the pool's images",
            "tasks",
        ),
    ]


def _store() -> list[Rule]:
    need = f"int(double({_EPISODES} * self.model.maxContextLength) * {BYTES_PER_TOKEN} / {STORE_FILL} / 1048576.0)"
    default = Redis.model_fields["max_memory_mib"].default
    memory = f"(has({_REDIS}.maxMemoryMib) ? {_REDIS}.maxMemoryMib : {default})"
    rules = [
        Rule(
            f"!({_OWN_STORE}) || {need} + {STORE_BASE_MIB} <= {memory}",
            "is too small for the work that may be outstanding; raise it, or lower maxContextLength, "
            "groupsPerStep, maxStaleness or maxConcurrentEpisodes",
            "store.redis.maxMemoryMib",
        ),
        Rule(
            f"!has({_REDIS}.url) || !has({_REDIS}.secretRef)",
            "has no effect beside url; remove one of them",
            "store.redis.secretRef",
        ),
    ]
    for key in ("port", "maxMemoryMib"):
        fault = (
            "belongs to the job's own Valkey and has no effect beside url or secretRef; "
            "remove one of them"
        )
        rule = f"({_OWN_STORE}) || !has({_REDIS}.{key})"
        rules.append(Rule(rule, fault, f"store.redis.{key}"))
    return rules


def _engine() -> list[Rule]:
    reserved = ", ".join(f"'{arg}'" for arg in sorted([*RESERVED_ARGS, *SHORT_ARGS]))
    args, port = "self.rollout.engine.args", "self.rollout.engine.port"
    return [
        Rule(
            f"self.rollout.engine.kind != 'simulated' || !has({args}) || size({args}) == 0",
            "has no effect with kind simulated; remove it; engine.env holds the knobs of the simulated engine",
            "rollout.engine.args",
        ),
        Rule(
            f"!has({args}) || {args}.all(a, !(a.split('=')[0].replace('_', '-') in [{reserved}]))",
            "one of them is set by rljob itself; remove it",
            "rollout.engine.args",
        ),
        _env("rollout.engine.env"),
        Rule(
            f"!has({port}) || !has({_REDIS}.port) || {port} != {_REDIS}.port",
            "is the port of spec.store.redis too; give one of them another port, or leave both out",
            "rollout.engine.port",
        ),
    ]


def _env(path: str) -> Rule:
    names = f"self.{path}.all(name, size(name) <= 256 && name.matches('{ENV_NAME}'))"
    fault = "holds a key that is no name of a variable; use letters, digits and _, no digit first"
    return Rule(f"!has(self.{path}) || {names}", fault, path)


def _scale() -> list[Rule]:
    least, most = "self.rollout.minReplicas", "self.rollout.maxReplicas"
    return [
        Rule(
            f"!has({least}) || has({most})",
            "has an effect only with maxReplicas; add maxReplicas, or remove it",
            "rollout.minReplicas",
        ),
        Rule(
            f"!has({most}) || has({least})",
            "has an effect only with minReplicas; add minReplicas, or remove it",
            "rollout.maxReplicas",
        ),
        Rule(
            f"!has({least}) || !has({most}) || {least} <= {most}",
            "is above maxReplicas; lower it",
            "rollout.minReplicas",
        ),
        Rule(
            "!has(self.lifecycle.activeDeadlineSeconds) || !has(self.lifecycle.progressDeadlineSeconds) || "
            "self.lifecycle.activeDeadlineSeconds >= self.lifecycle.progressDeadlineSeconds",
            "has no effect: activeDeadlineSeconds ends the job first; lower it or remove it",
            "lifecycle.progressDeadlineSeconds",
        ),
    ]


def spec_rules() -> list[Rule]:
    """At `spec` of an RLJob."""
    parts = (_modes, _sources, _schedule, _lengths, _trainer, _names, _store, _engine, _scale)
    return [rule for part in parts for rule in part()]


ROOT_RULES = (
    Rule(
        f"self.metadata.name.matches('{JOB_NAME}')",
        "is not a name that every child can carry; use at most 44 of a-z, 0-9 and -, a letter first",
        "metadata.name",
    ),
    Rule(
        f"self.spec.sandboxPools.all(p, size(self.metadata.name) + size(p.name) < {LABEL_LENGTH})",
        f"a pool's name is too long beside metadata.name: both and a dash must fit in {LABEL_LENGTH} characters; "
        "shorten one of them",
        "spec.sandboxPools",
    ),
)

TASK_RULES = (
    Rule(
        "!has(self.reward.options) || has(self.reward.name)",
        "has an effect only beside a reward's name; name the reward, or put it into the task's own options",
        "reward.options",
    ),
    _env("sandbox.env"),
)
