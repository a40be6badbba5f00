"""One measured number beside its comparator."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A line of `make bench`."""

    name: str
    value: float
    unit: str
    comparator: str
    """What anyone would use instead."""
    comparator_value: float
    goal: str = ""
    """In words; empty where the figure is only told."""
    holds: bool | None = None
    """Whether the goal is met; None without a goal."""
    seed: int

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.value / self.comparator_value

    def line(self) -> str:
        """As JSON; the ratio to nothing is null."""
        fields = asdict(self)
        fields["ratio"] = round(self.ratio, 3) if self.comparator_value else None
        fields["value"], fields["comparator_value"] = (
            round(self.value, 4),
            round(self.comparator_value, 4),
        )
        order = (
            "name",
            "value",
            "unit",
            "comparator",
            "comparator_value",
            "ratio",
            "goal",
            "holds",
            "seed",
        )
        return json.dumps({key: fields[key] for key in order})
