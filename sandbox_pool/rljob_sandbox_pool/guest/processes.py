"""Commands of a claim: started with limits, watched, ended with everything that they started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rljob_sandbox_pool.guest import system
from rljob_sandbox_pool.guest.checks import Command
from rljob_sandbox_pool.guest.loop import Loop, Timer
from rljob_sandbox_pool.guest.wire import RefusedError

MAX_RUNNING = 32
KILL_SECONDS = 5.0
"""How long a killed process may take to go."""
TIMEOUT_EXIT_CODE = 124
_CHUNK = 65_536

Done = Callable[[dict[str, Any]], None]


@dataclass
class Profile:
    """How commands run in this sandbox."""

    user: system.User
    rlimits: Mapping[str, int]
    env: Mapping[str, str]
    cwd: str
    shell: str
    adjust_oom: bool
    """The guest may make commands the OOM killer's first choice."""


@dataclass(eq=False)
class Job:
    """One running command."""

    pid: int
    command: Command
    done: Done
    before: frozenset[int]
    """Processes that were there already: leftovers of earlier commands, which a timeout of this one spares."""
    started: float = field(default_factory=time.monotonic)
    outputs: dict[int, bytearray] = field(default_factory=dict)
    """By descriptor while open."""
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    stdin: memoryview = field(default_factory=lambda: memoryview(b""))
    stdin_fd: int = -1
    truncated: bool = False
    timed_out: bool = False
    timer: Timer | None = None


class Processes:
    """Starts commands and reaps every child, the orphans that come to PID 1 included."""

    def __init__(self, loop: Loop, profile: Profile) -> None:
        self._loop, self._profile = loop, profile
        self._jobs: dict[int, Job] = {}
        loop.on_child(self.reap)

    def start(self, command: Command, done: Done) -> None:
        """Run; `done` gets the result's fields. Raises RefusedError."""
        if len(self._jobs) >= MAX_RUNNING:
            raise RefusedError(429, "busy", f"{MAX_RUNNING} commands are running")
        before = frozenset(pids())
        stdin_read, stdin_write = (
            os.pipe() if command.stdin else (os.open("/dev/null", os.O_RDONLY), -1)
        )
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                self._child(command, stdin_read, out_write, err_write)
        except OSError:
            for fd in (stdin_write, out_read, err_read):
                _close(fd)
            raise
        finally:
            for fd in (stdin_read, out_write, err_write):
                _close(fd)
        job = Job(pid, command, done, before, stdin=memoryview(command.stdin), stdin_fd=stdin_write)
        job.outputs = {out_read: job.stdout, err_read: job.stderr}
        self._jobs[pid] = job
        self._watch(job)

    def _watch(self, job: Job) -> None:
        for fd in job.outputs:
            os.set_blocking(fd, False)
            self._loop.watch(fd, read=lambda fd=fd: self._drain(job, fd))
        if job.stdin_fd >= 0:
            os.set_blocking(job.stdin_fd, False)
            self._loop.watch(job.stdin_fd, write=lambda: self._feed(job))
        deadline = job.started + job.command.timeout_seconds
        job.timer = self._loop.call_at(deadline, lambda: self._time_out(job))

    def _child(self, command: Command, stdin: int, stdout: int, stderr: int) -> None:
        """In the forked child: never returns."""
        profile = self._profile
        try:
            os.setsid()
            for fd, source in enumerate((stdin, stdout, stderr)):
                os.dup2(source, fd)
            system.default_signals()
            if profile.adjust_oom:
                system.preferred_by_oom_killer()
            profile.user.become()
            system.limit_child(profile.rlimits)
            line = command.command
            argv = [profile.shell, "-c", line] if isinstance(line, str) else line
            os.chdir(os.path.join(profile.cwd, command.cwd))
            os.execvpe(argv[0], argv, {**profile.env, **command.env})
        except OSError as error:
            name = error.filename if isinstance(error.filename, str) else command.command[0]
            os.write(2, f"rljob: {name}: {error.strerror}\n".encode("utf-8", "surrogateescape"))
        finally:
            os._exit(127)

    def _drain(self, job: Job, fd: int) -> None:
        """Take what a pipe holds; past the limit it is read and dropped, so that the command goes on."""
        kept = job.outputs[fd]
        for _ in range(16):
            try:
                data = os.read(fd, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                self._loop.watch(fd)
                os.close(fd)
                del job.outputs[fd]
                return
            room = job.command.max_output_bytes - len(kept)
            kept += data[: max(0, room)]
            job.truncated = job.truncated or len(data) > room

    def _feed(self, job: Job) -> None:
        try:
            job.stdin = job.stdin[os.write(job.stdin_fd, job.stdin[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:
            # The command closed its stdin: its right.
            job.stdin = memoryview(b"")
        if not job.stdin:
            self._loop.watch(job.stdin_fd)
            os.close(job.stdin_fd)
            job.stdin_fd = -1

    def _time_out(self, job: Job) -> None:
        job.timed_out = True
        if job.before == frozenset((1,)) and len(self._jobs) == 1:
            # Everything here is this command's; the kernel does it at once, between two forks of a fork bomb.
            _kill(-1)
        else:
            self._kill_family(job)
        late = lambda: self._finish(job, TIMEOUT_EXIT_CODE)  # noqa: E731
        job.timer = self._loop.call_at(self._loop.now() + KILL_SECONDS, late)

    def _kill_family(self, job: Job) -> None:
        """Stop all first: a stopped process starts no other, so with the limit on their number this comes to an end."""
        stopped: set[int] = set()
        while new := self._family(job) - stopped:
            for pid in new:
                _kill(pid, signal.SIGSTOP)
            stopped |= new
        for pid in stopped:
            _kill(pid)

    def _family(self, job: Job) -> set[int]:
        """The command, its group, session and descendants; and orphans that came up while it ran.

        An orphan (its parent ended, PID 1 inherited it) no longer tells whose it was: it is spared where another
        running command's session claims it, or where it was there before.
        """
        table = {pid: stat for pid in pids() if (stat := _stat(pid)) and stat.state != "Z"}
        children: dict[int, list[int]] = {}
        for pid, stat in table.items():
            children.setdefault(stat.parent, []).append(pid)
        others = set(self._jobs) - {job.pid}
        roots = [pid for pid, stat in table.items() if job.pid in (pid, stat.group, stat.session)]
        for pid in children.get(1, []):
            known = pid in job.before or pid in others or table[pid].session in others
            if not known:
                roots.append(pid)
        family: set[int] = set()
        while roots:
            if (pid := roots.pop()) not in family:
                family.add(pid)
                roots += children.get(pid, [])
        return family - {1}

    def reap(self) -> None:
        """Collect every child that has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if job := self._jobs.get(pid):
                code = os.waitstatus_to_exitcode(status)
                self._finish(job, code if code >= 0 else 128 - code)

    def _finish(self, job: Job, exit_code: int) -> None:
        """Answer. Whoever still holds the pipes (a daemon) is not waited for."""
        if self._jobs.pop(job.pid, None) is None:
            return
        for fd in list(job.outputs):
            self._drain(job, fd)
        for fd in [*job.outputs, job.stdin_fd]:
            if fd >= 0:
                self._loop.watch(fd)
                os.close(fd)
        if job.timer is not None:
            job.timer.cancel()
        job.done(
            {
                "exit_code": TIMEOUT_EXIT_CODE if job.timed_out else exit_code,
                "stdout": job.stdout.decode("utf-8", "replace"),
                "stderr": job.stderr.decode("utf-8", "replace"),
                "timed_out": job.timed_out,
                "truncated": job.truncated,
                "seconds": time.monotonic() - job.started,
            }
        )

    def is_busy(self) -> bool:
        """Whether a command runs that somebody waits for."""
        return bool(self._jobs)

    def kill_all(self) -> list[int]:
        """End every process but this one; returns those that would not go."""
        deadline = time.monotonic() + KILL_SECONDS
        while True:
            _kill(-1)
            self.reap()
            left = [pid for pid in pids() if pid != 1]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.001)


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    group: int
    session: int


def pids() -> list[int]:
    """Processes of this sandbox."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> _Stat | None:
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return None
    try:
        text = os.read(fd, 4096)
    except OSError:
        return None
    finally:
        os.close(fd)
    # The name in parentheses may hold anything, parentheses included.
    fields = text.rpartition(b")")[2].split()
    return _Stat(fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]))


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
