"""`rljob plan` and the pool manager are two rooms: what one counts with is what the other makes."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_operator.policies.node_fit import requests
from rljob_operator.policies.sandbox_needs import MAX_IMAGES, MAX_WEIGHT, apportion, needs
from rljob_sandbox_pool import sizing
from rljob_sandbox_pool.runtimes.base import SandboxSpec
from rljob_sandbox_pool.runtimes.pod_identity import Owner
from rljob_sandbox_pool.runtimes.pod_template import PodConfig, pod
from tests.unit.rljob_operator.conftest import make_job

CONFIG = PodConfig(guest_image="guest", sandbox_image="image")
OWNER = Owner(namespace="ns", name="job-p", uid="u")


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"limits": {"memoryMib": 16, "diskMib": 1}},
        {"limits": {"memoryMib": 4096, "diskMib": 2048}},
        {"writablePaths": ["/testbed", "/opt/venv"]},
        {"readOnlyRoot": False, "recycle": {"strategy": "recreate"}},
        {"resources": {"limits": {"cpu": "500m", "memory": "8Mi"}}},
        {"resources": {"requests": {"cpu": 2, "memory": "3Gi", "ephemeral-storage": "1Gi"}}},
    ],
)
def test_a_sandbox_is_planned_as_it_is_made(spec: dict[str, Any]) -> None:
    job = make_job(sandboxPools=[{"name": "shells", **spec}])
    (pool,) = job.spec.sandbox_pools
    box = SandboxSpec(id="job-p-0", key=b"k", index=0, limits=pool.limits, image="image")
    made = requests(pod(box, pool, OWNER, CONFIG)["spec"])
    (need,) = needs(job, None).pools
    assert need.requests == made


@pytest.mark.parametrize("total", [0, 1, 7, 100])
@pytest.mark.parametrize("weights", [{"a": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 30, "b": 7, "c": 1}])
def test_images_get_the_share_in_the_plan_that_the_pool_gives_them(
    total: int, weights: dict[str, int]
) -> None:
    assert apportion(total, {**weights}) == sizing.share(total, weights)


def test_bounds_of_the_plan_are_those_of_the_manifest() -> None:
    images = [{"image": f"i{number}", "weight": MAX_WEIGHT} for number in range(MAX_IMAGES)]
    assert make_job(sandboxPools=[{"name": "shells", "images": images}])
    for beyond in (
        [*images, {"image": "one more"}],
        [{"image": "a", "weight": MAX_WEIGHT + 1}],
    ):
        with pytest.raises(ValueError, match="images"):
            make_job(sandboxPools=[{"name": "shells", "images": beyond}])
