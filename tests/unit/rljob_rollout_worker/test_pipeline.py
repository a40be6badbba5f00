"""The dispatcher over fakes: everything completes, nothing leaks, every failure ends where it should."""

from collections.abc import Callable
from typing import Any

from rljob.codec import unpack
from rljob.testing.ledger import FakeLedger

Make = Callable[..., Any]


async def test_every_lease_becomes_a_completion(house: Make) -> None:
    home = house(ledger=FakeLedger(8, group_size=4))
    await home.run()
    assert len(home.ledger.completed) == 32
    assert {info.reward for _, info in home.ledger.completed.values()} == {1.0}
    assert home.ledger.leased == {}


async def test_a_trajectory_says_what_happened(house: Make) -> None:
    home = house(ledger=FakeLedger(1))
    await home.run()
    ((payload, info),) = home.ledger.completed.values()
    record = unpack(payload)
    assert (record.episode, record.attempt, record.outcome, record.reward) == (
        "t0-0.0",
        1,
        "completed",
        1.0,
    )
    assert (record.turns, record.tool_calls, record.task, record.worker) == (
        2,
        2,
        "shell",
        "worker-0",
    )
    assert record.metadata["kind"] == "lookup"
    assert record.metadata["submitted"] == record.metadata["answer"]
    assert set(record.stage_seconds) == {"acquire", "setup", "run", "reward", "engine_wait"}
    assert (info.min_version, info.max_version, info.turns) == (0, 0, 2)
    assert info.action_tokens == record.num_action_tokens > 0
