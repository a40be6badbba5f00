"""What a lease becomes: rows, overrides, sampling, prompts, fresh sandboxes, priorities, reports."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rljob.codec import unpack
from rljob.errors import ManifestError
from rljob.gateway import SessionSampling
from rljob.ids import PolicyVersion
from rljob.testing.chat import FakeGateway, call
from rljob.testing.ledger import FakeLedger
from rljob.testing.sandbox import FakeBroker
from rljob_rollout_worker.worker import limits_of

Make = Callable[..., Any]


def records(home: Any) -> list[Any]:
    return [unpack(payload) for payload, _ in home.ledger.completed.values()]


async def test_validation_is_sampled_its_own_way(house: Make) -> None:
    home = house(ledger=FakeLedger(1, validation=True))
    await home.run()
    assert home.gateway.specs[0].sampling == SessionSampling(
        temperature=0.5, top_p=1.0, max_tokens_per_turn=9
    )
    assert records(home)[0].sampling["temperature"] == 0.5


async def test_training_is_sampled_as_the_rollout_says(house: Make) -> None:
    home = house(ledger=FakeLedger(1))
    await home.run()
    (spec,) = home.gateway.specs
    assert (spec.sampling.temperature, spec.max_context_tokens) == (1.0, 512)
    assert spec.session_id.startswith("t0-0.0.1.")


async def test_an_attempt_that_comes_again_gets_a_session_of_its_own(house: Make) -> None:
    first, second = house(ledger=FakeLedger(1)), house(ledger=FakeLedger(1))
    await first.run()
    await second.run()
    assert first.gateway.specs[0].session_id != second.gateway.specs[0].session_id


async def test_a_row_overrides_turns_image_and_env(house: Make) -> None:
    overrides = {"maxTurns": 1, "image": "debian", "env": {"B": "2"}}
    tasks = [{"name": "shell", "type": "shell_files", "sandbox": {"pool": "p", "env": {"A": "1"}}}]
    seen: list[Any] = []

    def shell(box: Any, _line: str) -> str:
        seen.append((box.image, box.env))
        return "key=value\n"

    home = house(
        ledger=FakeLedger(1),
        row={"overrides": overrides},
        spec={"tasks": tasks},
        broker=FakeBroker(shell=shell),
    )
    await home.run()
    assert seen == [("debian", {"A": "1", "B": "2"})]
    assert (records(home)[0].outcome, records(home)[0].turns) == ("max_turns", 1)


async def test_the_configured_system_prompt_opens_every_episode(house: Make) -> None:
    opened: list[Any] = []

    def turn(messages: Any) -> Any:
        opened.append(list(messages[:2]))
        return call("submit", answer="x")

    tasks = [
        {
            "name": "shell",
            "type": "shell_files",
            "sandbox": {"pool": "default"},
            "agent": {"systemPrompt": "Be brief."},
        }
    ]
    prompt = [{"role": "system", "content": "old"}, {"role": "user", "content": "Q"}]
    home = house(
        ledger=FakeLedger(1),
        gateway=FakeGateway(turn),
        spec={"tasks": tasks},
        row={"prompt": prompt},
    )
    await home.run()
    assert opened[0] == [{"role": "system", "content": "Be brief."}, prompt[1]]


@pytest.mark.parametrize("size", [1, 2])
async def test_a_fresh_sandbox_is_claimed_after_the_first_was_released(
    house: Make, size: int
) -> None:
    tasks = [
        {
            "name": "shell",
            "type": "shell_files",
            "sandbox": {"pool": "default"},
            "reward": {"freshSandbox": True},
        }
    ]
    home = house(
        ledger=FakeLedger(40), broker=FakeBroker(size=size), spec={"tasks": tasks}, rows=40
    )
    await home.run()
    assert home.broker.num_claims == 80
    assert home.broker.most_claimed <= size
    assert sorted(home.broker.priorities) == [0] * 40 + [10] * 40
    assert {record.reward for record in records(home)} == {1.0}
    assert home.ledger.failures == []


async def test_validation_goes_before_training_and_old_groups_before_new(house: Make) -> None:
    home = house(ledger=FakeLedger(6), broker=FakeBroker(size=0))
    running = asyncio.create_task(home.run())
    while len(home.worker.pipeline.attempts) < 6:
        await asyncio.sleep(0.01)
    first, *rest = sorted(home.worker.pipeline.attempts, key=lambda a: a.priority)
    assert first.lease.row_index == 0
    assert [a.lease.row_index for a in rest] == [1, 2, 3, 4, 5]
    assert first.priority > (0, 99)
    assert home.worker.presence.report().waiting_for == "sandboxes"
    home.worker.stop()
    home.worker.stop()
    await running


async def test_the_report_says_what_runs_and_what_is_waited_for(house: Make) -> None:
    home = house(ledger=FakeLedger(3))
    home.engine.current = None
    running = asyncio.create_task(home.run())
    while not home.ledger.reports:
        await asyncio.sleep(0.01)
    assert home.ledger.reports[0].waiting_for == "engine: it starts"
    assert home.ledger.calls["lease"] == 0, "no version, no lease"
    home.engine.current = PolicyVersion(1, 0)
    await running
    report = home.worker.presence.report()
    assert report.facts["completed"] == 3
    assert report.facts["running"] == 0
    assert float(report.facts["tokens_per_second"]) > 0


async def test_what_an_earlier_start_had_claimed_is_given_back(house: Make) -> None:
    home = house(ledger=FakeLedger(1))
    (home.artifacts / "claims").mkdir(exist_ok=True)
    (home.artifacts / "claims" / "worker-0.txt").write_text("+old-1\n+old-2\n-old-1\n")
    await home.run()
    assert home.broker.returned == ["old-2"]


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ({"type": "shell_file"}, "spec.tasks[0].type: unknown task type 'shell_file'"),
        ({"options": {"x": 1}}, "spec.tasks[0].options: shell_files refuses its options"),
        ({"agent": {"name": "reakt"}}, "spec.tasks[0].agent.name: unknown agent 'reakt'"),
        ({"agent": {"tools": [{"name": "b:B"}]}}, "spec.tasks[0].agent.tools[0].name: tool 'b:B'"),
        ({"agent": {"tools": [{"name": "bash"}] * 2}}, "two tools call themselves 'bash'"),
        ({"reward": {"name": "no"}}, "spec.tasks[0].reward.name: unknown reward 'no'"),
        ({"reward": {"name": "math:pi"}}, "spec.tasks[0].reward.name: reward 'math:pi' is a float"),
        ({"reward": {"name": "builtins:dict"}}, "reward.name: builtins:dict makes a dict, which"),
    ],
)
async def test_a_wrong_plugin_is_refused_before_anything_is_leased(
    house: Make, task: dict[str, Any], problem: str
) -> None:
    base = {"name": "shell", "type": "shell_files", "sandbox": {"pool": "default"}}
    with pytest.raises(ManifestError) as caught:
        house(spec={"tasks": [base | task]})
    assert problem in str(caught.value)


async def test_a_worker_leases_no_more_than_could_get_a_sandbox(house: Make) -> None:
    spec = {
        "rollout": {"maxConcurrentEpisodes": 100},
        "sandboxPools": [{"name": "default", "max": 6}],
    }
    home = house(spec=spec, ledger=FakeLedger(20))
    assert limits_of(home.job).capacity == 6
    await home.run()
    assert home.ledger.most_leased == 6


@pytest.mark.parametrize(
    ("changes", "capacity"),
    [
        ({"replicas": 4}, 25),
        ({"replicas": 4, "minReplicas": 2, "maxReplicas": 10}, 50),
        ({"minReplicas": 3, "maxReplicas": 10}, 34),
    ],
)
async def test_a_worker_s_share_is_that_of_the_fewest_that_may_be_up(
    house: Make, changes: dict[str, int], capacity: int
) -> None:
    spec = {
        "rollout": {"maxConcurrentEpisodes": 100, **changes},
        "sandboxPools": [{"name": "default", "max": 500}],
    }
    assert limits_of(house(spec=spec).job).capacity == capacity
