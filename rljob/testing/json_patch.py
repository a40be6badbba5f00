"""How an API server changes an object: merge patches, and what server-side apply takes over and gives up."""

from __future__ import annotations

import copy
from typing import Any


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result: dict[str, Any] = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def overlay(live: Any, applied: Any) -> Any:
    """`live` with everything that was applied."""
    if isinstance(live, dict) and isinstance(applied, dict):
        return {**live, **{key: overlay(live.get(key), value) for key, value in applied.items()}}
    return copy.deepcopy(applied)


def without(live: Any, before: Any, now: Any) -> Any:
    """`live` without what the manager applied before and applies no more."""
    if not (isinstance(live, dict) and isinstance(before, dict)):
        return live
    present = now if isinstance(now, dict) else {}
    return {
        key: without(value, before.get(key), present.get(key))
        for key, value in live.items()
        if key in present or key not in before
    }
