"""(1) Prepared rows, by index.

The ledger hands out an index; which row that is, is a pure function of (seed, data hash, index):
every epoch is a full permutation of its own. No sampler state exists outside the index, so a
resumed job sees the rows it would have seen.
"""

from __future__ import annotations

import functools
import hashlib
import random
from pathlib import Path

import msgspec

from rljob.errors import DataError
from rljob.task_config import Row

PREPARED = "prepared"


class SplitInfo(msgspec.Struct, kw_only=True):
    """One split in `prepared/manifest.json`."""

    rows: int
    sha256: str


class PreparedManifest(msgspec.Struct, kw_only=True):
    """What of `prepared/manifest.json` the rows need; further fields belong to others."""

    train: SplitInfo | None = None
    """Absent in mode `eval`."""
    validation: SplitInfo | None = None

    @property
    def worked_on(self) -> SplitInfo:
        """What the ledger's rules are about. Raises DataError where nothing was prepared."""
        if (split := self.train or self.validation) is None:
            raise DataError(PREPARED, "holds no rows", "prepare again")
        return split


def load_manifest(artifacts: Path) -> PreparedManifest:
    """Read what the prepare component wrote. Raises DataError."""
    path = artifacts / PREPARED / "manifest.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=PreparedManifest)
    except FileNotFoundError:
        raise DataError(
            str(path), "is missing: nothing was prepared", "run the prepare component first"
        ) from None
    except msgspec.DecodeError as error:
        raise DataError(str(path), f"does not decode: {error}", "prepare again") from None


class Rows:
    """The rows of one split, held as their JSON lines and decoded one at a time."""

    def __init__(self, path: Path, info: SplitInfo) -> None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(
                str(path), f"cannot be read: {error.strerror}", "prepare again"
            ) from None
        found = hashlib.sha256(data).hexdigest()
        if found != info.sha256:
            raise DataError(
                str(path),
                f"has hash {found[:12]}, prepared was {info.sha256[:12]}",
                "the rows of a job never change: prepare again",
            )
        self._path, self.sha256 = path, info.sha256
        self._lines = [line for line in data.splitlines() if line.strip()]
        if len(self._lines) != info.rows or not self._lines:
            raise DataError(
                str(path),
                f"has {len(self._lines)} rows, prepared were {info.rows}",
                "prepare again",
            )

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, position: int) -> Row:
        """The row on line `position` (from 0). Raises DataError."""
        try:
            return msgspec.json.decode(self._lines[position], type=Row)
        except msgspec.DecodeError as error:
            raise DataError(
                self.where(position), str(error), "fix the row and prepare again"
            ) from None

    def where(self, position: int) -> str:
        """File and line, for people."""
        return f"{self._path}:{position + 1}"

    def row_hash(self, position: int) -> str:
        """First 16 hex digits of the SHA-256 of the prepared line, which is the row's canonical JSON."""
        return hashlib.sha256(self._lines[position]).hexdigest()[:16]


class Prompts:
    """Both splits of a job.

    Args:
        artifacts: The artifact store's folder.
        seed: `spec.data.train.seed`.
    """

    def __init__(self, artifacts: Path, seed: int) -> None:
        manifest = load_manifest(artifacts)
        folder = artifacts / PREPARED
        self.train = Rows(folder / "train.jsonl", manifest.train) if manifest.train else None
        self.validation = (
            Rows(folder / "validation.jsonl", manifest.validation) if manifest.validation else None
        )
        self._seed = seed

    def locate(self, row_index: int, *, validation: bool) -> tuple[Rows, int]:
        """The split and the line that an index means. Raises DataError where the split has no such row."""
        if not validation:
            if self.train is None:
                raise DataError("train.jsonl", "was not prepared", "prepare again")
            return self.train, train_position(
                self._seed, self.train.sha256, len(self.train), row_index
            )
        if self.validation is None or not 0 <= row_index < len(self.validation):
            raise DataError("validation.jsonl", f"has no row {row_index}", "prepare again")
        return self.validation, row_index


def train_position(seed: int, data_hash: str, num_rows: int, index: int) -> int:
    """Line of the training row at `index`; index counts on through the epochs."""
    epoch, place = divmod(index, num_rows)
    return _permutation(seed, data_hash, num_rows, epoch)[place]


@functools.lru_cache(
    maxsize=4
)  # groups in flight span two epochs at most, and a few spare cost little
def _permutation(seed: int, data_hash: str, num_rows: int, epoch: int) -> list[int]:
    order = list(range(num_rows))
    # a string seed is hashed with SHA-512 by `random`, the same on every machine and Python version
    random.Random(f"{seed}/{data_hash}/{epoch}").shuffle(order)
    return order
