"""`python -m benchmarks [--short] [NAME …]`: one JSON line per figure on stdout.

A missed goal says `"holds": false`, no more. `--short` shows in seconds that a benchmark works, where it has that
form: its numbers mean little.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import closing

NAMES = (
    *("codec", "stream", "exec_round_trip", "claims", "recycling", "soak"),
    *("cluster", "cluster_claims", "cluster_sandboxes"),
)


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all of them."""
    is_short, names = "--short" in names, [name for name in names if name != "--short"]
    if unknown := set(names) - set(NAMES):
        print(
            f"unknown benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}",
            file=sys.stderr,
        )
        return 2
    for name in names or NAMES:
        module = importlib.import_module(f"benchmarks.{name}")
        size = [module.SHORT] if is_short and hasattr(module, "SHORT") else []
        # Closed, so that what a benchmark has started ends also when printing is interrupted.
        with closing(module.figures(*size)) as figures:
            for figure in figures:
                print(figure.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
