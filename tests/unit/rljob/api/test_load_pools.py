"""A file of warm pools: a SandboxPool object or a manifest's pools, every fault in one line."""

from pathlib import Path

import pytest

from rljob.api.load_pools import load_pools
from rljob.errors import ManifestError

HEAD = "apiVersion: rljob.dev/v1alpha1\nkind: SandboxPool\nmetadata: {name: swe}\n"


def load(folder: Path, text: str) -> list[str]:
    """The pools, or the lines of what is wrong."""
    (folder / "pool.yaml").write_text(text)
    try:
        return [repr((each.name, each.warm, each.max)) for each in load_pools(folder / "pool.yaml")]
    except ManifestError as error:
        return str(error).replace(f"{folder}/", "").splitlines()


def test_a_SandboxPool_object_is_one_pool(tmp_path: Path) -> None:
    assert load(tmp_path, HEAD + "spec: {warm: 2, max: 3}\n") == ["('swe', 2, 3)"]


def test_a_pool_without_a_spec_has_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, HEAD) == ["('swe', 4, 64)"]


def test_a_manifest_gives_its_pools() -> None:
    assert load_pools(Path("examples/quickstart/rljob.yaml"))


@pytest.mark.parametrize(
    ("spec", "lines"),
    [
        ("{wram: 2}", ["pool.yaml:4: spec.wram: unknown key; did you mean warm?"]),
        ("{max: 0}", ["pool.yaml:4: spec.max: 0 is out of range; it must be ≥ 1"]),
        ("{warm: 5, max: 4}", ["pool.yaml:4: spec: warm 5 is above max 4"]),
        (
            "{egress: dns}",
            [
                "pool.yaml:4: spec.egress: dns is a policy of a cluster: sandboxes of one machine"
                " reach nothing; use none"
            ],
        ),
        (
            "{maxPerJob: 9, max: 4, warm: 1}",
            ["pool.yaml:4: spec.maxPerJob: 9 is above max 4; lower it"],
        ),
    ],
)
def test_every_fault_is_a_line(tmp_path: Path, spec: str, lines: list[str]) -> None:
    assert load(tmp_path, f"{HEAD}spec: {spec}\n") == lines


def test_another_kind_and_a_manifest_without_pools_are_refused(tmp_path: Path) -> None:
    assert "is 'Pod', not RLJob" in load(tmp_path, "kind: Pod\n")[0]
