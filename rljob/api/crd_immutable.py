"""One transition rule per key that may not change, made from the schema and `mutability.MUTABLE`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob.api.crd_rule import Rule
from rljob.api.mutability import holds_mutable, is_mutable

_FIX = "is immutable: a job keeps it; make a new RLJob"


def immutable_rules(spec: dict[str, Any]) -> list[Rule]:
    """For `spec`: every block's keys, one by one; lists as a whole, but those that hold what may change."""
    rules: list[Rule] = []
    for key, schema in spec["properties"].items():
        if is_mutable(key):
            continue
        if schema["type"] == "array" and holds_mutable(key):
            rules.append(_same_names(key))
        elif schema["type"] == "object" and "properties" in schema:
            rules += _block(key, schema, optional=_optional(spec, key))
        else:
            rules.append(_fixed(key, optional=_optional(spec, key)))
    return rules


def item_rules(name: str, item: dict[str, Any]) -> list[Rule]:
    """For the items of the list `name`, which are told apart by their keys."""
    return [
        _fixed(key, optional=_optional(item, key))
        for key in item["properties"]
        if key != "name" and not is_mutable(f"{name}.{key}")
    ]


def _block(key: str, schema: dict[str, Any], *, optional: bool) -> Iterator[Rule]:
    if optional:
        yield Rule(f"has(self.{key}) == has(oldSelf.{key})", _FIX, key)
    guard = f"!has(self.{key}) || !has(oldSelf.{key}) || " if optional else ""
    for name in schema["properties"]:
        if not is_mutable(f"{key}.{name}"):
            rule = _fixed(f"{key}.{name}", optional=_optional(schema, name))
            yield rule._replace(rule=f"{guard}({rule.rule})" if guard else rule.rule)


def _fixed(path: str, *, optional: bool) -> Rule:
    same = f"self.{path} == oldSelf.{path}"
    if not optional:
        return Rule(same, _FIX, path)
    both = f"has(self.{path}) == has(oldSelf.{path}) && (!has(self.{path}) || {same})"
    return Rule(both, _FIX, path)


def _same_names(key: str) -> Rule:
    rule = (
        f"size(self.{key}) == size(oldSelf.{key}) && "
        f"self.{key}.all(new, oldSelf.{key}.exists(old, old.name == new.name))"
    )
    return Rule(rule, f"{_FIX}; none can be added, removed or renamed", key)


def _optional(schema: dict[str, Any], key: str) -> bool:
    return key not in schema.get("required", []) and "default" not in schema["properties"][key]
