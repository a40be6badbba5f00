"""Calls to the API server, each with a deadline and bounded retries.

    call ──► token, fresh ──► request ──► answer
                 ▲               │ 429, 5xx, no connection: pause (Retry-After, else doubling), a few times
                 └───────────────┘ and only where a repeat does no harm

What is refused is a `KubeError` (`errors.py`). A create is repeated where it may have been seen: names are given, so
that the repeat of one that arrived is an `ExistsError`. Streams (watches, followed logs) have connections of their own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import httpx
import msgspec

from rljob.clock import Clock, SystemClock
from rljob.kube.config import KubeConfig
from rljob.kube.errors import ConflictError, GoneError, KubeError, NotFoundError, error_of
from rljob.kube.resources import Object, Resource

DEADLINE_SECONDS = 20.0
"""Of one call, retries included."""
ATTEMPT_SECONDS = 12.0
"""How long one attempt may stay without any byte."""
CONNECT_SECONDS = 4.0
MAX_ATTEMPTS = 6
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
MAX_CONNECTIONS = 32
PAGE = 500
TOKEN_SECONDS = 60.0
"""How long a token that was read is used before it is read again."""
_REPEAT_STATUSES = (500, 502, 503, 504)
_MERGE, _APPLY = "application/merge-patch+json", "application/apply-patch+yaml"


class KubeClient:
    """One API server, one identity. Belongs to the event loop that first uses it; `aclose` when done.

    Args:
        config: Where and who.
        user_agent: As the API server's log and metrics show us.
        deadline_seconds: Of every call that names no other.
        transport: For tests: what answers instead of the network.
        clock: Time, for the token's age.
        before_write: Called before every attempt of a call that is no GET; what it raises ends the call: a fence.
        on_answer: Told method and status of every attempt, status 0 where no answer came: metrics.
    """

    def __init__(
        self,
        config: KubeConfig,
        *,
        user_agent: str = "rljob",
        deadline_seconds: float = DEADLINE_SECONDS,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock | None = None,
        before_write: Callable[[], None] = lambda: None,
        on_answer: Callable[[str, int], None] = lambda method, status: None,
    ) -> None:
        self.config = config
        self._before_write, self._on_answer = before_write, on_answer
        self._deadline_seconds = deadline_seconds
        self._clock = clock or SystemClock()
        self._token, self._token_read = "", float("-inf")
        self._calls = self._http(user_agent, transport, MAX_CONNECTIONS)
        self._streams = self._http(user_agent, transport, None)

    def _http(
        self, user_agent: str, transport: httpx.AsyncBaseTransport | None, connections: int | None
    ) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        return httpx.AsyncClient(
            base_url=self.config.server,
            verify=self.config.tls or True,
            transport=transport,
            limits=limits,
            trust_env=False,
            headers={"user-agent": user_agent, "accept": "application/json", "accept-encoding": ""},
            timeout=httpx.Timeout(ATTEMPT_SECONDS, connect=CONNECT_SECONDS, pool=None),
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._calls.aclose()
        await self._streams.aclose()

    # ── verbs ──

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
        return (await self._answer("GET", path, params=params)).text

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
                event = _decode(line, path)
                kind, obj = str(event.get("type")), event.get("object") or {}
                if kind == "ERROR":
                    raise error_of(int(obj.get("code") or 500), obj)
                yield kind, obj

    async def lines(
        self,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        silence_seconds: float | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """The lines of an answer as they come: a watch, a followed log. Use with `contextlib.aclosing`.

        Raises:
            KubeError: refused, cut, or silent for `silence_seconds`.
        """
        headers = self._authorization()
        timeout = httpx.Timeout(silence_seconds, connect=CONNECT_SECONDS)
        stream = self._streams.stream("GET", path, params=params, headers=headers, timeout=timeout)
        rest = b""
        try:
            async with stream as response:
                if response.status_code >= 400:
                    await response.aread()
                    if response.status_code == 401:
                        self._token_read = float("-inf")
                    raise _refusal(response)
                async for chunk in response.aiter_bytes():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield line
            if rest:
                yield rest
        except httpx.TransportError as error:
            raise KubeError(0, "Stream", f"GET {path}: {_words(error)}") from None

    # ── one call ──

    async def call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        deadline_seconds: float | None = None,
    ) -> Any:
        """Any call whose answer is JSON. Raises KubeError."""
        answer = await self._answer(
            method,
            path,
            params=params,
            body=body,
            content_type=content_type,
            deadline_seconds=deadline_seconds,
        )
        return _decode(answer.content, path)

    async def _answer(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        deadline_seconds: float | None = None,
    ) -> httpx.Response:
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": content_type}
        last = "no answer"
        try:
            async with asyncio.timeout(deadline_seconds or self._deadline_seconds):
                for attempt in range(MAX_ATTEMPTS):
                    pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0**attempt)
                    if method != "GET":
                        self._before_write()
                    try:
                        response = await self._calls.request(
                            method,
                            path,
                            params=params,
                            content=content,
                            headers={**headers, **self._authorization()},
                        )
                    except httpx.TransportError as error:
                        self._on_answer(method, 0)
                        last = _words(error)
                    else:
                        self._on_answer(method, response.status_code)
                        if response.status_code < 400:
                            return response
                        pause = self._pause(response, pause, attempt)
                        last = str(_refusal(response))
                    await asyncio.sleep(pause * random.uniform(0.8, 1.2))
        except TimeoutError:
            pass
        raise KubeError(0, "Timeout", f"{method} {path}: {last}")

    def _pause(self, response: httpx.Response, pause: float, attempt: int) -> float:
        """How long to wait before the same call again. Raises KubeError where it is refused for good."""
        status = response.status_code
        if status == 401 and attempt == 0 and self.config.token is not None:
            self._token_read = float("-inf")
            return 0.0
        if status != 429 and status not in _REPEAT_STATUSES:
            raise _refusal(response)
        if attempt == MAX_ATTEMPTS - 1:
            raise _refusal(response)
        asked = response.headers.get("retry-after", "")
        return max(pause, float(asked)) if asked.isdigit() else pause

    def _authorization(self) -> dict[str, str]:
        if self.config.token is None:
            return {}
        now = self._clock.monotonic()
        if now - self._token_read > TOKEN_SECONDS:
            try:
                self._token, self._token_read = self.config.token(), now
            except OSError as error:
                raise KubeError(0, "Token", f"the token cannot be read ({error})") from None
        return {"authorization": f"Bearer {self._token}"}


def _selectors(label_selector: str, field_selector: str) -> dict[str, str]:
    given = {"labelSelector": label_selector, "fieldSelector": field_selector}
    return {name: value for name, value in given.items() if value}


def _decode(body: bytes, path: str) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        raise KubeError(0, "Nonsense", f"{path}: the answer is not JSON: {body[:200]!r}") from None


def _refusal(response: httpx.Response) -> KubeError:
    try:
        document = msgspec.json.decode(response.content)
    except msgspec.DecodeError:
        document = None
    return error_of(response.status_code, document, response.text[:500])


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
