"""Kubernetes quantities (`250m`, `2560Mi`) and resource requirements, in the form in which the API server prints them.

A rendered object is compared with the live one, so `1024Mi` must be written `1Gi` from the start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Any, cast

from rljob.errors import ManifestError

_QUANTITY = re.compile(
    r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|(Ki|Mi|Gi|Ti|Pi|Ei)|([numkMGTPE]))?"
)
_DECIMAL = ("n", "u", "m", "", "k", "M", "G", "T", "P", "E")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_MILLI = Decimal(1).scaleb(-3)
"""The API server rounds up to this in every list of resources."""
_LARGEST = 2**63 - 1

_FIX = "write it like 500m, 2 or 4Gi"


def parse(value: object, path: str) -> tuple[Decimal, str]:
    """Value of a quantity, and how it is written: binary, decimal or exponent.

    Raises:
        ManifestError: it is none.
    """
    text = str(value) if isinstance(value, int | float) else value
    if isinstance(value, bool) or not isinstance(text, str):
        raise ManifestError(path, f"{value!r} is no quantity", _FIX)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ManifestError(path, f"{text!r} is no quantity", _FIX)
    number, exponent, binary, suffix = match.groups()
    try:
        if exponent:
            amount, form = Decimal(number + exponent), "exponent"
        elif binary:
            amount, form = Decimal(number) * 1024 ** _BINARY.index(binary), "binary"
        else:
            amount, form = Decimal(number).scaleb(3 * _DECIMAL.index(suffix or "") - 9), "decimal"
        large = abs(amount) > _LARGEST
    except ArithmeticError:  # an exponent beyond what can be computed with
        raise ManifestError(path, f"{text!r} is no quantity", _FIX) from None
    if large:
        raise ManifestError(path, f"{text!r} is too large", _FIX)
    return amount.quantize(_MILLI, ROUND_CEILING), form


def canonical(value: object, path: str) -> str:
    """The quantity as the API server prints it.

    Raises:
        ManifestError: it is none.
    """
    amount, form = parse(value, path)
    if amount == 0:
        return "0"
    if form == "binary" and abs(amount) >= 1024 and amount == amount.to_integral_value():
        count, power = int(amount), 0
        while count % 1024 == 0 and power < len(_BINARY) - 1:
            count, power = count // 1024, power + 1
        return f"{count}{_BINARY[power]}"
    count, power = int(amount / _MILLI), _DECIMAL.index("m")
    while count % 1000 == 0 and power < len(_DECIMAL) - 1:
        count, power = count // 1000, power + 1
    unit = f"e{3 * power - 9}" if form == "exponent" and _DECIMAL[power] else _DECIMAL[power]
    return f"{count}{unit}"


def resources(given: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Resource requirements with every quantity checked and canonical.

    Raises:
        ManifestError: a key or quantity that Kubernetes would refuse.
    """
    found: dict[str, Any] = {}
    for key, value in given.items():
        if key == "claims":
            found[key] = value
            continue
        if key not in {"limits", "requests"} or not isinstance(value, Mapping):
            known = "resources are limits, requests and claims"
            raise ManifestError(f"{path}.{key}", "is not understood", known)
        amounts = cast("Mapping[str, Any]", value)
        if any(amount is not None for amount in amounts.values()):
            found[key] = {
                name: _amount(name, amount, f"{path}.{key}.{name}")
                for name, amount in amounts.items()
                if amount is not None
            }
    _refuse_contradictions(found, path)
    return found


def is_extended(name: str) -> bool:
    """Whether a resource is one of a device plugin's, such as nvidia.com/gpu: whole numbers, never overcommitted."""
    return "/" in name and not name.startswith(("kubernetes.io/", "hugepages-"))


def _amount(name: str, value: object, path: str) -> str:
    amount, _ = parse(value, path)
    if amount < 0:
        raise ManifestError(path, f"{value!r} is negative", _FIX)
    if is_extended(name) and amount != amount.to_integral_value():
        raise ManifestError(path, f"{value!r} is not whole", f"{name} comes in whole pieces")
    return canonical(value, path)


def _refuse_contradictions(found: Mapping[str, Any], path: str) -> None:
    limits, requests = found.get("limits", {}), found.get("requests", {})
    for name, amount in requests.items():
        where = f"{path}.requests.{name}"
        if is_extended(name) and limits.get(name) != amount:
            raise ManifestError(where, "has no equal limit", f"give {name} in limits alone")
        if name in limits and parse(amount, where)[0] > parse(limits[name], where)[0]:
            raise ManifestError(
                where, f"{amount} is above the limit {limits[name]}", "lower it, or raise the limit"
            )


def with_defaults(
    given: Mapping[str, Any], path: str, *, cpu: str, memory_mib: int
) -> dict[str, Any]:
    """A person's resource requirements; CPU and memory that they do not name are requested as given here."""
    own = resources(given, path)
    named = {*own.get("limits", {}), *own.get("requests", {})}
    defaults = {"cpu": cpu, "memory": canonical(f"{memory_mib}Mi", path)}
    requests = {name: value for name, value in defaults.items() if name not in named}
    requests |= own.get("requests", {})
    return {**own, **({"requests": requests} if requests else {})}
