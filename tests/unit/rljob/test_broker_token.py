"""Tokens of the broker: who is meant, and that nobody else can make them."""

import pytest

from rljob.broker_token import JobKey, job_of, job_token, pool_token

KEY = b"the broker's key"


def test_a_token_names_its_job() -> None:
    assert job_of(KEY, job_token(KEY, "team", "swe")) == JobKey("team", "swe")
    assert JobKey("team", "swe").pool == ""


def test_a_pools_token_names_the_one_pool_that_it_opens() -> None:
    named = job_of(KEY, pool_token(KEY, "team", "swe"))
    assert named == JobKey("team", "@swe")
    assert named.pool == "swe"


@pytest.mark.parametrize(
    "token",
    [
        "",
        ":",
        "team/swe",
        "team/swe:",
        "team/:" + "0" * 64,
        "/swe:" + "0" * 64,
        "tëam/swe:" + "é" * 64,
        job_token(b"another key", "team", "swe"),
        job_token(KEY, "team", "swe").replace("swe", "sw2"),
        job_token(KEY, "team", "swe").replace("team/", "tea/m"),
        job_token(KEY, "team", "swe") + "0",
    ],
)
def test_what_was_not_made_with_the_key_names_nobody(token: str) -> None:
    assert job_of(KEY, token) is None
