"""The two ports of the gateway.

    data port     POST /sessions/{id}/v1/chat/completions   GET /sessions/{id}/v1/models   bearer token of the session
                  GET /v1/models  /healthz  /metrics        no token: they tell nothing of any session
    control port  POST /sessions   POST /sessions/{id}/close   DELETE /sessions/{id}       bearer token of the job

Errors are OpenAI's form everywhere; `type` is the name of a class of `rljob.errors`, which
`rljob.gateway` raises again.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rljob.errors import DeadlineError, EngineError, GatewayError, RLJobError, TaskError
from rljob.gateway import (
    HEADER_AGENT,
    HEADER_BOOT_ID,
    HEADER_CONTEXT_FULL,
    HEADER_ENGINE_WAIT,
    HEADER_IDEMPOTENCY,
    HEADER_TURNS,
    ErrorBody,
    ErrorReply,
    Session,
    SessionSpec,
)
from rljob_services.gateway.adapters.openai import read_request
from rljob_services.gateway.messages import BadRequestError
from rljob_services.gateway.session import GatewaySession, SessionClosedError
from rljob_services.gateway.sessions import (
    GatewayFullError,
    SessionMissingError,
    Sessions,
    SessionTakenError,
    TokenError,
)
from rljob_services.gateway.turn import EngineGoneError

MAX_BODY_BYTES = 64 << 20
"""Of a request; a conversation of a million tokens fits."""

_STATUS: list[tuple[type[RLJobError], int]] = [
    (TokenError, 401),
    (SessionMissingError, 404),
    (SessionTakenError, 409),
    (SessionClosedError, 409),
    (GatewayFullError, 503),
    (EngineGoneError, 504),
    (DeadlineError, 504),
    (EngineError, 502),
    (GatewayError, 500),
    (TaskError, 400),
]
"""The first that fits."""

_WIRE_NAMES = (EngineError, DeadlineError, GatewayError)

Handler = Callable[[Request], Awaitable[Response]]


def data_app(sessions: Sessions, model: str) -> Starlette:
    """The data port: agents, also those inside sandboxes."""

    async def complete(request: Request) -> Response:
        session = _session(sessions, request)
        body = await _body(request)
        chat = read_request(body)
        answer = await session.answer(
            chat,
            agent_id=request.headers.get(HEADER_AGENT, "main")[:100],
            repeat_key=_repeat_key(request, body),
            body=body,
        )
        headers = {HEADER_ENGINE_WAIT: f"{session.engine_wait_seconds:.3f}"}
        if answer.context_full:
            headers[HEADER_CONTEXT_FULL] = "1"
        if chat.stream:
            events = b"".join(answer.to_events(chat.stream_options))
            return Response(events, headers=headers, media_type="text/event-stream")
        return Response(answer.to_json(), headers=headers, media_type="application/json")

    async def session_models(request: Request) -> Response:
        return _models(_session(sessions, request).spec.model)

    async def models(_: Request) -> Response:
        return _models(model)

    return _app(
        sessions,
        [
            ("POST", "/sessions/{id}/v1/chat/completions", complete),
            ("GET", "/sessions/{id}/v1/models", session_models),
            ("GET", "/v1/models", models),
            ("GET", "/metrics", _metrics),
        ],
    )


def control_app(sessions: Sessions, token: str) -> Starlette:
    """The control port: the worker."""

    async def open_session(request: Request) -> Response:
        _check_token(request, token)
        try:
            spec = msgspec.json.decode(await _body(request), type=SessionSpec)
            session = sessions.open(spec)
        except msgspec.MsgspecError as error:
            raise BadRequestError(f"the body is no session: {error}") from None
        return _json(Session(id=spec.session_id, token=session.token, boot_id=sessions.boot_id))

    async def close_session(request: Request) -> Response:
        _check_token(request, token)
        session = sessions.get(request.path_params["id"])
        packed = await session.close()
        headers = {
            HEADER_TURNS: str(session.turns),
            HEADER_ENGINE_WAIT: f"{session.engine_wait_seconds:.3f}",
        }
        return Response(packed, headers=headers, media_type="application/octet-stream")

    async def abort_session(request: Request) -> Response:
        _check_token(request, token)
        await sessions.abort(request.path_params["id"])
        return _json({})

    return _app(
        sessions,
        [
            ("POST", "/sessions", open_session),
            ("POST", "/sessions/{id}/close", close_session),
            ("DELETE", "/sessions/{id}", abort_session),
        ],
    )


def _app(sessions: Sessions, routes: list[tuple[str, str, Handler]]) -> Starlette:
    async def healthz(_: Request) -> Response:
        return _json(
            {
                "component": "gateway",
                "ok": True,
                "boot_id": sessions.boot_id,
                "sessions": len(sessions),
            }
        )

    def guarded(handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            try:
                response = await handler(request)
            except RLJobError as error:
                response = _error(error)
            response.headers[HEADER_BOOT_ID] = sessions.boot_id
            return response

        return handle

    all_routes = [*routes, ("GET", "/healthz", healthz)]
    return Starlette(
        routes=[
            Route(path, guarded(handler), methods=[method]) for method, path, handler in all_routes
        ]
    )


def _session(sessions: Sessions, request: Request) -> GatewaySession:
    return sessions.authorised(request.path_params["id"], _bearer(request))


def _repeat_key(request: Request, body: bytes) -> str:
    """What tells a repeated request; many clients give all requests of a trace one `x-request-id`."""
    if key := request.headers.get(HEADER_IDEMPOTENCY):
        return key
    trace = request.headers.get("x-request-id")
    return f"{trace}/{hashlib.sha256(body).hexdigest()}" if trace else ""


def _check_token(request: Request, token: str) -> None:
    if not hmac.compare_digest(_bearer(request).encode(), token.encode()):
        raise TokenError("the bearer token is not that of the job")


def _bearer(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


async def _body(request: Request) -> bytes:
    if int(request.headers.get("content-length", "0")) > MAX_BODY_BYTES:
        raise BadRequestError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BadRequestError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _models(model: str) -> Response:
    return _json(
        {
            "object": "list",
            "data": [{"id": model, "object": "model", "created": 0, "owned_by": "rljob"}],
        }
    )


async def _metrics(_: Request) -> Response:
    from prometheus_client import REGISTRY, generate_latest

    return Response(generate_latest(REGISTRY), media_type="text/plain; version=0.0.4")


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error(error: RLJobError) -> Response:
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    name = next(
        (kind.__name__ for kind in _WIRE_NAMES if isinstance(error, kind)), "invalid_request_error"
    )
    response = _json(
        ErrorReply(error=ErrorBody(message=str(error), type=name, code=type(error).__name__)),
        status,
    )
    response.headers["x-should-retry"] = "false"  # OpenAI's client would sample the turn twice more
    if status == 503:
        response.headers["retry-after"] = "5"
    return response
