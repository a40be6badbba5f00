"""One call to the API server, with a deadline and bounded retries; and streams, which may be silent only so long.

    call ──► token, fresh ──► request ──► answer
                 ▲               │ 429, 5xx, no connection: pause (Retry-After, else doubling), a few times
                 └───────────────┘

Streams (watches, followed logs) have connections of their own.
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
from rljob.kube.errors import KubeError, error_of
from rljob.kube.resources import Object

DEADLINE_SECONDS = 20.0
"""Of one call, retries included."""
ATTEMPT_SECONDS = 12.0
"""How long one attempt may stay without any byte."""
CONNECT_SECONDS = 4.0
MAX_ATTEMPTS = 6
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
MAX_CONNECTIONS = 32
TOKEN_SECONDS = 60.0
"""How long a token that was read is used before it is read again."""
_REPEAT_STATUSES = (500, 502, 503, 504)
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class Calls:
    """See `client.KubeClient`, which has the verbs. Belongs to the event loop that first uses it; `aclose` when done.

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
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        stream = self._streams.stream("GET", path, params=params, headers=headers, timeout=timeout)
        rest = b""
        try:
            async with stream as response:
                if response.status_code >= 400:
                    await response.aread()
                    if response.status_code == 401:
                        self._token_read = float("-inf")
                    raise _refusal(response)
                async with aclosing(_generator(response)) as chunks:
                    while chunk := await _next(chunks, path, silence_seconds):
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
        answer = await self.answer(
            method,
            path,
            params=params,
            body=body,
            content_type=content_type,
            deadline_seconds=deadline_seconds,
        )
        return decode(answer.content, path)

    async def answer(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        deadline_seconds: float | None = None,
    ) -> httpx.Response:
        """Any call, whatever its answer is made of. Raises KubeError."""
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": content_type}
        last, is_doubtful = "no answer", False
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
                        is_doubtful |= not isinstance(error, _NOT_SENT)
                    else:
                        self._on_answer(method, response.status_code)
                        if response.status_code < 400:
                            return response
                        pause = self._pause(response, pause, attempt, is_doubtful)
                        last = str(_refusal(response))
                        is_doubtful |= response.status_code in _REPEAT_STATUSES
                    await asyncio.sleep(pause * random.uniform(0.8, 1.2))
        except TimeoutError:
            pass
        raise KubeError(0, "Timeout", f"{method} {path}: {last}")

    def _pause(
        self, response: httpx.Response, pause: float, attempt: int, is_doubtful: bool
    ) -> float:
        """How long to wait before the same call again. Raises KubeError where it is refused for good."""
        status = response.status_code
        if status == 401 and attempt == 0 and self.config.token is not None:
            self._token_read = float("-inf")
            return 0.0
        if (status != 429 and status not in _REPEAT_STATUSES) or attempt == MAX_ATTEMPTS - 1:
            refusal = _refusal(response)
            refusal.is_doubtful = is_doubtful
            raise refusal
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


async def _generator(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    async for chunk in response.aiter_raw():
        yield chunk


async def _next(
    chunks: AsyncGenerator[bytes, None], path: str, silence_seconds: float | None
) -> bytes:
    """The next chunk, which may not be waited for longer; empty at the end. Raises KubeError."""
    try:
        async with asyncio.timeout(silence_seconds):
            return await anext(chunks, b"")
    except TimeoutError:
        words = f"GET {path}: nothing was heard for {silence_seconds:g} s"
        raise KubeError(0, "Silence", words) from None


def decode(body: bytes, path: str) -> Any:
    """The JSON of an answer to `path`. Raises KubeError."""
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
