"""`rljob sandbox cp`: files and folders between this machine and a claimed sandbox."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rljob.claimed_sandbox import ClaimedSandbox
from rljob.errors import UserError
from rljob_sandbox_pool.cli.state import NAME, State
from rljob_sandbox_pool.cli.where import attached, call


def main(state: State, source: str, target: str) -> None:
    """Copy one way or the other. Raises UserError."""
    here, there = _split(source), _split(target)
    if (here is None) == (there is None):
        raise UserError("cp", "one side is in a sandbox", "write it as CLAIM:/path")
    name, path = here or there or ("", "")
    stored = state.claim(name)
    local = Path(target if here else source)

    async def work() -> None:
        async with attached(stored) as box:
            await (_download(box, path, local) if here else _upload(box, local, path))

    call(work)


def _split(text: str) -> tuple[str, str] | None:
    """CLAIM:/path apart; None: a path of this machine, as everything with a slash before its colon is."""
    name, colon, path = text.partition(":")
    return (name, path or ".") if colon and NAME.fullmatch(name) else None


async def _upload(box: ClaimedSandbox, local: Path, remote: str) -> None:
    def read() -> tuple[bytes, int]:
        return local.read_bytes(), local.stat().st_mode & 0o777

    data, mode = await asyncio.to_thread(read)
    await box.write_file(remote, data, mode=mode)


async def _download(box: ClaimedSandbox, remote: str, local: Path) -> None:
    data = await box.read_file(remote)
    await asyncio.to_thread(local.write_bytes, data)
