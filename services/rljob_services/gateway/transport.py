"""httpx's client over `rljob.http1`: the engine client's calls without httpcore's connection pool.

Two engine calls are made in every turn. httpcore looks at every connection of its pool for each
request, which at 32 concurrent turns costs more than everything else that the gateway does (4.7 ms
of CPU a turn with it, 1.5 ms without).
"""

from __future__ import annotations

from urllib.parse import urlsplit

import httpx

from rljob.http1 import HttpClient, HttpError

_SET_BY_CLIENT = frozenset({"host", "content-length", "connection", "accept-encoding"})
_NO_LIMIT_SECONDS = 86_400.0
MAX_GENERATION_BYTES = 256 << 20
"""Largest answer of the engine: the token ids of prompt and turn with their logprobs, a million tokens and more."""


class PoolTransport(httpx.AsyncBaseTransport):
    """Sends what an `httpx.AsyncClient` asks for over an `HttpClient`; deadlines are the caller's.

    Args:
        url: URL of the one server that is asked.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._client = HttpClient(
            f"{parts.scheme}://{parts.netloc}", max_body_bytes=MAX_GENERATION_BYTES
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.AsyncBaseTransport`."""
        headers = {
            name: value for name, value in request.headers.items() if name not in _SET_BY_CLIENT
        }
        body = await request.aread()
        path = request.url.raw_path.decode("ascii")
        try:
            reply = await self._client.request(
                request.method, path, body, headers=headers, timeout_seconds=_NO_LIMIT_SECONDS
            )
        except (HttpError, TimeoutError) as error:
            raise httpx.ConnectError(f"{type(error).__name__}: {error}", request=request) from error
        return httpx.Response(reply.status, headers=reply.headers, content=reply.body)

    async def aclose(self) -> None:
        """See `httpx.AsyncBaseTransport`."""
        await self._client.aclose()
