"""The tree keeps its promises: one package per room, light imports, declared dependencies, no trace of a machine."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ["operator", "sandbox_pool", "rollout_worker", "services", "trainer", "simulator"]
PACKAGES = {"rljob": ROOT / "rljob"} | {
    f"rljob_{room}": ROOT / room / f"rljob_{room}" for room in ROOMS
}
INSIDE_THE_ENGINE = {"vllm_plugin.py", "vllm_cpu.py"}  # they run with vLLM's own packages
LOOKED_AT_TWICE = {
    "vllm_plugin.py",
    "rljob_types.py",
}  # past 400 lines because one page must hold them

HEAVY = {"torch", "verl", "ray", "transformers", "datasets", "vllm"}
SLOW_TO_IMPORT = HEAVY | {
    *("numpy", "pyarrow", "redis", "fastapi", "uvicorn", "httpx", "kopf", "kr8s", "kubernetes"),
    *("matplotlib", "structlog", "prometheus_client", "tokenizers", "jinja2"),
}


def sources(package: str) -> list[Path]:
    return sorted(PACKAGES[package].rglob("*.py"))


@cache
def tracked() -> list[Path]:
    """Files that git tracks, or, where this is no checkout, that lie here."""
    run = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if run.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in run.stdout.split("\0") if name and (ROOT / name).is_file()]


def imports(path: Path) -> Iterator[str]:
    """Absolute names of the modules that a file imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_holds_exactly_its_package(room: str) -> None:
    assert not (ROOT / room / "__init__.py").exists(), "it would shadow another module's name"
    packages = [path.parent.name for path in (ROOT / room).glob("*/__init__.py")]
    assert packages == [f"rljob_{room}"]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_on_one_page_what_enters_and_what_leaves(room: str) -> None:
    lines = (ROOT / room / "README.md").read_text().splitlines()
    assert 3 <= len(lines) <= 40


def test_the_import_rules_hold() -> None:
    run = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"Contracts: [1-9]\d* kept, 0 broken", run.stdout), run.stdout


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "rljob_trainer"])
def test_no_room_but_the_trainer_loads_torch(package: str) -> None:
    modules = [
        ".".join(path.relative_to(PACKAGES[package].parent).with_suffix("").parts)
        for path in sources(package)
        if path.name not in {*INSIDE_THE_ENGINE, "__main__.py"}
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name.removesuffix('.__init__'))\n"
        f"print(*sorted({HEAVY!r} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def test_help_loads_nothing_slow() -> None:
    code = (
        "import sys; sys.argv = ['rljob', '--help']\n"
        "from rljob.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"print('\\nLOADED', *sorted({SLOW_TO_IMPORT!r} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "run" in run.stdout
    assert run.stdout.splitlines()[-1] == "LOADED"


def test_the_guest_needs_the_standard_library_alone() -> None:
    guest = PACKAGES["rljob_sandbox_pool"] / "guest"
    own = "rljob_sandbox_pool.guest"
    foreign = {
        f"{path.name}: {name}"
        for path in guest.rglob("*.py")
        for name in imports(path)
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not f"{name}.".startswith(f"{own}.")
    }
    assert list(guest.rglob("*.py"))
    assert foreign == set()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def declared() -> dict[str, set[str]]:
    """Distribution names per extra; "" are those that every room gets."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"]} | project["optional-dependencies"]
    return {
        extra: {_normal(re.split(r"[\[<>=!;~ ]", need)[0]) for need in needs}
        for extra, needs in groups.items()
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_a_room_declares_what_it_imports(package: str) -> None:
    extra = "testing" if package == "rljob" else package.removeprefix("rljob_")
    allowed = declared()[""] | declared().get(extra, set())
    homes = packages_distributions()
    undeclared = set[str]()
    for path in sources(package):
        for name in imports(path) if path.name not in INSIDE_THE_ENGINE else ():
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or top in PACKAGES:
                continue
            if not {_normal(dist) for dist in homes.get(top, [top])} & allowed:
                undeclared.add(f"{path.relative_to(ROOT)}: {top}")
    assert undeclared == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_files_and_functions_stay_readable(package: str) -> None:
    long: list[str] = []
    for path in sources(package):
        text = path.read_text()
        if (lines := text.count("\n")) > (600 if path.name in LOOKED_AT_TWICE else 400):
            long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > 60:
                    long.append(f"{path.relative_to(ROOT)}: {node.name} has {length} lines")
    assert long == []


def test_test_files_stay_readable_too() -> None:
    lengths = {path: path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py")}
    assert {str(path): lines for path, lines in lengths.items() if lines > 600} == {}


MACHINE = re.compile(
    r"""
      (?<![\w./~-])/(?:work/\w|root/\.?(?:pyenv|cache|local)|home/[a-z]+/)   # folders of one machine
    | https?://[^\s/"'>)]*(?:pypi|pythonhosted|anaconda|artifactory|nexus|mirror)[^\s]*  # a registry
    | --(?:extra-)?index-url[ =]\S*//
    """,
    re.VERBOSE,
)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("cd /" + "work/main", True),
        ("see /" + "root/.cache", True),
        ("https://" + "pypi.example/simple", True),
        ("a/root/b, .root, a closed /root, no /root/.ssh", False),
        ("http://127.0.0.1:8000/work/x", False),
        ("cwd=/workspace", False),
    ],
)
def test_the_pattern_finds_traces_of_a_machine(line: str, found: bool) -> None:
    assert bool(MACHINE.search(line)) == found


def test_tracked_files_name_no_machine_and_no_registry() -> None:
    found: list[str] = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # binary, and frozen by its own test
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(text.splitlines(), 1)
            if MACHINE.search(line)
        ]
    assert found == []


def test_every_lock_is_hashed_and_names_no_host() -> None:
    locks = sorted((ROOT / "requirements").glob("*.lock"))
    assert {"cpu.lock", "tools.lock"} <= {lock.name for lock in locks}
    for lock in locks:
        text = lock.read_text()
        pins = re.findall(
            r"^[A-Za-z0-9].*?==.*?(?=^[A-Za-z0-9]|\Z)", text, re.MULTILINE | re.DOTALL
        )
        assert pins, lock.name
        assert all("--hash=sha256:" in pin for pin in pins), lock.name
        assert "://" not in text, lock.name
