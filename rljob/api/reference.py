"""The manifest's reference page, written from the models: `python -m rljob.api.reference > docs/manifest.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rljob.api.rljob_types import RLJob

_INTRODUCTION = """# The manifest

Written from the models in `rljob/api`; a test keeps it so. `rljob validate FILE` checks a manifest
and names every fault with its path. A key without effect is refused, not ignored.
`--set spec.trainer.steps=4` replaces a value for one run.

A **row** of a dataset (JSON lines or parquet) has `task` (a name of `spec.tasks`; may be left out
where there is only one), `prompt` (text, or a list of chat messages), `metadata` (whatever the
task's verifier needs) and `overrides` (`maxTurns`, `image`, `env` for this row alone).
"""


def render() -> str:
    """The whole page as Markdown."""
    schema = RLJob.model_json_schema(by_alias=True)
    sections = [_INTRODUCTION]
    for name in _reachable(schema):
        sections.append(_section(name, schema["$defs"]))
    return "\n".join(sections)


def _reachable(schema: Mapping[str, Any]) -> Iterator[str]:
    """Definitions in reading order: the spec first, then each block where it is first named."""
    seen: set[str] = set()
    queue = ["RLJobSpec"]
    while queue:
        name = queue.pop(0)
        if name not in seen:
            seen.add(name)
            yield name
            queue += list(_references(schema["$defs"][name]))


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if "$ref" in node:
            yield str(node["$ref"]).rpartition("/")[2]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def _section(name: str, definitions: Mapping[str, Any]) -> str:
    definition = definitions[name]
    required = set(definition.get("required", []))
    lines = [f"## {name}", "", _one_line(definition.get("description", "")), ""]
    lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for key, field in definition["properties"].items():
        default = "required" if key in required else _default(field)
        meaning = _one_line(field.get("description") or _block_meaning(field, definitions))
        lines.append(f"| `{key}` | {_type(field)} | {default} | {meaning} |")
    return "\n".join([*lines, ""])


def _block_meaning(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """A block's own sentence stands in for that of the key that holds it."""
    name = next(_references(field), None)
    return definitions[name]["description"] if name else ""


def _type(field: Mapping[str, Any]) -> str:
    if "$ref" in field:
        name = str(field["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field:
        return " or ".join(_type(part) for part in field["anyOf"] if part.get("type") != "null")
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array" and "items" in field:
        return f"list of {_type(field['items'])}"
    return str(field.get("type", "any")) + _bounds(field)


def _bounds(field: Mapping[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    parts = [f"{sign} {field[key]:,}" for key, sign in signs.items() if key in field]
    return f" ({', '.join(parts)})" if parts else ""


def _default(field: Mapping[str, Any]) -> str:
    default = field.get("default")
    if default is None or isinstance(default, dict | list):
        return "–"
    text = str(default).lower() if isinstance(default, bool) else str(default)
    return f"`{text}`"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(render())
