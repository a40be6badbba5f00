"""When a job is due for something although nothing changes."""

from __future__ import annotations

from collections.abc import Iterable


def passed(since_seconds: float | None, limit_seconds: float | None, now_seconds: float) -> bool:
    """Whether `limit_seconds` have gone by; never where either is not given."""
    return (
        since_seconds is not None
        and limit_seconds is not None
        and now_seconds - since_seconds >= limit_seconds
    )


def nearest(
    moments: Iterable[float | None], now_seconds: float, *, longest: float | None
) -> float | None:
    """Seconds until the nearest of the moments that lie ahead, at most `longest`; None: nothing is due."""
    ahead = [
        moment - now_seconds for moment in moments if moment is not None and moment > now_seconds
    ]
    if longest is not None:
        ahead.append(longest)
    return max(0.2, min(ahead)) if ahead else None
