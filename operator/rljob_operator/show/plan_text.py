"""`rljob plan`: the components of a manifest, what each step moves, which sandboxes it needs, and what does not fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rljob.api.effects import BYTES_PER_TOKEN, store_need_mib
from rljob.api.load import load
from rljob.api.placement import cluster_only_keys
from rljob.api.rljob_types import RLJob
from rljob_operator.policies.sandbox_needs import Needs, needs
from rljob_operator.render.component import Component
from rljob_operator.render.plan import plan
from rljob_operator.show.plan_nodes import Nodes, look
from rljob_operator.show.plan_rows import Rows, rows_of
from rljob_operator.show.plan_sandboxes import sandbox_json, sandbox_lines


class Plan(NamedTuple):
    """All that a plan tells."""

    job: RLJob
    manifest: Path
    rows: Rows
    needs: Needs
    nodes: Nodes | None


def make(
    manifest: Path, assignments: Sequence[str], *, in_cluster: bool, namespace: str | None
) -> Plan:
    """Read the manifest and its rows, and look at the cluster where that is asked for.

    Args:
        manifest: The YAML file.
        assignments: `path=value` overrides.
        in_cluster: Look at the nodes of the cluster of KUBECONFIG.
        namespace: Where the job will be; without it the manifest's, or the kubeconfig's.

    Raises:
        UserError: manifest or rows are wrong, or the cluster cannot be asked.
    """
    job = load(manifest, assignments, local=not in_cluster)
    rows = rows_of(job, manifest.resolve().parent)
    needed = needs(job, rows.counts)
    nodes = look(job, needed, namespace or job.metadata.namespace) if in_cluster else None
    return Plan(job, manifest, rows, needed, nodes)


def describe(it: Plan) -> str:
    """The whole text."""
    job = it.job
    lines = [f"{job.name}: {len(plan(job))} components, in start order"]
    lines += [_component(part) for part in plan(job)]
    lines += ["", *_numbers(job, it.manifest)]
    lines += ["", *sandbox_lines(it.rows, it.needs, it.nodes)]
    if it.nodes is None and (aside := cluster_only_keys(job)):
        lines.append(f"left aside on one machine: {', '.join(aside)}")
    return "\n".join(lines)


def as_json(it: Plan) -> str:
    """The same, for programs."""
    spec = it.job.spec
    steps = spec.mode == "train"
    found = {
        "job": it.job.name,
        "mode": spec.mode,
        "components": [
            {
                "name": part.name,
                "kind": part.kind,
                "cpu": part.resources.cpu,
                "memoryMib": part.resources.memory_mib,
                "after": part.depends,
            }
            for part in plan(it.job)
        ],
        "episodesPerStep": spec.trainer.groups_per_step * spec.rollout.group_size
        if steps
        else None,
        "weightBytes": weight_bytes(it.job, it.manifest) or None,
        "storeMib": store_need_mib(it.job),
        "sandboxes": sandbox_json(it.rows, it.needs, it.nodes),
    }
    return json.dumps(msgspec.to_builtins(found), indent=2)


def _component(part: Component) -> str:
    ports = " ".join(f"{port.name}:{port.pinned or 'free'}" for port in part.ports)
    after = f"after {', '.join(part.depends)}" if part.depends else ""
    resources = f"{part.resources.cpu:g} cpu, {part.resources.memory_mib} MiB"
    return f"  {part.name:13} {part.kind:8} {' '.join(part.command):52} {resources:18} {ports:42} {after}".rstrip()


def _numbers(job: RLJob, manifest: Path) -> list[str]:
    spec = job.spec
    episodes = spec.trainer.groups_per_step * spec.rollout.group_size
    weights = weight_bytes(job, manifest)
    memory = sum(part.resources.memory_mib for part in plan(job) if part.role != "prepare")
    moved = (
        f"{weights / 2**20:.1f} MiB per publish, one copy per rollout pod"
        if weights
        else "known once the model is prepared"
    )
    most = episodes * spec.model.max_context_length * BYTES_PER_TOKEN / 2**20
    of_steps = [
        f"episodes per step      {episodes} ({spec.trainer.groups_per_step} groups of {spec.rollout.group_size})",
        f"trajectory bytes       at most {most:.1f} MiB per step",
    ]
    return [
        *(of_steps if spec.mode == "train" else []),
        f"weight bytes           {moved}",
        f"store                  needs about {store_need_mib(job)} MiB of {spec.store.redis.max_memory_mib} MiB",
        f"memory                 about {memory} MiB in all",
    ]


def weight_bytes(job: RLJob, manifest: Path) -> int:
    """Bytes of the safetensors files of the model, where they lie on this machine; else 0."""
    scheme, _, rest = job.spec.model.source.partition("://")
    earlier = [run / "artifacts/prepared/model" for run in _runs_of(job)]
    folders = [manifest.resolve().parent / rest] if scheme == "file" else earlier
    sizes = (
        sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in folders
    )
    return next((size for size in sizes if size), 0)


def _runs_of(job: RLJob) -> list[Path]:
    """Earlier runs with the same model."""
    runs = (path.parent for path in Path("runs").glob("*/job.json"))
    return [
        run
        for run in runs
        if json.loads((run / "job.json").read_text())["spec"]["model"]["source"]
        == job.spec.model.source
    ]
