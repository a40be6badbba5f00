"""YAML text as plain values that remember their line: what manifest errors point at.

Refuses what YAML allows but a manifest must not hold: duplicate keys, several documents, keys that are not strings.
"""

from __future__ import annotations

import re
from typing import Any, cast

import yaml

from rljob.errors import ManifestError

KeyPath = tuple[str | int, ...]
"""Keys and list positions from the root."""

MAX_DEPTH = 48
MAX_NODES = 200_000
"""Past these a file holds an anchor that contains itself, or one that multiplies: no manifest is that large."""
_MAX_BITS = 64
"""Of a whole number."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `6e-4` as a number and `on`, `off`, `yes`, `no` and dates as strings, as YAML 1.2 does."""


_TAG = "tag:yaml.org,2002:"
_REPLACED = {_TAG + "bool", _TAG + "float", _TAG + "timestamp"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _TAG + "bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    _TAG + "float",
    re.compile(
        r"^[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


class Source:
    """A parsed manifest file: `data` and where each path stands."""

    def __init__(self, name: str, data: Any, lines: dict[KeyPath, int]) -> None:
        self.name, self.data, self._lines = name, data, lines

    def forget(self, path: KeyPath) -> None:
        """`path` was replaced by `--set`: nothing at or below it has a line in the file any more."""
        for known in [known for known in self._lines if known[: len(path)] == path]:
            del self._lines[known]
        self._lines[path] = 0

    def where(self, path: KeyPath) -> str:
        """`file:line` of a path, or of its nearest parent that the text holds; `--set` values have no line."""
        for end in range(len(path), -1, -1):
            if (line := self._lines.get(path[:end])) is not None:
                return f"{self.name}:{line}" if line else "--set"
        return self.name


def parse(text: str, name: str) -> Source:
    """Read one YAML document.

    Raises:
        ManifestError: not YAML, several documents, a duplicate key, or not a mapping.
    """
    try:
        node = _compose(text, name)
        lines: dict[KeyPath, int] = {}
        data = _construct(node, (), lines, name)
    except yaml.YAMLError as error:
        raise _syntax_error(error, name) from None
    except RecursionError:
        raise ManifestError(name, "nested too deeply", "a manifest needs few levels") from None
    if not isinstance(data, dict):
        raise ManifestError(
            f"{name}:1",
            "a manifest is a mapping with apiVersion, kind, metadata and spec",
            "see examples/quickstart/rljob.yaml",
        )
    return Source(name, data, lines)


def _compose(text: str, name: str) -> yaml.Node:
    documents = list(yaml.compose_all(text, Loader=_Loader))
    if len(documents) > 1:
        line = documents[1].start_mark.line + 1
        raise ManifestError(
            f"{name}:{line}", "a second YAML document starts here", "keep one document per file"
        )
    if not documents or documents[0] is None:
        raise ManifestError(
            f"{name}:1",
            "the file is empty",
            "write an RLJob into it; see examples/quickstart/rljob.yaml",
        )
    return documents[0]


def _syntax_error(error: yaml.YAMLError, name: str) -> ManifestError:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    where = f"{name}:{mark.line + 1}" if mark else name
    if "\\t" in problem:
        return ManifestError(where, "a tab stands where YAML wants spaces", "indent with spaces")
    return ManifestError(where, f"not YAML: {problem}", "correct the syntax")


def _construct(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], name: str) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if len(path) > MAX_DEPTH or len(lines) > MAX_NODES:
        raise ManifestError(
            f"{name}:{node.start_mark.line + 1}",
            "nested too deeply or too large",
            "an anchor that contains itself?",
        )
    if not isinstance(node, yaml.ScalarNode) and node.tag not in {_TAG + "map", _TAG + "seq"}:
        where = f"{name}:{node.start_mark.line + 1}"
        raise ManifestError(where, f"the tag {node.tag} has no meaning here", "remove it")
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, lines, name)
    if isinstance(node, yaml.SequenceNode):
        return [
            _construct(item, (*path, index), lines, name) for index, item in enumerate(node.value)
        ]
    return _scalar(node, name)


def _scalar(node: yaml.Node, name: str) -> Any:
    try:
        value = _Loader("").construct_object(node, deep=True)
    except ValueError:  # more digits than Python reads, or 0x without any
        value = None
    if (value is None and node.tag == _TAG + "int") or _too_long(value):
        where = f"{name}:{node.start_mark.line + 1}"
        raise ManifestError(
            where, "a whole number that cannot be read", "put it in quotes, or give fewer digits"
        )
    return value


def _too_long(value: Any) -> bool:
    return isinstance(value, int) and value.bit_length() > _MAX_BITS


def _mapping(
    node: yaml.MappingNode, path: KeyPath, lines: dict[KeyPath, int], name: str
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    merged: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag == _TAG + "merge":
            value = _construct(value_node, path, lines, name)
            for part in cast("list[Any]", value) if isinstance(value, list) else [value]:
                if not isinstance(part, dict):
                    fault = f"<< merges a mapping, not {part!r:.40}"
                    raise ManifestError(f"{name}:{line}", fault, "name an anchor of a mapping")
                merged = {**part, **merged}
            continue
        key = _scalar(key_node, name) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            raise ManifestError(
                f"{name}:{line}", f"the key {key!r} is not a string", "put it in quotes"
            )
        if key in result:
            first = lines[(*path, key)]
            raise ManifestError(
                f"{name}:{line}",
                f"{dotted((*path, key))} is given twice (first in line {first})",
                "keep one of them",
            )
        lines[(*path, key)] = line
        result[key] = _construct(value_node, (*path, key), lines, name)
    return {**merged, **result}


def dotted(path: KeyPath) -> str:
    """`spec.tasks[0].name`: a path as people write it."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def set_value(source: Source, assignment: str) -> None:
    """Apply one `path=value` (`--set`): the path may leave out `spec.`, the value is YAML.

    Raises:
        ManifestError: the assignment is malformed or its path runs through something that is no mapping or list.
    """
    text, equals, raw = assignment.partition("=")
    path = _path(text.strip())
    if not equals or not path:
        raise ManifestError(
            f"--set {assignment}", "not of the form path=value", "e.g. --set rollout.schedule=sync"
        )
    try:
        value = yaml.load(raw, Loader=_Loader) if raw.strip() else ""
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ManifestError(
            f"--set {assignment:.80}", "the value is not YAML", "put it in quotes"
        ) from None
    if path[0] not in {"spec", "metadata", "apiVersion", "kind"}:
        path = ("spec", *path)
    _assign(source.data, path, value, assignment)
    source.forget(path)


def _path(text: str) -> KeyPath:
    parts = [part for part in re.split(r"[.\[\]]", text) if part]
    return tuple(int(part) if part.isdigit() else part for part in parts)


def _assign(data: Any, path: KeyPath, value: Any, assignment: str) -> None:
    here: Any = data
    for depth, part in enumerate(path):
        if isinstance(part, str) and isinstance(here, dict):
            cast("dict[str, Any]", here).setdefault(part, {})
        elif not (
            isinstance(part, int) and isinstance(here, list) and part < len(cast("list[Any]", here))
        ):
            fault = f"there is no {dotted(path[: depth + 1])}"
            raise ManifestError(f"--set {assignment}", fault, "check the path")
        if depth == len(path) - 1:
            cast("Any", here)[part] = value
        here = cast("Any", here)[part]
