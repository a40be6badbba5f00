"""The engine agent: keeps the engine on the newest committed weights.

    ledger.policy() ──► follow loop: fetch (verified) ─► before_switch() ─► engine.switch() ─► hold_version()
    engine.status() ──► watch loop:  who is it, what does it serve, is it ready ──► `current`

`current` is what the engine itself said last, never what this side believes: a restarted engine names no version, so
it becomes None and the follow loop loads again. Versions are followed as pairs: after a resume n may go back. A
version that vanished while it was being fetched is no failure; the next look at the policy gives a newer one.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import structlog

from rljob import telemetry
from rljob.clock import Clock, SystemClock
from rljob.engine import EngineClient, EngineStatus, OldWeightsError, SwitchResult
from rljob.errors import CorruptError, EngineError, InfraError, RLJobError, StoreError
from rljob.ids import PolicyVersion
from rljob.ledger import Policy
from rljob.settings import Settings
from rljob.weights import VersionGoneError, WeightStore

POLL_SECONDS = 0.2
"""Between two looks at the ledger, and at the engine."""
SWITCH_SECONDS = 300.0
"""Deadline of one switch; the engine keeps it too."""
MAX_BACKOFF_SECONDS = 10.0

_log = structlog.get_logger("rljob.engine_agent")


class PolicySource(Protocol):
    """What of the ledger the agent uses."""

    async def policy(self) -> Policy:
        """The newest committed version."""
        ...

    async def hold_version(self, worker: str, boot_id: str, version: PolicyVersion | None) -> None:
        """Keep the weights of `version`."""
        ...


class EngineAgent:
    """Follows the policy for one engine. `run` never ends by itself.

    Args:
        settings: Where the engine, the artifacts and the scratch folder are.
        ledger: Names the newest version.
        worker: Name of this worker.
        boot_id: This start of it.
        clock: Time.
        client: The engine; by default the one of `settings`.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: PolicySource,
        *,
        worker: str,
        boot_id: str,
        clock: Clock | None = None,
        client: EngineClient | None = None,
    ) -> None:
        self.before_switch: Callable[[PolicyVersion], Awaitable[None]] | None = None
        """Awaited before the engine is told to switch: schedules without updates in flight let episodes end first."""
        self.problem = "the engine is starting"
        """What stands in the way of `current` being the newest version; empty when nothing does."""
        self._ledger, self._worker, self._boot_id = ledger, worker, boot_id
        self._clock = clock or SystemClock()
        self._client = client or EngineClient(
            settings.engine_url, settings.token, clock=self._clock
        )
        self._store = WeightStore(settings.artifacts)
        self._fetched = Path(settings.work_dir) / "weights"
        self._status: EngineStatus | None = None

    @property
    def current(self) -> PolicyVersion | None:
        """The version that the engine serves now; None while it serves none."""
        status = self._status
        return status.version if status is not None and status.state == "ready" else None

    async def run(self) -> None:
        """Watch and follow until cancelled. Raises FencedError when another boot has this worker's name."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_loop())
                tasks.create_task(self._follow_loop())
        except* RLJobError as group:
            raise group.exceptions[0] from None
        finally:
            await self._client.aclose()

    async def _watch_loop(self) -> None:
        while True:
            await self._look()
            await self._clock.sleep(POLL_SECONDS)

    async def _look(self) -> None:
        before = self._status
        try:
            self._status = await self._client.status()
        except InfraError as error:
            self._status = None
            if before is not None:
                _log.warning("engine_lost", reason=str(error))
            return
        if before is None or before.boot_id != self._status.boot_id:
            _log.info(
                "engine_found", boot_id=self._status.boot_id, version=str(self._status.version)
            )

    async def _follow_loop(self) -> None:
        failures = 0
        while True:
            try:
                await self._follow()
                failures = 0
            except VersionGoneError as error:
                _log.info("version_gone", reason=str(error))
            except (InfraError, CorruptError, OSError) as error:
                failures += 1
                self.problem = str(error)
                if not isinstance(error, StoreError):
                    telemetry.WEIGHT_SWITCHES.inc(
                        verdict="old" if isinstance(error, OldWeightsError) else "failed"
                    )
                _log.warning("switch_failed", reason=str(error), failures=failures)
            await self._clock.sleep(min(MAX_BACKOFF_SECONDS, POLL_SECONDS * 2 ** min(failures, 10)))

    async def _follow(self) -> None:
        """Bring the engine to the newest version, if it is reachable and not there yet."""
        policy, status = await self._ledger.policy(), self._status
        if status is None or policy.version is None:
            self.problem = (
                "no version is committed yet" if status else "the engine is not reachable"
            )
        elif status.version == policy.version:
            self.problem = "" if status.state == "ready" else f"the engine is {status.state}"
        elif status.state in {"empty", "ready"}:
            await self._switch(policy.version, policy.digest)

    async def _switch(self, version: PolicyVersion, digest: str) -> None:
        began, self.problem = self._clock.monotonic(), f"version {version} is being loaded"
        path = await asyncio.to_thread(self._store.fetch, version, self._fetched)
        if self.before_switch is not None:
            await self.before_switch(version)
        try:
            result = await self._client.switch(
                version, path, digest, timeout_seconds=SWITCH_SECONDS
            )
        except CorruptError:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)  # fetch it afresh
            raise
        finally:
            await self._look()
        if self._status is None or self._status.version != version:
            raise EngineError(
                f"the engine says {self._status and self._status.version} after a switch to {version}"
            )
        await self._ledger.hold_version(self._worker, self._boot_id, version)
        self._tell(version, result, self._clock.monotonic() - began)
        await asyncio.to_thread(self._forget_others, version)
        self.problem = ""

    def _tell(self, version: PolicyVersion, result: SwitchResult, seconds: float) -> None:
        telemetry.WEIGHT_SWITCHES.inc(verdict=result.verdict)
        telemetry.WEIGHT_SWITCH_SECONDS.observe(seconds)
        telemetry.WEIGHT_PAUSE_SECONDS.observe(result.pause_seconds)
        telemetry.POLICY_VERSION.set(version.n)
        _log.info(
            "switched",
            version=str(version),
            verdict=result.verdict,
            seconds=round(seconds, 3),
            pause_seconds=round(result.pause_seconds, 3),
        )

    def _forget_others(self, version: PolicyVersion) -> None:
        for path in self._fetched.iterdir():
            if path.name != str(version):
                shutil.rmtree(path, ignore_errors=True)
