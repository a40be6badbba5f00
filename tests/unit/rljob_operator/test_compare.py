import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_operator.compare import contains, project, same_quantity

SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.text("abc", max_size=3)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("pqrs"), inner),
    max_leaves=12,
)


@given(VALUES)
def test_a_value_contains_itself(value):
    assert contains(value, value)


@given(st.dictionaries(st.sampled_from("pqrs"), VALUES), st.dictionaries(st.just("more"), VALUES))
def test_what_the_server_adds_is_no_difference(wanted, more):
    live = copy.deepcopy(wanted) | more
    assert contains(live, wanted)
    assert project(live, wanted) == project(wanted, wanted)


@pytest.mark.parametrize(
    ("live", "wanted"),
    [
        ({"cpu": "500m"}, {"cpu": "0.5"}),
        ({"memory": "1Gi"}, {"memory": "1024Mi"}),
        ({"cpu": "2"}, {"cpu": 2}),
        ({}, {"replicas": 0, "paused": False, "env": [], "labels": {}, "name": ""}),
        (
            {"containers": [{"name": "injected"}, {"name": "a", "image": "x", "tty": False}]},
            {"containers": [{"name": "a", "image": "x"}]},
        ),
        ({"ports": [{"port": 2, "protocol": "TCP"}, {"port": 1}]}, {"ports": [{"port": 1}, {"port": 2}]}),
    ],
)  # fmt: skip
def test_the_same_differently_written_is_no_drift(live, wanted):
    assert contains(live, wanted)


@pytest.mark.parametrize(
    ("live", "wanted"),
    [
        ({"cpu": "500m"}, {"cpu": "501m"}),
        ({"replicas": 0}, {"replicas": 1}),
        ({}, {"replicas": 1}),
        ({"args": ["a", "b"]}, {"args": ["b", "a"]}),
        ({"args": ["a", "b"]}, {"args": ["a"]}),
        ({"args": ["a"]}, {"args": ["a", "b"]}),
        ({"containers": [{"name": "b"}]}, {"containers": [{"name": "a"}]}),
        ({"spec": "text"}, {"spec": {"a": 1}}),
        ({"items": {"a": 1}}, {"items": [1]}),
        ({"on": True}, {"on": False}),
    ],
)
def test_another_value_is_drift(live, wanted):
    assert not contains(live, wanted)


@pytest.mark.parametrize("text", ["", ".", "1.2.3", "abc", "1x", "--1"])
def test_text_that_is_no_quantity_equals_no_quantity(text):
    assert not same_quantity(text, "1")
    assert not same_quantity(text, text + " ")
