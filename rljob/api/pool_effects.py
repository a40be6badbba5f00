"""What types alone cannot refuse of one warm pool: the part of `effects` that SandboxPool objects are judged by too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from rljob.api.problem import Problem
from rljob.api.sandboxpool_types import SandboxPoolSpec

TAKEN_KEY: Final = (
    "(^|[.])(rljob[.]dev|app[.]kubernetes[.]io|security[.](alpha|beta)[.]kubernetes[.]io)/"
)
"""Keys of labels and annotations that say whose a pod is, or what the kernel denies it."""
TAKEN_PATHS: Final = (
    "/dev", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/opt/rljob", "/proc", "/run/rljob", "/run/secrets",
    "/sys", "/tmp", "/var/run", "/workspace",
)  # fmt: skip
"""Where the kernel's, the node's and the guest's own mounts lie. /var/run mostly leads to /run."""
DOTS: Final = "/[.][.]?(/|$)"

_Rule = Callable[[SandboxPoolSpec], Iterator[Problem]]


def pool_problems(pool: SandboxPoolSpec) -> list[Problem]:
    """Every problem of a pool whose types are right; paths are below the pool."""
    return [problem for rule in _RULES for problem in rule(pool)]


def _recycle(pool: SandboxPoolSpec) -> Iterator[Problem]:
    recycle = pool.recycle
    if recycle.strategy == "reset":
        return
    for key, value in (
        ("maxReuses", recycle.max_reuses),
        ("canary", recycle.canary),
        ("quarantineSeconds", recycle.quarantine_seconds),
    ):
        if value is not None:
            yield Problem(
                ("recycle", key), f"has no effect with strategy {recycle.strategy}", "remove it"
            )


def _security(pool: SandboxPoolSpec) -> Iterator[Problem]:
    if pool.pod_security == "baseline" and pool.runtime_class_name is None and pool.host_users:
        yield Problem(
            ("podSecurity",),
            "baseline needs a runtimeClassName that isolates the sandbox, or hostUsers: false",
            "add one of them, or use restricted",
        )
    if not pool.read_only_root and pool.recycle.strategy != "recreate":
        yield Problem(
            ("readOnlyRoot",),
            "false is taken back only by strategy recreate",
            "use recycle.strategy: recreate, or name the folders in writablePaths",
        )


def _egress(pool: SandboxPoolSpec) -> Iterator[Problem]:
    if pool.egress == "custom" and not pool.egress_rules:
        yield Problem(("egressRules",), "is required with egress custom", "add it, or use none")
    if pool.egress != "custom" and pool.egress_rules:
        yield Problem(
            ("egressRules",),
            f"has no effect with egress {pool.egress}",
            "remove it, or use egress: custom",
        )
    for index, rule in enumerate(pool.egress_rules):
        if unknown := sorted(rule.keys() - {"to", "ports"}):
            # Without its key a rule would allow everything.
            yield Problem(
                ("egressRules", index, unknown[0]), "unknown key", "a rule has to and ports"
            )


def _writable_paths(pool: SandboxPoolSpec) -> Iterator[Problem]:
    paths = pool.writable_paths
    for index, path in enumerate(paths):
        where = ("writablePaths", index)
        if re.search(DOTS, path):
            yield Problem(where, f"{path} holds . or ..", "name the folder itself")
        elif taken := next((each for each in TAKEN_PATHS if _overlap(path, each)), None):
            fault = f"{path} would cover or change {taken}" if path != taken else f"{path} is taken"
            yield Problem(where, fault, "name a folder of the image beside it")
        elif other := next((each for each in paths[:index] if _overlap(path, each)), None):
            fault = f"{path} is named twice" if path == other else f"{path} and {other} overlap"
            yield Problem(where, fault, "remove one of them")


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def _keys(pool: SandboxPoolSpec) -> Iterator[Problem]:
    for name, given in (("labels", pool.pod.labels), ("annotations", pool.pod.annotations)):
        for key in _taken(given):
            yield Problem(("pod", name, key), "is set by rljob itself", "use a key of your own")


def _taken(keys: Iterable[str]) -> Iterator[str]:
    return (key for key in keys if re.search(TAKEN_KEY, key))


def _numbers(pool: SandboxPoolSpec) -> Iterator[Problem]:
    if pool.max_per_job is not None and pool.max_per_job > pool.max:
        yield Problem(("maxPerJob",), f"{pool.max_per_job} is above max {pool.max}", "lower it")


_RULES: tuple[_Rule, ...] = (_recycle, _security, _egress, _writable_paths, _keys, _numbers)
