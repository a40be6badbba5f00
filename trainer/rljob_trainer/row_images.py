"""`python -m rljob_trainer.row_images FOLDER < job.json`: which tasks and images the rows name, counted.

    spec.data ─► rows, checked as `prepare` does ─► {"train": {"counts": [["shell", null, 240]]}, "validation": …}

For `rljob plan`, which knows no format of rows. A source that is elsewhere (a volume of a cluster, a hub that cannot be
reached) is `{"unread": why}`; a malformed row is exit code 2 and one line on stderr.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljob.api.rljob_types import RLJob
from rljob.errors import DataError, UserError
from rljob.labels import VOLUMES_PATH
from rljob.task_config import Row
from rljob_trainer.sources import fetch_rows

_IMAGE = re.compile(r"[!-~]{1,512}")
"""What a manifest takes as an image's name."""


def row_images(job: RLJob, base: Path) -> dict[str, Any]:
    """Split → counts of (task, image or None), as far as its rows can be read here.

    Args:
        job: The job.
        base: Folder that a relative file:// is relative to.

    Raises:
        DataError: a row is malformed.
    """
    data = job.spec.data
    found: dict[str, Any] = {}
    if job.spec.mode != "eval":
        found["train"] = _of(job, data.train.source, "train", base, None)
    if data.validation is not None:
        most = data.validation.max_rows
        found["validation"] = _of(job, data.validation.source, "validation", base, most)
    return found


def _of(job: RLJob, source: str, split: str, base: Path, most: int | None) -> dict[str, Any]:
    if why := _elsewhere(source):
        return {"unread": f"{source} {why}"}
    path = f"spec.data.{split}.source"
    try:
        rows = fetch_rows(source, split, base, [task.name for task in job.spec.tasks], path)
    except DataError:
        raise
    except UserError as error:  # a hub that cannot be reached
        return {"unread": error.problem}
    return {"counts": _counts(rows[:most], source)}


def _elsewhere(source: str) -> str:
    scheme, _, rest = source.partition("://")
    if scheme == "pvc" and not (Path(VOLUMES_PATH) / rest.partition("/")[0]).is_dir():
        return "is a volume of the cluster"
    if scheme == "file" and rest.startswith("/") and not Path(rest).exists():
        return "is not on this machine"
    return ""


def _counts(rows: Sequence[Row], source: str) -> list[list[Any]]:
    seen: Counter[tuple[str, str | None]] = Counter()
    for number, row in enumerate(rows, 1):
        image = row.overrides.get("image")
        if image is not None and not (isinstance(image, str) and _IMAGE.fullmatch(image)):
            where = f"{source}: row {number}"
            raise DataError(where, f"overrides.image is {image!r:.80}", "name an image")
        seen[row.task, image] += 1
    return [[task, image, count] for (task, image), count in seen.items()]


def main() -> int:
    """Entry point."""
    try:
        job = RLJob.model_validate_json(sys.stdin.read())
        json.dump(row_images(job, Path(sys.argv[1])), sys.stdout)
    except UserError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
