"""Published weights: the manifest and the store.

    trainer ── publish ──► <artifacts>/weights/{incarnation}-{n}/ ── fetch ──► engine agent ── switch(path) ──► engine

A version is a directory that vLLM can serve (safetensors, config, tokenizer) plus `rljob-manifest.json`, written
last. The whole directory appears by one rename: a reader sees all of it or nothing. Every tensor, every file and the
manifest itself have a hash; the engine checks the tensors once more as it loads them. No torch here.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rljob.errors import CorruptError, StoreError
from rljob.ids import PolicyVersion

MANIFEST = "rljob-manifest.json"
_CHUNK_BYTES = 4 * 1024 * 1024
_TEMPORARY = ".tmp-"
_REMOVED = ".gone-"


class VersionGoneError(StoreError):
    """The version is not in the store (pruned, or never published): take the newest."""


class Canary(msgspec.Struct, kw_only=True, frozen=True):
    """A sequence whose score tells versions apart. Log probabilities at temperature 1, one per token of `token_ids`."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float] | None = None
    """Under these weights, by the trainer. Absent where there is none: then they are the weights that the engine began
    with, and must score as before the load."""
    previous_logprobs: list[float] | None = None
    """Under the version before, for people; absent for the first. The engine scores its own before it loads."""


class FileEntry(msgspec.Struct, kw_only=True, frozen=True):
    """One file of a version."""

    bytes: int
    sha256: str


class WeightsManifest(msgspec.Struct, kw_only=True, frozen=True):
    """`rljob-manifest.json`."""

    incarnation: int
    n: int
    tensors: dict[str, str]
    """Name → hash of dtype, shape and bytes (see `tensor_hash`)."""
    files: dict[str, FileEntry]
    canary: Canary | None = None
    """Absent where nothing will serve these weights (simulated trainers)."""
    digest: str = ""
    """sha256 of the manifest's canonical JSON without this field."""

    @property
    def version(self) -> PolicyVersion:
        """The name of the weights."""
        return PolicyVersion(self.incarnation, self.n)


class RawTensor(msgspec.Struct, frozen=True):
    """A tensor without a framework."""

    name: str
    dtype: str
    """As safetensors spells it: F32, BF16 …"""
    shape: list[int]
    data: Any
    """Its contiguous little-endian bytes: bytes, memoryview or a NumPy array of uint8."""


def tensor_hash(dtype: str, shape: Sequence[int], data: Any) -> str:
    """The hash of one tensor in the manifest: of its dtype, shape and bytes."""
    digest = hashlib.sha256(f"{dtype}:{','.join(map(str, shape))}:".encode())
    digest.update(data)
    return digest.hexdigest()


class WeightStore:
    """The `weights/` folder of an artifact store.

    Args:
        artifacts: `Settings.artifacts`.
    """

    def __init__(self, artifacts: Path | str) -> None:
        self.root = Path(artifacts) / "weights"

    def path(self, version: PolicyVersion) -> Path:
        """Where a version is or would be."""
        return self.root / str(version)

    def list(self) -> builtins.list[PolicyVersion]:
        """Published versions, oldest first."""
        names = (path.parent.name for path in self.root.glob(f"*/{MANIFEST}"))
        return sorted(PolicyVersion.parse(name) for name in names if not name.startswith("."))

    def publish(
        self,
        version: PolicyVersion,
        source: Path | str,
        canary: Canary | Mapping[str, Any] | None,
        *,
        tensors: Sequence[RawTensor] | None = None,
    ) -> str:
        """Publish atomically; return the manifest's digest. Repeating it with the same content is harmless.

        Args:
            version: The name of the weights.
            source: A model directory; its files are copied.
            canary: What the engine verifies the load with.
            tensors: Instead of the safetensors files of `source`.

        Raises:
            CorruptError: the version was already published with other content.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        for abandoned in self.root.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(
                abandoned, ignore_errors=True
            )  # one trainer publishes: its predecessor died half-way
        scratch = self.root / f"{_TEMPORARY}{version}-{secrets.token_hex(4)}"
        scratch.mkdir()
        try:
            hashes = _fill(scratch, Path(source), tensors)
            manifest = _sealed(version, scratch, hashes, _canary(canary))
            if self.path(version).exists():
                return self._already(version, manifest)
            _write(scratch / MANIFEST, _canonical(manifest))
            _sync_directory(scratch)
            scratch.rename(self.path(version))
            _sync_directory(self.root)
            return manifest.digest
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _already(self, version: PolicyVersion, manifest: WeightsManifest) -> str:
        if self.manifest(version).digest != manifest.digest:
            raise CorruptError(f"weights {version} were already published with other content")
        return manifest.digest

    def manifest(self, version: PolicyVersion) -> WeightsManifest:
        """The manifest of a version.

        Raises:
            VersionGoneError: there is none.
            CorruptError: it does not verify.
        """
        return _read_manifest(self.path(version), version)

    def verify(self, version: PolicyVersion) -> WeightsManifest:
        """Hash every file and tensor of a version. Raises VersionGoneError, CorruptError."""
        manifest = self.manifest(version)
        _verify_files(self.path(version), manifest)
        actual = {
            name: digest
            for file in _safetensors(self.path(version))
            for name, digest in _hash_tensors(file)
        }
        if actual != manifest.tensors:
            raise CorruptError(f"weights {version}: tensors do not match the manifest")
        return manifest

    def fetch(self, version: PolicyVersion, dest: Path | str) -> Path:
        """Bring a version to `dest/{version}`, verified: hard links on one file system, else copies. Return the folder.

        Raises:
            VersionGoneError: it was pruned, or is not there.
            CorruptError: a file does not verify.
        """
        manifest = self.manifest(version)
        target, scratch = (
            Path(dest) / str(version),
            Path(dest) / f"{_TEMPORARY}{version}-{secrets.token_hex(4)}",
        )
        if target.exists():
            if _read_manifest(target, version).digest == manifest.digest:
                return target
            shutil.rmtree(target)
        scratch.mkdir(parents=True)
        try:
            for name in [*manifest.files, MANIFEST]:
                _link_or_copy(self.path(version) / name, scratch / name)
            _verify_files(scratch, manifest)
            scratch.rename(target)
        except FileNotFoundError as error:
            raise VersionGoneError(
                f"weights {version} vanished while being fetched: {error.filename}"
            ) from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return target

    def prune(
        self, keep: int, held: Collection[PolicyVersion] = ()
    ) -> builtins.list[PolicyVersion]:
        """Remove all but the `keep` newest versions and those `held`; return what was removed."""
        removed = [version for version in self.list()[: -keep or None] if version not in held]
        for version in removed:
            grave = self.root / f"{_REMOVED}{version}-{secrets.token_hex(4)}"
            self.path(version).rename(grave)  # a reader sees a whole version or none
        for grave in self.root.glob(f"{_REMOVED}*"):
            shutil.rmtree(grave, ignore_errors=True)
        return removed


def _canary(canary: Canary | Mapping[str, Any] | None) -> Canary | None:
    return (
        canary
        if canary is None or isinstance(canary, Canary)
        else msgspec.convert(dict(canary), Canary)
    )


def _canonical(manifest: WeightsManifest) -> bytes:
    return json.dumps(
        msgspec.to_builtins(manifest), sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode()


def _digest(manifest: WeightsManifest) -> str:
    body = msgspec.to_builtins(manifest)
    del body["digest"]
    return hashlib.sha256(
        json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    ).hexdigest()


def _sealed(
    version: PolicyVersion, folder: Path, hashes: dict[str, str], canary: Canary | None
) -> WeightsManifest:
    files = {
        path.name: FileEntry(bytes=path.stat().st_size, sha256=_hash_file(path))
        for path in sorted(folder.iterdir())
    }
    manifest = WeightsManifest(
        incarnation=version.incarnation, n=version.n, tensors=hashes, files=files, canary=canary
    )
    return msgspec.structs.replace(manifest, digest=_digest(manifest))


def _read_manifest(folder: Path, version: PolicyVersion) -> WeightsManifest:
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=WeightsManifest)
    except (FileNotFoundError, NotADirectoryError):
        raise VersionGoneError(f"weights {version} are not in {folder.parent}") from None
    except msgspec.MsgspecError as error:
        raise CorruptError(f"{folder / MANIFEST}: {error}") from None
    if manifest.version != version or manifest.digest != _digest(manifest):
        raise CorruptError(f"{folder / MANIFEST} does not verify")
    return manifest


def _fill(folder: Path, source: Path, tensors: Sequence[RawTensor] | None) -> dict[str, str]:
    """Write the files of a version into `folder`; return the hash of every tensor."""
    for path in sorted(source.iterdir()):
        is_weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
        if path.is_file() and path.name != MANIFEST and not (is_weights and tensors is not None):
            shutil.copyfile(path, folder / path.name)
    if tensors is not None:
        write_safetensors(folder / "model.safetensors", tensors)
    for path in folder.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    return {name: digest for file in _safetensors(folder) for name, digest in _hash_tensors(file)}


def write_safetensors(path: Path, tensors: Sequence[RawTensor]) -> None:
    """Write tensors in the safetensors format."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        size = memoryview(tensor.data).nbytes
        offsets = [position, position + size]
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        position += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # the format wants its data aligned
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors:
            stream.write(tensor.data)


def _safetensors(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _hash_tensors(path: Path) -> Iterator[tuple[str, str]]:
    """Name and hash of each tensor of a safetensors file."""
    try:
        with path.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(header_bytes))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                stream.seek(8 + header_bytes + begin)
                yield name, tensor_hash(entry["dtype"], entry["shape"], stream.read(end - begin))
    except (ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise CorruptError(f"{path} is no safetensors file: {error!r}") from None


def _verify_files(folder: Path, manifest: WeightsManifest) -> None:
    for name, entry in manifest.files.items():
        path = folder / name
        if path.stat().st_size != entry.bytes or _hash_file(path) != entry.sha256:
            raise CorruptError(f"weights {manifest.version}: {name} does not match the manifest")


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
