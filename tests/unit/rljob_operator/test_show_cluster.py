"""What the commands make of a cluster's objects."""

import pytest

from rljob import labels
from rljob_operator.show.cluster import _what_changed, sources


def pod(name, component, created="2026-01-01T00:00:00Z", **marks):
    return {
        "metadata": {
            "name": name,
            "creationTimestamp": created,
            "labels": {labels.COMPONENT: component, **marks},
        }
    }


def test_a_rollout_pod_is_three_components_by_its_ordinal():
    found = sources([pod("job-rollout-1", "rollout", **{"apps.kubernetes.io/pod-index": "1"})])
    assert [(s.component, s.container) for s in found] == [
        ("engine-1", "engine"),
        ("gateway-1", "gateway"),
        ("worker-1", "worker"),
    ]


def test_of_several_attempts_the_newest_is_shown():
    pods = [
        pod("job-trainer-2-0", "trainer", "2026-01-01T00:00:09Z"),
        pod("job-trainer-1-0", "trainer", "2026-01-01T00:00:01Z"),
    ]
    assert [s.pod for s in sources(pods)] == ["job-trainer-2-0"]


def test_sandboxes_have_no_log_of_their_own():
    assert sources([pod("box", "sandbox")]) == []


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [(None, 1, "created"), (1, 1, "unchanged"), (1, 2, "configured")],
)
def test_what_an_apply_did_is_told_by_the_generation(before, after, said):
    def made(generation):
        return {"metadata": {"generation": generation}}

    assert _what_changed(None if before is None else made(before), made(after)) == said
