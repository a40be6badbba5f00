"""What a record can be asked."""

from rljob.trajectory import Chain, Trajectory, VersionSpan


def record(*chains: Chain) -> Trajectory:
    return Trajectory(
        job="j",
        episode="t0-0.0",
        attempt=1,
        task="t",
        reward=1.0,
        outcome="completed",
        chains=list(chains),
        turns=1,
        tool_calls=0,
        started_at=0.0,
        worker="w",
        sandbox="s",
        model="m",
        row_index=0,
    )


def chain(length: int, spans: list[VersionSpan]) -> Chain:
    actions = sum(span.length for span in spans)
    return Chain(
        tokens=[0] * length,
        prompt_length=1,
        action_mask=[False] * (length - actions) + [True] * actions,
        logprobs=[-1.0] * actions,
        version_spans=spans,
        finish_reason="stop",
    )


def test_tokens_and_versions_are_counted_over_all_chains() -> None:
    both = record(
        chain(10, [VersionSpan(6, 2, 1, 4), VersionSpan(8, 2, 1, 5)]),
        chain(5, [VersionSpan(3, 2, 2, 3)]),
    )
    assert (both.num_tokens, both.num_action_tokens, both.version_range) == (15, 6, (3, 5))


def test_a_record_without_actions_has_no_version() -> None:
    assert record(chain(4, [])).version_range == (-1, -1)
    assert record().num_tokens == 0
