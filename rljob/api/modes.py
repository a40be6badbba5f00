"""What each mode needs and what has no effect in it.

| mode | rows | what ends it |
| --- | --- | --- |
| train | data.train, and data.validation now and then | trainer.steps |
| eval | data.validation | every row scored samplesPerPrompt times |
| rollout | data.train | rollout.groups prompts, or one pass over the rows |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

from rljob.api.problem import Problem, holds
from rljob.api.rljob_types import RLJob

Mode = Literal["train", "eval", "rollout"]

COLLECTED_EPISODES: Final = 64
"""Mode `rollout`: about so many are archived at once, and wait in the store until then."""


def _paths(*dotted: str) -> tuple[tuple[str, ...], ...]:
    return tuple(("spec", *path.split(".")) for path in dotted)


REQUIRED: Final[dict[Mode, tuple[tuple[str, ...], ...]]] = {
    "train": _paths("trainer", "data.train"),
    "eval": _paths("data.validation"),
    "rollout": _paths("data.train"),
}

_TRAINING = ("trainer", "rollout.schedule", "rollout.maxStaleness", "rollout.onStale",
             "rollout.maxEvictions", "rollout.waitSeconds", "rollout.partialRollout")  # fmt: skip

WITHOUT_EFFECT: Final[dict[Mode, tuple[tuple[str, ...], ...]]] = {
    "train": _paths("rollout.groups"),
    "eval": _paths(
        *_TRAINING,
        "data.train",
        "rollout.groups",
        "rollout.groupSize",
        "data.validation.everySteps",
    ),
    "rollout": _paths(*_TRAINING, "data.validation"),
}
"""None of these has a default in the CRD: there, given means that a person gave it."""


def mode_rules(job: RLJob) -> Iterator[Problem]:
    """Keys that are missing in the job's mode, and those that have no effect in it."""
    mode = job.spec.mode
    given = job.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    for path in REQUIRED[mode]:
        if not holds(given, path):
            yield Problem(path, f"is required in mode {mode}", "add it")
    for path in WITHOUT_EFFECT[mode]:
        if holds(given, path):
            yield Problem(path, f"has no effect in mode {mode}", "remove it")


def drop_without_effect(values: dict[str, Any]) -> None:
    """Remove from a dumped manifest what has no effect in its mode."""
    for *parents, key in WITHOUT_EFFECT[values["spec"]["mode"]]:
        here = values
        for parent in parents:
            here = here.get(parent, {})
        here.pop(key, None)
