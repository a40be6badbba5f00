"""A worker whose event loop stands still ends, and says where."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from rljob.errors import MachineError
from rljob_rollout_worker.watchdog import STALL_SECONDS, VARIABLE, Watchdog, stall_seconds

BLOCKS = """
import asyncio, time
from rljob import telemetry
from rljob_rollout_worker.watchdog import Watchdog

async def blocking_reward():
    time.sleep(60)

async def main():
    with Watchdog(1.0, lambda: "reward 1"):
        await asyncio.sleep(0.1)
        await asyncio.create_task(blocking_reward(), name="episode-t0-0.0.1")

telemetry.configure_logging("worker-0")
asyncio.run(main())
"""


def test_a_loop_that_is_blocked_ends_the_process_with_its_stack_and_one_line() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKS], capture_output=True, text=True, timeout=50, check=False
    )
    *stack, line = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert any("in blocking_reward" in frame for frame in stack)
    assert "event=event_loop_stalled" in line
    assert 'doing="reward 1"' in line
    assert 'task="episode-t0-0.0.1 blocking_reward"' in line


async def test_a_loop_that_runs_or_is_held_up_a_little_is_left_alone() -> None:
    ends: list[int] = []
    with Watchdog(2.0, lambda: "", ends.append):
        time.sleep(0.5)
        await asyncio.sleep(0.2)
    assert not ends
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]


async def test_without_a_limit_nothing_is_watched() -> None:
    with Watchdog(0.0, lambda: ""):
        assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]


def test_the_limit_is_in_the_environment() -> None:
    assert stall_seconds({}) == STALL_SECONDS
    assert stall_seconds({VARIABLE: "2.5"}) == 2.5
    with pytest.raises(MachineError, match="RLJOB_WORKER_STALL_SECONDS is 'soon'; give seconds"):
        stall_seconds({VARIABLE: "soon"})
