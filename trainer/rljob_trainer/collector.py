"""What a job without a trainer works with: the prepared model is version 0, and stays it.

    prepared/model ─► weights/{incarnation}-0 ─► ledger.commit: engines load it, workers may lease

A collector that starts again finds the version and goes on with it under a new incarnation, so that no engine switches
and nothing that runs is lost. No trainer knows how the weights score, so the canary carries no log probabilities: the
hashes of the tensors, and a score that loading did not change, stand for them.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob.api.rljob_types import RLJob
from rljob.clock import Clock
from rljob.errors import MachineError, UserError
from rljob.ids import PolicyVersion
from rljob.weights import Canary, WeightStore
from rljob_trainer.files import sha256, write_atomic
from rljob_trainer.progress import Progress
from rljob_trainer.publish import first_canary

if TYPE_CHECKING:
    from rljob.ledger import Ledger

NAME = "collector"
RESULT = "result.json"


@dataclass
class Collector:
    """Everything a loop of this kind holds. Built once per incarnation by `collect`, or by a test."""

    job: RLJob
    artifacts: Path
    ledger: Ledger
    incarnation: int
    version: PolicyVersion
    digest: str
    num_rows: int
    """Of the data that the mode works on."""
    progress: Progress
    clock: Clock

    async def commit(self, step: int) -> None:
        """`step` batches are collected; the policy stays as it is."""
        await self.ledger.commit(self.incarnation, step, self.version, self.digest)

    async def finish(self, result: dict[str, Any]) -> None:
        """Write result.json."""
        spec = self.job.spec
        head = {"mode": spec.mode, "model": spec.model.source, "version": str(self.version)}
        data = json.dumps({**head, **result}, indent=2).encode() + b"\n"
        await asyncio.to_thread(write_atomic, self.artifacts / RESULT, data)

    async def last_death(self) -> str:
        """Why the newest dead letter was given up, for people."""
        letters = await self.ledger.dead_letters()
        return " ".join(letters[-1].reason.split())[:300] if letters else "unknown"

    def nothing_came_back(self, what: str, reason: str) -> UserError:
        """The end of a job whose every episode fails."""
        problem = f"{what} failed all their attempts; the last: {reason}"
        return UserError("spec.tasks", problem, "see `rljob logs worker-0`")


def publish_prepared(artifacts: Path, incarnation: int) -> tuple[PolicyVersion, str]:
    """Publish the prepared model, or find it published; version and digest. Blocks.

    Raises:
        MachineError: the artifact store holds the weights of another model.
    """
    store, model = WeightStore(artifacts), artifacts / "prepared" / "model"
    if published := store.list():
        manifest = store.manifest(published[-1])
        if any(
            not (model / name).is_file()
            or (model / name).stat().st_size != entry.bytes
            or sha256(model / name) != entry.sha256
            for name, entry in manifest.files.items()
        ):
            fix = "name an empty folder or volume in spec.store.artifacts"
            raise MachineError(str(artifacts), "holds the weights of another job", fix)
        return published[-1], manifest.digest
    row = first_canary(artifacts / "prepared")
    tokens = row.tokens.tolist()
    canary = Canary(
        prompt_ids=tokens[: row.prompt_length], token_ids=tokens[row.prompt_length :], logprobs=None
    )
    version = PolicyVersion(incarnation, 0)
    return version, store.publish(version, model, canary)
