"""`rljob export`: a published version, verified file by file, as a directory that vLLM serves."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from rljob.errors import CorruptError, MachineError
from rljob.ids import PolicyVersion
from rljob.weights import MANIFEST, WeightStore
from rljob_operator.show.runs import artifacts_of, find, unknown


def main(to: Path, *, version: str | None, name: str | None, runs_dir: Path) -> None:
    """Copy a version out."""
    folder = find(name, runs_dir)
    store = WeightStore(artifacts_of(folder))
    published = store.list()
    if not published:
        raise MachineError(
            folder.name, "has published no weights yet", "wait for the trainer's first step"
        )
    chosen = published[-1] if version is None else _parse(version, published)
    try:
        _copy(store, chosen, to)
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise MachineError(str(to), problem, "name another folder") from None
    sys.stdout.write(f"{folder.name} {chosen} is in {to}: vllm serve {to}\n")


def _copy(store: WeightStore, chosen: PolicyVersion, to: Path) -> None:
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise MachineError(str(to), "exists and is not an empty folder", "name another one")
    to.mkdir(parents=True, exist_ok=True)
    # fetched files may be links into the run; what people get is theirs to change
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}.") as scratch:
        try:
            fetched = store.fetch(chosen, scratch)
        except CorruptError as error:
            raise MachineError(
                str(store.path(chosen)), str(error), "export another --version"
            ) from None
        shutil.copytree(fetched, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))


def _parse(text: str, published: list[PolicyVersion]) -> PolicyVersion:
    names = [str(version) for version in published]
    if text not in names:
        raise unknown("version", text, names)
    return PolicyVersion.parse(text)
