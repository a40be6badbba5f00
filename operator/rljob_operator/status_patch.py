"""Which status to write, and when. Pure.

| what changed | written |
| --- | --- |
| nothing | never |
| phase, a condition's type, status or reason, observedGeneration; or there is an event to post | at once |
| numbers and messages | at most every few seconds |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATUS_SECONDS = 3.0
"""Between two writes that only bring numbers."""

Status = Mapping[str, Any]


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch that makes `old` into `new`; empty where they are the same. Lists are replaced whole."""
    patch: dict[str, Any] = dict.fromkeys(old.keys() - new.keys())
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := merge_patch(before, value):
                patch[key] = inner
        elif key not in old or before != value:
            patch[key] = value
    return patch


def without_nulls(status: Status) -> dict[str, Any]:
    """The status as the API server keeps it: keys without a value are not there."""
    return {
        key: without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in status.items()
        if value is not None
    }


def is_urgent(old: Status, new: Status) -> bool:
    """Whether people or controllers wait for this change."""
    return _gist(old) != _gist(new)


def _gist(status: Status) -> Any:
    listed = status.get("conditions") or ()
    conditions = sorted((item["type"], item["status"], item.get("reason", "")) for item in listed)
    return status.get("phase"), status.get("observedGeneration"), conditions
