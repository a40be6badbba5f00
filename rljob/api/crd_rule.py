"""One rule across fields, as it stands in a CustomResourceDefinition."""

from __future__ import annotations

from typing import Any, NamedTuple


class Rule(NamedTuple):
    """One `x-kubernetes-validations` entry."""

    rule: str
    message: str
    field: str = ""
    """Where the fault is told, below the place of the rule."""
    reason: str = "FieldValueInvalid"

    def entry(self) -> dict[str, Any]:
        """As it stands in the CRD."""
        entry = {"rule": self.rule, "message": self.message}
        if self.field:
            entry["fieldPath"] = f".{self.field}"
        return entry if self.reason == "FieldValueInvalid" else entry | {"reason": self.reason}
