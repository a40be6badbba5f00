"""The plan against a model of the API server: whatever was there, a few passes bring what is wanted, and then rest."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob import labels
from rljob_operator.expectations import Expectations, version
from rljob_operator.observed import ChildKey, Observed
from rljob_operator.plan import Verb, key_of, plan, settled_digest

UID = "job-uid"
KINDS = ("ConfigMap", "Job", "PersistentVolumeClaim", "StatefulSet")


def child(kind="ConfigMap", name="a", *, uid=UID, spec=None):
    metadata = {"name": name, "labels": {labels.JOB_UID: uid}, "ownerReferences": [{"uid": uid}]}
    return {"kind": kind, "metadata": metadata, "spec": spec or {}}


def resource(**metadata):
    return {"kind": "RLJob", "metadata": {"name": "j", "uid": UID, **metadata}}


def observed(*children, owner=None):
    return Observed(
        resource=owner or resource(), children={key_of(item): item for item in children}
    )


def verbs(actions):
    return {action.key: action.verb for action in actions}


class Server:
    """What the API server does with actions; uids and versions count up."""

    def __init__(self, children=()):
        self.children, self.count, self.writes = {}, 0, 0
        for item in children:
            self._store(key_of(item), item)

    def _store(self, key, obj, uid=""):
        self.count += 1
        live = copy.deepcopy(obj)
        live["metadata"] |= {"uid": uid or f"u{self.count}", "resourceVersion": str(self.count)}
        live["spec"]["defaulted"] = True
        self.children[key] = live
        return live

    def carry_out(self, actions, expectations, now=0.0):
        for action in actions:
            self.writes += 1
            live = self.children.get(action.key)
            if action.verb is Verb.DELETE:
                del self.children[action.key]
                expectations.deleted(live["metadata"]["uid"], now)
                continue
            assert (action.verb is Verb.CREATE) == (live is None)
            merged = copy.deepcopy(live or action.obj)
            merged["metadata"] |= action.obj["metadata"]
            merged["spec"] |= action.obj["spec"]
            answer = self._store(action.key, merged, live["metadata"]["uid"] if live else "")
            expectations.written(action.key, live, answer, now)
            uid, digest = answer["metadata"]["uid"], settled_digest(action.obj, answer)
            expectations.settled[action.key] = (uid, digest)


CHILDREN = st.builds(
    child, st.sampled_from(KINDS), st.sampled_from("abc"), spec=st.dictionaries(st.just("x"), st.integers(0, 2))
)  # fmt: skip
OWN = st.lists(CHILDREN, max_size=6, unique_by=key_of)


@given(before=OWN, wanted=OWN)
def test_one_pass_brings_what_is_wanted_and_the_next_rests(before, wanted):
    server, expectations = Server(before), Expectations()
    for _ in range(2):
        server.carry_out(
            plan(wanted, observed(*server.children.values()), expectations, 0.0), expectations
        )
    writes = server.writes
    assert not plan(wanted, observed(*server.children.values()), expectations, 0.0)
    assert not plan(wanted, observed(*server.children.values()), Expectations(), 0.0)  # restarted
    kept = {key_of(item) for item in before if item["kind"] == "PersistentVolumeClaim"}
    assert server.children.keys() == {key_of(item) for item in wanted} | kept
    assert server.writes == writes


@given(wanted=OWN, lag=st.booleans())
def test_a_copy_that_lags_makes_nothing_twice(wanted, lag):
    server, expectations = Server(), Expectations()
    for _ in range(3):
        told = {} if lag else {key: version(item) for key, item in server.children.items()}
        seen = expectations.overlay({} if lag else server.children, told, 1.0)
        actions = plan(wanted, Observed(resource=resource(), children=seen), expectations, 1.0)
        server.carry_out(actions, expectations, 1.0)
    assert server.writes == len(wanted)


def test_what_belongs_to_another_job_or_nobody_is_never_deleted():
    stranger, half = child(name="s", uid="other"), child(name="h")
    half["metadata"]["ownerReferences"] = []
    assert not plan([], observed(stranger, half), Expectations(), 0.0)


def test_a_field_of_ours_that_somebody_changed_is_set_back_and_a_field_of_theirs_is_left():
    server, expectations = Server(), Expectations()
    wanted = [child("StatefulSet", spec={"replicas": 2})]
    server.carry_out(plan(wanted, observed(), expectations, 0.0), expectations)
    live = server.children[key_of(wanted[0])]
    live["spec"]["theirs"] = 1
    assert not plan(wanted, observed(live), expectations, 0.0)
    live["spec"]["replicas"] = 3
    assert [a.verb for a in plan(wanted, observed(live), expectations, 0.0)] == [Verb.APPLY]


def test_what_the_server_makes_of_a_value_is_not_applied_again():
    server, expectations = Server(), Expectations()
    wanted = [child(spec={"x": "as we write it"})]
    server.carry_out(plan(wanted, observed(), expectations, 0.0), expectations)
    live = server.children[key_of(wanted[0])]
    live["spec"]["x"] = "as it is kept"
    expectations.settled[key_of(live)] = (
        live["metadata"]["uid"],
        settled_digest(_stamped(live, wanted[0]), live),
    )
    assert not plan(wanted, observed(live), expectations, 0.0)


def _stamped(live, wanted):
    return {
        **wanted,
        "metadata": {**wanted["metadata"], "annotations": live["metadata"]["annotations"]},
    }


@pytest.mark.parametrize("kind", ["Job", "PersistentVolumeClaim"])
def test_what_cannot_change_is_never_written_again(kind):
    live = child(kind, spec={"x": 1})
    assert not plan([child(kind, spec={"x": 2})], observed(live), Expectations(), 0.0)


def test_a_child_that_is_being_deleted_is_waited_for():
    live = child()
    live["metadata"]["deletionTimestamp"] = "now"
    assert not plan([child()], observed(live), Expectations(), 0.0)
    assert not plan([], observed(live), Expectations(), 0.0)


def test_while_the_job_is_being_deleted_nothing_is_made_and_what_is_there_scales_down():
    owner = resource(deletionTimestamp="now")
    live = child("StatefulSet", spec={"replicas": 2})
    wanted = [child("StatefulSet", spec={"replicas": 0}), child("Service")]
    actions = plan(wanted, observed(live, owner=owner), Expectations(), 0.0)
    assert verbs(actions) == {ChildKey("StatefulSet", "a"): Verb.APPLY}


def scaled(replicas, manager="kube-controller-manager", subresource="scale"):
    live = child("StatefulSet", spec={"replicas": replicas})
    entry = {
        "manager": manager,
        "fieldsV1": {"f:spec": {"f:replicas": {}}},
        "subresource": subresource,
    }
    live["metadata"]["managedFields"] = [entry]
    return live


@pytest.mark.parametrize(
    ("live", "wanted", "applied"),
    [
        (scaled(5), 2, None),  # an autoscaler's
        (scaled(5), 0, 0),  # nobody scales what is suspended
        (scaled(0), 2, 2),
        (scaled(5, "kubectl"), 2, 2),  # a person's is drift
        (scaled(5, "kube-controller-manager", "status"), 2, 2),
    ],
)
def test_replicas_that_an_autoscaler_decides_are_left_to_it(live, wanted, applied):
    (action,) = plan(
        [child("StatefulSet", spec={"replicas": wanted})], observed(live), Expectations(), 0.0
    )
    assert action.obj["spec"].get("replicas") == applied


def test_a_refused_write_is_held_for_longer_each_time_and_tried_at_once_when_the_wish_changes():
    expectations, wanted = Expectations(), [child(spec={"x": 1})]
    (action,) = plan(wanted, observed(), expectations, 0.0)
    expectations.refused(action.key, action.wanted, {}, 0.0)
    assert not plan(wanted, observed(), expectations, 1.9)
    assert plan(wanted, observed(), expectations, 2.1)
    expectations.refused(action.key, action.wanted, {}, 2.1)
    assert not plan(wanted, observed(), expectations, 6.0)
    assert plan([child(spec={"x": 2})], observed(), expectations, 2.2)
