"""The pure policies, as tables."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_operator.policies.progress import Progress, Told, blame
from rljob_operator.policies.restart import Action, Ended, decide, pause_seconds
from rljob_operator.policies.resume import changed_keys
from tests.unit.rljob_operator.conftest import make_job


def ended(**fields: Any) -> Ended:
    base: dict[str, Any] = {
        "name": "worker-0", "role": "worker", "code": 1, "may_end": False, "ever_ready": True, "failures_in_row": 0,
    }  # fmt: skip
    return Ended(**(base | fields))


@pytest.mark.parametrize(
    ("fields", "action", "counted"),
    [
        ({"code": 0, "may_end": True}, Action.DONE, False),
        ({"code": 0}, Action.RESTART, True),
        ({"code": 1}, Action.RESTART, True),
        ({"code": 137}, Action.RESTART, True),
        ({"code": 1, "failures_in_row": 2}, Action.RESTART, True),
        ({"code": 1, "failures_in_row": 3}, Action.FAIL, True),
        ({"code": 137, "failures_in_row": 3}, Action.FAIL, True),
        ({"code": 2}, Action.FAIL, True),
        ({"code": 3, "role": "trainer"}, Action.RESTART, False),
        ({"code": 3, "role": "trainer", "failures_in_row": 9}, Action.RESTART, False),
        ({"code": 3, "role": "trainer", "fenced_in_row": 1}, Action.RESTART, True),
        (
            {"code": 3, "role": "trainer", "fenced_in_row": 1, "failures_in_row": 3},
            Action.FAIL,
            True,
        ),
        ({"code": 1, "role": "engine", "ever_ready": False}, Action.FAIL, True),
        ({"code": 137, "role": "engine", "ever_ready": False}, Action.RESTART, True),
        (
            {"code": 1, "role": "engine", "ever_ready": False, "killed_for": "not ready"},
            Action.RESTART,
            True,
        ),
        ({"code": 1, "role": "engine", "ever_ready": True}, Action.RESTART, True),
    ],
)
def test_what_happens_when_a_component_has_ended(
    fields: dict[str, Any], action: Action, counted: bool
) -> None:
    decision = decide(ended(**fields), backoff_limit=3)
    assert (decision.action, decision.counted) == (action, counted)


def test_bad_input_of_a_component_is_bad_input_of_the_run() -> None:
    decision = decide(ended(code=2, last_lines=("noise", "x: wrong; fix it")), backoff_limit=3)
    assert (decision.exit_code, decision.message) == (2, "x: wrong; fix it")


def test_what_vllm_refuses_is_told_with_the_key_it_comes_from() -> None:
    decision = decide(
        ended(role="engine", name="engine-0", code=2, last_lines=("error: no --x",)),
        backoff_limit=3,
    )
    assert (
        decision.message
        == "spec.rollout.engine: engine-0 refused to start: error: no --x; correct it"
    )


def test_the_pause_doubles_and_has_an_end() -> None:
    assert [pause_seconds(n) for n in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert pause_seconds(10_000) == 30


def test_progress_is_a_counter_that_moves() -> None:
    progress = Progress().seen(1, now_seconds=10)
    assert not progress.seen(1, now_seconds=19).stalled(19, deadline_seconds=10)
    assert progress.seen(1, now_seconds=21).stalled(21, deadline_seconds=10)
    assert not progress.seen(2, now_seconds=21).stalled(22, deadline_seconds=10)


@pytest.mark.parametrize(
    ("states", "told", "sentence"),
    [
        (
            {"trainer": "ready", "engine-0": "starting"},
            {"trainer": Told("groups", 1)},
            "engine-0 is starting",
        ),
        (
            {"trainer": "backing off", "store": "starting", "worker-0": "ready"},
            {},
            "store is starting, trainer is backing off",
        ),
        (
            {"gateway-0": "not answering"},
            {"worker-0": Told("engine", 1)},
            "gateway-0 is not answering",
        ),
        (
            {"trainer": "ready", "worker-0": "ready"},
            {"trainer": Told("groups", 1), "worker-0": Told("", 99)},
            "worker-0 has said nothing for 99 s",
        ),
        (
            {"trainer": "ready", "worker-0": "ready"},
            {"trainer": Told("groups: 1 of 8 ready", 1), "worker-0": Told("sandboxes", 2)},
            "trainer waits for groups: 1 of 8 ready, worker-0 waits for sandboxes",
        ),
        ({"trainer": "ready"}, {}, "no component says what it waits for"),
    ],
)
def test_a_stall_is_blamed_on_whom_it_hangs(
    states: dict[str, str], told: dict[str, Told], sentence: str
) -> None:
    assert blame(states, told) == sentence


def test_a_resumed_run_may_have_more_steps_but_no_other_groups() -> None:
    old = make_job()
    more = make_job(trainer={"backend": "simulated", "steps": 9, "groupsPerStep": 2})
    other = make_job(trainer={"backend": "simulated", "steps": 3, "groupsPerStep": 4})
    assert changed_keys(old, more) == []
    assert [error.path for error in changed_keys(old, other)] == ["spec.trainer.groupsPerStep"]
