"""Loads images into the test cluster's containerd without copying their layers.

buildah's unpacked layers ─ hard links ─► snapshots;   manifest, configuration ─► `ctr images import`
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import tempfile
import time
from pathlib import Path

from storage import CACHE, BuildError, Stored, run, say, stored

CLUSTER_NAME = os.environ.get("RLJOB_CLUSTER_NAME", "rljob")
CLUSTER_STATE = Path(os.environ.get("RLJOB_CLUSTER_STATE", f"/var/tmp/{CLUSTER_NAME}"))


def ctr(*argv: object, **options: object) -> str:
    """containerd's client, in the namespace of the kubelet."""
    socket = CLUSTER_STATE / "containerd.sock"
    return run("ctr", "-a", socket, "-n", "k8s.io", *argv, seconds=300, **options)


def load(named: dict[str, list[str]]) -> None:
    """Load into the cluster what it does not have: NAME → its tags."""
    if not (CLUSTER_STATE / "containerd.sock").exists():
        raise BuildError(
            f"cluster {CLUSTER_NAME} is not up: make cluster-up (RLJOB_CLUSTER_NAME names another)"
        )
    there = dict(re.findall(r"^(\S+)\s+\S+\s+(sha256:\S+)", ctr("images", "ls"), re.M))
    snapshots = set(re.findall(r"^(sha256:\S+)", ctr("snapshots", "ls"), re.M))
    for name, tags in named.items():
        began = time.monotonic()
        image = stored(tags[0])
        digest = "sha256:" + hashlib.sha256(image.manifest).hexdigest()
        if all(there.get(tag) == digest for tag in tags):
            continue
        link_layers(image, snapshots)
        import_names(image, tags)
        say(f"{name:15s} loaded in {time.monotonic() - began:4.1f} s  {tags[0]}")


def link_layers(image: Stored, snapshots: set[str]) -> None:
    """Make each layer a snapshot of the cluster's, of the same files."""
    chain = ""
    for diff_id, layer in zip(
        json.loads(image.config)["rootfs"]["diff_ids"], image.layers, strict=True
    ):
        parent, chain = chain, chain_id(chain, diff_id)
        if chain in snapshots:
            continue
        key = f"rljob-{os.getpid()}-{chain}"
        (mount,) = json.loads(ctr("snapshots", "prepare", "--mounts", key, *filter(None, [parent])))
        target = upper_folder(mount)
        try:
            link_tree(layer, target)
            ctr("snapshots", "commit", chain, key)
        except BuildError:
            ctr("snapshots", "rm", key)
            raise
        ctr("snapshots", "label", chain, "containerd.io/gc.root=rljob")  # no content names it
        snapshots.add(chain)


def chain_id(parent: str, diff_id: str) -> str:
    """The OCI name of a layer on top of others."""
    if not parent:
        return diff_id
    return "sha256:" + hashlib.sha256(f"{parent} {diff_id}".encode()).hexdigest()


def upper_folder(mount: dict[str, object]) -> Path:
    """Where a prepared snapshot takes its files: the lowest layer is a bind mount, the others overlays."""
    options = mount.get("Options") or []
    upper = [o.removeprefix("upperdir=") for o in options if o.startswith("upperdir=")]
    return Path(upper[0] if upper else str(mount["Source"]))


def link_tree(source: Path, target: Path) -> None:
    """Hard links, or copies where the file systems differ; attributes and whiteouts as they are."""
    one_disk = source.stat().st_dev == target.stat().st_dev
    run("cp", "-a", *(["-l"] if one_disk else []), f"{source}/.", target, seconds=600)


def import_names(image: Stored, tags: list[str]) -> None:
    """Tell containerd (and through it the kubelet) of an image whose layers it has."""
    digest = hashlib.sha256(image.manifest).hexdigest()
    entry = {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "digest": f"sha256:{digest}",
        "size": len(image.manifest),
    }
    named = [{**entry, "annotations": {"io.containerd.image.name": tag}} for tag in tags]
    files = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps({"schemaVersion": 2, "manifests": named}).encode(),
        f"blobs/sha256/{digest}": image.manifest,
        f"blobs/sha256/{hashlib.sha256(image.config).hexdigest()}": image.config,
    }
    with tempfile.NamedTemporaryFile(dir=CACHE / "tmp", suffix=".tar") as archive:
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        archive.flush()
        ctr("images", "import", "--no-unpack", archive.name)
