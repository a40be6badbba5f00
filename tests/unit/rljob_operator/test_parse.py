import copy

import pytest

from rljob.api import source
from rljob.api.rljob_types import RLJob
from rljob_operator.parse import parse


@pytest.fixture
def live(request):
    """The quick start as the API server would give it back."""
    text = (request.config.rootpath / "examples/quickstart/rljob.yaml").read_text()
    manifest = source.parse(text, "quickstart").data
    manifest["metadata"] |= {
        "namespace": "team-a", "uid": "u1", "resourceVersion": "7", "generation": 2,
        "labels": {"argocd.argoproj.io/instance": "x"}, "annotations": {"a/b": "c"},
        "managedFields": [], "finalizers": ["rljob.dev/ledger"],
    }  # fmt: skip
    return manifest | {"status": {"phase": "Running", "step": 3}}


def test_a_live_object_becomes_the_job_with_its_namespace(live):
    job = parse(live)
    assert isinstance(job, RLJob)
    assert (job.metadata.name, job.metadata.namespace) == (live["metadata"]["name"], "team-a")


def test_labels_and_annotations_do_not_reach_what_is_rendered(live):
    bare = copy.deepcopy(live)
    del bare["metadata"]["labels"], bare["metadata"]["annotations"]
    assert parse(live) == parse(bare)


def test_every_fault_is_a_line_that_begins_with_its_path(live):
    live["spec"]["rollout"]["groupSizes"] = 4
    live["spec"]["trainer"]["steps"] = "many"
    faults = parse(live)
    assert isinstance(faults, list)
    assert sorted(line.partition(": ")[0] for line in faults) == [
        "spec.rollout.groupSizes",
        "spec.trainer.steps",
    ]
    assert "did you mean groupSize?" in " ".join(faults)


def test_a_rule_that_only_rljob_knows_is_named_with_its_path(live):
    live["spec"]["model"] |= {"source": "recipe://tiny", "revision": "main"}
    faults = parse(live)
    assert isinstance(faults, list)
    assert faults[0].startswith("spec.model.revision: has no effect")


def test_another_kind_is_a_fault_and_no_exception(live):
    assert parse(live | {"kind": "Pod"}) == ["kind: is 'Pod', not RLJob; give an RLJob manifest"]
