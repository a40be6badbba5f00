"""The worker's own append-only record of what it handed over: one of the three sides of the audit.

    write `sent` ─fsync─► ledger.complete ─answer─► write the answer ─fsync─► forget the payload

After a `kill -9` at any point the log still tells the truth:
- every completion the ledger ever accepted has a `sent` line, since that is durable before the call
  is made: a trained record without one was made up by somebody;
- every `accepted` line names a completion that the ledger did accept, since it is written only after
  the answer: one that is neither outstanding nor archived nor dead-lettered is lost;
- a `sent` line without an answer means that the worker died in between: both endings are right, so
  it proves nothing.

A line torn by a full disk or a power cut is closed with a newline at the next start; readers skip
lines that do not decode. Lines are appended with one `write` each and made durable in groups: one
fsync, on a thread, serves all that wait for it.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Literal

import msgspec

Answer = Literal["sent", "accepted", "already_done"]


class CompletionLine(msgspec.Struct, kw_only=True):
    """One line of `completions/<worker>.jsonl`."""

    time: float
    """Seconds since the epoch."""
    episode: str
    attempt: int
    answer: Answer
    reward: float
    outcome: str
    sha256: str
    """Of the packed trajectory."""


class CompletionLog:
    """Appends lines; `append` returns when the line is on the disk."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._written = self._synced = 0
        self._syncing: asyncio.Task[None] | None = None
        _close_torn_line(self._fd)

    async def append(self, line: CompletionLine) -> None:
        """Write a line and wait until it is durable."""
        os.write(self._fd, msgspec.json.encode(line) + b"\n")
        self._written += 1
        mine = self._written
        while self._synced < mine:
            if self._syncing is None or self._syncing.done():
                self._syncing = asyncio.create_task(self._sync(), name="completions-fsync")
            # shielded: one waiter's cancellation must not take the fsync from the others
            await asyncio.shield(self._syncing)

    async def _sync(self) -> None:
        upto = self._written
        await asyncio.to_thread(os.fsync, self._fd)
        self._synced = upto

    async def aclose(self) -> None:
        """Wait for a running fsync, then close the file."""
        if self._syncing is not None:
            await self._syncing
        os.close(self._fd)


def _close_torn_line(fd: int) -> None:
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        os.write(fd, b"\n")


def read_completions(path: Path) -> list[CompletionLine]:
    """The lines that decode, in order."""
    lines: list[CompletionLine] = []
    for raw in path.read_bytes().splitlines():
        try:
            lines.append(msgspec.json.decode(raw, type=CompletionLine))
        except msgspec.DecodeError:
            continue
    return lines
