"""One fault of a manifest, and how a key is found in one."""

from __future__ import annotations

from typing import NamedTuple, cast

from rljob.api.source import KeyPath, dotted


class Problem(NamedTuple):
    """One fault: where, what is wrong, what to do."""

    path: KeyPath
    problem: str
    fix: str

    def __str__(self) -> str:
        text = f"{dotted(self.path) or 'manifest'}: {self.problem}"
        return f"{text}; {self.fix}" if self.fix else text


def holds(data: object, path: KeyPath) -> bool:
    """Whether `data` has something other than nothing at `path`; `*` stands for every list position."""
    if not path:
        return data not in (None, {}, [])
    if path[0] == "*":
        return isinstance(data, list) and any(
            holds(item, path[1:]) for item in cast("list[object]", data)
        )
    return (
        isinstance(data, dict)
        and path[0] in data
        and holds(cast("dict[object, object]", data)[path[0]], path[1:])
    )
