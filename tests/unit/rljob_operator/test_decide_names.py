"""Plugins that a cluster's workers cannot know are refused before anything starts."""

import yaml

from rljob.api.rljob_types import RLJob
from rljob_operator.decision.accept import cluster_faults
from rljob_operator.observed import ClusterConfig, Images
from tests.harness.simulated_job import EXAMPLE

CONFIG = ClusterConfig(
    images=Images(
        trainer="t", rollout_worker="w", services="s", engine="e", sandbox_pool="p", sandbox="b"
    )
)


def faults(**task):
    manifest = yaml.safe_load((EXAMPLE / "rljob.yaml").read_text())
    image = task.pop("image", None)
    manifest["spec"]["tasks"][0] |= task
    if image:
        manifest["spec"]["rollout"]["worker"] = {"image": image}
    return cluster_faults(RLJob.model_validate(manifest), CONFIG)


def test_a_task_type_that_nobody_brings_is_refused_with_its_path_and_what_there_is():
    (line,) = faults(type="no_such_family")
    assert line.startswith("spec.tasks[0].type: unknown task type 'no_such_family'; known: ")
    assert "shell_files" in line


def test_an_image_of_ones_own_may_bring_any_plugin():
    assert faults(type="no_such_family", image="registry/mine:1") == []


def test_an_import_path_is_left_to_the_worker_that_can_import_it():
    assert faults(type="my_pkg.tasks:MyTask") == []
