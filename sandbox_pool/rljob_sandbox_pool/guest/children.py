"""Children of the guest: started with limits, reaped, ended with everything that they started."""

from __future__ import annotations

import fcntl
import os
import signal
import termios
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rljob_sandbox_pool.guest import system
from rljob_sandbox_pool.guest.loop import Loop

KILL_SECONDS = 5.0
"""How long a killed process may take to go."""
_ABOVE = 300
"""Descriptors from here on are no child's standard ones, and no shell's own."""

OnExit = Callable[[int], None]
"""Gets the exit code; 128 + signal where a signal ended the child."""


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


@dataclass(frozen=True)
class Program:
    """What a child is to run."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    descriptors: Mapping[int, int]
    """By number in the child: the guest's."""
    complaints: int = 2
    """Where (in the child) is said that it does not start."""
    terminal: int | None = None
    """The descriptor (in the child) that becomes its controlling terminal."""


class Children:
    """Starts them and reaps every one, the orphans that come to PID 1 included."""

    def __init__(self, loop: Loop, profile: Profile) -> None:
        self.profile = profile
        self._alive: dict[int, OnExit] = {}
        loop.on_child(self.reap)

    def start(self, program: Program, on_exit: OnExit) -> int:
        """Fork and run; the pid. Raises OSError."""
        pid = os.fork()
        if pid == 0:
            self._become(program)
        self._alive[pid] = on_exit
        return pid

    def _become(self, program: Program) -> None:
        """In the forked child: never returns."""
        profile = self.profile
        try:
            os.setsid()
            _place(program.descriptors)
            if program.terminal is not None:
                fcntl.ioctl(program.terminal, termios.TIOCSCTTY, 0)
            system.default_signals()
            if profile.adjust_oom:
                system.preferred_by_oom_killer()
            profile.user.become()
            system.limit_child(profile.rlimits)
            os.chdir(os.path.join(profile.cwd, program.cwd))
            os.execvpe(program.argv[0], list(program.argv), {**profile.env, **program.env})
        except OSError as error:
            name = error.filename if isinstance(error.filename, str) else program.argv[0]
            words = f"rljob: {name}: {error.strerror}\n"
            os.write(program.complaints, words.encode("utf-8", "surrogateescape"))
        finally:
            os._exit(127)

    def reap(self) -> None:
        """Collect every child that has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if on_exit := self._alive.pop(pid, None):
                code = os.waitstatus_to_exitcode(status)
                on_exit(code if code >= 0 else 128 - code)

    def forget(self, pid: int) -> None:
        """Nobody waits for it any more."""
        self._alive.pop(pid, None)

    def kill_family(self, owner: int, spared: frozenset[int], *, orphans: bool = True) -> None:
        """End `family`.

        All are stopped first: a stopped process starts no other, so with the limit on their number this ends.
        """
        if spared == frozenset((1,)) and set(self._alive) <= {owner}:
            # Everything here is this one's; the kernel does it at once, between two forks of a fork bomb.
            send(-1, signal.SIGKILL)
            return
        stopped: set[int] = set()
        while new := self.family(owner, spared, orphans=orphans) - stopped:
            for pid in new:
                send(pid, signal.SIGSTOP)
            stopped |= new
        for pid in stopped:
            send(pid, signal.SIGKILL)

    def family(self, owner: int, spared: frozenset[int], *, orphans: bool = True) -> set[int]:
        """A child, its group, session and descendants; and orphans that came up while it ran.

        An orphan (its parent ended, PID 1 inherited it) no longer tells whose it was: it is left out where another
        child's session claims it. Left out are also those `spared`, and what they started.
        """
        table = {pid: stat for pid in pids() if (stat := _stat(pid)) and stat.state != "Z"}
        others = set(self._alive) - {owner}
        roots = [pid for pid, stat in table.items() if owner in (pid, stat.group, stat.session)]
        if orphans:
            inherited = [pid for pid, stat in table.items() if stat.parent == 1]
            roots += [
                pid for pid in inherited if pid not in others and table[pid].session not in others
            ]
        sheltered = _with_descendants(spared - {owner, 1}, table)
        return _with_descendants(roots, table) - sheltered - (spared & {owner}) - {1}

    def kill_all(self) -> list[int]:
        """End every process but this one; returns those that would not go."""
        deadline = time.monotonic() + KILL_SECONDS
        while True:
            send(-1, signal.SIGKILL)
            self.reap()
            left = [pid for pid in pids() if pid != 1]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.001)


def _place(descriptors: Mapping[int, int]) -> None:
    # First out of the way: one that is to be placed may lie where another belongs.
    above = {
        number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for number, fd in descriptors.items()
    }
    for number, fd in above.items():
        os.dup2(fd, number)


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    group: int
    session: int


def pids() -> list[int]:
    """Processes of this sandbox."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def send(pid: int, number: int) -> bool:
    """Send a signal, to a group where `pid` is negative; False: there is nobody."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def _with_descendants(roots: Iterable[int], table: Mapping[int, _Stat]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, stat in table.items():
        children.setdefault(stat.parent, []).append(pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        if (pid := waiting.pop()) not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


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
