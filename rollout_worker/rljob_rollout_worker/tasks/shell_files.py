"""`shell_files`: a few text files in a sandbox and one question about them, checked exactly.

A row's metadata: `files` {path: text} that the sandbox starts with, `answer` that must be
submitted, and `expect` {path: text} of files that must read so at the end. Paths are relative to
the sandbox's working directory. No partial credit: a verifier that pays for half an answer teaches
half answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import msgspec

from rljob.errors import DataError
from rljob.sandbox import Sandbox
from rljob.task_config import AgentResult, Message, Reward, Row


class Files(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The metadata of a `shell_files` row."""

    answer: str
    files: dict[str, str] = {}
    expect: dict[str, str] = {}
    kind: str = ""
    """What kind of question it is; only for statistics."""


class ShellFiles:
    """The task family.

    Args:
        max_file_bytes: A file that the agent grew past this counts as wrong.
    """

    def __init__(self, max_file_bytes: int = 1_000_000) -> None:
        self._max_file_bytes = max_file_bytes

    def check(self, row: Row) -> None:
        """Refuse a malformed row before any episode runs on it. Raises DataError."""
        _metadata(row)

    async def setup(self, box: Sandbox, row: Row) -> list[Message]:
        """See `rljob.task_config.Task.setup`."""
        files = _metadata(row).files
        await box.write_files({path: text.encode() for path, text in files.items()})
        return row.messages()

    async def reward(self, box: Sandbox, row: Row, result: AgentResult) -> Reward:
        """1.0 when the submitted answer is right and every expected file has the expected text, else 0.0."""
        wanted = _metadata(row)
        answered = result.answer is not None and result.answer.strip() == wanted.answer.strip()
        # files are read even when the answer is wrong: the parts tell what failed
        files_right = all(
            [await self._reads(box, path, text) for path, text in wanted.expect.items()]
        )
        return Reward(
            value=float(answered and files_right),
            parts={"answer": float(answered), "files": float(files_right)},
        )

    async def export(self, box: Sandbox, row: Row) -> bytes:
        """See `rljob.task_config.ExportingTask.export`: the expected files as they stand."""
        found = {path: await self._text(box, path) for path in _metadata(row).expect}
        return msgspec.json.encode(found)

    async def load(self, box: Sandbox, row: Row, exported: bytes) -> None:
        """See `rljob.task_config.ExportingTask.load`."""
        found = msgspec.json.decode(exported, type=dict[str, str | None])
        for path, text in found.items():
            if text is None:
                await box.exec(["rm", "-rf", "--", path])
            else:
                await box.write_file(path, text.encode())

    async def _reads(self, box: Sandbox, path: str, text: str) -> bool:
        return await self._text(box, path) == text

    async def _text(self, box: Sandbox, path: str) -> str | None:
        try:
            return (await box.read_file(path, max_bytes=self._max_file_bytes)).decode()
        except (
            OSError,
            ValueError,
        ):  # missing, a folder, unreadable, too large, or not UTF-8: all wrong
            return None


def _metadata(row: Row) -> Files:
    try:
        files = msgspec.convert(row.metadata, Files)
    except msgspec.ValidationError as error:
        raise DataError(
            "metadata", f"not a shell_files row: {error}", "give files, answer and expect"
        ) from None
    for path in (*files.files, *files.expect):
        _check_path("metadata", path)
    return files


def _check_path(where: str, path: str) -> None:
    if not path or ".." in PurePosixPath(path).parts or path.startswith("/"):
        raise DataError(
            where, f"path {path!r} leaves the sandbox's working directory", "use a relative path"
        )


def metadata(
    files: Mapping[str, str], answer: str, expect: Mapping[str, str] | None = None, kind: str = ""
) -> dict[str, Any]:
    """Metadata of one row, as a builder of datasets writes it."""
    return {"files": dict(files), "answer": answer, "expect": dict(expect or {}), "kind": kind}
