"""The verbs: get, list, watch, create, apply, patch, replace, delete.

What is refused is a `KubeError` (`errors.py`). A create is repeated where it may have been seen: names are given, so
that the repeat of one that arrived is an `ExistsError`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from rljob.kube.calls import Calls, decode
from rljob.kube.errors import ConflictError, GoneError, NotFoundError, error_of
from rljob.kube.resources import Object, Resource

PAGE = 500
_MERGE, _APPLY = "application/merge-patch+json", "application/apply-patch+yaml"


class KubeClient(Calls):
    """One API server, one identity. Belongs to the event loop that first uses it; `aclose` when done.

    For its arguments see `calls.Calls`.
    """

    async def get(
        self, resource: Resource, name: str, namespace: str | None = None, subresource: str = ""
    ) -> Object:
        """One object. Raises KubeError."""
        return await self.call("GET", resource.path(namespace, name, subresource))

    async def find(
        self, resource: Resource, name: str, namespace: str | None = None
    ) -> Object | None:
        """One object, or None where there is none. Raises KubeError."""
        try:
            return await self.get(resource, name, namespace)
        except NotFoundError:
            return None

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
    ) -> tuple[list[Object], str]:
        """All objects of a namespace (of all of them), page by page, and the resource version to watch from.

        Raises:
            KubeError: see there; a page that comes too late starts the list over, once.
        """
        params = _selectors(label_selector, field_selector)
        try:
            return await self._list(resource, namespace, params)
        except GoneError:
            return await self._list(resource, namespace, params)

    async def _list(
        self, resource: Resource, namespace: str | None, params: dict[str, str]
    ) -> tuple[list[Object], str]:
        items: list[Object] = []
        params = {**params, "limit": str(PAGE)}
        while True:
            page = await self.call("GET", resource.path(namespace), params=params)
            for item in page.get("items") or []:
                # The items of a list do not say what they are.
                items.append({"apiVersion": resource.api_version, "kind": resource.kind, **item})
            params["continue"] = page["metadata"].get("continue") or ""
            if not params["continue"]:
                return items, str(page["metadata"]["resourceVersion"])

    async def create(
        self,
        resource: Resource,
        obj: Object,
        namespace: str | None = None,
        *,
        dry_run: bool = False,
    ) -> Object:
        """Make an object that has a name. Raises ExistsError, KubeError."""
        params = {"dryRun": "All", "fieldValidation": "Strict"} if dry_run else None
        return await self.call("POST", resource.path(namespace), body=obj, params=params)

    async def apply(
        self,
        resource: Resource,
        obj: Object,
        namespace: str | None = None,
        *,
        field_manager: str,
        subresource: str = "",
    ) -> Object:
        """Server-side apply: the fields of `obj` become ours and have these values. Raises KubeError."""
        path = resource.path(namespace, obj["metadata"]["name"], subresource)
        params = {"fieldManager": field_manager, "force": "true"}
        return await self.call("PATCH", path, body=obj, params=params, content_type=_APPLY)

    async def patch(
        self,
        resource: Resource,
        name: str,
        patch: Mapping[str, Any],
        namespace: str | None = None,
        *,
        subresource: str = "",
        field_manager: str = "",
    ) -> Object:
        """JSON merge patch; with `metadata.resourceVersion` in it, only if nothing changed. Raises KubeError."""
        params = {"fieldManager": field_manager} if field_manager else None
        path = resource.path(namespace, name, subresource)
        return await self.call("PATCH", path, body=dict(patch), params=params, content_type=_MERGE)

    async def replace(
        self, resource: Resource, obj: Object, namespace: str | None = None
    ) -> Object:
        """PUT: with the resource version that was read. Raises ConflictError, KubeError."""
        return await self.call("PUT", resource.path(namespace, obj["metadata"]["name"]), body=obj)

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str = "",
        grace_seconds: int | None = None,
        propagation: str = "Background",
    ) -> bool:
        """Delete an object; with `uid`, only that very one. False where it is gone already. Raises KubeError."""
        body: Object = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": propagation,
        }
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        try:
            await self.call("DELETE", resource.path(namespace, name), body=body)
        except NotFoundError:
            return False
        except ConflictError:
            if not uid:
                raise
            return False
        return True

    async def logs(
        self,
        namespace: str,
        pod: str,
        *,
        container: str = "",
        tail_lines: int = 50,
        previous: bool = False,
    ) -> str:
        """The last lines that a container wrote. Raises KubeError."""
        params = {"tailLines": str(tail_lines), "limitBytes": "1000000"}
        params |= {"container": container} if container else {}
        params |= {"previous": "true"} if previous else {}
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        return (await self.answer("GET", path, params=params)).text

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
        timeout_seconds: int = 300,
        silence_seconds: float = 90.0,
    ) -> AsyncGenerator[tuple[str, Object], None]:
        """What happens after `resource_version`: (ADDED | MODIFIED | DELETED | BOOKMARK, object).

        Ends when the server ends it, as it does after `timeout_seconds`. Use with `contextlib.aclosing`.

        Raises:
            GoneError: list again.
            KubeError: anything else, among it a watch that said nothing, no bookmark either, for `silence_seconds`.
        """
        params = {
            **_selectors(label_selector, field_selector),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(timeout_seconds),
        }
        path = resource.path(namespace)
        async with aclosing(
            self.lines(path, params=params, silence_seconds=silence_seconds)
        ) as lines:
            async for line in lines:
                event = decode(line, path)
                kind, obj = str(event.get("type")), event.get("object") or {}
                if kind == "ERROR":
                    raise error_of(int(obj.get("code") or 500), obj)
                yield kind, obj


def _selectors(label_selector: str, field_selector: str) -> dict[str, str]:
    given = {"labelSelector": label_selector, "fieldSelector": field_selector}
    return {name: value for name, value in given.items() if value}
