"""Validation is sampled like training, but for the keys that it has of its own."""

from __future__ import annotations

from rljob.api.rljob_types import Sampling, ValidationSampling

TRAINING = Sampling(temperature=0.8, max_tokens_per_turn=56)


def test_without_keys_of_its_own_validation_is_sampled_like_training() -> None:
    assert ValidationSampling().over(TRAINING) == TRAINING


def test_a_key_of_its_own_replaces_only_that_of_training() -> None:
    assert ValidationSampling(top_p=0.9).over(TRAINING) == Sampling(
        temperature=0.8, top_p=0.9, max_tokens_per_turn=56
    )
