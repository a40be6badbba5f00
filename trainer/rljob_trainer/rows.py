"""Rows in: JSON lines or parquet to checked `Row`s, with the line named where one is malformed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rljob.errors import DataError
from rljob.task_config import Row


def read_rows(file: Path, task_names: list[str]) -> list[Row]:
    """Read and check a dataset file.

    A row without `task` gets the only Task Config where there is just one. In parquet, `metadata`
    and `overrides` may be
    structs or JSON text.

    Args:
        file: A `.jsonl`, `.json` (lines) or `.parquet` file.
        task_names: Names of the manifest's Task Configs.

    Raises:
        DataError: the file is missing or empty, or a row is malformed or names a task that is not
        configured.
    """
    if not file.is_file():
        raise DataError(str(file), "no such file", "give a JSON lines or parquet file")
    raw = _parquet(file) if file.suffix == ".parquet" else _json_lines(file)
    rows = [_row(where, data, task_names) for where, data in raw]
    if not rows:
        raise DataError(str(file), "holds no rows")
    return rows


def check_tasks(rows: list[Row], task_names: list[str], where: str) -> None:
    """Refuse rows whose task is not configured.

    Raises:
        DataError: naming the first such row.
    """
    for number, row in enumerate(rows, 1):
        if row.task not in task_names:
            raise _unknown_task(f"{where}:{number}", row.task, task_names)


def _json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}:{number}"
            if not line.strip():
                continue
            try:
                yield where, json.loads(line)
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise DataError(
                    where, f"not JSON ({error})", "write one JSON object per line"
                ) from None


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(str(file), f"not a parquet file ({reason})") from None
    for number, data in enumerate(table.to_pylist(), 1):
        where = f"{file}: row {number}"
        for key in ("metadata", "overrides"):
            data[key] = _parse_text(where, key, data.get(key))
        yield where, data


def _parse_text(where: str, key: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value or {}
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise DataError(where, f"{key} is not JSON ({error})") from None


def _row(where: str, data: Any, task_names: list[str]) -> Row:
    if not isinstance(data, dict):
        raise DataError(where, "a row must be a JSON object", 'write {"task": …, "prompt": …}')
    if "task" not in data and len(task_names) == 1:
        data = {"task": task_names[0], **data}
    unknown = sorted(set(data) - set(Row.__struct_fields__))
    if unknown:
        known = ", ".join(Row.__struct_fields__)
        fix = f"known keys: {known}; put task data into metadata"
        raise DataError(where, f"unknown key {unknown[0]!r}", fix)
    try:
        row = msgspec.convert(data, Row)
    except msgspec.ValidationError as error:
        raise DataError(where, str(error), "see docs/manifest.md for the shape of a row") from None
    if not row.messages():
        raise DataError(where, "prompt holds no message")
    if row.task not in task_names:
        raise _unknown_task(where, row.task, task_names)
    return row


def _unknown_task(where: str, task: str, known: list[str]) -> DataError:
    return DataError(
        where, f"task {task!r} is not configured", f"spec.tasks has: {', '.join(known)}"
    )
