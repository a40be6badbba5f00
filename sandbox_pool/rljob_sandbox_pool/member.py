"""One sandbox as its pool sees it, and the pool's side of the guest's API.

state      holds                                 leaves by
STARTING   a process whose guest was not heard   the keyed challenge answered; a deadline
READY      a pristine sandbox                    a claim; too long idle
CLAIMED    an owner                              release, expiry
RESETTING  what the owner left                   a verified reset → READY; evidence → ENDING
ENDING     a kill under way                      nothing of it left
"""

from __future__ import annotations

import enum
import hmac
import json
import secrets
from collections.abc import Mapping

import msgspec

from rljob.errors import SandboxError
from rljob.http1 import HttpClient, HttpError
from rljob_sandbox_pool.guest.claims import proof
from rljob_sandbox_pool.runtimes.base import RunningSandbox, SandboxSpec

START_SECONDS = 30.0
CALL_SECONDS = 10.0
RESET_SECONDS = 20.0
MAX_BODY_BYTES = 65_536
"""Largest answer of a guest to its pool."""


class MemberState(enum.Enum):
    """See the table above."""

    STARTING = "starting"
    """Its guest has not proved itself yet."""
    READY = "ready"
    """Pristine."""
    CLAIMED = "claimed"
    """Has an owner."""
    RESETTING = "resetting"
    """Being cleaned and verified."""
    ENDING = "ending"
    """Killed; still holds its place."""


class _Health(msgspec.Struct):
    id: str
    state: str
    boot_nonce: str
    proof: str = ""


class Member:
    """One sandbox of a pool."""

    def __init__(self, spec: SandboxSpec, running: RunningSandbox, *, now: float) -> None:
        self.id, self.index = spec.id, spec.index
        self.state = MemberState.STARTING
        self.since = now
        """When it came into its state, monotonic."""
        self.uses = 0
        self.boot_nonce = ""
        self.running = running
        self._key = spec.key
        self._http = HttpClient(running.url, max_body_bytes=MAX_BODY_BYTES)

    @property
    def url(self) -> str:
        """Where its guest listens."""
        return self.running.url

    async def verify(self) -> None:
        """STARTING: the guest proves that it holds the key, and says its boot nonce. Raises SandboxError."""
        challenge = secrets.token_hex(16)
        health = await self._call("GET", f"/healthz?challenge={challenge}", timeout=START_SECONDS)
        try:
            heard = msgspec.json.decode(health, type=_Health)
        except msgspec.MsgspecError as error:
            raise SandboxError(f"sandbox {self.id}: nonsense from its guest: {error}") from None
        expected = proof(self._key, "guest", challenge, heard.boot_nonce, heard.state)
        if not hmac.compare_digest(expected.encode(), heard.proof.encode()) or heard.id != self.id:
            raise SandboxError(f"sandbox {self.id}: its guest failed the keyed challenge")
        if heard.state != "warm":
            raise SandboxError(f"sandbox {self.id}: its guest calls itself {heard.state[:20]}")
        self.boot_nonce = heard.boot_nonce

    async def claim(
        self, claim_id: str, token: str, env: Mapping[str, str], ttl_seconds: float
    ) -> None:
        """Compare-and-set inside the guest. Raises SandboxError."""
        body = {"claim_id": claim_id, "token": token, "env": dict(env), "ttl_seconds": ttl_seconds}
        await self._call("POST", "/claim", json.dumps(body).encode())
        self.uses += 1

    async def reset(self) -> None:
        """End the claim, clean, verify. Raises SandboxError with the evidence."""
        await self._call("POST", "/reset", b"{}", timeout=RESET_SECONDS)

    async def aclose(self) -> None:
        """Hang up."""
        await self._http.aclose()

    async def _call(
        self, method: str, target: str, body: bytes = b"", *, timeout: float = CALL_SECONDS
    ) -> bytes:
        headers = (
            {"x-rljob-pool": proof(self._key, "pool", self.boot_nonce)} if self.boot_nonce else {}
        )
        try:
            answer = await self._http.request(
                method, target, body, headers=headers, timeout_seconds=timeout
            )
        except (HttpError, TimeoutError) as error:
            reason = str(error) or f"no answer within {timeout:g} s"
            raise SandboxError(f"sandbox {self.id}: {reason}") from None
        if answer.status != 200:
            raise SandboxError(
                f"sandbox {self.id}: {answer.body[:2000].decode('utf-8', 'replace')}"
            )
        return answer.body
