"""The record that all benchmarks share: 32 K tokens of a long agent episode, 22 % of them sampled.

Ids are uniform over a vocabulary of 151,936: no packing can do better on the ids than 17.2 bits, so the sizes below are
the worst case. Real text packs smaller.
"""

from __future__ import annotations

import numpy as np

from rljob.trajectory import Chain, Trajectory, VersionSpan

SEED = 7
NUM_TOKENS = 32_768
VOCABULARY = 151_936
TURNS = 40
PROMPT_TOKENS = 1_000
TURN_TOKENS = 780
"""Tokens from one assistant turn to the next: its action and what the tools answered."""
ACTION_TOKENS = 180
"""Sampled tokens per turn; 40 of them are 22 % of the record."""


def mixed_trajectory(seed: int = SEED) -> Trajectory:
    """One finished episode; the policy changed every ten turns."""
    rng = np.random.default_rng(seed)
    starts = [PROMPT_TOKENS + TURN_TOKENS * turn for turn in range(TURNS)]
    mask = [False] * NUM_TOKENS
    for start in starts:
        mask[start : start + ACTION_TOKENS] = [True] * ACTION_TOKENS
    chain = Chain(
        tokens=rng.integers(0, VOCABULARY, NUM_TOKENS).tolist(),
        prompt_length=PROMPT_TOKENS,
        action_mask=mask,
        logprobs=(-rng.exponential(0.7, TURNS * ACTION_TOKENS)).astype(np.float32).tolist(),
        version_spans=[
            VersionSpan(start, ACTION_TOKENS, 1, 3 + turn // 10)
            for turn, start in enumerate(starts)
        ],
        finish_reason="stop",
    )
    return Trajectory(
        job="benchmark",
        episode="t12-0.3",
        attempt=1,
        task="files",
        reward=1.0,
        reward_parts={"answer": 1.0},
        outcome="completed",
        chains=[chain],
        turns=TURNS,
        tool_calls=TURNS - 1,
        stage_seconds={"acquire": 0.1, "setup": 0.4, "run": 61.0, "reward": 2.0},
        started_at=1_700_000_000.0,
        worker="worker-0",
        sandbox="box-7",
        model="model",
        sampling={"temperature": 1.0, "top_p": 1.0},
        row_index=12,
    )
