"""One sandbox as its pool sees it, and the pool's side of the guest's API.

state        holds                                 leaves by
STARTING     a process whose guest was not heard   the keyed challenge answered; a deadline
READY        a pristine sandbox                    a claim; too long idle
CLAIMED      an owner                              release, expiry
RESETTING    what the owner left                   a verified reset → READY; evidence → QUARANTINED
QUARANTINED  evidence, for a look                  time; its place is wanted
ENDING       a kill under way                      nothing of it left
"""

from __future__ import annotations

import asyncio
import enum
import hmac
import json
import secrets
from collections.abc import Sequence

import msgspec

from rljob.errors import SandboxError
from rljob.http1 import HttpClient, HttpError
from rljob_sandbox_pool.guest.claims import proof
from rljob_sandbox_pool.leases import ClaimRequest, Owner
from rljob_sandbox_pool.runtimes.base import RunningSandbox, SandboxSpec

CALL_SECONDS = 10.0
CLAIM_SECONDS = 5.0
RESET_SECONDS = 20.0
POLL_SECONDS = 0.1
LONGEST_POLL_SECONDS = 1.0
"""How often a guest is tried whose sandbox has an address but does not answer yet."""
MAX_BODY_BYTES = 65_536
"""Largest answer of a guest to its pool."""


MAX_EVIDENCE, MAX_EVIDENCE_CHARS = 16, 500
"""What is kept of a guest's words."""


class UncleanError(SandboxError):
    """A sandbox did not verify after its reset, or its guest is not who it was: never to be used again.

    Args:
        message: In a sentence.
        evidence: In words of the guest.
    """

    def __init__(self, message: str, evidence: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.evidence = [each[:MAX_EVIDENCE_CHARS] for each in evidence[:MAX_EVIDENCE]] or [message]


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
    QUARANTINED = "quarantined"
    """A reset did not verify: never used again."""
    ENDING = "ending"
    """Killed; still holds its place."""


class HeldClaim(msgspec.Struct):
    """Guest → pool: the claim that holds it."""

    id: str
    seconds_left: float
    owner: str = ""
    boot_id: str = ""


class Health(msgspec.Struct):
    """Guest → pool: `GET /healthz`."""

    id: str
    state: str
    boot_nonce: str
    proof: str = ""
    uses: int = 0
    """This and what follows is told only to a pool that proves itself, with the boot nonce it has heard."""
    job: str = ""
    claim: HeldClaim | None = None
    evidence: list[str] = []
    """Why it is quarantined."""


class Member:
    """One sandbox of a pool."""

    def __init__(self, spec: SandboxSpec, running: RunningSandbox, *, now: float) -> None:
        self.id, self.index, self.image = spec.id, spec.index, spec.image
        self.state = MemberState.STARTING
        self.born = self.since = now
        """When it came into its state, monotonic; `born`: into the first."""
        self.grown = now
        """When it was heard first."""
        self.is_unheard = False
        """It was adopted, and has not said yet what it is."""
        self.uses = 0
        self.job = ""
        """Whose claims it has served."""
        self.claim_id = self.owner = ""
        """Who holds it, while it is CLAIMED."""
        self.evidence: list[str] = []
        """Why it is QUARANTINED, in words of its guest."""
        self.boot_nonce = self.url = ""
        self.running = running
        self._key = spec.key
        self._http: HttpClient | None = None

    async def verify(self, patience_seconds: float) -> Health:
        """STARTING: the guest proves that it holds the key. Raises SandboxError.

        Args:
            patience_seconds: How long the guest may stay silent once its address is known.
        """
        self.url = await self.running.locate()
        self._http = HttpClient(self.url, max_body_bytes=MAX_BODY_BYTES)
        heard = await self._challenge(patience_seconds)
        self.boot_nonce = heard.boot_nonce
        return heard

    async def _challenge(self, patience_seconds: float) -> Health:
        """The guest proves what it is. Raises UncleanError where it cannot, SandboxError where it says nothing."""
        challenge = secrets.token_hex(16)
        heard = _health(
            self.id, await self._hear(f"/healthz?challenge={challenge}", patience_seconds)
        )
        expected = proof(self._key, "guest", challenge, heard.boot_nonce, heard.state)
        if not hmac.compare_digest(expected.encode(), heard.proof.encode()) or heard.id != self.id:
            raise UncleanError(f"sandbox {self.id}: its guest failed the keyed challenge")
        return heard

    async def ask(self) -> Health:
        """What the guest of a sandbox that others started tells its pool. Raises SandboxError."""
        return _health(self.id, await self._call("GET", "/healthz"))

    async def claim(self, request: ClaimRequest) -> str:
        """Compare-and-set inside the guest; the claim's token. Raises SandboxError."""
        token = self.token(request.id)
        owner = request.owner or Owner("", "")
        body = {
            "claim_id": request.id,
            "token": token,
            "env": dict(request.env),
            "ttl_seconds": request.ttl_seconds,
            "owner": owner.name,
            "boot_id": owner.boot_id,
            "job": request.job,
        }
        if request.idle_seconds > 0:
            body["idle_seconds"] = request.idle_seconds
        await self._call("POST", "/claim", json.dumps(body).encode(), timeout=CLAIM_SECONDS)
        self.uses += 1
        return token

    def token(self, claim_id: str) -> str:
        """What opens the sandbox to a claim: a pool manager that takes over finds the same."""
        return proof(self._key, "claim", claim_id, self.boot_nonce)

    async def reset(self) -> None:
        """End the claim, clean, verify, prove itself anew. Raises UncleanError with the evidence, SandboxError."""
        try:
            async with asyncio.timeout(RESET_SECONDS):
                await self._reset()
        except TimeoutError:
            words = f"sandbox {self.id}: its reset took more than {RESET_SECONDS:g} s"
            raise SandboxError(words) from None
        heard = await self._challenge(CALL_SECONDS)
        if (heard.state, heard.boot_nonce) != ("warm", self.boot_nonce):
            words = f"sandbox {self.id}: after its reset its guest calls itself {heard.state[:20]}"
            raise UncleanError(words)

    async def _reset(self) -> None:
        while True:
            try:
                await self._call("POST", "/reset", b"{}", timeout=RESET_SECONDS)
            except _RefusedError as refusal:
                if refusal.error == "quarantined":
                    raise UncleanError(str(refusal), (await self.ask()).evidence) from None
                # One that its owner, or an earlier pool manager, has begun.
                if refusal.error != "resetting":
                    raise
                await asyncio.sleep(POLL_SECONDS)
            else:
                return

    async def aclose(self) -> None:
        """Hang up."""
        if self._http is not None:
            await self._http.aclose()

    async def _hear(self, target: str, patience_seconds: float) -> bytes:
        """The first answer of a guest that may not be up yet. Raises SandboxError."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + patience_seconds, POLL_SECONDS
        while True:
            left = deadline - loop.time()
            try:
                return await self._call("GET", target, timeout=max(0.05, min(left, CALL_SECONDS)))
            except SandboxError:
                if self.running.failed.done() or loop.time() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(LONGEST_POLL_SECONDS, pause * 1.5)

    async def _call(
        self, method: str, target: str, body: bytes = b"", *, timeout: float = CALL_SECONDS
    ) -> bytes:
        assert self._http is not None
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
            raise _RefusedError(self.id, answer.body)
        return answer.body


class _RefusedError(SandboxError):
    """The guest answered, with something else than 200."""

    def __init__(self, sandbox_id: str, body: bytes) -> None:
        super().__init__(f"sandbox {sandbox_id}: {body[:2000].decode('utf-8', 'replace')}")
        try:
            self.error = msgspec.json.decode(body, type=_Refusal).error
        except msgspec.MsgspecError:
            self.error = ""


class _Refusal(msgspec.Struct):
    error: str


def _health(sandbox_id: str, body: bytes) -> Health:
    try:
        return msgspec.json.decode(body, type=Health)
    except msgspec.MsgspecError as error:
        raise SandboxError(f"sandbox {sandbox_id}: nonsense from its guest: {error}") from None
