"""The gateway as the worker sees it: sessions, their chat, and what they recorded.

    worker ── open_session(spec) ──────► control port    a session id, its bearer token, its base URL
    agent  ── chat completions ────────► data port       OpenAI's form; the gateway keeps the token ids
    worker ── close_session(id) ───────► control port    packed chains, the same each time it is asked

A gateway that restarted knows none of the sessions of its former self: every call on one raises `GatewayError`, and the
episode gets another attempt.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from rljob.clock import Clock, SystemClock
from rljob.codec import unpack_chains
from rljob.errors import (
    CorruptError,
    DeadlineError,
    EngineError,
    GatewayError,
    InfraError,
    RLJobError,
    TaskError,
)
from rljob.http1 import Answer, HttpClient, HttpError
from rljob.task_config import ChatReply, Message
from rljob.trajectory import Chain

HEADER_BOOT_ID = "x-rljob-boot-id"
"""Names one start of the gateway, on every answer."""
HEADER_CONTEXT_FULL = "x-rljob-context-full"
"""`1`: no token is left in the session's context."""
HEADER_ENGINE_WAIT = "x-rljob-engine-wait-seconds"
"""Seconds that the session has waited for an engine that was not ready; no clock of the episode should count them."""
HEADER_TURNS = "x-rljob-turns"
HEADER_AGENT = "x-rljob-agent"
"""Which agent of the episode speaks; without it `main`. Becomes `Chain.agent_id`."""
HEADER_IDEMPOTENCY = "idempotency-key"
"""A request that is sent again under the same key gets the answer of the first.

`x-request-id` serves too, for requests of the same body.
"""

ENGINE_WAIT_LIMIT_SECONDS = 1800.0
"""How long one turn waits for an engine that answers but is not ready, beside its own deadline."""

CONTROL_SECONDS = 30.0
"""Deadline of one call on the control port."""
RETRY_SECONDS = 10.0
"""How long a gateway that cannot be reached is asked again."""
RETRY_PAUSE_SECONDS = 0.2
TURN_MARGIN_SECONDS = 30.0
"""What the client gives the gateway past the turn's deadline before it gives up itself."""
MAX_CHAINS_BYTES = 1 << 30
"""Largest answer of the control port: a gateway holds no more of all its sessions together."""
MAX_CHAT_BYTES = 64 << 20
"""Largest answer of the data port: no larger request is taken there either."""


class SessionSampling(msgspec.Struct, frozen=True, kw_only=True):
    """How every turn of a session is sampled.

    The session decides: what a request says of temperature and the like is not used.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens_per_turn: int = 1024
    """A request may ask for less."""


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """worker → gateway. One episode's session."""

    session_id: str
    """Unique among the gateway's sessions; opening it again with the same spec gives the same session."""
    model: str = "policy"
    """What `GET /v1/models` and answers name."""
    sampling: SessionSampling = SessionSampling()
    max_context_tokens: int = 4096
    """Tokens per chain, prompt and response together."""
    turn_seconds: float = 300.0
    """Deadline of one turn; its clock stands still while the engine is not ready."""
    ttl_seconds: float = 7200.0
    """An open session that nobody uses for so long is forgotten; a closed one after some minutes."""


class Session(msgspec.Struct, kw_only=True, omit_defaults=True):
    """gateway → worker. An open session."""

    id: str
    token: str
    """Bearer token of the data port, for this session alone."""
    boot_id: str
    base_url: str = ""
    """What an OpenAI client takes as its base URL: `…/sessions/{id}/v1`."""
    turn_seconds: float = 300.0
    pool: Any = None
    """Connections to the data port (`HttpClient`), shared by the sessions of one client; never on the wire."""


class ClosedSession(msgspec.Struct, kw_only=True, frozen=True):
    """What a session recorded."""

    chains: list[Chain]
    """Those with at least one sampled token, in the order in which they were opened."""
    turns: int
    boot_id: str
    engine_wait_seconds: float


class GatewayClient:
    """Client of the control port. Safe to share between tasks of one event loop; `aclose` when done.

    Args:
        control_url: Control port, no trailing slash.
        data_url: Data port, no trailing slash.
        token: Bearer token of the job.
        clock: Time, for retries.
    """

    def __init__(
        self, control_url: str, data_url: str, token: str, *, clock: Clock | None = None
    ) -> None:
        self.data_url = data_url
        self._clock = clock or SystemClock()
        self._control = HttpClient(
            control_url,
            {"authorization": f"Bearer {token}", "content-type": "application/json"},
            max_body_bytes=MAX_CHAINS_BYTES,
        )
        self._data = HttpClient(data_url, max_body_bytes=MAX_CHAT_BYTES)

    async def __aenter__(self) -> GatewayClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._control.aclose()
        await self._data.aclose()

    async def open_session(self, spec: SessionSpec) -> Session:
        """Open a session. Raises GatewayError: unreachable, full, or the id is taken by another spec."""
        reply = await self._call("POST", "/sessions", msgspec.json.encode(spec))
        try:
            session = msgspec.json.decode(reply.body, type=Session)
        except msgspec.MsgspecError as error:
            raise GatewayError(
                f"gateway answered what its protocol does not allow: {error}"
            ) from None
        session.base_url = f"{self.data_url}/sessions/{quote(session.id, safe='')}/v1"
        session.turn_seconds, session.pool = spec.turn_seconds, self._data
        return session

    async def close_session(self, session_id: str) -> ClosedSession:
        """End a session (a turn in flight is dropped) and fetch its chains.

        May be repeated until the session's time to live ends.

        Raises:
            GatewayError: the gateway is unreachable, or restarted and lost the session.
        """
        reply = await self._call("POST", f"/sessions/{quote(session_id, safe='')}/close")
        try:
            return ClosedSession(
                chains=unpack_chains(reply.body),
                turns=int(reply.headers[HEADER_TURNS]),
                boot_id=reply.headers[HEADER_BOOT_ID],
                engine_wait_seconds=float(reply.headers[HEADER_ENGINE_WAIT]),
            )
        except (CorruptError, KeyError, ValueError) as error:
            raise GatewayError(
                f"gateway answered what its protocol does not allow: {error!r}"
            ) from None

    async def abort_session(self, session_id: str) -> None:
        """Drop a session and what it recorded. A session that the gateway does not know is no error."""
        await self._call("DELETE", f"/sessions/{quote(session_id, safe='')}")

    async def _call(self, method: str, path: str, body: bytes = b"") -> Answer:
        reply = await request_with_retry(
            self._control, method, path, body, {}, CONTROL_SECONDS, self._clock
        )
        if reply.status != 200:
            raise error_of(reply)
        return reply


class SessionChat:
    """The policy behind one session, as `rljob.task_config.Chat`.

    Args:
        session: An open session.
        agent: Which agent of the episode speaks.
        clock: Time, for retries.
    """

    def __init__(
        self, session: Session, *, agent: str = "main", clock: Clock | None = None
    ) -> None:
        self._session = session
        self._clock = clock or SystemClock()
        url = urlsplit(session.base_url)
        self._pool: HttpClient = session.pool or HttpClient(
            f"{url.scheme}://{url.netloc}", max_body_bytes=MAX_CHAT_BYTES
        )
        self._path = f"{url.path}/chat/completions"
        self._headers = {
            "authorization": f"Bearer {session.token}",
            "content-type": "application/json",
            HEADER_AGENT: agent,
        }
        self.engine_wait_seconds = 0.0
        """What the gateway last said of `HEADER_ENGINE_WAIT`."""

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> ChatReply:
        """Sample one assistant turn.

        Raises:
            EngineError: the engine refused or answered nonsense.
            DeadlineError: the turn's deadline passed.
            GatewayError: the gateway is unreachable, or restarted and lost the session.
            TaskError: the conversation is none that the chat API allows.
        """
        body: dict[str, Any] = {"messages": messages}
        if tools:
            body["tools"] = tools
        headers = {**self._headers, HEADER_IDEMPOTENCY: secrets.token_hex(8)}
        limit = self._session.turn_seconds + ENGINE_WAIT_LIMIT_SECONDS + TURN_MARGIN_SECONDS
        reply = await request_with_retry(
            self._pool, "POST", self._path, msgspec.json.encode(body), headers, limit, self._clock
        )
        if reply.status != 200:
            raise error_of(reply)
        if reply.headers.get(HEADER_BOOT_ID) != self._session.boot_id:
            raise GatewayError("the session was opened on another start of the gateway")
        self.engine_wait_seconds = float(reply.headers.get(HEADER_ENGINE_WAIT, "0"))
        return _chat_reply(reply)


class _Choice(msgspec.Struct):
    message: Message
    finish_reason: str


class _Completion(msgspec.Struct):
    choices: list[_Choice]


def _chat_reply(reply: Answer) -> ChatReply:
    try:
        choice = msgspec.json.decode(reply.body, type=_Completion).choices[0]
    except (msgspec.MsgspecError, IndexError) as error:
        raise GatewayError(f"gateway answered what its protocol does not allow: {error}") from None
    is_full = reply.headers.get(HEADER_CONTEXT_FULL) == "1"
    return ChatReply(
        message=choice.message, finish_reason=choice.finish_reason, context_full=is_full
    )


class ErrorBody(msgspec.Struct, kw_only=True):
    """gateway → client. `type` is the name of a class of `rljob.errors`, or OpenAI's `invalid_request_error`."""

    message: str
    type: str
    code: str | None = None
    param: str | None = None


class ErrorReply(msgspec.Struct, kw_only=True):
    """Body of every answer that is an error, in OpenAI's form."""

    error: ErrorBody


_ERRORS: dict[str, type[InfraError]] = {
    kind.__name__: kind for kind in (EngineError, GatewayError, DeadlineError)
}


def error_of(reply: Answer) -> RLJobError:
    """The error that an answer other than 200 stands for: its class by name, else `TaskError` for a bad request."""
    try:
        body = msgspec.json.decode(reply.body, type=ErrorReply).error
    except msgspec.MsgspecError:
        return GatewayError(f"gateway answered {reply.status}: {reply.body[:200]!r}")
    if kind := _ERRORS.get(body.type):
        return kind(body.message)
    return TaskError(f"gateway refused the request: {body.message}")


async def request_with_retry(
    pool: HttpClient,
    method: str,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    timeout_seconds: float,
    clock: Clock,
) -> Answer:
    """Send a request that may be repeated; a gateway that cannot be reached is asked again for `RETRY_SECONDS`.

    Raises:
        GatewayError: it stayed unreachable, or did not answer within `timeout_seconds`.
    """
    unreachable_since: float | None = None
    while True:
        try:
            return await pool.request(
                method, path, body, headers=headers, timeout_seconds=timeout_seconds
            )
        except TimeoutError:
            raise GatewayError(
                f"gateway at {pool.url} did not answer {path} within {timeout_seconds:.0f} s"
            ) from None
        except HttpError as error:
            now = clock.monotonic()
            unreachable_since = now if unreachable_since is None else unreachable_since
            if now - unreachable_since >= RETRY_SECONDS:
                raise GatewayError(
                    f"gateway at {pool.url} is unreachable: {type(error).__name__} {error}".rstrip()
                ) from error
        await clock.sleep(RETRY_PAUSE_SECONDS)
