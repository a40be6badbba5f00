"""A job whose every episode fails ends and says why; one that merely waits, or drops groups, says so and goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rljob.errors import UserError
from rljob.ledger import DeadLetter
from rljob_trainer.drought import Drought


class Counts:
    """A ledger of which only counts and dead letters are asked."""

    def __init__(self) -> None:
        self.counts = {"dead": 5, "dropped": 0, "completed": 100}
        self.letters: list[DeadLetter] = []

    async def snapshot(self) -> Any:
        return SimpleNamespace(counts=dict(self.counts))

    async def dead_letters(self) -> list[DeadLetter]:
        return self.letters

    def kill(self, count: int) -> None:
        self.counts["dead"] += count
        self.letters.append(
            DeadLetter(
                id="1-0",
                group="t7-0",
                episode="t7-0.1",
                reason="setup: boom",
                evidence="boom\nat x",
                time=0,
            )
        )


class Ticks:
    """A clock that goes on by ten seconds with every look at it."""

    def __init__(self) -> None:
        self.time = 0.0

    def monotonic(self) -> float:
        self.time += 10
        return self.time


@pytest.fixture
def ledger() -> Counts:
    return Counts()


@pytest.fixture
def drought(ledger: Counts) -> Drought:
    return Drought(ledger, 4, Ticks())  # type: ignore[arg-type]


async def test_what_died_before_the_wait_began_is_not_told(drought: Drought) -> None:
    assert await drought.look() == ""


async def test_groups_given_up_are_told_with_the_last_reason(
    drought: Drought, ledger: Counts
) -> None:
    await drought.look()
    ledger.kill(3)
    assert await drought.look() == "; 3 groups given up, the last: setup: boom"


async def test_when_every_group_fails_the_job_ends_with_one_line(
    drought: Drought, ledger: Counts
) -> None:
    await drought.look()
    ledger.kill(4)
    with pytest.raises(UserError, match=r"4 groups in a row failed .* setup: boom; see") as caught:
        await drought.look()
    assert "\n" not in str(caught.value)


async def test_while_some_episodes_complete_the_job_goes_on(
    drought: Drought, ledger: Counts
) -> None:
    await drought.look()
    ledger.kill(400)
    ledger.counts["completed"] += 1
    assert "400 groups given up" in await drought.look()


async def test_dropped_groups_are_told(drought: Drought, ledger: Counts) -> None:
    await drought.look()
    ledger.counts["dropped"] += 9
    assert await drought.look() == "; 9 groups dropped, their rewards agree"
