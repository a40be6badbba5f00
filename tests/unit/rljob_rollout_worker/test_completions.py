"""The completion log: durable, append-only, sound after a kill."""

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from rljob_rollout_worker.completions import CompletionLine, CompletionLog, read_completions


def line(number: int) -> CompletionLine:
    return CompletionLine(
        time=1.0,
        episode=f"t{number}-0.0",
        attempt=1,
        answer="sent",
        reward=0.5,
        outcome="completed",
        sha256="ab",
    )


async def test_lines_are_appended_across_restarts(tmp_path: Path) -> None:
    path = tmp_path / "completions" / "w.jsonl"
    for number in range(2):
        log = CompletionLog(path)
        await log.append(line(number))
        await log.aclose()
    assert read_completions(path) == [line(0), line(1)]


async def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_bytes(msgspec.json.encode(line(0)) + b'\n{"time": 1.0, "epis')
    log = CompletionLog(path)
    await log.append(line(1))
    await log.aclose()
    assert read_completions(path) == [line(0), line(1)]


async def test_one_fsync_serves_all_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    log = CompletionLog(tmp_path / "w.jsonl")
    await asyncio.gather(*(log.append(line(i)) for i in range(50)))
    assert len(synced) < 10
    assert synced[-1] == (tmp_path / "w.jsonl").stat().st_size
    await log.aclose()


async def test_append_returns_after_the_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda _fd: events.append("fsync"))
    log = CompletionLog(tmp_path / "w.jsonl")
    await log.append(line(0))
    events.append("returned")
    assert events == ["fsync", "returned"]
    await log.aclose()
