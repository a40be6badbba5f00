"""Before a sandbox starts: copies folders of its image twice, to begin with and to go back to.

    python -m rljob_sandbox_pool.guest.seed [--max-mib=N] SEED TARGET PATH…

PATH number n becomes SEED/n, which the sandbox only reads, and TARGET/n, which it sees as PATH and may change. Modes,
links, hard links and times are kept; owners only by root. A PATH that the image does not have is empty. What
cannot be read is left out, and said on stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rljob_sandbox_pool.guest.folders import FOLDER, Copy, TooLargeError

MAX_MIB = 65_536
_USAGE = "usage: seed [--max-mib=N] SEED TARGET PATH…"


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 with one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    max_mib = MAX_MIB
    if words and words[0].startswith("--max-mib="):
        digits = words.pop(0).partition("=")[2]
        if not (digits.isascii() and digits.isdigit() and 0 < len(digits) < 12):
            sys.stderr.write(f"{_USAGE}\n")
            return 1
        max_mib = int(digits)
    if len(words) < 2:
        sys.stderr.write(f"{_USAGE}\n")
        return 1
    seed, target, *paths = words
    for number, path in enumerate(paths):
        for root in (seed, target):
            if complaint := _copy(path, f"{root}/{number}", max_mib << 20):
                sys.stderr.write(f"{path}: {complaint}\n")
                return 1
    return 0


def _copy(path: str, to: str, max_bytes: int) -> str:
    """What went wrong; empty: nothing."""
    if (real := os.path.realpath(path)) != path:
        return f"a link leads from there to {real}, where the sandbox would not see the copy; name {real}"
    copy = Copy(max_bytes)
    try:
        os.mkdir(to, 0o755)
        copy_folder(copy, path, to)
    except (OSError, TooLargeError) as error:
        return str(error)
    if copy.num_left_out:
        sys.stderr.write(f"{path}: {copy.num_left_out} left out, as {copy.left_out[0]}\n")
    return ""


def copy_folder(copy: Copy, path: str, to: str) -> None:
    """The folder `path`, where there is one, into the empty folder `to`. Raises OSError, TooLargeError."""
    try:
        source = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    try:
        target = os.open(to, FOLDER)
        try:
            copy.copy(source, target)
        finally:
            os.close(target)
    finally:
        os.close(source)


if __name__ == "__main__":
    sys.exit(main())
