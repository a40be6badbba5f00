"""All sessions of one gateway: opened and closed by the worker, used by agents, forgotten after their time to live."""

from __future__ import annotations

import asyncio
import hmac
import re

from rljob import telemetry
from rljob.errors import GatewayError
from rljob.gateway import SessionSpec
from rljob.ids import new_boot_id
from rljob_services.gateway.messages import BadRequestError
from rljob_services.gateway.session import GatewaySession, Service

MAX_SESSIONS = 4096
MAX_BYTES = 1 << 30
"""Of tokens and messages of all sessions. Past either, closed sessions make room, then none is opened."""
CLOSED_SECONDS = 300.0
"""How long the chains of a closed session can be asked for again."""
SWEEP_SECONDS = 15.0

_SESSION_ID = re.compile(r"[A-Za-z0-9._~-]{1,200}")


class SessionMissingError(GatewayError):
    """The gateway does not know the session: it restarted, or the session's time to live ended."""


class SessionTakenError(GatewayError):
    """The id names a session that was opened with another spec, or is closed."""


class GatewayFullError(GatewayError):
    """No room for another session; later there may be."""


class TokenError(GatewayError):
    """The bearer token is not that of the session."""


class Sessions:
    """The registry.

    Args:
        service: What all sessions share.
    """

    def __init__(self, service: Service) -> None:
        self.boot_id = new_boot_id()
        self._service = service
        self._sessions: dict[str, GatewaySession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, spec: SessionSpec) -> GatewaySession:
        """Open a session; the same spec again gives the same session.

        Raises:
            BadRequestError: the id is malformed.
            SessionTakenError: the id is in use.
            GatewayFullError: too many sessions, or too much memory in them.
        """
        if not _SESSION_ID.fullmatch(spec.session_id):
            raise BadRequestError("session_id must be 1 to 200 letters, digits or . _ ~ -")
        if found := self._sessions.get(spec.session_id):
            if found.is_closed or found.spec != spec:
                raise SessionTakenError(f"session {spec.session_id} exists already")
            return found
        self._make_room()
        session = self._sessions[spec.session_id] = GatewaySession(spec, self._service)
        self._count()
        return session

    def get(self, session_id: str) -> GatewaySession:
        """The session of that id. Raises SessionMissingError."""
        if (session := self._sessions.get(session_id)) is None:
            raise SessionMissingError(
                f"session {session_id} is not known here: the gateway restarted, or its time ended"
            )
        return session

    def authorised(self, session_id: str, token: str) -> GatewaySession:
        """The session of that id, for who holds its token. Raises SessionMissingError, TokenError."""
        session = self.get(session_id)
        if not hmac.compare_digest(session.token.encode(), token.encode()):
            raise TokenError(f"the bearer token is not that of session {session_id}")
        return session

    async def abort(self, session_id: str) -> None:
        """Drop a session; one that is not known is no error."""
        if session := self._sessions.pop(session_id, None):
            self._count()
            await session.abort()

    async def sweep_loop(self) -> None:
        """Forget sessions that nobody has used for their time to live."""
        while True:
            await self._service.clock.sleep(SWEEP_SECONDS)
            await self.sweep()

    async def sweep(self) -> None:
        """One round of `sweep_loop`."""
        now = self._service.clock.monotonic()
        for session_id, session in list(self._sessions.items()):
            limit = CLOSED_SECONDS if session.is_closed else session.spec.ttl_seconds
            if session.is_idle and now - session.last_used > limit:
                await self.abort(session_id)

    async def aclose(self) -> None:
        """Drop all sessions."""
        await asyncio.gather(*(self.abort(session_id) for session_id in list(self._sessions)))

    def _make_room(self) -> None:
        """Forget the closed sessions that were asked for longest ago, as far as it takes."""
        num_bytes = sum(session.num_bytes for session in self._sessions.values())
        closed = [session for session in self._sessions.values() if session.is_closed]
        closed.sort(key=lambda session: session.last_used, reverse=True)
        while len(self._sessions) >= MAX_SESSIONS or num_bytes >= MAX_BYTES:
            if not closed:
                raise GatewayFullError(
                    f"{len(self._sessions)} open sessions hold {num_bytes} bytes; "
                    f"there is room for {MAX_SESSIONS} and {MAX_BYTES}"
                )
            oldest = closed.pop()
            num_bytes -= oldest.num_bytes
            del self._sessions[oldest.spec.session_id]

    def _count(self) -> None:
        telemetry.GATEWAY_SESSIONS.set(len(self._sessions))
