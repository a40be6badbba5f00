"""pydantic models → the structural schema of a CustomResourceDefinition.

    $ref             written out in place            anyOf with null   the other one: the API server drops nulls
    Literal          enum                            dict[str, Any]    object, unknown fields preserved
    dict[str, X]     additionalProperties            tuple             list of exactly so many
    gt, lt           minimum + exclusiveMinimum      block of defaults `{}`, the API server fills in what lies below

A default is left out where it is empty, and where the meaning of the key hangs on another (`HANGS`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rljob.api.base import HANGS
from rljob.api.model_tree import model_of

Schema = dict[str, Any]

_KEPT: Final = (
    "type", "enum", "pattern", "format", "minimum", "maximum", "minLength", "maxLength",
    "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip
_LIST_KEYS: Final = {"Condition": "type", "PoolImage": "image"}
"""What tells the items of a list apart, where it is not their name."""


def structural(model: type[BaseModel], *, without: frozenset[str] = frozenset()) -> Schema:
    """The schema of a model, whole, without some of its keys."""
    document = model.model_json_schema(by_alias=True)
    schema = _object(model, document, document.get("$defs", {}))
    for key in without:
        del schema["properties"][key]
    return schema


def _object(model: type[BaseModel], definition: Mapping[str, Any], definitions: Schema) -> Schema:
    properties: Schema = {}
    required: list[str] = []
    for name, field in model.model_fields.items():
        key = field.alias or name
        properties[key] = _property(field, definition["properties"][key], definitions)
        if field.is_required():
            required.append(key)
    schema: Schema = {"type": "object", "properties": properties}
    if description := _one_line(model.__doc__):
        schema["description"] = description
    if required:
        schema["required"] = required
    return schema


def _property(field: FieldInfo, node: Mapping[str, Any], definitions: Schema) -> Schema:
    inner = model_of(field.annotation)
    schema = _node(node, inner, definitions)
    if description := _one_line(field.description):
        schema["description"] = description
    default = _default(field)
    if default not in (None, [], {}) or (default == {} and "properties" in schema):
        schema["default"] = default
    return schema


def _default(field: FieldInfo) -> Any:
    """As JSON; a block is `{}`, since the keys inside have defaults of their own."""
    if field.is_required() or field.json_schema_extra == HANGS:
        return None
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return {}
    if isinstance(value, list | tuple):
        return [
            item.model_dump(mode="json", exclude_defaults=True)
            if isinstance(item, BaseModel)
            else item
            for item in value
        ]
    return value


def _node(node: Mapping[str, Any], model: type[BaseModel] | None, definitions: Schema) -> Schema:
    if "anyOf" in node:
        (node,) = (part for part in node["anyOf"] if part.get("type") != "null")
    if "$ref" in node:
        assert model is not None
        return _object(model, definitions[str(node["$ref"]).rpartition("/")[2]], definitions)
    if "const" in node:
        return {"type": node["type"], "enum": [node["const"]]}
    schema: Schema = {key: node[key] for key in _KEPT if key in node}
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if exclusive in node:
            schema |= {bound: node[exclusive], exclusive: True}
    if node.get("type") == "array":
        _list(schema, node, model, definitions)
    elif node.get("type") == "object":
        _mapping(schema, node, definitions)
    return schema


def _list(
    schema: Schema, node: Mapping[str, Any], model: type[BaseModel] | None, definitions: Schema
) -> None:
    items = node["items"] if "items" in node else node["prefixItems"][0]
    schema["items"] = _node(items, model, definitions)
    if model is None:
        schema["x-kubernetes-list-type"] = "atomic"
        return
    schema["x-kubernetes-list-type"] = "map"
    schema["x-kubernetes-list-map-keys"] = [_LIST_KEYS.get(model.__name__, "name")]


def _mapping(schema: Schema, node: Mapping[str, Any], definitions: Schema) -> None:
    if "patternProperties" in node:  # a CRD cannot bound keys
        (values,) = node["patternProperties"].values()
    else:
        values = node.get("additionalProperties", True)
    if isinstance(values, Mapping) and values:
        schema["additionalProperties"] = _node(values, None, definitions)
    else:
        schema["x-kubernetes-preserve-unknown-fields"] = True


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
