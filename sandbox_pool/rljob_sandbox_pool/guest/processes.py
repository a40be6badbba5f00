"""Commands of a claim: each with its pipes, its deadline and its output, which is kept or handed on as it comes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rljob_sandbox_pool.guest.checks import Command
from rljob_sandbox_pool.guest.children import KILL_SECONDS, Children, Profile, Program, pids
from rljob_sandbox_pool.guest.loop import Loop, Timer
from rljob_sandbox_pool.guest.pipes import Inlet, Outlet, Output, encoded, piece
from rljob_sandbox_pool.guest.stream import Stream
from rljob_sandbox_pool.guest.wire import RefusedError

MAX_RUNNING = 32
TIMEOUT_EXIT_CODE = 124

Done = Callable[[dict[str, Any]], None]


@dataclass(eq=False)
class Job:
    """One running command."""

    command: Command
    done: Done
    stream: Stream | None
    spared: frozenset[int]
    """Processes that were there already: leftovers of earlier commands, which a timeout of this one spares."""
    pid: int = 0
    started: float = field(default_factory=time.monotonic)
    outputs: dict[str, Output] = field(default_factory=dict)
    outlets: list[Outlet] = field(default_factory=list)
    stdin: Inlet | None = None
    timed_out: bool = False
    timer: Timer | None = None

    def take(self, name: str, data: bytes) -> None:
        """Output has come."""
        kept = self.outputs[name].add(data)
        if self.stream is None or not kept:
            return
        self.stream.push(piece(name, self.outputs[name].take()))
        if self.stream.full:
            for outlet in self.outlets:
                outlet.pause()

    def go_on(self) -> None:
        """What the stream had no room for is taken now."""
        for outlet in self.outlets:
            outlet.resume()

    def result(self, exit_code: int) -> dict[str, Any]:
        """The fields of `rljob.sandbox.ExecResult`."""
        facts = {
            "exit_code": TIMEOUT_EXIT_CODE if self.timed_out else exit_code,
            "timed_out": self.timed_out,
            "truncated": any(output.truncated for output in self.outputs.values()),
            "seconds": time.monotonic() - self.started,
        }
        if self.stream is not None:
            return facts
        return facts | {
            name: encoded(output.take(), self.command.encoding)
            for name, output in self.outputs.items()
        }


class Processes:
    """Starts commands and ends them."""

    def __init__(self, loop: Loop, profile: Profile) -> None:
        self.children = Children(loop, profile)
        self._loop = loop
        self._jobs: set[Job] = set()

    def start(self, command: Command, done: Done, stream: Stream | None = None) -> None:
        """Run; `done` gets the result's fields. Raises RefusedError.

        With a stream its output goes there; the stream's end is left to `done`, and whoever reads it no more ends the
        command.
        """
        if len(self._jobs) >= MAX_RUNNING:
            raise RefusedError(429, "busy", f"{MAX_RUNNING} commands are running")
        job = Job(command, done, stream, frozenset(pids()))
        self._run(job)
        self._jobs.add(job)
        deadline = job.started + command.timeout_seconds
        job.timer = self._loop.call_at(deadline, lambda: self._time_out(job))
        if stream is not None:
            stream.on_room = job.go_on
            stream.on_gone = lambda: self._end(job)

    def _run(self, job: Job) -> None:
        stdin = os.pipe() if job.command.stdin else (os.open("/dev/null", os.O_RDONLY), -1)
        stdout, stderr = os.pipe(), os.pipe()
        theirs = {0: stdin[0], 1: stdout[1], 2: stderr[1]}
        line = job.command.command
        argv = [self.children.profile.shell, "-c", line] if isinstance(line, str) else line
        program = Program(argv, job.command.cwd, job.command.env, theirs)
        try:
            job.pid = self.children.start(program, lambda code: self._finish(job, code))
        except OSError:
            for fd in (stdin[1], stdout[0], stderr[0]):
                if fd >= 0:
                    os.close(fd)
            raise
        finally:
            for fd in theirs.values():
                os.close(fd)
        for name, fd in (("stdout", stdout[0]), ("stderr", stderr[0])):
            job.outputs[name] = Output(job.command.max_output_bytes)
            take = lambda data, name=name: job.take(name, data)  # noqa: E731
            job.outlets.append(Outlet(self._loop, fd, take))
        if stdin[1] >= 0:
            job.stdin = Inlet(self._loop, stdin[1])
            job.stdin.send(job.command.stdin)
            job.stdin.end()

    def _time_out(self, job: Job) -> None:
        job.timed_out = True
        self._end(job)

    def _end(self, job: Job) -> None:
        if job.timer is not None:
            job.timer.cancel()
        self.children.kill_family(job.pid, job.spared)
        late = lambda: self._finish(job, TIMEOUT_EXIT_CODE)  # noqa: E731
        job.timer = self._loop.call_at(self._loop.now() + KILL_SECONDS, late)

    def _finish(self, job: Job, exit_code: int) -> None:
        """Answer. Whoever still holds the pipes (a daemon) is not waited for."""
        self._jobs.discard(job)
        self.children.forget(job.pid)
        for outlet in job.outlets:
            outlet.drain()
            outlet.close()
        if job.stdin is not None:
            job.stdin.close()
        if job.timer is not None:
            job.timer.cancel()
        job.done(job.result(exit_code))

    def is_busy(self) -> bool:
        """Whether a command runs that somebody waits for."""
        return bool(self._jobs)

    def kill_all(self) -> list[int]:
        """End every process but this one; returns those that would not go."""
        return self.children.kill_all()
