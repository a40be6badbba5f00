"""`rljob sandbox cp`: files and folders between this machine and a claimed sandbox.

A destination that ends in a slash, or is a folder of this machine, gets what is copied under its own name; else it is
the new name.
"""

from __future__ import annotations

import posixpath
import sys
from pathlib import Path

from rljob.errors import UserError
from rljob.sandbox_archive import download, upload
from rljob_sandbox_pool.cli.state import NAME, State
from rljob_sandbox_pool.cli.where import attached, call


def main(state: State, source: str, target: str) -> None:
    """Copy one way or the other. Raises UserError."""
    here, there = _split(source), _split(target)
    if (here is None) == (there is None):
        raise UserError("cp", "one side is in a sandbox", "write it as CLAIM:/path")
    name, remote = here or there or ("", "")
    stored = state.claim(name)
    where, local = f"{name}:{remote}", Path(target if here else source)
    if here is None:
        remote = f"{remote}{local.resolve().name}" if remote.endswith("/") else remote
    elif target.endswith("/") or local.is_dir():
        local /= posixpath.basename(posixpath.normpath(remote)).lstrip(".") or "sandbox"

    async def work() -> int:
        async with attached(stored, where) as box:
            if here is None:
                await upload(box, local, remote)
                return 0
            return len((await download(box, remote, local)).left_out)

    if num := call(work):
        sys.stderr.write(f"{where}: {num} links that lead out of the folder were left out\n")


def _split(text: str) -> tuple[str, str] | None:
    """CLAIM:/path apart; None: a path of this machine, as everything with a slash before its colon is."""
    name, colon, path = text.partition(":")
    return (name, path or "./") if colon and NAME.fullmatch(name) else None
