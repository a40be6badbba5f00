"""The rules of one warm pool in CEL: the twins of `rljob.api.pool_effects`.

They stand at `spec` of a SandboxPool, and at the items of `sandboxPools` of an RLJob. What lies inside `egressRules`,
`tolerations` and `resources` the API server keeps unread.
"""

from __future__ import annotations

from typing import Final

from rljob.api.base import LABEL_KEY
from rljob.api.crd_rule import Rule
from rljob.api.pool_effects import DOTS, TAKEN_KEY, TAKEN_PATHS

_PATHS = "self.writablePaths"
_RULES = "(has(self.egressRules) && size(self.egressRules) > 0)"


def _only_with_reset(key: str) -> Rule:
    rule = f"!has(self.recycle.{key}) || self.recycle.strategy == 'reset'"
    return Rule(rule, "has no effect with strategy recreate; remove it", f"recycle.{key}")


def _map_keys(field: str) -> list[Rule]:
    given = f"self.{field}"
    form = f"!has({given}) || {given}.all(key, size(key) <= 317 && key.matches('{LABEL_KEY}'))"
    free = f"!has({given}) || {given}.all(key, !key.matches('{TAKEN_KEY}'))"
    fault = "holds a key of another form; use prefix/name with letters, digits, -, _ and ."
    return [
        Rule(form, fault, field),
        Rule(free, "holds a key that is set by rljob itself; use a key of your own", field),
    ]


def _overlap(other: str) -> str:
    return f"(p + '/').startsWith({other}) || ({other}).startsWith(p + '/')"


def _writable_paths() -> list[Rule]:
    taken = ", ".join(f"'{path}/'" for path in TAKEN_PATHS)
    beside = f"{_PATHS}.all(p, [{taken}].all(t, !({_overlap('t')})))"
    second = _overlap("q + '/'")
    alone = f"{_PATHS}.all(p, {_PATHS}.exists_one(q, {second}))"
    return [
        Rule(f"!has({_PATHS}) || ({rule})", message, "writablePaths")
        for rule, message in (
            (f"!{_PATHS}.exists(p, p.matches('{DOTS}'))", "holds . or ..; name the folder itself"),
            (
                beside,
                "one of them would cover or change what is taken; name folders of the image beside "
                + ", ".join(TAKEN_PATHS),
            ),
            (alone, "two of them overlap; remove one of them"),
        )
    ]


POOL_RULES: Final = (
    Rule("self.warm <= self.max", "is above max; lower it", "warm"),
    Rule(
        "!has(self.maxPerJob) || self.maxPerJob <= self.max",
        "is above max; lower it",
        "maxPerJob",
    ),
    *(_only_with_reset(key) for key in ("maxReuses", "canary", "quarantineSeconds")),
    Rule(
        "self.podSecurity != 'baseline' || has(self.runtimeClassName) || !self.hostUsers",
        "baseline needs a runtimeClassName that isolates the sandbox, or hostUsers: false; add one of them, "
        "or use restricted",
        "podSecurity",
    ),
    Rule(
        "self.readOnlyRoot || self.recycle.strategy == 'recreate'",
        "false is taken back only by strategy recreate; use recycle.strategy: recreate, "
        "or name the folders in writablePaths",
        "readOnlyRoot",
    ),
    Rule(
        f"self.egress != 'custom' || {_RULES}",
        "is required with egress custom; add it, or use none",
        "egressRules",
        "FieldValueRequired",
    ),
    Rule(
        f"self.egress == 'custom' || !{_RULES}",
        "has an effect only with egress custom; remove it, or use egress: custom",
        "egressRules",
    ),
    *_writable_paths(),
    *_map_keys("pod.labels"),
    *_map_keys("pod.annotations"),
    *_map_keys("pod.nodeSelector")[:1],
)

JOB_POOL_RULES: Final = (
    *POOL_RULES,
    Rule(
        "!has(self.maxPerJob)",
        "has no effect in a job's own pool; remove it, or lower max",
        "maxPerJob",
    ),
)
