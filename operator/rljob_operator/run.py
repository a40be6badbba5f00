"""One run from a manifest: everything is checked before anything starts; afterwards the summary is written.

prepare:  load ─► claim the folder ─► plan ─► machine, store, ports ─► lay the folder
drive:    LocalDriver under a view ─► audit while the store lives ─► summary.json, curve.png
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml
from rich.console import Console

from rljob.api.effects import resolved
from rljob.api.load import load
from rljob.api.placement import cluster_only_keys
from rljob.api.rljob_types import RLJob
from rljob.clock import SystemClock
from rljob.errors import UserError
from rljob.ids import new_token
from rljob_operator import enter
from rljob_operator.audit import audit_run
from rljob_operator.drivers.folder import EventLog, RunFolder, write_text
from rljob_operator.drivers.local import LocalDriver
from rljob_operator.drivers.observer import LedgerObserver
from rljob_operator.drivers.watch import View, Watch
from rljob_operator.drivers.wiring import Wiring
from rljob_operator.machine import lacks, observe, valkey_server
from rljob_operator.policies.verdict import Verdict
from rljob_operator.render.component import Component
from rljob_operator.render.plan import plan, redis_url
from rljob_operator.summary import AuditNumbers, Summary, build, table
from rljob_operator.view.live import LiveView
from rljob_operator.view.plain import PlainView

_CURVE_SECONDS = 60
_PLAIN_WIDTH = 120


class Run:
    """A checked, claimed and laid-out run. Make it with `prepare`."""

    def __init__(
        self,
        job: RLJob,
        components: list[Component],
        folder: RunFolder,
        artifacts: Path,
        wiring: Wiring,
        plain: bool,
    ) -> None:
        self._job, self._plan, self._folder = job, components, folder
        self._artifacts, self._wiring = artifacts, wiring
        self._console = Console(highlight=False, width=_PLAIN_WIDTH if plain else None)
        self._plain, self._clock = plain, SystemClock()
        self._events = EventLog(folder)
        self._audit: AuditNumbers | None = None
        store = next((part for part in components if part.role == "store"), None)
        self._redis_url = job.spec.store.redis.url or wiring.fill(
            store or components[0], redis_url(job)
        )
        self._observer = LedgerObserver(self._redis_url, job.ledger_name, self._clock)

    @classmethod
    def prepare(
        cls,
        manifest: Path,
        *,
        assignments: Sequence[str],
        runs_dir: Path,
        resume: bool,
        plain: bool,
    ) -> Run:
        """Check everything and lay out the folder; nothing is started.

        Raises:
            UserError: something is wrong with the manifest, the folder or the machine.
        """
        job = load(manifest, assignments, local=True)
        components = plan(job)
        for problem in lacks(observe(runs_dir), components):
            raise problem
        folder = RunFolder(runs_dir.absolute() / job.name)
        folder.claim()
        artifacts = artifacts_of(job, folder, manifest)
        enter.check(folder, job, artifacts, resume=resume)
        wiring = _wire(components, folder, artifacts, manifest)
        if job.spec.store.redis.url:
            asyncio.run(enter.check_redis(job.spec.store.redis.url, job.ledger_name, resume=resume))
        if not resume and (moved := folder.move_aside()):
            sys.stdout.write(f"the earlier run is now {moved}\n")
        folder.lay()
        artifacts.mkdir(parents=True, exist_ok=True)
        _write_manifest(folder, job)
        return cls(job, components, folder, artifacts, wiring, plain)

    async def drive(self) -> int:
        """Run the job to its end; the exit code."""
        began, started_at = self._clock.monotonic(), self._clock.now()
        self._folder.mark_running(started_at, self._artifacts)
        self._connection_file(self._redis_url)
        self._announce()
        view = PlainView(self._say) if self._plain else LiveView(self._console)
        with view:
            watch = self._watch(view, started_at)
            driver = self._driver(watch)
            self._catch_signals(driver, view)
            verdict = await driver.run()
            watch.end(verdict)
        await self._observer.aclose()
        self._connection_file("")
        summary = self._summarise(verdict, watch, self._clock.monotonic() - began)
        self._close(summary, verdict)
        return verdict.exit_code

    def _watch(self, view: View, started_at: float) -> Watch:
        return Watch(
            self._job,
            self._folder,
            self._events,
            self._artifacts,
            observer=self._observer,
            view=view,
            clock=self._clock,
            started_at=started_at,
        )

    def _driver(self, watch: Watch) -> LocalDriver:
        async def before_store_ends() -> None:
            watch.last(await self._observer.snapshot())
            self._audit = await audit_run(self._artifacts, self._observer)

        return LocalDriver(
            self._job,
            self._plan,
            self._wiring,
            self._folder,
            self._events,
            observer=self._observer,
            watch=watch,
            before_store_ends=before_store_ends,
            clock=self._clock,
        )

    def _catch_signals(self, driver: LocalDriver, view: View) -> None:
        loop = asyncio.get_running_loop()

        def stop() -> None:
            view.note("stopping; once more to stop at once")
            driver.stop()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop)

    def _announce(self) -> None:
        self._say(f"run {self._job.name} in {self._folder.root}")
        if aside := cluster_only_keys(self._job):
            self._say(f"left aside on one machine: {', '.join(aside)}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _connection_file(self, url: str) -> None:
        """How `rljob ledger audit` reaches the store of a living run; for its owner's eyes."""
        file = self._folder.root / "connection.json"
        file.unlink(missing_ok=True)
        if url:
            file.touch(mode=0o600)
            file.write_text(msgspec.json.encode({"redis_url": url}).decode())

    def _summarise(self, verdict: Verdict, watch: Watch, wall_seconds: float) -> Summary:
        return build(
            verdict,
            name=self._job.name,
            mode=self._job.spec.mode,
            steps_wanted=self._job.spec.trainer.steps,
            folder=self._folder.root,
            artifacts=self._artifacts,
            snapshot=watch.snapshot,
            audit=self._audit,
            wall_seconds=wall_seconds,
            starting_seconds=watch.first_weights_seconds,
            restarts=watch.facts.restarts,
        )

    def _close(self, summary: Summary, verdict: Verdict) -> None:
        self._folder.write("summary.json", msgspec.to_builtins(summary))
        if self._job.spec.mode == "train":
            draw_curve(self._artifacts, self._folder.root / "curve.png")
        if verdict.exit_code == UserError.exit_code:
            sys.stderr.write(f"{verdict.message}\n")  # bad input is one line and nothing else
        else:
            self._console.print(table(summary))


def artifacts_of(job: RLJob, folder: RunFolder, manifest: Path) -> Path:
    """Where the artifacts of a run lie: `spec.store.artifacts`, else inside its folder."""
    if job.spec.store.artifacts is None:
        return folder.root / "artifacts"
    return manifest.resolve().parent / job.spec.store.artifacts.removeprefix("file://")


def draw_curve(artifacts: Path, target: Path) -> None:
    """Draw the reward curve in a process of its own: matplotlib takes a second and much memory."""
    command = [sys.executable, "-m", "rljob_operator.view.curve", str(artifacts), str(target)]
    try:
        subprocess.run(command, timeout=_CURVE_SECONDS, check=False, stdout=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"the reward curve was not drawn within {_CURVE_SECONDS} s\n")


def _wire(
    components: list[Component], folder: RunFolder, artifacts: Path, manifest: Path
) -> Wiring:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rljob"
    paths = {
        "artifacts": artifacts,
        "job_file": folder.job_file,
        "store": folder.store,
        "work": folder.root / "work",
        "cache": cache,
        "manifest": manifest.resolve().parent,
    }
    secrets = {"token": new_token(), "pool_key": new_token(), "redis": new_token()}
    return Wiring(components, paths, secrets, {"valkey-server": valkey_server() or "valkey-server"})


def _write_manifest(folder: RunFolder, job: RLJob) -> None:
    values = resolved(job)
    folder.write("job.json", values)
    write_text(
        folder.root / "rljob.yaml", yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    )
