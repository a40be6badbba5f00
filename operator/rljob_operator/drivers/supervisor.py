"""The life of one component: start → ready → ended → what the restart policy says.

    wait for dependencies ─► start ─► probe until ready, and on ─► wait for its end ─► decide
              ▲                                                                     │
              └──────────── pause ◄── restart ──────────────────────────────────────┴─► done | the job fails

Waits for: readiness and answers within deadlines, the process's end, the pause between starts. Cancelling `run` and
then `stop` unblock all of them.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from enum import StrEnum

from rljob.clock import Clock
from rljob_operator.drivers import tasks
from rljob_operator.drivers.folder import EventLog, RunFolder
from rljob_operator.drivers.process import Process
from rljob_operator.drivers.readiness import answers
from rljob_operator.drivers.wiring import Wiring
from rljob_operator.policies.restart import EXIT_FENCED, Action, Decision, Ended, decide
from rljob_operator.render.component import Component, Kind, Probe

_START_PROBE_SECONDS = 0.1
_PROBE_SECONDS = 0.5
_SILENT_SECONDS = 2.0
"""After so long without an answer a component is called silent; a busy machine makes pauses of a second."""


class State(StrEnum):
    """Where a component is; what it holds."""

    WAITING = "waiting"
    """For its dependencies; no process."""
    STARTING = "starting"
    """A process that does not answer yet."""
    RUNNING = "running"
    """A process that has no question to answer: it runs to its end."""
    READY = "ready"
    """A process that answers."""
    SILENT = "not answering"
    """A process that was ready and no longer answers; past the progress deadline it is killed."""
    BACKING_OFF = "backing off"
    """No process; the next start is due after a pause."""
    DONE = "done"
    """No process; its work is finished."""
    FAILED = "failed"
    """No process; it has failed the job."""
    STOPPED = "stopped"
    """No process; the job has ended."""


class ComponentFailed(Exception):  # noqa: N818  (an outcome, not an error of ours)
    """A component fails the whole job."""

    def __init__(self, component: str, decision: Decision) -> None:
        super().__init__(component, decision)
        self.component, self.decision = component, decision


class Supervisor:
    """Keeps one component running.

    Args:
        component: What to run.
        wiring: Fills in its placeholders.
        folder: Where its log goes.
        events: Where its starts and ends are recorded.
        backoff_limit: Failures in a row before the job fails.
        silence_seconds: How long a ready component may be silent before it is killed.
        may_end: Whether the component's good end is expected now.
        clock: Time.
    """

    def __init__(
        self,
        component: Component,
        wiring: Wiring,
        folder: RunFolder,
        events: EventLog,
        *,
        backoff_limit: int,
        silence_seconds: float,
        may_end: Callable[[], Awaitable[bool]],
        clock: Clock,
    ) -> None:
        self.component, self._wiring, self._folder, self._events = component, wiring, folder, events
        self._backoff_limit, self._silence_seconds = backoff_limit, silence_seconds
        self._may_end, self._clock = may_end, clock
        self.state = State.WAITING
        self.usable = asyncio.Event()
        """Set once it is ready (a service) or done (a preparation): dependents may start."""
        self.restarts = 0
        self.last_end = ""
        self._failures_in_row = self._fenced_in_row = 0
        self._ever_ready = self._stopping = False
        self._killed_for = ""
        self._process: Process | None = None

    @property
    def name(self) -> str:
        """Of the component."""
        return self.component.name

    @property
    def pid(self) -> int | None:
        """Of the component's own process while it runs."""
        return self._process.pid if self._process else None

    def committed(self) -> None:
        """A step was committed: earlier failures are forgotten."""
        self._failures_in_row = self._fenced_in_row = 0

    async def run(self, dependencies: list[Supervisor]) -> None:
        """Live until done.

        Raises:
            ComponentFailed: the job must fail.
        """
        for dependency in dependencies:
            await dependency.usable.wait()
        while not self._stopping:
            ended = await self._once()
            if self._stopping:
                return
            decision = decide(ended, self._backoff_limit)
            self._note(ended, decision)
            if decision.action is Action.DONE:
                self.usable.set()
                return
            if decision.action is Action.FAIL:
                raise ComponentFailed(self.name, decision)
            await self._clock.sleep(decision.delay_seconds)

    async def stop(self) -> None:
        """End the process, well if it does so in time."""
        self._stopping = True
        if self._process:
            await self._process.stop(self.component.grace_seconds)
        if self.state not in {State.DONE, State.FAILED}:
            self.state = State.STOPPED

    async def kill(self) -> None:
        """End the process now."""
        self._stopping = True
        if self._process:
            await self._process.kill()

    async def _once(self) -> Ended:
        """One start to its end."""
        self._process = process = await self._start()
        watch = asyncio.create_task(self._watch(process))
        try:
            code = await process.wait()
        finally:
            await tasks.end(watch)
        if not watch.cancelled():
            watch.result()  # a watch that broke is an error of ours
        self._process = None  # after a cancellation it still runs, for `stop` to end
        return Ended(
            name=self.name,
            role=self.component.role,
            code=code,
            may_end=self.component.kind is Kind.PREPARE
            or (code == 0 and not self._stopping and await self._may_end()),
            ever_ready=self._ever_ready,
            killed_for=self._killed_for,
            failures_in_row=self._failures_in_row,
            fenced_in_row=self._fenced_in_row,
            last_lines=tuple(process.last_lines(5)),
        )

    async def _start(self) -> Process:
        launch, work = self._wiring.launch(self.component), self._wiring.work_dir(self.component)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        for path, text in launch.files.items():
            path.touch(mode=0o600)
            path.write_text(text)
        self.state, self._killed_for = State.STARTING, ""
        process = await Process.start(
            launch.argv,
            launch.env,
            self._folder.log(self.name),
            work,
            makes_namespaces=self.component.makes_namespaces,
        )
        self._events.event("started", self.name, f"pid {process.pid}")
        return process

    async def _watch(self, process: Process) -> None:
        """Probe until it answers, then whether it still does. Past either deadline the process is killed."""
        if (probe := self.component.probe) is None:
            self.state = State.RUNNING
            return
        if await self._asked(probe, probe.deadline_seconds, until=True):
            self.state, self._ever_ready = State.READY, True
            self._events.event("ready", self.name, "")
            self.usable.set()
            await self._asked(probe, self._silence_seconds, until=False)
        await process.kill()

    async def _asked(self, probe: Probe, deadline_seconds: float, *, until: bool) -> bool:
        """Ask `until` it answers, or as long as it does; False once it was silent past the deadline."""
        host, port = self._wiring.address(self.name, probe.port)
        heard = self._clock.monotonic()
        while True:
            if await answers(probe, host, port, self._secret(probe)):
                if until:
                    return True
                self.state, heard = State.READY, self._clock.monotonic()
            silence = self._clock.monotonic() - heard
            if not until and silence > _SILENT_SECONDS:
                self.state = State.SILENT
            if silence > deadline_seconds:
                self._killed_for = (
                    f"{'not ready' if until else 'no answer'} within {deadline_seconds:.0f} s"
                )
                self._events.event("silent", self.name, self._killed_for)
                return False
            await self._clock.sleep(_START_PROBE_SECONDS if until else _PROBE_SECONDS)

    def _secret(self, probe: Probe) -> str:
        return self._wiring.fill(
            self.component, "${secret:redis}" if probe.scheme == "redis" else "${secret:token}"
        )

    def _note(self, ended: Ended, decision: Decision) -> None:
        self.state = {
            Action.DONE: State.DONE,
            Action.FAIL: State.FAILED,
            Action.RESTART: State.BACKING_OFF,
        }[decision.action]
        if decision.counted:
            self._failures_in_row += 1
        self._fenced_in_row = self._fenced_in_row + 1 if ended.code == EXIT_FENCED else 0
        if decision.action is Action.RESTART:
            self.restarts += 1
            self.last_end = decision.reason
        text = f"code {ended.code}; {decision.action}{f' ({decision.reason})' if decision.reason else ''}"
        self._events.event(
            "ended",
            self.name,
            text if not ended.last_lines else f"{text}; last line: {ended.last_lines[-1][:500]}",
        )
