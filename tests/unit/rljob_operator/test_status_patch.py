from hypothesis import given
from hypothesis import strategies as st

from rljob_operator.status_patch import is_urgent, merge_patch, without_nulls

LEAVES = st.integers(0, 3) | st.text("ab", max_size=2) | st.lists(st.integers(0, 2), max_size=2)
STATUSES = st.dictionaries(
    st.sampled_from("pqr"),
    st.recursive(LEAVES, lambda s: st.dictionaries(st.sampled_from("xy"), s)),
)


def apply_merge_patch(target, patch):
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    target = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = apply_merge_patch(target.get(key), value)
    return target


@given(STATUSES, STATUSES)
def test_the_patch_makes_the_old_status_the_new_one(old, new):
    assert apply_merge_patch(old, merge_patch(old, new)) == new


@given(STATUSES)
def test_nothing_is_written_where_nothing_changed(status):
    assert merge_patch(status, status) == {}


def test_numbers_can_wait_and_conditions_cannot():
    ready = {"type": "Ready", "status": "True", "reason": "Up", "message": "a"}
    old = {"phase": "Running", "step": 1, "conditions": [ready]}
    assert not is_urgent(old, old | {"step": 2, "conditions": [ready | {"message": "b"}]})
    assert is_urgent(old, old | {"phase": "Failed"})
    assert is_urgent(old, old | {"conditions": [ready | {"status": "False"}]})
    assert is_urgent(old, old | {"observedGeneration": 2})


def test_keys_without_a_value_are_not_there():
    assert without_nulls({"a": None, "b": {"c": None, "d": 0}}) == {"b": {"d": 0}}
