"""Sources in: `hf://`, `file://`, `pvc://` and `recipe://` to a local model directory or to rows."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from rljob.errors import DataError, UserError
from rljob.labels import VOLUMES_PATH
from rljob.task_config import Row
from rljob_trainer import recipes
from rljob_trainer.recipes import Say
from rljob_trainer.rows import check_tasks, read_rows

_MODEL_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_BUILDING = ".building-"
_ABANDONED_SECONDS = 86_400


def fetch_model(
    source: str, revision: str | None, base: Path, cache: Path, target: Path, say: Say
) -> bool:
    """Put the model into `target` (an empty directory) and check that it can be served and trained.

    Args:
        source: `spec.model.source`.
        revision: `spec.model.revision`, for hf:// only.
        base: Folder that a relative file:// is relative to.
        cache: Folder of models that recipes built before.
        target: Where the model directory goes.
        say: Takes lines of progress.

    Returns:
        Whether the model came out of a cache.

    Raises:
        UserError: the model cannot be had or lacks something; the line names it.
    """
    scheme, _, rest = source.partition("://")
    from_cache = False
    if scheme == "recipe":
        from_cache = _build_recipe_model(source, cache, target, say)
    elif scheme == "hf":
        _copy_tree(_download(rest, revision, "model", _MODEL_PATTERNS, "spec.model.source"), target)
    else:
        folder = _on_disk(source, base, "spec.model.source")
        if not folder.is_dir():
            fix = "give the folder of a Hugging Face model"
            raise UserError("spec.model.source", f"no such folder: {folder}", fix)
        _copy_tree(folder, target)
    check_model(target)
    return from_cache


def fetch_rows(
    source: str, split: str, base: Path, task_names: list[str], manifest_path: str
) -> list[Row]:
    """The rows of a source, each checked.

    Args:
        source: `spec.data.train.source` or that of validation; `hf://ORG/NAME/FILE` names one file of a dataset.
        split: "train" or "validation"; recipes make disjoint rows for each.
        base: Folder that a relative file:// is relative to.
        task_names: Names of the manifest's Task Configs.
        manifest_path: The key that error lines name.

    Raises:
        UserError: the source cannot be had or a row is malformed.
    """
    scheme, _, rest = source.partition("://")
    if scheme == "recipe":
        recipe, options = recipes.parse(source, manifest_path)
        rows = recipe.build_rows(split, options)
        check_tasks(rows, task_names, source)
        return rows
    if scheme in ("file", "pvc"):
        return read_rows(_on_disk(source, base, manifest_path), task_names)
    owner, name, file = _split_hf_file(rest, manifest_path)
    folder = _download(f"{owner}/{name}", None, "dataset", [file], manifest_path)
    return read_rows(folder / file, task_names)


def _on_disk(source: str, base: Path, manifest_path: str) -> Path:
    """The path of a file:// source (absolute, or relative to the manifest's folder) or of a pvc:// one (mounted)."""
    scheme, _, rest = source.partition("://")
    if scheme == "file":
        return base / rest
    claim, _, path = rest.partition("/")
    if not claim or not path or ".." in (claim, *path.split("/")):
        fix = "write pvc://CLAIM/path/inside/the/volume, without .."
        raise DataError(manifest_path, f"{source} names no place inside a volume", fix)
    volume = Path(VOLUMES_PATH) / claim
    if not volume.is_dir():
        fix = "pvc:// sources are for clusters; on one machine use file://"
        raise DataError(manifest_path, f"the volume {claim} is not mounted at {volume}", fix)
    found = volume / path
    if not found.resolve().is_relative_to(volume.resolve()):
        raise DataError(manifest_path, f"{source} leads out of its volume", "copy it there")
    if not found.exists():
        fix = "check the path, and that the claim holds the data"
        raise DataError(manifest_path, f"the volume {claim} has no {path}", fix)
    return found


def check_model(folder: Path) -> None:
    """Check that a model directory can be served and trained.

    Raises:
        UserError: config, tokenizer, weights or chat template are missing.
    """
    where = "spec.model.source"
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise UserError(
                where, f"the model has no {name}", "save model and (fast) tokenizer there"
            )
        _load_json(folder / name, where)
    if not list(folder.glob("*.safetensors")):
        fix = "save it with safe_serialization=True"
        raise UserError(where, "the model has no *.safetensors weights", fix)
    if not _has_chat_template(folder, where):
        fix = "add chat_template to tokenizer_config.json or a chat_template.jinja"
        raise UserError(where, "the model has no chat template", fix)


def digest_files(folder: Path) -> str:
    """SHA-256 over the names and contents of every file of a model directory."""
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0")
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _load_json(file: Path, where: str) -> Mapping[str, object]:
    try:
        data = json.loads(file.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(where, f"{file.name} of the model is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise UserError(where, f"{file.name} of the model is not a JSON object")
    return data


def _has_chat_template(folder: Path, where: str) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(_load_json(config, where).get("chat_template"))


def _build_recipe_model(source: str, cache: Path, target: Path, say: Say) -> bool:
    recipe, options = recipes.parse(source, "spec.model.source")
    cached = cache / "models" / recipes.fingerprint(recipe, options)
    hit = (cached / "complete").is_file()
    if not hit:
        say(f"building {source}")
        _remove_abandoned(cached.parent)
        building = cached.with_name(f"{cached.name}{_BUILDING}{secrets.token_hex(4)}")
        (building / "model").mkdir(parents=True)
        recipe.build_model(building / "model", options, say)
        (building / "complete").touch()
        shutil.rmtree(cached, ignore_errors=True)
        _settle(building, cached)
    _copy_tree(cached / "model", target)
    return hit


def _settle(building: Path, cached: Path) -> None:
    try:
        building.rename(cached)
    except OSError:
        if not (cached / "complete").is_file():
            raise
        shutil.rmtree(building)  # another run on this machine built the same and was faster


def _remove_abandoned(models: Path) -> None:
    """What a killed start left half built; a living one is young."""
    for half in models.glob(f"*{_BUILDING}*"):
        if time.time() - half.stat().st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(half, ignore_errors=True)


def _copy_tree(source: Path, target: Path) -> None:
    """Copy a model directory, following links: the artifact store must not depend on its source.

    Modes stay behind: a read-only folder that is copied could not be replaced again.
    """
    for file in source.rglob("*"):
        if file.is_file():
            place = target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)


def _split_hf_file(rest: str, manifest_path: str) -> tuple[str, str, str]:
    parts = rest.split("/", 2)
    if len(parts) != 3 or not all(parts):
        fix = "write hf://ORG/NAME/path/to/file.parquet"
        raise DataError(manifest_path, f"hf://{rest} does not name a file", fix)
    return parts[0], parts[1], parts[2]


def _download(
    repo: str, revision: str | None, repo_type: str, patterns: list[str], manifest_path: str
) -> Path:
    """Fetch from the Hugging Face hub into its own cache (content-addressed and resumable)."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = snapshot_download(
            repo, revision=revision, repo_type=repo_type, allow_patterns=patterns, etag_timeout=30
        )
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        httpx.HTTPError,
        OSError,
    ) as error:
        reason = str(error).strip().splitlines()[0]
        fix = "check the name, HF_TOKEN and the network, or use file://"
        raise UserError(manifest_path, f"cannot fetch hf://{repo} ({reason})", fix) from None
    return Path(path)
