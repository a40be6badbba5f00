"""Rows as verl wants them: micro-batches, jagged tensors, weights per token. verl and torch are imported inside.

Legend: B rows of a micro-batch, N rows, T tokens of a row, P of them before the first action, R = T - P.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rljob.api.rljob_types import Algorithm
from rljob_trainer.backends.base import TrainRow

CORRECTION = {"token_is": "token", "sequence_is": "sequence"}
"""`correction.type` → verl's `rollout_is`."""


def micro_batches(rows: Sequence[TrainRow], max_tokens: int) -> Iterator[list[int]]:
    """Indices of rows, shortest first; a part has at most `max_tokens` tokens, padding included, or one row."""
    part: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: len(rows[index].tokens)):
        if part and (len(part) + 1) * len(rows[index].tokens) > max_tokens:
            yield part
            part = []
        part.append(index)
    if part:
        yield part


def rows_that_matter(rows: Sequence[TrainRow]) -> list[TrainRow]:
    """Rows with an advantage; one row without where none has, since AdamW's momentum moves the weights all the same."""
    return [row for row in rows if row.advantage != 0.0] or [
        min(rows, key=lambda row: len(row.tokens))
    ]


def shares(rows: Sequence[TrainRow], algorithm: Algorithm) -> list[NDArray[np.float32]]:
    """N arrays [R]: a chain's weight in its episode's token mean; 1 for the other aggregations."""
    by_token = algorithm.loss_aggregation == "seq_mean_token_mean"
    return [np.full(len(row.mask), row.share if by_token else 1.0, np.float32) for row in rows]


def corrections(
    rows: Sequence[TrainRow], old: Sequence[Any], rollout: Sequence[Any], algorithm: Algorithm
) -> tuple[list[NDArray[np.float32]], dict[str, float]]:
    """N arrays [R] of importance weights between trainer and rollout, and verl's account of them."""
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    assert algorithm.correction is not None, "asked for only where one is configured"
    pad = functools.partial(pad_sequence, batch_first=True)
    proto, _, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=pad([torch.from_numpy(values) for values in old]),
        rollout_log_prob=pad([torch.from_numpy(values) for values in rollout]),
        response_mask=pad([torch.from_numpy(row.mask) for row in rows]).float(),
        rollout_is=CORRECTION[algorithm.correction.type],
        rollout_is_threshold=algorithm.correction.threshold,
    )
    assert proto is not None, "verl gives weights whenever rollout_is is set"
    weights = proto.batch["rollout_is_weights"].numpy()
    told = {name.replace("rollout_corr/", ""): float(value) for name, value in metrics.items()}
    kept = {
        name: told[name] for name in ("rollout_is_mean", "rollout_is_max", "kl") if name in told
    }
    return [weights[index, : len(row.mask)] for index, row in enumerate(rows)], kept


def tensordict(rows: Sequence[TrainRow], temperature: float, num_episodes: int) -> Any:
    """One micro-batch as verl wants it: jagged tensors [B, …] and settings beside them."""
    from verl.utils import tensordict_utils as tu

    mask = jagged([row.mask.astype(np.int64) for row in rows])
    tensors = {
        "input_ids": jagged([row.tokens.astype(np.int64) for row in rows]),
        "position_ids": jagged([np.arange(len(row.tokens)) for row in rows]),
        "prompts": jagged([row.tokens[: row.prompt_length].astype(np.int64) for row in rows]),
        "responses": jagged([row.tokens[row.prompt_length :].astype(np.int64) for row in rows]),
        "response_mask": mask,
        "loss_mask": mask,
    }
    settings = {
        "temperature": temperature,
        "use_remove_padding": False,
        "pad_token_id": 0,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": len(rows),
        "calculate_entropy": False,
        "global_batch_size": num_episodes,
    }
    return tu.get_tensordict(tensors, non_tensor_dict=settings)


def jagged(arrays: Sequence[NDArray[Any]]) -> Any:
    """Arrays [·] of different lengths as one jagged tensor [B, ·]."""
    import torch

    return torch.nested.as_nested_tensor(
        [torch.from_numpy(array) for array in arrays], layout=torch.jagged
    )
