"""`python -m benchmarks [NAME …]`: one JSON line per figure on stdout. A missed goal says `"holds": false`, no more."""

from __future__ import annotations

import importlib
import sys
from contextlib import closing

NAMES = ("codec", "stream", "cluster", "cluster_sandboxes")


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all of them."""
    if unknown := set(names) - set(NAMES):
        print(
            f"unknown benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}",
            file=sys.stderr,
        )
        return 2
    for name in names or NAMES:
        # Closed, so that what a benchmark has started ends also when printing is interrupted.
        with closing(importlib.import_module(f"benchmarks.{name}").figures()) as figures:
            for figure in figures:
                print(figure.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
