"""`rljob sandbox reap`: removes what is left of pools and pool managers that are no more.

    -n NAMESPACE ─► objects with a pool's label whose SandboxPool or RLJob does not live
    else ─────────► claims whose time is over, and what a `serve` that was killed left in the state folder

Nothing that lives is touched.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rljob_sandbox_pool.cli.state import State
from rljob_sandbox_pool.cli.where import call
from rljob_sandbox_pool.runtimes import cgroups

if TYPE_CHECKING:
    from rljob.kube.client import KubeClient
    from rljob.kube.resources import Resource

_OWNERS = ("SandboxPool", "RLJob")
_COMPONENTS = ("sandbox", "claims", "pre-pull")


def main(state: State, namespace: str | None, *, dry_run: bool) -> None:
    """Say what goes, and remove it unless it is a dry run. Raises UserError."""
    if namespace is None:
        _local(state, dry_run=dry_run)
        return

    async def work() -> None:
        from rljob.kube import config
        from rljob.kube.client import KubeClient

        kube = KubeClient(config.load(), user_agent="rljob")
        try:
            await in_cluster(kube, namespace, dry_run=dry_run)
        finally:
            await kube.aclose()

    call(work)


# ── on this machine ──


def _local(state: State, *, dry_run: bool) -> None:
    """A pool manager that was killed took its sandboxes with it."""
    dead, now = state.was_served(), time.time()
    for name, stored in state.claims().items():
        if stored.expires < now or (dead is not None and stored.where.token == dead.token):
            _tell(f"claim {name}", dry_run=dry_run)
            if not dry_run:
                state.forget(name)
    if dead is not None:
        _tell(f"state of pid {dead.pid}", dry_run=dry_run)
        if not dry_run:
            shutil.rmtree(state.work, ignore_errors=True)
            cgroups.sweep(cgroups.find())
            state.forget_served()


# ── in a cluster ──


async def in_cluster(kube: KubeClient, namespace: str, *, dry_run: bool) -> None:
    """What is left of pools of a namespace. Raises KubeError."""
    from rljob import labels
    from rljob.kube.resources import by_kind

    found: list[tuple[Resource, dict[str, Any]]] = []
    for kind in ("Pod", "NetworkPolicy", "Secret", "DaemonSet"):
        objects, _ = await kube.list(by_kind(kind), namespace, label_selector=labels.POOL)
        found += [
            (by_kind(kind), each)
            for each in objects
            if each["metadata"]["labels"].get(labels.COMPONENT) in _COMPONENTS
        ]
    # After the others: whose owner is not there now is not about to get it.
    alive: set[str] = set()
    for kind in _OWNERS:
        owners, _ = await kube.list(by_kind(kind), namespace)
        alive |= {owner["metadata"]["uid"] for owner in owners}
    for resource, orphan in orphans(found, alive):
        metadata = orphan["metadata"]
        _tell(f"{resource.kind} {namespace}/{metadata['name']}", dry_run=dry_run)
        if not dry_run:
            await kube.delete(resource, metadata["name"], namespace, uid=metadata["uid"])


def orphans(
    found: Iterable[tuple[Resource, dict[str, Any]]], alive: set[str]
) -> Iterator[tuple[Resource, dict[str, Any]]]:
    """Those that no living pool or job owns; what belongs to another object of the cluster goes with that."""
    for resource, each in found:
        metadata = each["metadata"]
        references = metadata.get("ownerReferences") or []
        is_ours = all(reference["kind"] in _OWNERS for reference in references)
        lives = any(reference["uid"] in alive for reference in references)
        if is_ours and not lives and not metadata.get("deletionTimestamp"):
            yield resource, each


def _tell(what: str, *, dry_run: bool) -> None:
    sys.stdout.write(f"{what} {'would be removed' if dry_run else 'removed'}\n")
