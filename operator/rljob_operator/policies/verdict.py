"""How a job ended."""

from __future__ import annotations

import msgspec


class Verdict(msgspec.Struct, frozen=True):
    """The end of a job: its phase, why, and the exit code of `rljob run`."""

    phase: str
    reason: str
    message: str
    exit_code: int
