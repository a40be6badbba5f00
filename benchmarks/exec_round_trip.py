"""What a command costs in a sandbox, beyond the command: `true`, and an interpreter that does nothing.

    here ─► client ─► guest ─► fork, exec, wait ─► answer          bare      subprocess.run on this machine
                        └────► a shell that is there ─► answer     SWE-ReX   its LocalRuntime, without a sandbox:
                                                                             execute, and a session of its shell

SWE-ReX (benchmarks/swe_rex.py) is left out where it cannot be installed. Rounds take turns, so that a busy moment of
the machine meets everybody. Beside exec through an API server: `make bench NAME=cluster_claims`.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from benchmarks import swe_rex
from benchmarks.figure import Figure
from benchmarks.local_pool import POOL, SEED, LocalPool, local_pool, percentile
from rljob import sandbox_shells
from rljob.sandbox_client import ClaimedSandbox
from rljob.sandbox_shells import Shell

GOAL_MS = 5.0
"""At most so much above the bare command, at the median."""
BARE = "subprocess"
PAIRS = (
    ("exec", BARE),
    ("exec", "SWE-ReX execute"),
    ("shell", BARE),
    ("shell", "SWE-ReX session"),
)
"""Ways of ours, and what each stands beside."""
_PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin") or "python3"
COMMANDS = {"true": ["true"], "python": [_PYTHON, "-c", "pass"]}
"""By name in the figures; each is both in a sandbox and here."""


class Size(NamedTuple):
    """How much is measured."""

    rounds: int
    per_round: int
    """Commands of each kind in a row."""
    with_swe_rex: bool = True


FULL = Size(rounds=10, per_round=20)
SHORT = Size(rounds=2, per_round=3, with_swe_rex=False)

Way = Callable[[Sequence[str], int], Awaitable[list[float]]]
"""Runs a command so many times; the milliseconds that each took."""


def figures(size: Size = FULL) -> Iterator[Figure]:
    """By command and comparator."""
    with ExitStack() as stack:
        others: dict[str, Way] = {BARE: bare}
        if size.with_swe_rex and (peer := stack.enter_context(swe_rex.driver())):
            others |= {f"SWE-ReX {way}": peer.way(way) for way in swe_rex.WAYS}
        pool = stack.enter_context(local_pool(warm=1, max=1, ready=1))
        measured = asyncio.run(_measure(pool, size, others))
    yield from compare(measured)


def compare(measured: dict[str, dict[str, list[float]]]) -> Iterator[Figure]:
    """Milliseconds by way and command."""
    for ours, other in PAIRS:
        for command in COMMANDS:
            if not measured.get(other, {}).get(command):
                continue  # not installed, or not one succeeded
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                value, beside = (percentile(measured[w][command], share) for w in (ours, other))
                is_goal = (ours, other, name) == ("exec", BARE, "p50")
                yield Figure(
                    name=f"{ours}_{command}_{name}",
                    value=value,
                    unit="ms",
                    comparator=other,
                    comparator_value=beside,
                    goal=f"at most {GOAL_MS:g} ms above the comparator" if is_goal else "",
                    holds=value - beside <= GOAL_MS if is_goal else None,
                    seed=SEED,
                )


async def _measure(
    pool: LocalPool, size: Size, others: dict[str, Way]
) -> dict[str, dict[str, list[float]]]:
    client = pool.client()
    async with (
        client.claim(POOL) as box,
        sandbox_shells.shell(box, cwd=None, env=None, pty=False, rows=24, columns=80) as shell,
    ):
        ways = {"exec": in_sandbox(box), "shell": in_shell(shell), **others}
        times = {way: {command: list[float]() for command in COMMANDS} for way in ways}
        for _ in range(size.rounds):
            for name, way in ways.items():
                for command, argv in COMMANDS.items():
                    times[name][command] += await way(argv, size.per_round)
    await client.aclose()
    return times


async def bare(argv: Sequence[str], number: int) -> list[float]:
    """On this machine."""
    times: list[float] = []
    for _ in range(number):
        began = time.perf_counter()
        subprocess.run(argv, capture_output=True, check=True)  # noqa: ASYNC221 (alone in its loop)
        times.append(1000 * (time.perf_counter() - began))
    return times


def in_shell(shell: Shell) -> Way:
    """As a line of a shell in a claimed sandbox."""

    async def run(argv: Sequence[str], number: int) -> list[float]:
        times: list[float] = []
        for _ in range(number):
            began = time.perf_counter()
            result = await shell.run(shlex.join(argv))
            times.append(1000 * (time.perf_counter() - began))
            if result.exit_code:
                raise RuntimeError(f"{argv}: {result.output}")
        return times

    return run


def in_sandbox(box: ClaimedSandbox) -> Way:
    """In a claimed sandbox."""

    async def run(argv: Sequence[str], number: int) -> list[float]:
        times: list[float] = []
        for _ in range(number):
            began = time.perf_counter()
            result = await box.exec(argv)
            times.append(1000 * (time.perf_counter() - began))
            if result.exit_code:
                raise RuntimeError(f"{argv}: {result.stderr}")
        return times

    return run
