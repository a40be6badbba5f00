"""A real API server and `rljob validate` judge every manifest of the table alike.

The API server is asked by dry runs under strict field validation, so nothing is started. What it gives back, defaults
filled in, must be the same job to rljob as the manifest that went in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from rljob.api.effects import resolved
from rljob.api.load import check
from rljob.api.rljob_types import RLJob
from rljob.api.source import Source
from rljob.errors import ManifestError
from tests.harness.cluster import ROOT, Cluster, Object, wait_until
from tests.harness.manifests import Case, base, cases, pools, random_manifests

CRDS = sorted((ROOT / "charts/rljob/files/crds").glob("*.yaml"))
DRY = {"dryRun": "All", "fieldValidation": "Strict"}
PLACE = "default"


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Cluster:
    """A cluster that knows our kinds as this tree has them."""
    for file in CRDS:
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(file))
    for kind in ("RLJob", "SandboxPool"):
        wait_until(kind, lambda kind=kind: cluster.api("GET", cluster.path(kind)).is_success, 30)
    return cluster


def refused_paths(answer: httpx.Response) -> list[str]:
    """Where the API server sees faults."""
    told: Object = answer.json()
    assert told["kind"] == "Status", told
    causes = told.get("details", {}).get("causes", [])
    unknown = re.findall(r'unknown field "([^"]+)"', told["message"])
    return [cause["field"] for cause in causes if "field" in cause] + unknown


def refused_by_rljob(manifest: Object, folder: Path | None) -> list[str]:
    """Where `rljob validate` sees faults; without a folder, but for plugins."""
    try:
        check(Source("m", manifest, {}), folder)
    except ManifestError as error:
        return [line.removeprefix("m: ").partition(": ")[0] for line in str(error).splitlines()]
    return []


def agree(answer: httpx.Response, wanted: str | None) -> None:
    """The API server names `wanted`; None: it accepts."""
    if wanted is None:
        assert answer.is_success, answer.text
        return
    assert answer.status_code in {400, 422}, answer.text
    paths = refused_paths(answer)
    assert any(path.startswith(wanted) for path in paths), answer.json()["message"]


@pytest.mark.parametrize("case", cases("cases"), ids=lambda case: case.name)
def test_the_api_server_and_rljob_judge_alike(api: Cluster, case: Case, tmp_path: Path) -> None:
    answer = api.api("POST", api.path("RLJob", PLACE), case.manifest, **DRY)
    agree(answer, case.refused)
    wanted = case.refused or case.validate
    found = refused_by_rljob(case.manifest, tmp_path)
    assert (not found) if wanted is None else any(path.startswith(wanted) for path in found), found
    if wanted is None:
        assert resolved(job_of(answer.json())) == resolved(job_of(case.manifest))


def overlap(one: str, other: str) -> bool:
    """One path is the other, or lies above it."""
    return one.startswith(other) or other.startswith(one)


@pytest.mark.parametrize("seed", range(4))
def test_both_judge_random_manifests_alike(api: Cluster, seed: int) -> None:
    accepted = 0
    for manifest in random_manifests(seed, 100):
        answer = api.api("POST", api.path("RLJob", PLACE), manifest, **DRY)
        found = refused_by_rljob(manifest, None)
        assert answer.is_success is not bool(found), (manifest["spec"], answer.text, found)
        accepted += answer.is_success
        if found:
            told = refused_paths(answer)
            assert any(overlap(one, other) for one in found for other in told), (told, found)
    assert 20 < accepted < 80


def test_kubectl_and_rljob_read_a_whole_number_written_as_a_float_alike(api: Cluster) -> None:
    manifest = base()
    manifest["spec"]["rollout"]["groupSize"] = 4.0
    args = ("create", "--dry-run=server", "--validate=strict", "-o", "json", "-n", PLACE)
    made = json.loads(api.kubectl(*args, "-f", "-", stdin=yaml.safe_dump(manifest)))
    assert job_of(made).spec.rollout.group_size == job_of(manifest).spec.rollout.group_size == 4


def job_of(resource: Object) -> RLJob:
    """The job in a manifest or in an object of the API server."""
    metadata = {key: resource["metadata"][key] for key in ("name",)}
    return check(Source("m", resource | {"metadata": metadata, "status": None}, {}))


@pytest.mark.parametrize("case", pools(), ids=lambda case: case.name)
def test_the_api_server_judges_pools(api: Cluster, case: Case) -> None:
    agree(api.api("POST", api.path("SandboxPool", PLACE), case.manifest, **DRY), case.refused)


@pytest.fixture(scope="module")
def accepted(api: Cluster) -> Iterator[str]:
    """Path of a job that is there, suspended so that an operator starts nothing."""
    manifest = base()
    manifest["metadata"]["name"] = "immutable"
    manifest["spec"] |= {"suspend": True, "scheduling": {"queueName": "a"}}
    path = api.path("RLJob", PLACE)
    api.delete("RLJob", "immutable", PLACE)
    wait_until("no such job", lambda: api.get("RLJob", "immutable", PLACE) is None, 90)
    answer = api.api("POST", path, manifest)
    assert answer.is_success, answer.text
    yield f"{path}/immutable"
    api.delete("RLJob", "immutable", PLACE)


@pytest.mark.parametrize("case", cases("updates"), ids=lambda case: case.name)
def test_only_what_a_running_job_takes_over_may_change(
    api: Cluster, accepted: str, case: Case
) -> None:
    spec = {"scheduling": {"queueName": "a"}} | case.manifest["spec"]

    def changed() -> httpx.Response | None:
        live = api.api("GET", accepted).json()
        live["metadata"] |= {k: v for k, v in case.manifest["metadata"].items() if k != "name"}
        answer = api.api("PUT", accepted, live | {"spec": spec}, **DRY)
        return None if answer.status_code == 409 else answer

    answer = wait_until("no other writer", changed, 20)
    assert answer is not None
    agree(answer, case.refused)


@pytest.mark.parametrize(("replicas", "allowed"), [(3, True), (0, False), (10_001, False)])
def test_the_scale_subresource_scales_rollouts_within_their_bounds(
    api: Cluster, accepted: str, replicas: int, allowed: bool
) -> None:
    body = {"spec": {"replicas": replicas}}
    path, kind = f"{accepted}/scale", "application/merge-patch+json"
    answer = api.api("PATCH", path, body, kind, **DRY)
    assert answer.is_success is allowed, answer.text


FULL_STATUS: dict[str, Any] = {
    "observedGeneration": 1, "phase": "Running", "message": "", "step": 3, "steps": 8, "policyVersion": 3,
    "rewardMean": 0.25, "validation": {"score": 0.5, "step": 2}, "backlog": 1, "gpus": 8,
    "rollouts": {"replicas": 2, "readyReplicas": 1, "desired": 2, "selector": "a=b", "completed": 9, "failed": 1,
                 "running": 4, "completionRate": 0.9, "meanTurns": 2.5},
    "trainer": {"attempt": 1, "failures": 0, "lastCheckpoint": 2}, "staleness": {"mean": 0.5, "max": 1},
    "sandboxes": {"warm": 4, "claimed": 2}, "startTime": "2027-01-01T00:00:00Z",
    "conditions": [{"type": "Accepted", "status": "True", "reason": "Valid", "message": "",
                    "lastTransitionTime": "2027-01-01T00:00:00Z", "observedGeneration": 1}],
}  # fmt: skip


def test_a_whole_status_is_taken_as_it_is_and_an_unknown_key_is_not(
    api: Cluster, accepted: str
) -> None:
    path, kind = f"{accepted}/status", "application/merge-patch+json"
    answer = api.api("PATCH", path, {"status": FULL_STATUS}, kind, **DRY)
    assert answer.is_success, answer.text
    assert FULL_STATUS.items() <= answer.json()["status"].items()
    assert not api.api("PATCH", path, {"status": {"mood": "good"}}, kind, **DRY).is_success


def test_kubectl_get_tells_the_story(api: Cluster, accepted: str) -> None:
    shown = api.kubectl("get", "rlj", "-n", PLACE, "-o", "wide").splitlines()[0].split()
    assert shown == [
        "NAME", "PHASE", "STEP", "STEPS", "REWARD", "ROLLOUTS", "WARM", "STALENESS", "GPUS",
        "VERSION", "VALIDATION", "MESSAGE", "AGE",
    ]  # fmt: skip
    assert "immutable" in api.kubectl("get", "all,rl", "-n", PLACE)
    assert "SandboxPool" not in api.kubectl("get", "rlpool", "-n", PLACE, check=False)
