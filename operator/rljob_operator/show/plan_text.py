"""`rljob plan`: the components of a manifest as text, and what each step moves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rljob.api.effects import BYTES_PER_TOKEN, store_need_mib
from rljob.api.load import load
from rljob.api.placement import cluster_only_keys
from rljob.api.rljob_types import RLJob
from rljob_operator.render.component import Component
from rljob_operator.render.plan import plan


def describe(manifest: Path, assignments: Sequence[str]) -> str:
    """The whole text."""
    job = load(manifest, assignments, local=True)
    lines = [f"{job.name}: {len(plan(job))} components, in start order"]
    lines += [_component(part) for part in plan(job)]
    lines += ["", *_numbers(job, manifest)]
    if aside := cluster_only_keys(job):
        lines.append(f"left aside on one machine: {', '.join(aside)}")
    return "\n".join(lines)


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
