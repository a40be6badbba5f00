"""Who holds which sandbox, and until when. Pure but for the clock it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rljob.clock import Clock


class Owner(NamedTuple):
    """Who claims, and in which start of its process."""

    name: str
    boot_id: str


@dataclass(frozen=True)
class ClaimRequest:
    """What a claim asks for."""

    id: str
    env: Mapping[str, str] = field(default_factory=dict)
    ttl_seconds: float = 3600.0
    wait_seconds: float = 0.0
    """How long it may wait for a sandbox."""
    owner: Owner | None = None
    image: str = ""
    """Empty: the pool's first."""
    job: str = ""
    """For whom; empty where the pool serves but one job."""
    idle_seconds: float = 0.0
    """The guest ends itself after so long without a call of the claim; 0: not."""
    priority: int = 0
    """Of the claims that wait, the highest is served first."""


@dataclass(frozen=True)
class Lease:
    """One claim on one sandbox."""

    claim_id: str
    sandbox_id: str
    expires: float
    """Monotonic seconds. The guest ends itself at the same time; this is for its broker to notice."""
    answer: bytes
    """What the claim was answered with: a repeated request gets it again."""
    owner: Owner | None = None
    job: str = ""


class Leases:
    """The claims of one broker. Jobs choose the ids of their claims: the same id of two jobs is two claims."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_claim: dict[tuple[str, str], Lease] = {}

    def __len__(self) -> int:
        return len(self._by_claim)

    def add(self, lease: Lease) -> None:
        """Remember a claim."""
        self._by_claim[lease.job, lease.claim_id] = lease

    def get(self, claim_id: str, job: str = "") -> Lease | None:
        """The claim, if it lives."""
        return self._by_claim.get((job, claim_id))

    def remove(self, claim_id: str, job: str = "") -> Lease | None:
        """Forget a claim; None where there is none."""
        return self._by_claim.pop((job, claim_id), None)

    def remove_sandbox(self, sandbox_id: str) -> Lease | None:
        """Forget the claim on a sandbox that is no more."""
        lease = next(
            (lease for lease in self._by_claim.values() if lease.sandbox_id == sandbox_id), None
        )
        return self.remove(lease.claim_id, lease.job) if lease else None

    def of_earlier_boots(self, owner: Owner, job: str = "") -> list[Lease]:
        """Claims of the same owner of the same job from before it was restarted: nobody holds them any more."""
        return [
            lease
            for lease in self._by_claim.values()
            if lease.owner
            and lease.owner.name == owner.name
            and lease.job == job
            and lease.owner.boot_id != owner.boot_id
        ]

    def of_job(self, job: str = "") -> list[Lease]:
        """What a job holds."""
        return [lease for lease in self._by_claim.values() if lease.job == job]

    def expired(self) -> list[Lease]:
        """Claims past their time to live."""
        now = self._clock.monotonic()
        return [lease for lease in self._by_claim.values() if lease.expires <= now]
