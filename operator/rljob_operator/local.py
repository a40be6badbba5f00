"""`python -m rljob_operator.local MANIFEST`: one job on this machine, from manifest to summary.

    manifest ─► checks (manifest, folder, machine, ports) ─► LocalDriver ─► summary.json, curve.png, table

Exit codes: 0 Succeeded, 1 Failed, 2 bad input (one line per fault, nothing was started), 130 stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rljob.errors import UserError

STOPPED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job."""
    arguments = parse(argv)
    from rljob_operator.run import Run

    try:
        run = Run.prepare(
            arguments.manifest,
            assignments=arguments.assignments,
            runs_dir=arguments.runs_dir,
            resume=arguments.resume,
            plain=arguments.plain or not sys.stdout.isatty(),
        )
        return asyncio.run(run.drive())
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return STOPPED


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="rljob run")
    parser.add_argument("manifest", type=Path)
    parser.add_argument(
        "--set", dest="assignments", action="append", default=[], metavar="PATH=VALUE"
    )
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--plain", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
