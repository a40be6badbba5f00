"""buildah with a storage of our own, and how it keeps an image."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CACHE = Path(os.environ.get("RLJOB_IMAGES_CACHE", Path.home() / ".cache/rljob/images"))


def say(*words: object) -> None:
    """Progress, at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class BuildError(Exception):
    """What the caller is told, in a line."""


def run(*argv: object, seconds: float = 120, **options: object) -> str:
    """A command's standard output; what it said is the failure's text."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=seconds, check=False, **options
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"not done after {seconds:.0f} s: {' '.join(words[:12])}") from None
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise BuildError(f"{tail}\n{' '.join(words)}: exit status {done.returncode}")
    return done.stdout


def buildah(*argv: object, seconds: float = 120, **options: object) -> str:
    """A buildah of our own storage: it sees no image of the machine's, and the machine none of ours."""
    (CACHE / "tmp/buildah-cache").mkdir(parents=True, exist_ok=True)
    policy = CACHE / "policy.json"
    policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    name = hashlib.sha256(str(CACHE).encode()).hexdigest()[:8]
    storage = ["--root", CACHE / "storage", "--runroot", f"/run/rljob-images-{name}"]
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "TMPDIR": str(CACHE / "tmp")}
    if argv[0] in ("build", "push", "commit", "from"):
        argv = (argv[0], "--signature-policy", policy, *argv[1:])
    driver = ["--storage-driver", "overlay"]
    return run("buildah", *storage, *driver, *argv, seconds=seconds, env=environment, **options)


def install_buildah() -> None:
    """From Debian, where it is missing."""
    if shutil.which("buildah"):
        return
    if os.geteuid() or not shutil.which("apt-get"):
        raise BuildError("buildah is missing: install it (apt-get install buildah)")
    say("installing buildah")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "-qq", "install", "-y", "--no-install-recommends", "buildah"]
    try:
        run(*install, seconds=300, env=environment)
    except BuildError:
        run("apt-get", "-qq", "update", seconds=300, env=environment)
        run(*install, seconds=300, env=environment)


def have() -> dict[str, str]:
    """Tag → id of what our storage holds, the newest image first."""
    listed = json.loads(buildah("images", "--json") or "[]") or []
    listed.sort(key=lambda image: image["createdatraw"], reverse=True)
    return {name: image["id"] for image in listed for name in image.get("names") or []}


class Stored(NamedTuple):
    """An image as buildah keeps it."""

    manifest: bytes
    config: bytes
    layers: tuple[Path, ...]
    """The unpacked layers, the lowest first."""


def stored(tag: str) -> Stored:
    """Look an image up in buildah's storage."""
    seen = json.loads(buildah("inspect", "--type", "image", tag))
    manifest, config = seen["Manifest"].encode(), seen["Config"].encode()
    if hashlib.sha256(config).hexdigest() != seen["FromImageID"]:
        raise BuildError(f"{tag}: buildah shows another configuration than it stores")
    storage = CACHE / "storage"
    tops = {
        i["id"]: i["layer"]
        for i in json.loads((storage / "overlay-images/images.json").read_text())
    }
    below = {
        layer["id"]: layer.get("parent")
        for layer in json.loads((storage / "overlay-layers/layers.json").read_text())
    }
    chain: list[Path] = []
    layer = tops[seen["FromImageID"]]
    while layer:
        chain.insert(0, storage / "overlay" / layer / "diff")
        layer = below[layer]
    return Stored(manifest, config, tuple(chain))


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One build or load at a time on a machine: they share the storage."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build runs: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
