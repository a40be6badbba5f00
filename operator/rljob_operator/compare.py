"""Whether a live object holds what was applied, and which part of it that is. Pure.

The API server adds defaults, so live objects hold more; lists of named things (containers, ports, variables) are
compared by name, others place by place; `500m` is `0.5`, `1Gi` is `1024Mi`; what is empty may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

_MERGE_KEYS = (
    "name",
    "containerPort",
    "port",
    "mountPath",
    "devicePath",
    "topologyKey",
    "uid",
    "type",
)
"""What identifies an item of a list, the first that all items have (strategic merge keys of the API)."""
_QUANTITY = re.compile(
    r"^([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)(m|u|n|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$"
)
_SCALE = {"": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3")} | {
    prefix + suffix: Decimal(base) ** power
    for suffix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kMGTPE" if not suffix else "KMGTPE", start=1)
}
_MISSING = object()


def contains(live: Any, wanted: Any) -> bool:
    """Whether every value of `wanted` is in `live`."""
    if isinstance(wanted, dict):
        if live is _MISSING or live is None:
            return not any(not _empty(value) for value in wanted.values())
        return isinstance(live, dict) and all(
            contains(live.get(key, _MISSING), value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        if live is _MISSING or live is None:
            return not wanted
        return isinstance(live, list) and all(
            contains(other, value) for other, value in _pairs(live, wanted)
        )
    if live is _MISSING:
        return _empty(wanted)
    return live == wanted or same_quantity(live, wanted)


def project(live: Any, wanted: Any) -> Any:
    """The part of `live` that `wanted` speaks of."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        return {key: project(live[key], value) for key, value in wanted.items() if key in live}
    if isinstance(wanted, list) and isinstance(live, list):
        return [
            None if other is _MISSING else project(other, value)
            for other, value in _pairs(live, wanted)
        ]
    return live


def same_quantity(one: Any, other: Any) -> bool:
    """Whether two values are the same quantity, differently written."""
    first, second = _quantity(one), _quantity(other)
    return first is not None and first == second


def _pairs(live: list[Any], wanted: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Items that belong together; a wanted one without a partner, or a stray one, has _MISSING for it."""
    key = _merge_key(wanted)
    if key is None or _merge_key(live) is None:
        longest = max(len(live), len(wanted))
        for index in range(longest):
            other = live[index] if index < len(live) else _MISSING
            yield other, wanted[index] if index < len(wanted) else {"": "a place too many"}
        return
    by_key = {item.get(key): item for item in live if isinstance(item, dict)}
    for item in wanted:
        yield by_key.get(item[key], _MISSING), item


def _merge_key(items: list[Any]) -> str | None:
    if not items or not all(isinstance(item, dict) for item in items):
        return None
    for key in _MERGE_KEYS:
        values = [item.get(key) for item in items]
        if None not in values and len(set(map(str, values))) == len(values):
            return key
    return None


def _empty(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_empty(inner) for inner in value.values())
    return value in (None, "", False, 0) or value == []


def _quantity(value: Any) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    match = _QUANTITY.match(str(value))
    if match is None or match[1].count(".") > 1:
        return None
    try:
        return Decimal(match[1]) * _SCALE[match[2] or ""]
    except ArithmeticError:
        return None
