"""What commands are given, checked: each fault is one line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rljob.errors import UserError

_VARIABLE = re.compile(r"[^=\0]+=[^\0]*", re.DOTALL)


def environment(assignments: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE, each. Raises UserError."""
    for text in assignments:
        if not _VARIABLE.fullmatch(text):
            raise UserError("--env", f"{text!r} is no variable", "write NAME=VALUE")
    pairs = [text.partition("=") for text in assignments]
    return {name: value for name, _, value in pairs}


def is_token(text: str) -> bool:
    """Whether a header carries it as it is."""
    return text.isascii() and text.isprintable() and text == text.strip() != ""


def in_range(option: str, value: float | None, low: float, high: float) -> None:
    """That a number is between its bounds. Raises UserError."""
    if value is not None and not low <= value <= high:  # nan is neither
        fix = f"it must be between {low:g} and {high:.0f}"
        raise UserError(option, f"{value:g} is out of range", fix)
