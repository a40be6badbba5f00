"""Back to pristine, and proof of it.

    kill everything → empty folders, put back what the image had → compare with what was seen at boot → canary

A difference is evidence: the sandbox is not used again.
"""

from __future__ import annotations

import os
import resource
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rljob_sandbox_pool.guest.checks import Command
from rljob_sandbox_pool.guest.folders import FOLDER, empty, flags, set_flags
from rljob_sandbox_pool.guest.ports import listeners
from rljob_sandbox_pool.guest.system import User
from rljob_sandbox_pool.guest.writable import Writable

MAX_NAMED = 5
CANARY_SECONDS = 10.0
CANARY_BYTES = 65_536
_COMPARED = ("exit_code", "stdout", "stderr", "truncated")
_PORT_TRIES, _PORT_SECONDS = 25, 0.02
"""How often and after what pause it is asked again who listens: a socket that was in flight goes a moment later."""
_IPC_TABLES = ("/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg")


@dataclass(frozen=True)
class Snapshot:
    """What a reset must bring back."""

    mounts: bytes
    folders: dict[str, tuple[int, ...]]
    """Per writable folder: mode, owner, group, entries, blocks and inodes in use."""
    ipc: int
    """System V objects."""
    ports: frozenset[str]
    """Sockets at which something can be reached."""
    guest: tuple[object, ...]
    """Its limits, priority, scheduling and place in the queue for memory: whoever runs as the same user could change
    them."""
    sealed: dict[str, object]
    """Per file that nobody should have touched, or folder of such files: all that a touch changes. With a slash at its
    end: what lies in the folder, whatever happens below."""

    @classmethod
    def take(
        cls, folders: Sequence[str], shared: Sequence[str] = (), sealed: Sequence[str] = ()
    ) -> Snapshot:
        """Look. Of `shared` folders the file system is not theirs alone: what is in use there says nothing."""
        kinds = sorted({getattr(resource, name) for name in dir(resource) if name[:7] == "RLIMIT_"})
        return cls(
            mounts=_read("/proc/self/mountinfo"),
            folders={path: _folder_facts(path, shared=path in shared) for path in folders},
            sealed={path: _seal(path) for path in sealed},
            ports=listeners(),
            ipc=sum(max(0, _read(path).count(b"\n") - 1) for path in _IPC_TABLES),
            guest=(
                *(resource.getrlimit(kind) for kind in kinds),
                os.getpriority(os.PRIO_PROCESS, 0),
                os.sched_getscheduler(0),
                _read("/proc/self/oom_score_adj"),
            ),
        )

    def differences(self, now: Snapshot) -> list[str]:
        """In words; empty: none."""
        found: list[str] = []
        if now.mounts != self.mounts:
            found.append("the mounts have changed")
        if now.ipc != self.ipc:
            found.append(f"{now.ipc} System V objects are left")
        if now.guest != self.guest:
            found.append("the guest's own limits, priority or scheduling have changed")
        found += [f"somebody listens: {port}" for port in sorted(now.ports - self.ports)]
        for path, facts in self.folders.items():
            if now.folders[path] != facts:
                found.append(f"{path} is {now.folders[path]}, was {facts}")
        found += [
            f"{path} was touched" for path in self.sealed if now.sealed[path] != self.sealed[path]
        ]
        return found


def _seal(path: str) -> object:
    if path.endswith("/"):
        found = [(name, os.lstat(path + name)) for name in sorted(os.listdir(path))]
        return [(name, info.st_ino, info.st_mode, info.st_uid, info.st_gid) for name, info in found]
    info = os.lstat(path)
    facts = (info.st_ino, info.st_mode, info.st_size, info.st_ctime_ns)
    inside = sorted(os.listdir(path)) if stat.S_ISDIR(info.st_mode) else []
    return (facts, [(name, _seal(os.path.join(path, name))) for name in inside])


def _folder_facts(path: str, *, shared: bool) -> tuple[int, ...]:
    info, space = os.stat(path), os.statvfs(path)
    # Blocks and inodes show what no listing does: files that are unlinked but open.
    used = (0, 0) if shared else (space.f_blocks - space.f_bfree, space.f_files - space.f_ffree)
    return (
        info.st_mode,
        info.st_uid,
        info.st_gid,
        len(os.listdir(path)),
        *used,
        len(os.listxattr(path)),
    )


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        data = b""
        while more := os.read(fd, 65_536):
            data += more
        return data
    finally:
        os.close(fd)


def empty_folder(path: str, user: User, wanted_flags: int) -> None:
    """Remove all that is in it, and what its owner attached to it or set of it. Raises OSError."""
    with user.borrowed():
        at = os.open(path, FOLDER)
        try:
            info = os.fstat(at)
            if info.st_uid == os.geteuid():
                for name in os.listxattr(at):
                    os.removexattr(at, name)
                set_flags(at, wanted_flags)
            empty(at)
        finally:
            os.close(at)


class Reset:
    """Empties and verifies the writable folders of this sandbox."""

    def __init__(
        self,
        user: User,
        folders: Sequence[str],
        shared: Sequence[str] = (),
        sealed: Sequence[str] = (),
        writable: Sequence[Writable] = (),
    ) -> None:
        self._user, self._folders, self._shared, self._sealed = user, folders, shared, sealed
        self._writable = writable
        self._modes = {path: stat.S_IMODE(os.stat(path).st_mode) for path in folders}
        self._flags = {path: _flags(path) for path in folders}
        self._times = {path: os.stat(path).st_mtime_ns for path in folders}
        self._affinity = os.sched_getaffinity(0)
        self._pristine = self._look()
        self._put_times()

    def _look(self) -> Snapshot:
        # Put right, not compared: a node gives the CPUs of a sandbox to others and back as it likes.
        with suppress(OSError):
            os.sched_setaffinity(0, self._affinity)
        return Snapshot.take(self._folders, self._shared, self._sealed)

    def run(self) -> list[str]:
        """After every other process has gone. Returns the evidence that it failed."""
        try:
            for path in self._folders:
                self._restore(path)
        except OSError as error:
            return [f"{error.filename}: {error.strerror}"]
        found = [words for writable in self._writable for words in writable.restore()]
        now = self._look()
        for _ in range(_PORT_TRIES):
            if now.ports <= self._pristine.ports:
                break
            time.sleep(_PORT_SECONDS)
            now = self._look()
        self._put_times()
        return found + self._pristine.differences(now)

    def _put_times(self) -> None:
        """An owner can set them as he likes: to what he has to tell the next one. Last, since to look changes them."""
        with self._user.borrowed():
            for path, time_ns in self._times.items():
                if os.stat(path).st_uid == os.geteuid():
                    os.utime(path, ns=(time_ns, time_ns))

    def _restore(self, path: str) -> None:
        info = os.stat(path)
        if stat.S_IMODE(info.st_mode) != self._modes[path]:
            with self._user.borrowed():
                os.chmod(path, self._modes[path])
        empty_folder(path, self._user, self._flags[path])


def _flags(path: str) -> int:
    at = os.open(path, FOLDER)
    try:
        return flags(at)
    finally:
        os.close(at)


def survivors(pids: Sequence[int]) -> str:
    """Processes that were killed and are still there, as evidence."""
    names = [
        f"{pid} {_read(f'/proc/{pid}/comm').decode('utf-8', 'replace').strip()}" for pid in pids
    ]
    return f"{len(pids)} processes do not end: {', '.join(names[:MAX_NAMED])}"


class Canary:
    """A command whose result is known: after a reset it has to be the same."""

    def __init__(self, command: str) -> None:
        self.command = Command(command, "", {}, b"", CANARY_SECONDS, CANARY_BYTES)
        self._expected: dict[str, Any] = {}

    def expect(self, result: dict[str, Any]) -> str:
        """The first result; returns why it is none, or nothing."""
        self._expected = result
        if result["timed_out"]:
            return f"it does not end within {CANARY_SECONDS:g} s"
        return f"it does not run: {result['stderr']:.200}" if result["exit_code"] == 127 else ""

    def differences(self, result: dict[str, Any]) -> list[str]:
        """In words; empty: none."""
        if result["timed_out"]:
            return [f"the canary does not end within {CANARY_SECONDS:g} s"]
        names = [name for name in _COMPARED if result[name] != self._expected[name]]
        return [
            f"the canary's {name} is {result[name]!r:.200}, was {self._expected[name]!r:.200}"
            for name in names
        ]
