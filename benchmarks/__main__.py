"""`python -m benchmarks [NAME …]`: one JSON line per figure on stdout. A missed goal says `"holds": false`, no more."""

from __future__ import annotations

import importlib
import sys

NAMES = ("codec", "stream")


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all of them."""
    if unknown := set(names) - set(NAMES):
        print(
            f"unknown benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}",
            file=sys.stderr,
        )
        return 2
    for name in names or NAMES:
        for figure in importlib.import_module(f"benchmarks.{name}").figures():
            print(figure.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
