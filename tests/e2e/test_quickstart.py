"""The quick start, the same file as for `make run`, on the real stack in pods: suspended, resumed, deleted."""

import json

import pytest
import yaml

from tests.harness.cluster import ROOT, Cluster
from tests.harness.cluster_job import ClusterJob

MANIFEST = ROOT / "examples" / "quickstart" / "rljob.yaml"


@pytest.mark.timeout(1500)
def test_the_quick_start_learns_in_pods_through_a_suspension_and_leaves_nothing(
    cluster: Cluster, namespace: str, system: str
) -> None:
    job = ClusterJob(cluster, namespace, yaml.safe_load(MANIFEST.read_text()))
    cluster.kubectl("apply", "-f", str(MANIFEST), "-n", namespace)
    job.until("it trains", lambda: job.step >= 5, 600)
    job.patch(suspend=True)
    job.until_phase("Suspended", 240)
    assert not job.pods()
    stopped_at = job.step
    job.patch(suspend=False)
    job.until_phase("Succeeded", 900)
    assert job.step == 16 > stopped_at >= 5

    lines = (job.artifacts() / "metrics" / "validation.jsonl").read_text().splitlines()
    scores = {line["step"]: line["score"] for line in map(json.loads, lines)}
    assert scores[16] > scores[0] + 0.2, scores
    assert job.status["validation"]["score"] == pytest.approx(scores[16], abs=0.01)
    job.assert_nothing_lost()

    claim = cluster.get("PersistentVolumeClaim", "quickstart-artifacts", namespace)
    assert claim
    cluster.delete("RLJob", "quickstart", namespace)
    job.until("it is gone with its pods", lambda: not job.resource and not job.pods(), 120)
    job.until(
        "its volume is gone",
        lambda: cluster.get("PersistentVolume", claim["spec"]["volumeName"]) is None,
        60,
    )
