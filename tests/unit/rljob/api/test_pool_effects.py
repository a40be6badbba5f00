"""What one warm pool may say: keys without effect, paths that break the sandbox, keys of ours."""

from pathlib import Path
from typing import Any

import pytest

from rljob.api.load import check, load
from rljob.api.pool_effects import pool_problems
from rljob.api.sandboxpool_types import SandboxPoolSpec
from rljob.api.source import Source
from rljob.errors import ManifestError
from tests.harness.manifests import Case, cases

QUICKSTART = Path(__file__).parents[4] / "examples/quickstart/rljob.yaml"


def faults(**spec: Any) -> list[str]:
    found = pool_problems(SandboxPoolSpec.model_validate(spec))
    assert all(problem.fix for problem in found)
    return [".".join(map(str, problem.path)) for problem in found]


@pytest.mark.parametrize("case", cases("cases"), ids=lambda case: case.name)
def test_the_table_is_judged_as_it_says(case: Case, tmp_path: Path) -> None:
    found: list[str] = []
    try:
        check(Source("m", case.manifest, {}), tmp_path)
    except ManifestError as error:
        found = str(error).splitlines()
    wanted = case.refused or case.validate
    assert bool(found) is (wanted is not None), found
    assert wanted is None or any(line.startswith(f"m: {wanted}") for line in found), found


@pytest.mark.parametrize(
    "path",
    ["/proc", "/proc/x", "/sys/fs", "/dev", "/opt", "/opt/rljob/x", "/run", "/run/rljob", "/run/secrets/x", "/etc",
     "/etc/hosts", "/etc/resolv.conf", "/var", "/var/run", "/tmp", "/tmp/x", "/workspace/x", "/a/..", "/..", "/./a"],
)  # fmt: skip
def test_a_path_that_would_break_the_guest_or_the_nodes_mounts_is_refused(path: str) -> None:
    assert faults(writable_paths=["/fine", path]) == ["writablePaths.1"]


@pytest.mark.parametrize(
    "path", ["/root", "/opt/venv", "/usr", "/etc/ssl", "/procs", "/tmp2", "/run/postgresql", "/..a"]
)
def test_a_folder_of_the_image_may_be_writable(path: str) -> None:
    assert faults(writable_paths=[path]) == []


def test_paths_in_each_other_are_refused_whatever_their_order() -> None:
    assert faults(writable_paths=["/a/b", "/ab", "/a"]) == ["writablePaths.2"]
    assert faults(writable_paths=["/a", "/a/b"]) == ["writablePaths.1"]
    assert faults(writable_paths=["/a", "/a"]) == ["writablePaths.1"]


def test_baseline_needs_something_that_isolates_root() -> None:
    assert faults(pod_security="baseline") == ["podSecurity"]
    assert faults(pod_security="baseline", host_users=False) == []
    assert faults(pod_security="baseline", runtime_class_name="kata") == []


def test_a_quota_fits_into_the_pool() -> None:
    assert faults(max=4, max_per_job=5) == ["maxPerJob"]
    assert faults(max=4, max_per_job=4) == []


@pytest.mark.parametrize("egress", ["dns", "gateway", "public"])
def test_one_machine_refuses_every_egress_in_one_line(egress: str) -> None:
    given = [f"sandboxPools[0].egress={egress}"]
    load(QUICKSTART, given, plugins=False)
    with pytest.raises(ManifestError) as error:
        load(QUICKSTART, given, plugins=False, local=True)
    (line,) = str(error.value).splitlines()
    assert f"spec.sandboxPools[0].egress: {egress} is a policy of a cluster" in line
