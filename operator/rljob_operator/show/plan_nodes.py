"""The nodes of a cluster, beside a plan: what they have left, and what of the job's pods finds no place.

nodes, pods, runtime classes, quotas ─► room per node ─► the job's pods and sandboxes, placed ─► what does not fit
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from rljob import labels
from rljob.api.rljob_types import RLJob
from rljob.errors import MachineError, ManifestError
from rljob.kube.client import KubeClient
from rljob.kube.errors import ForbiddenError
from rljob.kube.resources import NODE, POD, RESOURCE_QUOTA, RUNTIME_CLASS, Object
from rljob_operator.observed import ClusterConfig, Images, Owner, Shape
from rljob_operator.policies.amounts import Amounts
from rljob_operator.policies.node_fit import (
    Fit,
    Room,
    Wish,
    beside_pulls,
    beyond_quotas,
    fit,
    requests,
    rooms,
    spread,
)
from rljob_operator.policies.sandbox_needs import Needs
from rljob_operator.render.children import rendered, shaped
from rljob_operator.render.context import Context
from rljob_operator.show import cluster


class Nodes(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A cluster as the plan sees it."""

    rooms: list[Room]
    largest: str
    """Pool with the largest sandbox."""
    fits: list[Fit]
    """Of that pool alone, on each node."""
    placed: dict[str, int]
    """Component or pool → pods that found a place, all side by side."""
    problems: list[str]


def look(job: RLJob, needs: Needs, namespace: str | None) -> Nodes:
    """Ask the cluster of KUBECONFIG. Raises MachineError."""

    async def work(client: KubeClient, space: str) -> Nodes:
        try:
            return await compare(client, job, needs, space)
        except ForbiddenError as error:
            fix = "a ClusterRole must allow it; rljob plan without --cluster asks nobody"
            raise MachineError("kubernetes", str(error), fix) from None

    return cluster.call(namespace, work)


async def compare(client: KubeClient, job: RLJob, needs: Needs, namespace: str) -> Nodes:
    """What fits. Raises KubeError."""
    classes = sorted({p.runtime_class_name for p in job.spec.sandbox_pools if p.runtime_class_name})
    nodes, _ = await client.list(NODE)
    pods, _ = await client.list(POD)
    quotas = await _quotas(client, namespace)
    runtime_classes = {name: await _class(client, name) for name in classes}
    mine = [pod for pod in pods if _is_of(pod, job, namespace)]
    free = rooms(nodes, (pod for pod in pods if not _is_of(pod, job, namespace)))
    sandboxes = [
        _wish(job, index, needs, runtime_classes) for index in range(len(job.spec.sandbox_pools))
    ]
    pulled = {pool.name for pool in job.spec.sandbox_pools if pool.pre_pull}
    free = beside_pulls(free, [wish for wish in sandboxes if wish.pool in pulled])
    wishes = [*own_pods(job), *sandboxes]
    placed = {
        pool: sum(each.number for each in fits) for pool, fits in spread(wishes, free).items()
    }
    largest = max(sandboxes, key=lambda wish: (wish.each.memory_mib, wish.each.cpu_millis))
    problems = [
        f"RuntimeClass {name}: is not in the cluster; install it, or change runtimeClassName"
        for name, known in runtime_classes.items()
        if known is None
    ]
    problems += _homeless(wishes, placed, free)
    problems += beyond_quotas(quotas, wishes, mine)
    return Nodes(
        rooms=free,
        largest=largest.pool,
        fits=[fit(room, largest) for room in free],
        placed=placed,
        problems=problems,
    )


async def _quotas(client: KubeClient, namespace: str) -> list[Object]:
    try:
        return (await client.list(RESOURCE_QUOTA, namespace))[0]
    except ForbiddenError:  # the plan says less, but nothing wrong
        return []


async def _class(client: KubeClient, name: str) -> Object | None:
    try:
        return await client.find(RUNTIME_CLASS, name)
    except ForbiddenError:  # as above
        return {}


def _is_of(pod: Object, job: RLJob, namespace: str) -> bool:
    """The job's own pods would be counted twice."""
    metadata = pod["metadata"]
    mine = (metadata.get("labels") or {}).get(labels.JOB) == job.name
    return mine and metadata.get("namespace") == namespace


def _wish(job: RLJob, index: int, needs: Needs, classes: Mapping[str, Object | None]) -> Wish:
    pool, need = job.spec.sandbox_pools[index], needs.pools[index]
    known = classes.get(pool.runtime_class_name or "") or {}
    scheduling = known.get("scheduling") or {}
    overhead = Amounts.of((known.get("overhead") or {}).get("podFixed") or {})
    return Wish(
        pool=pool.name,
        each=need.requests + overhead,
        number=need.at_most,
        node_selector={**(scheduling.get("nodeSelector") or {}), **pool.pod.node_selector},
        tolerations=[*(scheduling.get("tolerations") or ()), *pool.pod.tolerations],
    )


def own_pods(job: RLJob) -> list[Wish]:
    """Trainer, rollouts and store, as the operator would render them; `prepare` has ended before they begin."""
    config = ClusterConfig(images=Images(**dict.fromkeys(Images.__struct_fields__, "image")))
    owner = Owner(job.metadata.namespace or "default", job.name, "0" * 36)
    rollout = job.spec.rollout
    shape = Shape(
        prepare_attempt=None,
        store=True,
        rollouts=rollout.max_replicas or rollout.replicas,
        trainer_attempt=1,
    )
    try:
        objects = shaped(rendered(Context(job, owner, config)), shape)
    except ManifestError:
        return []  # `rljob apply` and the operator say why it cannot be rendered
    return [_own(item) for item in objects if item["kind"] in {"StatefulSet", "Job"}]


def _own(item: Object) -> Wish:
    spec = item["spec"]["template"]["spec"]
    return Wish(
        pool=f"({item['metadata']['labels'][labels.COMPONENT]})",
        each=requests(spec),
        number=item["spec"].get("replicas") or item["spec"].get("completions") or 1,
        node_selector=spec.get("nodeSelector") or {},
        tolerations=spec.get("tolerations") or (),
    )


def _homeless(
    wishes: Sequence[Wish], placed: Mapping[str, int], free: Sequence[Room]
) -> Iterator[str]:
    for wish in wishes:
        if (missing := wish.number - placed[wish.pool]) <= 0:
            continue
        short = {each.short for each in (fit(room, wish) for room in free)}
        why = ", ".join(sorted(short)) or "there is no node"
        yield f"{wish.pool}: {missing} of {wish.number} pods find no node ({why}); add nodes, or ask for less"
