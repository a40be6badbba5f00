"""Whether the watches still tell of everything: what is watched is compared with what is there.

kopf's watch is a black box that has been seen to end without a word. Once a minute all RLJobs are listed: one whose
newest version kopf has not told of at two looks in a row proves that its watch is dead, and the process ends so that it
is started afresh. Between the looks the list fills in what was missed. The informers' own ages are looked at too.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from rljob.clock import Clock
from rljob.kube.client import KubeClient
from rljob.kube.errors import KubeError
from rljob.kube.informer import Informer
from rljob.kube.resources import RLJOB, Object, uid_of
from rljob_operator import operator_metrics as metrics
from rljob_operator.copies import Jobs
from rljob_operator.health import Health

AUDIT_SECONDS = 60.0
LOOK_SECONDS = 2.0
SILENT_SECONDS = 300.0
"""An informer lists again by itself when its watch is silent; if that has not helped for so long, nothing will."""

_log = structlog.get_logger("rljob.operator")


class WatchSilentError(Exception):
    """A watch is dead: end the process, a new one starts afresh."""


class WatchAudit:
    """Compares RLJobs as listed with what kopf told."""

    def __init__(
        self, client: KubeClient, jobs: Jobs, namespaces: Sequence[str], clock: Clock
    ) -> None:
        self._client, self._jobs, self._clock = client, jobs, clock
        self._namespaces: Sequence[str | None] = namespaces or (None,)
        self._untold: dict[str, tuple[str, str]] = {}
        """uid → (version listed, version told) of jobs that kopf lagged behind at the last look."""
        self._missing: set[str] = set()
        self._consistent = clock.monotonic()

    def age_seconds(self) -> float:
        """Since kopf was last seen to be up to date."""
        return self._clock.monotonic() - self._consistent

    async def run(self) -> None:
        """Look once a minute. Raises WatchSilentError."""
        while True:
            await self._clock.sleep(AUDIT_SECONDS)
            try:
                await self.look()
            except KubeError as error:
                _log.warning("audit_failed", reason=str(error))

    async def look(self) -> None:
        """One look. Raises WatchSilentError, KubeError."""
        listed: dict[str, Object] = {}
        for namespace in self._namespaces:
            items, _ = await self._client.list(RLJOB, namespace)
            listed.update((uid_of(job), job) for job in items)
        untold: dict[str, tuple[str, str]] = {}
        for uid, job in listed.items():
            version, told = str(job["metadata"]["resourceVersion"]), self._jobs.told(uid)
            if version == told:
                continue
            if uid in self._untold and self._untold[uid][1] == told:
                name = job["metadata"]["name"]
                raise WatchSilentError(
                    f"kopf's watch is dead: it did not tell of RLJob {name} {version}"
                )
            untold[uid] = (version, told)
            self._jobs.catch_up(job)
        self._forget_missing(listed)
        self._untold = untold
        if not untold:
            self._consistent = self._clock.monotonic()

    def _forget_missing(self, listed: dict[str, Object]) -> None:
        """A job that two lists in a row do not have is gone, though its end was not told."""
        missing = {uid for job in self._jobs.all() if (uid := uid_of(job)) not in listed}
        for uid in missing & self._missing:
            self._jobs.remove(uid)
        self._missing = missing


async def watch_ages(
    informers: Sequence[Informer], audit: WatchAudit, health: Health, clock: Clock
) -> None:
    """Show the ages, for ever. Raises WatchSilentError."""
    while True:
        health.beat()
        metrics.WATCH_AGE_SECONDS.set(audit.age_seconds(), kind=RLJOB.kind)
        oldest: dict[str, float] = {}
        for informer in informers:
            kind = informer.resource.kind
            oldest[kind] = max(oldest.get(kind, 0.0), informer.age_seconds())
        for kind, age in oldest.items():
            metrics.WATCH_AGE_SECONDS.set(age, kind=kind)
            if age > SILENT_SECONDS:
                health.problem = f"the watch of {kind} is silent for {age:.0f} s"
                raise WatchSilentError(health.problem)
        await clock.sleep(LOOK_SECONDS)
