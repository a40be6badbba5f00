"""A pod template made final: a person's overrides merged in, then in the form in which the API server keeps it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from rljob_operator.render.overrides import merge
from rljob_operator.render.quantities import canonical, resources


def with_templates(
    template: Mapping[str, Any], overrides: Iterable[tuple[str, Mapping[str, Any]]]
) -> dict[str, Any]:
    """The template with (path, override) after (path, override) over it.

    Raises:
        ManifestError: an override is malformed, or touches what is reserved.
    """
    last = ""
    for path, override in overrides:
        if override:
            template, last = merge(template, override, path), path
    return settled(template, last)


def settled(template: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Quantities canonical, ports with their protocol, nothing that the API server leaves out.

    Args:
        template: Metadata and spec of a pod.
        path: Of the override that a fault must come from.

    Raises:
        ManifestError: a quantity is none.
    """
    spec = dict(template["spec"])
    for kind in ("initContainers", "containers"):
        if kind in spec:
            spec[kind] = [
                _container(item, f"{path}.spec.{kind}[{item['name']}]") for item in spec[kind]
            ]
    spec["volumes"] = [
        _volume(item, f"{path}.spec.volumes[{item['name']}]") for item in spec.get("volumes", [])
    ]
    return _without_empty({**template, "spec": spec})


def _container(given: Mapping[str, Any], path: str) -> dict[str, Any]:
    made = dict(given)
    if "resources" in made:
        made["resources"] = resources(made["resources"], f"{path}.resources")
    if "ports" in made:
        made["ports"] = [
            {**port, "protocol": port.get("protocol", "TCP")} for port in made["ports"]
        ]
    return made


def _volume(given: Mapping[str, Any], path: str) -> dict[str, Any]:
    limit = (given.get("emptyDir") or {}).get("sizeLimit")
    if limit is None:
        return dict(given)
    size = canonical(limit, f"{path}.emptyDir.sizeLimit")
    return {**given, "emptyDir": {**given["emptyDir"], "sizeLimit": size}}


_DROPPED_WHEN_FALSE = ("readOnly", "hostNetwork", "hostPID", "hostIPC", "stdin", "stdinOnce", "tty")
_KEPT_EMPTY = ("emptyDir", "labelSelector", "podSelector", "namespaceSelector")


def _without_empty(value: Any) -> Any:
    """What the API server prints nothing for: null, "", [], {} (but where it means something), false by default."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value)
        found = {key: _without_empty(item) for key, item in items.items()}
        return {key: item for key, item in found.items() if not _is_nothing(key, item)}
    if isinstance(value, list):
        return [_without_empty(item) for item in cast("list[Any]", value)]
    return value


def _is_nothing(key: str, value: Any) -> bool:
    if value in (None, "", [], {}) and not isinstance(value, bool | int):
        return key not in _KEPT_EMPTY or value is None
    return value is False and key in _DROPPED_WHEN_FALSE
