"""`FakeKube`: an API server in memory, as an httpx transport; what `rljob.kube` needs of one, and how it fails.

    fake = FakeKube();  client = fake.client();  fake.put(obj);  fake.writes  … what was asked for and changed something

It keeps resource versions, uids, generations, finalizers, owner references (dependents go at once), server-side apply
(fields no longer applied go), merge patches, status as a subresource, pages, watches with bookmarks, access reviews. It
fails when told: `down` (no connection), `faults` (an answer or an exception instead of the real one), `lose_answer`,
`cut_watches`, `compact` (410 for older versions), `silent` (watches say nothing more), `denied` (RBAC).
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import httpx

from rljob.kube import resources
from rljob.kube.client import KubeClient
from rljob.kube.config import KubeConfig
from rljob.kube.resources import Object, Resource
from rljob.testing.json_patch import merged, overlay, without

Fault = Callable[[httpx.Request], httpx.Response | BaseException | None]
"""Looks at a request: an answer or an exception instead of the real one, or None."""
_PATH = re.compile(
    r"^/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?$"
)
_KINDS: dict[tuple[str, str], Resource] = {
    (value.group, value.plural): value
    for value in vars(resources).values()
    if isinstance(value, Resource)
}
_VERBS = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}
Place = tuple[str, str, str, str]
"""group, plural, namespace, name."""


class _Refused(Exception):  # noqa: N818 (control flow of this file)
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message


def status(code: int, reason: str, message: str = "", **headers: str) -> httpx.Response:
    """An answer that refuses."""
    body = {"kind": "Status", "code": code, "reason": reason, "message": message or reason}
    return httpx.Response(code, json=body, headers=headers)


class FakeKube(httpx.AsyncBaseTransport):
    """See the module."""

    def __init__(self) -> None:
        self.objects: dict[Place, Object] = {}
        self.writes: list[tuple[str, str]] = []
        """Method and path of each request that was carried out and is no read."""
        self.requests: list[tuple[str, str]] = []
        self.down = False
        self.silent = False
        self.faults: list[Fault] = []
        """Asked in turn for each request; one that answers is used up."""
        self.lasting: list[Fault] = []
        """The same, for ever."""
        self.denied: set[tuple[str, str]] = set()
        """(verb, plural) that access reviews and calls refuse."""
        self.served = set(_KINDS)
        self.bookmark_seconds = 30.0
        self.watches = 0
        """Open watches."""
        self._version, self._oldest, self._cut = 100, 0, 0
        self._history: list[tuple[int, str, Place, Object, Object | None]] = []
        """Version, what happened, where, the object, what it was before."""
        self._applied: dict[tuple[Place, str], Object] = {}
        self._changed = asyncio.Event()

    def client(self, **options: Any) -> KubeClient:
        """A client that talks to it."""
        return KubeClient(KubeConfig("http://fake"), transport=self, **options)

    # ── for tests ──

    def put(self, obj: Object) -> Object:
        """Make or replace an object, as somebody else."""
        kind, metadata = _kind(obj["kind"]), obj["metadata"]
        place = (kind.group, kind.plural, metadata.get("namespace", ""), metadata["name"])
        return self._store(place, copy.deepcopy(obj))

    def get(self, kind: str, name: str, namespace: str = "ns") -> Object | None:
        """An object, or None."""
        return self.objects.get((_kind(kind).group, _kind(kind).plural, namespace, name))

    def all(self, kind: str) -> list[Object]:
        """All objects of a kind."""
        wanted = (_kind(kind).group, _kind(kind).plural)
        return [obj for place, obj in self.objects.items() if place[:2] == wanted]

    def remove(self, kind: str, name: str, namespace: str = "ns") -> None:
        """Delete an object for good, as somebody else."""
        self._gone((_kind(kind).group, _kind(kind).plural, namespace, name))

    def cut_watches(self) -> None:
        """Every open watch breaks."""
        self._cut += 1
        self._wake()

    def compact(self) -> None:
        """Older versions are no longer kept: watches from them are answered 410."""
        self._history.clear()
        self._version += 1
        self._oldest = self._version

    def lose_answer(self, method: str, plural: str) -> None:
        """The next such call is carried out, but its answer is lost on the way."""

        def fault(request: httpx.Request) -> Exception | None:
            if request.method != method or f"/{plural}" not in request.url.path:
                return None
            self._answer(request, request.url.path)
            return httpx.ReadError("connection reset")

        self.faults.append(fault)

    # ── the server ──

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        path = request.url.path
        self.requests.append((request.method, path))
        if self.down:
            raise httpx.ConnectError("connection refused")
        if (answer := self._fault(request)) is not None:
            if isinstance(answer, BaseException):
                raise answer
            return answer
        try:
            return self._answer(request, path)
        except _Refused as refused:
            return status(refused.code, refused.reason, refused.message)

    def _fault(self, request: httpx.Request) -> httpx.Response | BaseException | None:
        for fault in list(self.faults):
            if (answer := fault(request)) is not None:
                self.faults.remove(fault)
                return answer
        return next((answer for f in self.lasting if (answer := f(request)) is not None), None)

    def _answer(self, request: httpx.Request, path: str) -> httpx.Response:
        if path.startswith("/apis/") and path.count("/") == 3:
            return self._discover(path)
        match = _PATH.match(path)
        if match is None:
            raise _Refused(404, "NotFound", path)
        group, plural = match["group"] or "", match["plural"]
        if (group, plural) not in self.served:
            raise _Refused(404, "NotFound", f"{plural}.{group} is not served")
        body: Object = json.loads(request.content) if request.content else {}
        if plural == resources.ACCESS_REVIEW.plural:
            return httpx.Response(201, json=self._review(body))
        place = (group, plural, match["namespace"] or "", match["name"] or "")
        self._authorize(request, place)
        return self._act(request, place, match["sub"] or "", body)

    def _act(self, request: httpx.Request, place: Place, sub: str, body: Object) -> httpx.Response:
        match request.method:
            case "GET" if not place[3]:
                if request.url.params.get("watch"):
                    return self._watch(request, place)
                return httpx.Response(200, json=self._list(request, place))
            case "GET":
                return httpx.Response(200, json=self._existing(place))
            case "POST":
                return httpx.Response(201, json=self._create(request, place, body))
            case "PATCH" if "apply" in request.headers["content-type"]:
                return httpx.Response(200, json=self._apply(request, place, body))
            case "PATCH":
                return httpx.Response(200, json=self._merge(request, place, sub, body))
            case "PUT":
                return httpx.Response(200, json=self._replace(request, place, body))
            case _:
                return httpx.Response(200, json=self._delete(request, place, body))

    def _discover(self, path: str) -> httpx.Response:
        _, _, group, version = path.split("/")
        names = [plural for (of, plural) in self.served if of == group]
        if not names:
            raise _Refused(404, "NotFound", path)
        items = [{"name": name} for name in names]
        return httpx.Response(200, json={"groupVersion": f"{group}/{version}", "resources": items})

    def _review(self, body: Object) -> Object:
        asked = body["spec"]["resourceAttributes"]
        allowed = (asked["verb"], asked["resource"]) not in self.denied
        return {**body, "status": {"allowed": allowed}}

    def _authorize(self, request: httpx.Request, place: Place) -> None:
        verb = _VERBS.get(request.method, "get" if place[3] else "list")
        if (verb, place[1]) in self.denied:
            raise _Refused(403, "Forbidden", f'User "x" cannot {verb} resource "{place[1]}"')

    # ── objects ──

    def _existing(self, place: Place) -> Object:
        if place not in self.objects:
            raise _Refused(404, "NotFound", f'{place[1]} "{place[3]}" not found')
        return self.objects[place]

    def _list(self, request: httpx.Request, place: Place) -> Object:
        params = request.url.params
        found = [
            {key: value for key, value in obj.items() if key not in ("kind", "apiVersion")}
            for at, obj in sorted(self.objects.items())
            if _within(at, place) and _selected(obj, params)
        ]
        start, limit = int(params.get("continue") or 0), int(params.get("limit") or len(found) or 1)
        rest = str(start + limit) if start + limit < len(found) else ""
        metadata = {"resourceVersion": str(self._version), "continue": rest}
        return {"metadata": metadata, "items": found[start : start + limit]}

    def _create(self, request: httpx.Request, place: Place, body: Object) -> Object:
        place = (*place[:3], body["metadata"]["name"])
        if place in self.objects:
            raise _Refused(409, "AlreadyExists", f'{place[1]} "{place[3]}" already exists')
        return self._write(request, place, body)

    def _apply(self, request: httpx.Request, place: Place, body: Object) -> Object:
        live, manager = self.objects.get(place), request.url.params["fieldManager"]
        uid = body["metadata"].pop("uid", None)
        if uid and (live is None or live["metadata"]["uid"] != uid):
            raise _Refused(409, "Conflict", "uid mismatch")
        before = self._applied.get((place, manager), {}) if live else {}
        merged = overlay(without(live or {}, before, body), body)
        self._applied[place, manager] = copy.deepcopy(body)
        return self._write(request, place, merged)

    def _merge(self, request: httpx.Request, place: Place, sub: str, body: Object) -> Object:
        live, metadata = self._existing(place), body.get("metadata") or {}
        self._precondition(live, metadata.get("uid"), metadata.get("resourceVersion"))
        patch = {"status": body.get("status", {})} if sub == "status" else body
        return self._write(request, place, merged(live, patch))

    def _replace(self, request: httpx.Request, place: Place, body: Object) -> Object:
        live = self._existing(place)
        self._precondition(live, None, body["metadata"].get("resourceVersion"))
        return self._write(request, place, body)

    def _delete(self, request: httpx.Request, place: Place, body: Object) -> Object:
        live = self._existing(place)
        self._precondition(live, (body.get("preconditions") or {}).get("uid"), None)
        self.writes.append((request.method, request.url.path))
        if live["metadata"].get("finalizers"):
            metadata = {**live["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
            return self._store(place, {**live, "metadata": metadata})
        self._gone(place)
        return {"kind": "Status", "status": "Success"}

    def _precondition(self, live: Object, uid: Any, version: Any) -> None:
        metadata = live["metadata"]
        if uid not in (None, metadata["uid"]) or version not in (None, metadata["resourceVersion"]):
            raise _Refused(409, "Conflict", "the object has been modified or is another one")

    def _write(self, request: httpx.Request, place: Place, obj: Object) -> Object:
        self.writes.append((request.method, request.url.path))
        return self._store(place, copy.deepcopy(obj))

    def _store(self, place: Place, obj: Object) -> Object:
        old, kind, metadata = self.objects.get(place), _KINDS[place[0], place[1]], obj["metadata"]
        obj |= {"apiVersion": kind.api_version, "kind": kind.kind}
        metadata["namespace"] = place[2]
        if old is None:
            metadata["uid"] = metadata.get("uid") or f"uid-{self._version + 1}"
            metadata["generation"] = 1
        else:
            metadata |= {
                key: old["metadata"][key] for key in ("uid", "resourceVersion", "generation")
            }
            if old == obj:
                return old
            metadata["generation"] += int(old.get("spec") != obj.get("spec"))
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        self.objects[place] = obj
        self._tell("MODIFIED" if old else "ADDED", place, obj, old)
        if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
            self._gone(place)
        return obj

    def _gone(self, place: Place) -> None:
        obj = self.objects.pop(place)
        self._version += 1
        metadata = {**obj["metadata"], "resourceVersion": str(self._version)}
        self._tell("DELETED", place, {**obj, "metadata": metadata})
        for at, child in list(self.objects.items()):
            owners = child["metadata"].get("ownerReferences") or ()
            if at in self.objects and any(one.get("uid") == metadata["uid"] for one in owners):
                self._gone(at)

    # ── watches ──

    def _tell(self, kind: str, place: Place, obj: Object, old: Object | None = None) -> None:
        self._history.append((self._version, kind, place, copy.deepcopy(obj), old))
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _watch(self, request: httpx.Request, place: Place) -> httpx.Response:
        since = int(request.url.params["resourceVersion"])
        if since < self._oldest:
            raise _Refused(410, "Expired", "too old resource version")
        return httpx.Response(200, stream=_Stream(self._events(request, place, since)))

    async def _events(
        self, request: httpx.Request, place: Place, since: int
    ) -> AsyncGenerator[bytes, None]:
        cut = self._cut
        self.watches += 1
        try:
            while True:
                changed = self._changed
                for version, kind, at, obj, old in list(self._history):
                    if version <= since or not _within(at, place) or self.silent:
                        continue
                    if told := _as_selected(kind, obj, old, request.url.params):
                        yield _line(told, obj)
                        since = version
                if self._cut != cut:
                    raise httpx.ReadError("connection reset")
                try:
                    async with asyncio.timeout(self.bookmark_seconds):
                        await changed.wait()
                except TimeoutError:
                    if not self.silent:
                        yield _line(
                            "BOOKMARK", {"metadata": {"resourceVersion": str(self._version)}}
                        )
        finally:
            self.watches -= 1


class _Stream(httpx.AsyncByteStream):
    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for event in self._events:
            yield event

    async def aclose(self) -> None:
        await self._events.aclose()


def _line(kind: str, obj: Object) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


def _kind(kind: str) -> Resource:
    return resources.CORE_EVENT if kind == "Event" else resources.by_kind(kind)


def _within(at: Place, wanted: Place) -> bool:
    return at[:2] == wanted[:2] and wanted[2] in ("", at[2])


def _as_selected(kind: str, obj: Object, old: Object | None, params: Mapping[str, str]) -> str:
    """What a watch is told: an object that is selected no longer is gone for it. Empty: nothing."""
    is_in = _selected(obj, params)
    if kind != "MODIFIED" or old is None or is_in == _selected(old, params):
        return kind if is_in else ""
    return "ADDED" if is_in else "DELETED"


def _selected(obj: Object, params: Mapping[str, str]) -> bool:
    labels: Mapping[str, str] = obj["metadata"].get("labels") or {}
    for term in filter(None, params.get("labelSelector", "").split(",")):
        name, equals, value = term.partition("=")
        if name not in labels or (equals and labels[name] != value):
            return False
    for term in filter(None, params.get("fieldSelector", "").split(",")):
        name, _, value = term.partition("=")
        found: Any = obj
        for key in name.split("."):
            found = (found or {}).get(key)
        if found != value:
            return False
    return True
