"""A person's `template` over a rendered pod template: a strategic merge.

    maps       key by key; null deletes
    lists      of named things by their name (the table below), `$patch: delete` in an item deletes it;
               tolerations are added; any other list replaces

What the operator finds its pods by, and what wires them together, cannot be overridden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from rljob import labels
from rljob.errors import ManifestError
from rljob.settings import PREFIX, Settings

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "env": "name",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "schedulingGates": "name",
}
"""List → the key by which its items are merged."""
APPENDED = {"tolerations"}
WHOLE = {"env"}
"""Lists whose items are replaced as a whole: a value and its source exclude each other."""
HANDLERS = ("httpGet", "tcpSocket", "exec", "grpc")
"""A probe has one."""
CONTAINERS = ("containers", "initContainers")
RESERVED_SPEC = ("restartPolicy", "hostname", "subdomain", "activeDeadlineSeconds")
"""Keys of a pod's spec that the operator's own work hangs on."""
RESERVED_ENV = frozenset(PREFIX + name.upper() for name in Settings.__struct_fields__)
OWN_LABELS = frozenset(labels.labels("", "", "")) | {labels.ATTEMPT, labels.KUEUE_QUEUE}


def merge(template: Mapping[str, Any], override: Mapping[str, Any], path: str) -> dict[str, Any]:
    """`template` with `override` over it.

    Raises:
        ManifestError: the override touches what is reserved, or is no pod template.
    """
    for key, value in override.items():
        if key not in {"metadata", "spec"}:
            raise ManifestError(
                f"{path}.{key}", "is no part of a pod template", "metadata and spec are"
            )
        _refuse_null(value, f"{path}.{key}")
    _refuse_metadata(_mapping(override.get("metadata"), f"{path}.metadata"), f"{path}.metadata")
    _refuse_spec(_mapping(override.get("spec"), f"{path}.spec"), f"{path}.spec")
    merged = _maps(template, override, path)
    _refuse_strangers(merged["spec"], template["spec"], f"{path}.spec")
    return merged


def _refuse_strangers(merged: Mapping[str, Any], rendered: Mapping[str, Any], path: str) -> None:
    """A container that is not the pod's own must bring its image: most often it is one of ours in the wrong list."""
    ours = {kind: [item["name"] for item in rendered.get(kind, [])] for kind in CONTAINERS}
    known = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in ours.items() if names)
    for kind, other in zip(CONTAINERS, reversed(CONTAINERS), strict=True):
        for item in merged.get(kind, []):
            name = item["name"]
            if name not in ours[kind] and (name in ours[other] or not item.get("image")):
                raise ManifestError(
                    f"{path}.{kind}[{name}]", "is no container of this pod", f"it has {known}"
                )


def _refuse_metadata(metadata: Mapping[str, Any], path: str) -> None:
    for key in metadata:
        if key not in {"labels", "annotations"}:
            raise ManifestError(
                f"{path}.{key}", "cannot be overridden", "labels and annotations can"
            )
        _refuse_null(metadata[key], f"{path}.{key}")
    for kind in ("labels", "annotations"):
        for name, value in _mapping(metadata.get(kind), f"{path}.{kind}").items():
            where = f"{path}.{kind}.{name}"
            if name in OWN_LABELS or name.split("/")[0] == labels.GROUP:
                raise ManifestError(where, "is set by rljob itself", "remove it")
            if value is not None and not isinstance(value, str):
                raise ManifestError(where, f"{value!r} is no text", "put it in quotes")


def _refuse_spec(spec: Mapping[str, Any], path: str) -> None:
    for key in RESERVED_SPEC:
        if key in spec:
            raise ManifestError(f"{path}.{key}", "is set by rljob itself", "remove it")
    for kind in CONTAINERS:
        for index, container in enumerate(_items(spec.get(kind), f"{path}.{kind}")):
            where = f"{path}.{kind}[{index}]"
            if "restartPolicy" in container and kind == "containers":
                raise ManifestError(f"{where}.restartPolicy", "belongs to a sidecar", "remove it")
            _mapping(container.get("resources"), f"{where}.resources")
            _items(container.get("ports"), f"{where}.ports")
            for number, item in enumerate(_items(container.get("env"), f"{where}.env")):
                _refuse_variable(item, f"{where}.env[{number}]")
    for index, volume in enumerate(_items(spec.get("volumes"), f"{path}.volumes")):
        _mapping(volume.get("emptyDir"), f"{path}.volumes[{index}].emptyDir")


def _refuse_null(value: object, path: str) -> None:
    """Of a whole part, which holds what the operator finds its pods by."""
    if value is None:
        raise ManifestError(path, "cannot be removed", "leave it out, or name what is to go in it")


def _refuse_variable(item: Mapping[str, Any], path: str) -> None:
    name, value = str(item.get("name", "")), item.get("value")
    if name in RESERVED_ENV or name.startswith(f"{PREFIX}SECRET_"):
        raise ManifestError(path, f"{name} is set by rljob itself", "remove it")
    if value is not None and not isinstance(value, str):
        raise ManifestError(f"{path}.value", f"{value!r} is no text", "put it in quotes")


def _maps(base: Mapping[str, Any], over: Mapping[str, Any], path: str) -> dict[str, Any]:
    merged = dict(base)
    if any(over.get(handler) is not None for handler in HANDLERS):
        for handler in HANDLERS:
            merged.pop(handler, None)
    for key, value in over.items():
        where = f"{path}.{key}"
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            below = _mapping(merged.get(key), where)
            merged[key] = _maps(below, cast("Mapping[str, Any]", value), where)
        elif key in MERGE_KEYS and isinstance(value, list):
            merged[key] = _lists(key, merged.get(key) or [], cast("list[Any]", value), where)
        elif key in APPENDED and isinstance(value, list):
            merged[key] = [*(merged.get(key) or []), *_items(cast("list[Any]", value), where)]
        else:
            _refuse_kind(merged.get(key), value, where)
            merged[key] = value
    return merged


def _lists(
    name: str, base: Sequence[Mapping[str, Any]], over: Sequence[Any], path: str
) -> list[dict[str, Any]]:
    by, merged = MERGE_KEYS[name], [dict(item) for item in base]
    for index, item in enumerate(_items(over, path)):
        where = f"{path}[{index}]"
        if item.get(by) is None:
            raise ManifestError(where, f"has no {by}", f"items of {name} are merged by {by}")
        at = next((i for i, old in enumerate(merged) if old.get(by) == item[by]), None)
        if item.get("$patch") == "delete":
            merged = [old for old in merged if old.get(by) != item[by]]
        elif at is None:
            merged.append(_maps({}, item, where))
        elif name in WHOLE or (name == "volumes" and _other_source(merged[at], item)):
            merged[at] = _maps({}, item, where)
        else:
            merged[at] = _maps(merged[at], item, where)
    return merged


def _other_source(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a volume changes its kind, which would leave it with two."""
    return bool(set(new) - {"name"} - set(old))


def _mapping(value: object, path: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ManifestError(path, f"is {_kind(value)}, not a mapping", "write key: value below it")
    return cast("Mapping[str, Any]", value)


def _items(value: object, path: str) -> list[Mapping[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ManifestError(path, f"is {_kind(value)}, not a list", "begin its items with a dash")
    found = cast("list[object]", value)
    return [_mapping(item, f"{path}[{index}]") for index, item in enumerate(found)]


def _refuse_kind(old: object, new: object, path: str) -> None:
    """A rendered mapping or list can only be overridden by its like."""
    if isinstance(old, dict | list) and not isinstance(new, type(cast("object", old))):
        raise ManifestError(path, f"is {_kind(new)}, not {_kind(cast('object', old))}", "")


def _kind(value: object) -> str:
    for kind, name in ((Mapping, "a mapping"), (list, "a list"), (str, "text")):
        if isinstance(value, kind):
            return name
    return "true or false" if isinstance(value, bool) else "a number"
