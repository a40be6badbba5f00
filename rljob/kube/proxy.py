"""A Service of the cluster by way of the API server's proxy, for who reaches the API server and nothing behind it.

    client ─► API server, /api/v1/namespaces/NS/services/NAME:PORT/proxy/… ─► Service ─► pod

The API server takes `authorization` for itself, so that tokens of the Service's own travel in another header.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from typing import NamedTuple, cast

import httpx

from rljob.http1 import MAX_BODY_BYTES, Answer, HttpError, HungUpError, Streamed
from rljob.kube.config import KubeConfig

CONNECT_SECONDS = 5.0


class ServicePort(NamedTuple):
    """A port of a Service."""

    namespace: str
    service: str
    port: str
    """Its name, or its number."""

    @property
    def path(self) -> str:
        """Where the API server passes it on."""
        return f"/api/v1/namespaces/{self.namespace}/services/{self.service}:{self.port}/proxy"


class ServiceProxy:
    """Requests to one Service; a `rljob.http1.Transport`. Belongs to one event loop; `aclose` when done.

    Args:
        config: Where the API server is and who we are.
        target: Which Service.
        headers: Sent with every request.
        transport: For tests: what answers instead of the network.
    """

    def __init__(
        self,
        config: KubeConfig,
        target: ServicePort,
        headers: Mapping[str, str] | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._config, self._target = config, target
        self._http = httpx.AsyncClient(
            base_url=config.server,
            verify=config.tls or True,
            transport=transport,
            trust_env=False,
            headers={"user-agent": "rljob", "accept-encoding": "", **(headers or {})},
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        )

    async def request(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 10.0,
        max_body_bytes: int | None = None,
    ) -> Answer:
        """See `rljob.http1.HttpClient.request`. Raises HttpError, TimeoutError."""
        async with (
            asyncio.timeout(timeout_seconds),
            self._ask(method, target, body, headers) as response,
            aclosing(self._pieces(response, max_body_bytes)) as pieces,
        ):
            content = b"".join([piece async for piece in pieces])
        return Answer(response.status_code, dict(response.headers), content)

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 10.0,
        max_body_bytes: int | None = None,
    ) -> AsyncIterator[Streamed]:
        """See `rljob.http1.HttpClient.stream`. Raises HttpError, TimeoutError."""
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(timeout_seconds):
                response = await stack.enter_async_context(self._ask(method, target, body, headers))
            pieces = await stack.enter_async_context(
                aclosing(self._pieces(response, max_body_bytes))
            )
            yield Streamed(response.status_code, dict(response.headers), pieces)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    @asynccontextmanager
    async def _ask(
        self, method: str, target: str, body: bytes, headers: Mapping[str, str] | None
    ) -> AsyncIterator[httpx.Response]:
        identity = self._identity()
        request = self._http.build_request(
            method,
            self._target.path + target,
            content=body,
            headers={**(headers or {}), **identity},
        )
        with _named(self._config.server):
            response = await self._http.send(request, stream=True)
        try:
            yield response
        finally:
            await response.aclose()

    def _identity(self) -> dict[str, str]:
        if self._config.token is None:
            return {}
        try:
            return {"authorization": f"Bearer {self._config.token()}"}
        except OSError as error:
            raise HttpError(f"the token cannot be read ({error})", connected=False) from None

    async def _pieces(
        self, response: httpx.Response, max_body_bytes: int | None
    ) -> AsyncGenerator[bytes, None]:
        limit = left = MAX_BODY_BYTES if max_body_bytes is None else max_body_bytes
        with _named(self._config.server):
            raw = cast("AsyncGenerator[bytes, None]", response.aiter_raw())
            async with aclosing(raw) as pieces:
                async for piece in pieces:
                    left -= len(piece)
                    if left < 0:
                        raise HttpError(f"answer is past the limit of {limit} bytes")
                    yield piece


@contextmanager
def _named(server: str) -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise HttpError(f"cannot connect to {server}: {error}", connected=False) from None
    except httpx.TransportError as error:
        raise HungUpError(f"{server} hung up ({type(error).__name__})") from None
