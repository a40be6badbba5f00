"""Archives of the sandbox, with the rights of the agent's user, one at a time and a little at a time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from rljob_sandbox_pool.guest import pack
from rljob_sandbox_pool.guest.archive import unpack
from rljob_sandbox_pool.guest.loop import Loop
from rljob_sandbox_pool.guest.system import User
from rljob_sandbox_pool.guest.wire import RefusedError

MAX_ARCHIVE_BYTES = 16 * 1024 * 1024
"""Largest archive read: it is in memory twice while it is sent."""
MIN_PART_BYTES = 262_144
SLICE_SECONDS = 0.02
"""How long others wait while an archive is at work."""

_T = TypeVar("_T")
Failed = Callable[[RefusedError | OSError], None]


class _Task(NamedTuple):
    steps: Generator[None, None, Any]
    done: Callable[[Any], None]
    failed: Failed


class Archives:
    """Reads and writes; relative paths start at the workspace."""

    def __init__(self, loop: Loop, user: User, workspace: str) -> None:
        self._loop, self._user, self._workspace = loop, user, workspace
        self._tasks: deque[_Task] = deque()
        # As for files: what /proc/self shows is the guest.
        self._forbidden_device = os.stat("/proc").st_dev

    def pack(
        self,
        path: str,
        max_bytes: int,
        after: str | None,
        done: Callable[[pack.Packed], None],
        failed: Failed,
    ) -> None:
        """See `pack.pack`."""
        max_bytes = max(MIN_PART_BYTES, min(max_bytes, MAX_ARCHIVE_BYTES))
        full = os.path.join(self._workspace, path)
        self._begin(pack.pack(full, max_bytes, after, self._forbidden_device), done, failed)

    def unpack(
        self, path: str, archive: bytes, done: Callable[[int], None], failed: Failed
    ) -> None:
        """See `archive.unpack`; the folder is made where it is missing."""
        full = os.path.join(self._workspace, path)
        self._begin(self._unpack(full, archive), done, failed)

    def cancel(self) -> None:
        """Stop them all: the sandbox is no longer what they were asked of."""
        tasks = list(self._tasks)
        self._tasks.clear()
        for task in tasks:
            task.steps.close()
            task.failed(RefusedError(409, "resetting", "the sandbox was reset meanwhile"))

    def _unpack(self, full: str, archive: bytes) -> Generator[None, None, int]:
        try:
            root = os.open(full, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            os.makedirs(full, exist_ok=True)
            root = os.open(full, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return (yield from unpack(root, archive))
        finally:
            os.close(root)

    def _begin(
        self, steps: Generator[None, None, _T], done: Callable[[_T], None], failed: Failed
    ) -> None:
        self._tasks.append(_Task(steps, done, failed))
        if len(self._tasks) == 1:
            self._loop.call_at(self._loop.now(), self._go_on)

    def _go_on(self) -> None:
        """The first task, for a while."""
        if not self._tasks:
            return
        task, until = self._tasks[0], self._loop.now() + SLICE_SECONDS
        try:
            with self._user.borrowed():
                next(task.steps)
                while self._loop.now() < until:
                    next(task.steps)
        except StopIteration as end:
            self._tasks.popleft()
            task.done(end.value)
        except (RefusedError, OSError) as error:
            self._tasks.popleft()
            task.failed(error)
        if self._tasks:
            self._loop.call_at(self._loop.now(), self._go_on)
