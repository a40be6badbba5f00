from rljob_operator.expectations import EXPIRY_SECONDS, Expectations, gone, version
from rljob_operator.observed import ChildKey

KEY = ChildKey("Job", "a")


def obj(uid="u1", version="1", **metadata):
    return {
        "kind": "Job",
        "metadata": {"name": "a", "uid": uid, "resourceVersion": version, **metadata},
    }


def test_a_create_stands_in_until_the_copy_has_it():
    expectations = Expectations()
    expectations.written(KEY, None, obj(), 0.0)
    assert expectations.overlay({}, {}, 1.0) == {KEY: obj()}
    assert expectations.overlay({}, {KEY: "u0/gone"}, 1.0) == {KEY: obj()}, "its predecessor's end"
    copy = {KEY: obj(version="2")}
    assert expectations.overlay(copy, {KEY: "u1/2"}, 2.0) == copy
    assert expectations.overlay({}, {KEY: "u1/2"}, 3.0) == {}, "told of once, the copy is believed"


def test_a_child_that_came_and_went_between_two_looks_is_not_believed_to_be_there():
    expectations = Expectations()
    expectations.written(KEY, None, obj(), 0.0)
    assert expectations.overlay({}, {KEY: gone(obj())}, 1.0) == {}


def test_an_apply_stands_in_until_the_copy_moves():
    expectations = Expectations()
    expectations.written(KEY, obj(version="1"), obj(version="2"), 0.0)
    before = {KEY: obj(version="1")}
    assert expectations.overlay(before, {KEY: "u1/1"}, 1.0)[KEY] == obj(version="2")
    after = {KEY: obj(version="3")}
    assert expectations.overlay(after, {KEY: "u1/3"}, 1.0)[KEY] == obj(version="3")


def test_an_apply_that_changed_nothing_is_not_waited_for():
    expectations = Expectations()
    expectations.written(KEY, obj(), obj(), 0.0)
    assert not expectations.pending


def test_a_delete_counts_until_the_copy_has_another_or_none():
    expectations = Expectations()
    expectations.deleted("u1", 0.0)
    assert "deletionTimestamp" in expectations.overlay({KEY: obj()}, {}, 1.0)[KEY]["metadata"]
    again = obj(uid="u2")
    assert expectations.overlay({KEY: again}, {}, 1.0) == {KEY: again}
    assert not expectations.going


def test_a_copy_that_never_catches_up_is_believed_in_the_end():
    expectations = Expectations()
    expectations.written(KEY, None, obj(), 0.0)
    expectations.deleted("u9", 0.0)
    late = EXPIRY_SECONDS + 1
    assert expectations.overlay({}, {}, late) == {}
    assert not expectations.going


def test_a_write_that_works_ends_the_refusal():
    expectations = Expectations()
    expectations.refused(KEY, "w", {"reason": "ApplyFailed"}, 0.0)
    assert expectations.warnings() == [{"reason": "ApplyFailed"}]
    assert expectations.next_try() == 2.0
    expectations.written(KEY, None, obj(), 1.0)
    assert not expectations.warnings()
    assert expectations.next_try() is None


def test_what_is_no_longer_wanted_is_no_longer_refused():
    expectations = Expectations()
    expectations.refused(KEY, "w", {}, 0.0)
    expectations.forget_refusals(set())
    assert not expectations.warnings()


def test_versions_tell_objects_of_one_name_apart():
    assert version(None) == ""
    assert version(obj(uid="a")) != version(obj(uid="b"))
