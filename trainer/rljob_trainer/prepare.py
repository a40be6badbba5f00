"""Makes model and rows ready before anything else starts: the first component of every plan.

    spec.model ──► fetch or build (cache) ──► check ──┐
    spec.data  ──► fetch or build ──► check, canonical ─┴──► <artifacts>/prepared/  (renamed into
    place, manifest last)

Consumes the manifest. Produces prepared/model, prepared/{train,validation}.jsonl (what the mode uses) and
prepared/manifest.json. Waits only for the sources. A prepared folder that matches the manifest is kept, so resuming
costs nothing; one that a killed start left half done does not count.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from rljob.api.rljob_types import RLJob
from rljob.errors import DataError, UserError
from rljob.settings import Settings
from rljob.task_config import Row
from rljob_trainer.files import new_directory
from rljob_trainer.recipes import Say
from rljob_trainer.sources import digest_files, fetch_model, fetch_rows


def prepare(settings: Settings, say: Say) -> dict[str, Any]:
    """Fill `<artifacts>/prepared` and return its manifest.

    Raises:
        UserError: a source cannot be had, or a row is malformed.
    """
    job = settings.job()
    prepared = Path(settings.artifacts) / "prepared"
    key = _sources_key(job)
    if (kept := _kept(prepared, key)) is not None:
        say("prepared before, kept")
        return kept
    started = time.monotonic()
    with new_directory(prepared) as partial:
        (partial / "model").mkdir()
        manifest = {"key": key, **_fill(job, settings, partial, say)}
        manifest["seconds"] = round(time.monotonic() - started, 3)
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=2))
    return manifest


def _fill(job: RLJob, settings: Settings, partial: Path, say: Say) -> dict[str, Any]:
    base = Path(settings.manifest_dir or ".")
    data = job.spec.data
    tasks = [task.name for task in job.spec.tasks]
    # Rows first: a malformed row should be told before minutes go into a model.
    train: list[Row] = []
    manifest: dict[str, Any] = {}
    if job.spec.mode != "eval":
        train = fetch_rows(data.train.source, "train", base, tasks, "spec.data.train.source")
        manifest["train"] = _write_rows(partial / "train.jsonl", train)
    if data.validation is not None:
        source = data.validation.source
        rows = fetch_rows(source, "validation", base, tasks, "spec.data.validation.source")
        rows = rows[: data.validation.max_rows]
        _refuse_overlap(train, rows)
        manifest["validation"] = _write_rows(partial / "validation.jsonl", rows)
    cache = Path(settings.cache_dir or Path(settings.artifacts) / "cache") / "prepared"
    model = job.spec.model
    manifest["from_cache"] = fetch_model(
        model.source, model.revision, base, cache, partial / "model", say
    )
    manifest["model_digest"] = digest_files(partial / "model")
    return manifest


def _write_rows(file: Path, rows: list[Row]) -> dict[str, Any]:
    """Canonical JSON lines, so that the hash of the file is the hash of the data."""
    encoder = msgspec.json.Encoder(order="sorted")
    data = b"".join(encoder.encode(row) + b"\n" for row in rows)
    file.write_bytes(data)
    return {"rows": len(rows), "sha256": hashlib.sha256(data).hexdigest()}


def _refuse_overlap(train: list[Row], validation: list[Row]) -> None:
    seen = {msgspec.json.encode(row, order="sorted") for row in train}
    for number, row in enumerate(validation, 1):
        if msgspec.json.encode(row, order="sorted") in seen:
            raise DataError(
                "spec.data.validation.source",
                f"row {number} is a training row too",
                "keep validation rows out of the training data",
            )


def _sources_key(job: RLJob) -> str:
    spec = job.spec
    sources = [spec.model.model_dump(mode="json"), spec.data.model_dump(mode="json")]
    parts = [*sources, [task.name for task in spec.tasks]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _kept(prepared: Path, key: str) -> dict[str, Any] | None:
    file = prepared / "manifest.json"
    if not file.is_file():
        return None
    manifest = json.loads(file.read_text())
    return manifest if manifest.get("key") == key else None


def main() -> int:
    """Entry point of the component. Exit code 2 on bad input, with the line as the last of stderr."""
    settings = Settings.from_env()
    settings.make_folders()
    # Threads that spin while they wait make a warm start five times slower on a machine that does other things too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    def say(line: str) -> None:
        print(f"prepare: {line}", file=sys.stderr, flush=True)  # noqa: T201

    try:
        manifest = prepare(settings, say)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201
        return error.exit_code
    training, validation = (
        manifest.get(split, {}).get("rows", 0) for split in ("train", "validation")
    )
    origin, seconds = "from cache" if manifest["from_cache"] else "built", manifest["seconds"]
    say(f"model {origin}, {training} training rows, {validation} validation rows, {seconds} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
