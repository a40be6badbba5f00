"""Moments as Kubernetes writes them: RFC 3339 in UTC, whole seconds."""

from __future__ import annotations

import math
from datetime import UTC, datetime


def to_text(seconds: float) -> str:
    """Seconds since the epoch → `2026-11-30T11:22:33Z`; a part of a second is cut off."""
    moment = datetime.fromtimestamp(math.floor(seconds), UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def to_seconds(text: str | None) -> float | None:
    """What `to_text` wrote, or any other RFC 3339 moment; None for None, empty or unreadable text."""
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
