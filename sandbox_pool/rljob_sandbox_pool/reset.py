"""What becomes of a sandbox after its claim: verified and used again, or replaced. Pure."""

from __future__ import annotations

import enum

from rljob.api.rljob_types import Recycle

DEFAULT_MAX_REUSES = 50
DEFAULT_QUARANTINE_SECONDS = 600.0


class Fate(enum.Enum):
    """After a release."""

    RESET = "reset"
    """Clean it, verify it, use it again."""
    REPLACE = "replace"
    """End it; another takes its place."""


def fate(recycle: Recycle, *, uses: int, broken: bool) -> Fate:
    """Decide about a sandbox that has had `uses` claims; `broken`: its owner found that it did not answer."""
    if (
        broken
        or recycle.strategy == "recreate"
        or uses > (recycle.max_reuses or DEFAULT_MAX_REUSES)
    ):
        return Fate.REPLACE
    return Fate.RESET


def quarantine_seconds(recycle: Recycle) -> float:
    """How long a sandbox that did not verify is kept for a look."""
    given = recycle.quarantine_seconds
    return DEFAULT_QUARANTINE_SECONDS if given is None else float(given)
