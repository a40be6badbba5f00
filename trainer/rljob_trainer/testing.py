"""Fakes for tests of this room: a ledger in memory that answers a trainer as the real one does, jobs, trajectories."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljob.api.rljob_types import RLJob
from rljob.codec import pack
from rljob.errors import FencedError, StoreError
from rljob.ids import EpisodeId, GroupId, PolicyVersion
from rljob.ledger.types import (
    LedgerSnapshot,
    Policy,
    Report,
    TakenGroup,
    TakeReply,
    ValidationStatus,
)
from rljob.trajectory import Chain, Trajectory, VersionSpan


def job(**trainer: Any) -> RLJob:
    """A small simulated job; keywords replace keys of `spec.trainer`, `rollout` and `validation` those of their own."""
    rollout, validation = trainer.pop("rollout", {}), trainer.pop("validation", None)
    data: dict[str, Any] = {"train": {"source": "file:///rows.jsonl"}}
    if validation is not None:
        data["validation"] = {"source": "file:///validation.jsonl", **validation}
    spec = {
        "model": {"source": "file:///model"},
        "data": data,
        "tasks": [{"name": "t", "type": "shell_files", "sandbox": {"pool": "p"}}],
        "rollout": {"groupSize": 2, **rollout},
        "trainer": {"backend": "simulated", "steps": 4, "groupsPerStep": 2, **trainer},
        "sandboxPools": [{"name": "p"}],
    }
    manifest = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "j"},
        "spec": spec,
    }
    return RLJob.model_validate(manifest)


def chain(
    n: int = 0,
    prompt: int = 5,
    actions: int = 4,
    tool: int = 0,
    incarnation: int = 1,
    seed: int = 0,
) -> Chain:
    """A chain: prompt, half of the actions, tool output, the other half."""
    rng = random.Random(f"{n}/{prompt}/{actions}/{tool}/{seed}")
    first = actions // 2 if tool else actions
    mask = [False] * prompt + [True] * first + [False] * tool + [True] * (actions - first)
    spans = [VersionSpan(prompt, first, incarnation, n)]
    if actions - first:
        spans.append(VersionSpan(prompt + first + tool, actions - first, incarnation, n))
    return Chain(
        tokens=[rng.randrange(10, 90) for _ in mask],
        prompt_length=prompt,
        action_mask=mask,
        logprobs=[-rng.random() for _ in range(actions)],
        version_spans=spans,
        finish_reason="stop",
    )


def trajectory(
    episode: str, reward: float, chains: Sequence[Chain] | None = None, **fields: Any
) -> Trajectory:
    """A finished episode."""
    name = EpisodeId.parse(episode)
    known: dict[str, Any] = {
        "job": "j",
        "episode": episode,
        "attempt": 1,
        "task": "t",
        "reward": reward,
        "outcome": "completed",
        "chains": list(chains)
        if chains is not None
        else [chain(seed=name.group.row_index * 100 + name.member)],
        "turns": 2,
        "tool_calls": 2,
        "started_at": 1.0,
        "worker": "w",
        "sandbox": "s",
        "model": "m",
        "row_index": name.group.row_index,
    }
    return Trajectory(**{**known, **fields})


class FakeLedger:
    """Hands out groups 0, 1, 2 … as soon as they are asked for, or after `empty_takes` refusals."""

    def __init__(self, group_size: int = 2) -> None:
        self.group_size = group_size
        self.incarnation = 0
        self.step = 0
        self.version: PolicyVersion | None = None
        self.commits: list[tuple[int, PolicyVersion, str]] = []
        self.taken: dict[int, list[TakenGroup]] = {}
        self.archived_steps: list[int] = []
        self.resumed: list[tuple[int, int | None]] = []
        self.archived_step = 0
        self.rejected: list[GroupId] = []
        self.reports: list[Report] = []
        self.empty_takes = 0
        self.next_row = 0
        self.sampled_n: int | None = None
        self.held: set[PolicyVersion] = set()
        self.validations: dict[int, dict[str, Any]] = {}
        self.phase: str | None = None
        self.fail_at: tuple[str, int] | None = None
        """The call and step that raises once, instead of doing anything."""

    def _fence(self, incarnation: int) -> None:
        if incarnation != self.incarnation:
            raise FencedError(f"incarnation {incarnation} is not {self.incarnation}")

    async def open_trainer(self, boot_id: str, *, at_least: int = 0) -> int:
        self.incarnation += 1
        return self.incarnation

    async def resume(
        self,
        incarnation: int,
        step: int,
        *,
        archived_step: int | None = None,
        archived_groups: Sequence[GroupId] = (),
    ) -> None:
        self._fence(incarnation)
        self.resumed.append((step, archived_step))
        self.step, self.archived_step = step, archived_step or step
        assert set(archived_groups) >= {
            group.group for s in range(1, self.archived_step + 1) for group in self.taken[s]
        }

    async def take(self, incarnation: int, step: int, groups: int) -> TakeReply:
        self._fence(incarnation)
        assert step == self.archived_step + 1, (
            f"take({step}) after {self.archived_step} was archived"
        )
        if self.empty_takes:
            self.empty_takes -= 1
            return TakeReply(
                groups=None,
                reason="groups",
                retry_after_seconds=0.01,
                facts={"need": groups, "ready": 1},
            )
        if step not in self.taken:
            self.taken[step] = [self.make_group() for _ in range(groups)]
        return TakeReply(groups=self.taken[step])

    def make_group(self) -> TakenGroup:
        """The next group, sampled by the newest committed version, or by n = `sampled_n`."""
        group = GroupId("t", self.next_row, 0)
        self.next_row += 1
        n = self.sampled_n if self.sampled_n is not None else self.version.n if self.version else 0
        members = [EpisodeId(group, member) for member in range(self.group_size)]
        made = [
            trajectory(str(name), float(name.member % 2), [chain(n=n, seed=group.major)])
            for name in members
        ]
        return TakenGroup(group=group, payloads=[pack(item) for item in made], evictions=0)

    async def archived(self, incarnation: int, step: int) -> None:
        self._fence(incarnation)
        self.archived_steps.append(step)
        self.archived_step = step

    async def reject(
        self,
        incarnation: int,
        step: int,
        groups: Sequence[GroupId],
        reason: str,
        evidence: str = "",
    ) -> None:
        self._fence(incarnation)
        self.rejected += groups
        kept = [taken for taken in self.taken[step] if taken.group not in groups]
        self.taken[step] = kept + [self.make_group() for _ in groups]

    async def finish(self, incarnation: int, phase: str, message: str = "") -> None:
        self._fence(incarnation)
        self.phase = phase

    async def commit(
        self, incarnation: int, step: int, version: PolicyVersion, digest: str
    ) -> None:
        self._fence(incarnation)
        if self.fail_at == ("commit", step):
            self.fail_at = None
            raise StoreError(f"commit {step}")
        assert self.step <= step <= self.archived_step
        self.step, self.version = step, version
        self.commits.append((step, version, digest))

    async def held_versions(self) -> set[PolicyVersion]:
        return self.held

    async def snapshot(self) -> LedgerSnapshot:
        policy = Policy(version=self.version, step=self.step)
        numbers: dict[str, Any] = dict.fromkeys(
            ("stream_entries", "stream_pending", "memory_bytes", "max_memory_bytes"), 0
        )
        texts: dict[str, Any] = {"phase": self.phase, "message": "", "counts": {}, "reports": {}}
        means: dict[str, Any] = {"reward_mean": None, "reward_recent": None, "turns_recent": None}
        known: dict[str, Any] = {
            "step": self.step,
            "steps": 0,
            "incarnation": self.incarnation,
            "policy": policy,
        }
        return LedgerSnapshot(
            **known, **texts, **means, **numbers, validation={}, staleness={}, progress=0
        )

    async def report(self, component: str, report: Report) -> None:
        assert component == "trainer"
        self.reports.append(report)

    async def open_validation(
        self,
        incarnation: int,
        step: int,
        version: PolicyVersion,
        rows: int,
        samples_per_prompt: int,
        settled: bool,
    ) -> None:
        self._fence(incarnation)
        names = [
            EpisodeId(GroupId("v", step, row), m)
            for row in range(rows)
            for m in range(samples_per_prompt)
        ]
        entry = {
            "version": version,
            "settled": settled,
            "todo": names,
            "out": [],
            "done": 0,
            "dead": 0,
            "open": True,
        }
        self.validations[step] = {**entry, "total": len(names)}

    def finish_validation(
        self, step: int, episodes: int, reward: float = 1.0, dead: int = 0
    ) -> None:
        """Complete so many of the open episodes of a validation, and give up `dead` more."""
        run = self.validations[step]
        for _ in range(min(episodes, len(run["todo"]))):
            name = run["todo"].pop(0)
            made = trajectory(str(name), reward, [chain(n=run["version"].n)])
            run["out"].append((f"{len(run['out']):09d}-0", pack(made)))
            run["done"] += 1
        run["dead"] += dead

    async def validation(self, step: int) -> ValidationStatus:
        if (run := self.validations.get(step)) is None:
            return ValidationStatus(step=step, open=False)
        counts = {name: run[name] for name in ("total", "done", "dead", "open", "settled")}
        return ValidationStatus(step=step, **counts)

    async def drain_validation(
        self, incarnation: int, step: int, *, after: str = ""
    ) -> list[tuple[str, bytes]]:
        self._fence(incarnation)
        return [entry for entry in self.validations[step]["out"] if entry[0] > after]

    async def close_validation(self, incarnation: int, step: int) -> None:
        self._fence(incarnation)
        self.validations[step]["open"] = False


class FakeStore:
    """A weight store that remembers what it was given."""

    def __init__(self, artifacts: Path) -> None:
        self.artifacts = artifacts
        self.canaries: dict[PolicyVersion, Any] = {}
        self.pruned: list[tuple[int, set[PolicyVersion]]] = []

    def publish(self, version: PolicyVersion, source: Path, canary: Any) -> str:
        target = self.artifacts / "weights" / str(version)
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        self.canaries[version] = canary
        return f"digest-{version}"

    def prune(self, keep: int, held: set[PolicyVersion]) -> None:
        self.pruned.append((keep, held))


def lines(path: Path) -> list[dict[str, Any]]:
    """A JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
