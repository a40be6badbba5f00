"""Whether the roles of a job could be placed in time; if not, the job is suspended so that it holds nothing in vain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Placed(NamedTuple):
    """A role at one moment."""

    name: str
    ready: bool
    words: str
    """Why not: the scheduler's, the quota's, the kubelet's."""


def overdue(
    roles: Sequence[Placed], since_seconds: float, deadline_seconds: float, now_seconds: float
) -> str:
    """One sentence that names the roles which are not ready; empty while all are, or there is time left."""
    missing = [role for role in roles if not role.ready]
    if not missing or now_seconds - since_seconds < deadline_seconds:
        return ""
    names = "; ".join(f"{role.name} ({role.words})" for role in missing)
    return f"not all roles were ready within {deadline_seconds:g} s: {names}"
