"""Images that share nothing with the guest: no Python, musl only, no shell at all, files that only root reads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.harness.cluster import script

PREFIX = "localhost/rljob-e2e"


def load_all(folder: Path) -> dict[str, str]:
    """Make every image below `folder` and load it into the cluster; name → tag."""
    return {name: _load(folder, name, make) for name, make in _MAKERS.items()}


def _load(folder: Path, name: str, make: Callable[[Path], None]) -> str:
    root, tag = folder / name, f"{PREFIX}-{name}:1"
    root.mkdir()
    make(root)
    loaded = script("load-image", str(root), "--tag", tag)
    assert loaded.returncode == 0, loaded.stderr
    shutil.rmtree(root)
    return tag


def _debian(root: Path, *packages: str) -> None:
    made = script("rootfs", str(root), *packages)
    assert made.returncode == 0, made.stderr


def _shell(root: Path) -> None:
    """A static shell, and a Python older than the guest could run with."""
    _debian(root, "busybox-static")
    old = root / "usr" / "bin" / "python3"
    old.write_text("#!/bin/sh\necho Python 2.4; exit 1\n")
    old.chmod(0o755)


def _musl(root: Path) -> None:
    """No glibc: the loader and the C library are musl's, as in Alpine."""
    _debian(root, "busybox-static", "musl")


def _distroless(root: Path) -> None:
    """One static program: no shell, no library, no /etc."""
    made = root.with_name("distroless-from")
    made.mkdir()
    _debian(made, "busybox-static")
    (root / "app").mkdir()
    shutil.copy2(made / "bin" / "busybox", root / "app" / "busybox")
    shutil.rmtree(made)


def _root_owned(root: Path) -> None:
    """A repository that only root may read, with modes and links to keep."""
    _debian(root, "busybox-static")
    repository = root / "testbed"
    (repository / "src").mkdir(parents=True)
    (repository / "src" / "a.py").write_text("A = 1\n")
    (repository / "src" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (repository / "src" / "run.sh").chmod(0o755)
    os.link(repository / "src" / "a.py", repository / "src" / "hard.py")
    (repository / "link").symlink_to("src/a.py")
    (repository / "private").write_text("only root\n")
    (repository / "private").chmod(0o600)
    repository.chmod(0o700)


_MAKERS: dict[str, Callable[[Path], None]] = {
    "shell": _shell,
    "musl": _musl,
    "distroless": _distroless,
    "root": _root_owned,
}
