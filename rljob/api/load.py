"""A manifest file → `RLJob`, or every fault of it, each in one line: `file:line: path: problem; fix`.

text ─ parse ─► values with lines ─ pydantic ─► RLJob ─ effects ─► RLJob
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from rljob.api.base import FREE_FORM
from rljob.api.effects import find_problems
from rljob.api.model_tree import keys_at
from rljob.api.placement import refused_locally
from rljob.api.problem import Problem
from rljob.api.rljob_types import RLJob
from rljob.api.source import KeyPath, Source, dotted, parse, set_value
from rljob.errors import ManifestError

M = TypeVar("M", bound=BaseModel)

MAX_BYTES = 16 * 1024 * 1024
"""Of a manifest."""
_WHOLE = 2**53
"""Below it a float that is a whole number is exactly that."""


class ManifestFaultsError(ManifestError):
    """Every fault of one manifest; `str` gives one line per fault."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("manifest", f"{len(lines)} faults", "")
        self.args = (tuple(lines),)
        self.lines = tuple(lines)

    def __str__(self) -> str:
        return "\n".join(self.lines)


def load(
    file: Path, assignments: Sequence[str] = (), *, plugins: bool = True, local: bool = False
) -> RLJob:
    """Read, check and return a manifest.

    Args:
        file: The YAML file.
        assignments: `path=value` overrides (`--set`), applied before checking.
        plugins: Also check that named tasks, agents, tools and rewards can be found.
        local: Also refuse what only a cluster has.

    Raises:
        ManifestError: the file cannot be read or parsed.
        ManifestFaultsError: keys are wrong; all of them are listed.
    """
    source = read(file)
    for assignment in assignments:
        set_value(source, assignment)
    job = check(source, file.resolve().parent if plugins else None)
    if local and (problems := refused_locally(job)):
        raise faults(source, problems)
    return job


def check(source: Source, plugin_dir: Path | None = None) -> RLJob:
    """Validate parsed values; with `plugin_dir` also that plugins resolve (import paths are looked up there first)."""
    _check_kind(source)
    job = validate(source, RLJob)
    if problems := find_problems(job, plugin_dir):
        raise faults(source, problems)
    return job


def validate(source: Source, model: type[M]) -> M:
    """Parsed values as what they should be. Raises ManifestFaultsError."""
    text = _as_json(source)
    try:
        return model.model_validate_json(text, strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        raise faults(source, [_explain(item, model) for item in error.errors()]) from None


def faults(source: Source, problems: Sequence[Problem]) -> ManifestFaultsError:
    """The error that lists them."""
    return ManifestFaultsError([_line(source, problem) for problem in problems])


def _as_json(source: Source) -> str:
    try:
        return json.dumps(_as_kubernetes_reads(source.data), allow_nan=True)
    except (TypeError, ValueError, RecursionError):  # what only --set lets in: sets, bytes, cycles
        fault = "a value that a manifest cannot hold"
        raise ManifestError("--set", fault, "use text, numbers, lists and mappings") from None


def _as_kubernetes_reads(data: Any, *, free: bool = False) -> Any:
    """A key that is null is a key that is not given, and 8.0 is 8: the API server sees no difference either."""
    if isinstance(data, dict):
        return {
            key: _as_kubernetes_reads(value, free=free or key in FREE_FORM)
            for key, value in cast("dict[str, Any]", data).items()
            if free or value is not None
        }
    if isinstance(data, list):
        return [_as_kubernetes_reads(item, free=free) for item in cast("list[Any]", data)]
    return (
        int(data) if isinstance(data, float) and abs(data) < _WHOLE and data.is_integer() else data
    )


def read(file: Path) -> Source:
    """Read a file of YAML. Raises ManifestError."""
    return parse(_text(file), str(file))


def _text(file: Path) -> str:
    try:
        with file.open("rb") as manifest:
            data = manifest.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            problem = f"holds more than {MAX_BYTES >> 20} MiB"
            raise ManifestError(str(file), problem, "is it the right file?")
        return data.decode()
    except FileNotFoundError:
        raise ManifestError(str(file), "there is no such file", "check the path") from None
    except IsADirectoryError:
        raise ManifestError(
            str(file), "is a folder", "name a file, e.g. rljob.yaml in it"
        ) from None
    except UnicodeDecodeError:
        raise ManifestError(str(file), "is not UTF-8 text", "a manifest is YAML") from None
    except OSError as error:
        raise ManifestError(
            str(file), f"cannot be read ({error.strerror})", "check its permissions"
        ) from None


def _check_kind(source: Source) -> None:
    kind = source.data.get("kind")
    if kind not in {None, "RLJob"}:
        raise ManifestError(
            f"{source.where(('kind',))}: kind", f"is {kind!r}, not RLJob", "give an RLJob manifest"
        )


def _line(source: Source, problem: Problem) -> str:
    text = f"{source.where(problem.path)}: {dotted(problem.path) or 'manifest'}: {problem.problem}"
    return f"{text}; {problem.fix}" if problem.fix else text


def _explain(error: Any, model: type[BaseModel]) -> Problem:
    """One pydantic error in the words of a person who reads YAML."""
    path: KeyPath = tuple(error["loc"])
    kind, context, given = error["type"], error.get("ctx", {}), error.get("input")
    if kind == "extra_forbidden":
        known = keys_at(model, path[:-1])
        close = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.6)
        return Problem(
            path,
            "unknown key",
            f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}",
        )
    if kind == "missing":
        return Problem(path, "is required", "add it")
    if kind == "value_error":
        return Problem(path, str(context.get("error", error["msg"])), "")
    if kind == "literal_error":
        return Problem(path, f"{_show(given)} is not allowed", f"use {context['expected']}")
    if kind in _BOUNDS:
        sign, key = _BOUNDS[kind]
        return Problem(
            path, f"{_show(given)} is out of range", f"it must be {sign} {context[key]:g}"
        )
    if kind == "string_pattern_mismatch":
        return Problem(
            path,
            f"{_show(given)} does not have the form it needs",
            f"it must match {context['pattern']}",
        )
    if kind in _TYPES:
        return Problem(path, f"expected {_TYPES[kind]}, got {_show(given)}", "correct the value")
    return Problem(path, f"{error['msg'][:1].lower()}{error['msg'][1:]}", f"got {_show(given)}")


_BOUNDS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": ("≥", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("≤", "le"),
}
_TYPES = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "…"
