"""The guest's bundle runs in a root that holds nothing else: no shell, no libc, no Python."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_sandbox_pool import bundle
from rljob_sandbox_pool.guest.pod import VARIABLE

GUEST = "/opt/rljob/guest"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty root but for the bundle."""
    root = tmp_path_factory.mktemp("root")
    (root / GUEST[1:]).parent.mkdir(parents=True)
    argv = [sys.executable, "-m", "rljob_sandbox_pool.bundle", str(root / GUEST[1:])]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for name in ("proc", "dev", "workspace", "tmp"):
        (root / name).mkdir()
    return root


def test_it_is_small_and_compiled(root: Path) -> None:
    files = [path for path in (root / GUEST[1:]).rglob("*") if path.is_file()]
    assert len(files) < 300
    assert sum(path.stat().st_size for path in files) < 60_000_000
    assert not [path for path in files if path.suffix == ".py"]
    names = {path.name for path in (root / GUEST[1:]).rglob("rljob_sandbox_pool/*")}
    assert names == {"guest"}


def run(root: Path, code: str) -> list[str]:
    """A command line that runs code in the root, in namespaces of its own."""
    *python, _ = bundle.command(GUEST)
    mount = f"mount -t proc proc {root}/proc && exec chroot {root} {' '.join(python)} '{code}'"
    return ["unshare", "--pid", "--mount", "--fork", "--kill-child", "sh", "-c", mount]


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_what_the_guest_may_import_late_is_there(root: Path) -> None:
    code = "import ctypes, hashlib, json, encodings.idna, traceback; ctypes.CDLL(None); print(hashlib.sha256().name)"
    done = subprocess.run(run(root, code), capture_output=True, text=True, timeout=60)
    assert done.stdout == "sha256\n", done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_folders_are_copied_from_a_root_without_anything_else(root: Path) -> None:
    for name in ("seed", "target", "data"):
        (root / name).mkdir()
    (root / "data/file").write_text("as the image has it")
    command = bundle.seed_command(GUEST, "/seed", "/target", ["/none", "/data"], max_mib=64)
    argv = ["chroot", str(root), *command]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("seed", "target"):
        assert (root / name / "1/file").read_text() == "as the image has it"


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_the_guest_answers_from_an_empty_root(root: Path, free_port: Callable[[], int]) -> None:
    config = {
        "id": "box-1",
        "key": "00",
        "port": free_port(),
        "env": {},
        "workspace": "/workspace",
        "folders": ["/workspace", "/tmp"],
        "shared_folders": ["/workspace", "/tmp"],
        "rlimits": {},
        "marker": "/tmp/booted",
    }
    states = []
    for _ in range(2):
        guest = subprocess.Popen(
            run(root, bundle.ENTRY),
            env={VARIABLE: json.dumps(config), "PATH": os.environ["PATH"]},
            stderr=subprocess.PIPE,
        )
        try:
            states.append(health(f"http://127.0.0.1:{config['port']}/healthz")["state"])
        finally:
            guest.kill()
            guest.communicate(timeout=30)
    assert states == ["warm", "tainted"]


def health(url: str) -> dict[str, str]:
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.load(answer)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
