"""CPU, memory and disk that pods ask for and nodes have. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR
from typing import Any

import msgspec

from rljob_operator.render.quantities import parse

_MIB = 2**20


class Amounts(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """In thousandths of a CPU and MiB, so that they add up exactly."""

    cpu_millis: int = 0
    memory_mib: int = 0
    disk_mib: int = 0

    @classmethod
    def of(cls, quantities: Mapping[str, Any], *, down: bool = False) -> Amounts:
        """Of a map of quantities, as resource requirements and nodes have them; rounded up, or `down`.

        Raises:
            ManifestError: a value is no quantity.
        """
        way = ROUND_FLOOR if down else ROUND_CEILING

        def whole(name: str, unit: int, times: int = 1) -> int:
            value = parse(quantities.get(name) or 0, name)[0]
            return int((value * times / unit).to_integral_value(way))

        return cls(
            cpu_millis=whole("cpu", 1, 1000),
            memory_mib=whole("memory", _MIB),
            disk_mib=whole("ephemeral-storage", _MIB),
        )

    @classmethod
    def requested(cls, resources: Mapping[str, Any]) -> Amounts:
        """What a container requests; what it only limits is requested too. Raises ManifestError."""
        return cls.of({**(resources.get("limits") or {}), **(resources.get("requests") or {})})

    @classmethod
    def limited(cls, resources: Mapping[str, Any]) -> Amounts:
        """What a container may use, where it says so; else what it requests. Raises ManifestError."""
        return cls.of({**(resources.get("requests") or {}), **(resources.get("limits") or {})})

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            cpu_millis=self.cpu_millis + other.cpu_millis,
            memory_mib=self.memory_mib + other.memory_mib,
            disk_mib=self.disk_mib + other.disk_mib,
        )

    def __mul__(self, number: int) -> Amounts:
        return Amounts(
            cpu_millis=self.cpu_millis * number,
            memory_mib=self.memory_mib * number,
            disk_mib=self.disk_mib * number,
        )

    def __sub__(self, other: Amounts) -> Amounts:
        return self + other * -1

    def most(self, other: Amounts) -> Amounts:
        """The larger of each."""
        return Amounts(
            cpu_millis=max(self.cpu_millis, other.cpu_millis),
            memory_mib=max(self.memory_mib, other.memory_mib),
            disk_mib=max(self.disk_mib, other.disk_mib),
        )

    def times_in(self, room: Amounts) -> tuple[int, str]:
        """How often this fits into `room`, and what runs short first. What asks for nothing fits without end."""
        short = [
            (max(0, have) // need, name)
            for name, need, have in (
                ("cpu", self.cpu_millis, room.cpu_millis),
                ("memory", self.memory_mib, room.memory_mib),
                ("disk", self.disk_mib, room.disk_mib),
            )
            if need > 0
        ]
        return min(short, default=(_ENDLESS, "nothing"))


_ENDLESS = 1_000_000
