"""The lifecycle of a sandbox, and the claim that is its lock.

    state        holds                                       leaves by
    WARM         nothing; pristine                           claim
    CLAIMED      one claim: id, token, env, time to live     release, reset (pool), expiry
    DIRTY        what the last claim left behind             reset
    QUARANTINED  evidence of a reset that did not verify     never
    TAINTED      a second boot: who knows what ran before    never

Claiming is compare-and-set: only WARM takes a claim, so of all the brokers that believe a sandbox free, one gets it.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from rljob_sandbox_pool.guest.wire import RefusedError


class State(enum.Enum):
    """Where in its life a sandbox is."""

    WARM = "warm"
    """Pristine; takes a claim."""
    CLAIMED = "claimed"
    """One owner."""
    DIRTY = "dirty"
    """The claim has ended; only a reset makes it warm again."""
    QUARANTINED = "quarantined"
    """A reset did not verify: never used again."""
    TAINTED = "tainted"
    """The guest has booted before in this sandbox: never used."""


@dataclass(frozen=True)
class Claim:
    """What one claim brought."""

    id: str
    token: str
    env: Mapping[str, str]
    expires: float
    """On the guest's monotonic clock."""
    idle_seconds: float = 0.0
    """After so long without a call the claim is over; 0: not."""
    owner: str = ""
    """Who claimed, for a broker that takes over; so are the next two."""
    boot_id: str = ""
    job: str = ""


def proof(key: bytes, role: str, *parts: str) -> str:
    """What only a holder of the sandbox's key can say about `parts`; `role` keeps uses apart."""
    return hmac.new(
        key, "\0".join((role, *parts)).encode("utf-8", "replace"), hashlib.sha256
    ).hexdigest()


def sandbox_key(pool_key: str, sandbox_id: str) -> bytes:
    """The key of one sandbox. The pool's own key never enters a sandbox."""
    return hmac.new(pool_key.encode(), sandbox_id.encode(), hashlib.sha256).digest()


class Lock:
    """State and claim of this sandbox."""

    def __init__(self, *, tainted: bool) -> None:
        self.state = State.TAINTED if tainted else State.WARM
        self.claim: Claim | None = None
        self.evidence: list[str] = []
        self.job = ""
        """Whose claim was the first: a reset sandbox is used again only inside that job."""
        self.resetting = False
        """Nobody may claim or use it meanwhile."""

    def take(self, claim: Claim) -> None:
        """WARM → CLAIMED. The same claim again is no second claim. Raises RefusedError."""
        if self.claim is not None and self.claim.id == claim.id:
            if not hmac.compare_digest(self.claim.token.encode(), claim.token.encode()):
                raise RefusedError(409, "claimed", "this claim has another token")
            return
        self._refuse_resetting()
        if self.state is not State.WARM:
            raise RefusedError(409, self.state.value, f"the sandbox is {self.state.value}")
        self.state, self.claim = State.CLAIMED, claim
        self.job = self.job or claim.job

    def check(self, claim_id: str, token: str) -> Claim:
        """The claim, where both its id and its token are right. Raises RefusedError."""
        claim = self.claim
        if claim is None or self.state is not State.CLAIMED:
            raise RefusedError(409, "not_claimed", f"the sandbox is {self.state.value}")
        right_token = hmac.compare_digest(claim.token.encode(), token.encode("utf-8", "replace"))
        if claim.id != claim_id or not right_token:
            raise RefusedError(401, "wrong_claim", "this is not the claim that holds the sandbox")
        self._refuse_resetting()
        return claim

    def begin_reset(self) -> None:
        """Until `cleaned`. Raises RefusedError."""
        self._refuse_resetting()
        self.resetting = True

    def _refuse_resetting(self) -> None:
        if self.resetting:
            raise RefusedError(409, "resetting", "the sandbox is being reset")

    def release(self) -> None:
        """CLAIMED → DIRTY: from here on the token opens nothing."""
        if self.state is State.CLAIMED:
            self.state = State.DIRTY
        self.claim = None

    def cleaned(self, evidence: list[str], *, keep_claim: bool) -> None:
        """The end of a reset: WARM (or still CLAIMED) without evidence, QUARANTINED with it."""
        self.resetting = False
        if evidence:
            self.state, self.claim, self.evidence = State.QUARANTINED, None, evidence
        elif not keep_claim:
            self.state, self.claim = State.WARM, None
