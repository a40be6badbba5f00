"""What the operator's role must allow, as data, and the look at start whether it does.

The chart renders its Roles from the same list. A verb that is missing at start ends the operator with one line per
verb, resource and namespace; one that is taken away later becomes a condition of the jobs that need it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rljob.kube import resources
from rljob.kube.client import KubeClient
from rljob.kube.resources import Resource
from rljob_operator.cluster_client import may, plural_name

SIDE_BY_SIDE = 8
_KEPT = ("get", "list", "watch", "create", "patch", "delete")


class Rule(NamedTuple):
    """Verbs on one resource."""

    resource: Resource
    verbs: tuple[str, ...]
    why: str
    subresource: str = ""
    where: str = "jobs"
    """`jobs`: in every namespace with RLJobs; `operator`: in the operator's own."""
    optional: bool = False
    """Needed only where the cluster knows the kind."""


RULES: tuple[Rule, ...] = (
    Rule(
        resources.RLJOB,
        ("get", "list", "watch", "patch", "delete"),
        "suspend, finalizer, time to live",
    ),
    Rule(resources.RLJOB, ("get", "patch"), "status", "status"),
    Rule(resources.RLJOB, ("update",), "owner references that block deletion", "finalizers"),
    Rule(resources.SANDBOX_POOL, _KEPT, "pools of jobs"),
    Rule(resources.POD, ("get", "list", "watch"), "why a job waits"),
    Rule(
        resources.SECRET, ("get", "create", "patch"), "a job's tokens; read by name, never listed"
    ),
    Rule(resources.CONFIG_MAP, _KEPT, "job file, pinned rendering"),
    Rule(resources.SERVICE_ACCOUNT, _KEPT, "an account without rights for the pods"),
    Rule(resources.SERVICE, _KEPT, "store, trainer, rollouts"),
    Rule(resources.PVC, ("get", "list", "watch", "create", "patch"), "artifacts, store"),
    Rule(resources.STATEFUL_SET, _KEPT, "store, rollouts"),
    Rule(resources.JOB, ("get", "list", "watch", "create", "delete"), "prepare, trainer"),
    Rule(resources.NETWORK_POLICY, _KEPT, "who may talk to whom"),
    Rule(resources.PDB, _KEPT, "one pod at a time when a node is drained"),
    Rule(resources.POD_MONITOR, _KEPT, "metrics", optional=True),
    Rule(
        resources.CORE_EVENT,
        ("get", "list", "create", "patch"),
        "events on jobs, warnings of children",
    ),
    Rule(resources.LEASE, ("get", "create", "update"), "one leader", where="operator"),
)
"""Beside these the operator asks only what every identity may: discovery and reviews of its own access."""


class Missing(NamedTuple):
    """A verb that the role lacks."""

    verb: str
    resource: Resource
    subresource: str
    namespace: str | None

    def __str__(self) -> str:
        where = f"in namespace {self.namespace}" if self.namespace else "in all namespaces"
        return (
            f"rbac: the operator may not {self.verb} {plural_name(self.resource, self.subresource)} {where}; "
            "add the verb to its role (the chart's does)"
        )


async def missing(
    client: KubeClient,
    namespaces: Sequence[str],
    operator_namespace: str,
    optional: Iterable[Resource],
) -> list[Missing]:
    """Verbs that the role lacks, in the order of `RULES`.

    Args:
        client: Ours.
        namespaces: Those with RLJobs; empty: all.
        operator_namespace: Where the Lease is.
        optional: Optional kinds that this cluster knows.

    Raises:
        KubeError: the API server cannot be asked.
    """
    slots, known = asyncio.Semaphore(SIDE_BY_SIDE), set(optional)

    async def ask(candidate: Missing) -> bool:
        async with slots:
            verb, resource, subresource, namespace = candidate
            return await may(client, verb, resource, namespace, subresource)

    candidates = [
        Missing(verb, rule.resource, rule.subresource, namespace)
        for rule in RULES
        if not rule.optional or rule.resource in known
        for namespace in _places(rule, namespaces, operator_namespace)
        for verb in rule.verbs
    ]
    allowed = await asyncio.gather(*map(ask, candidates))
    return [one for one, may_be in zip(candidates, allowed, strict=True) if not may_be]


def _places(rule: Rule, namespaces: Sequence[str], operator_namespace: str) -> Sequence[str | None]:
    if rule.where == "operator":
        return (operator_namespace,)
    return namespaces or (None,)
