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

FAILED = 1
STOPPED = 130
_DISK_FIX = "see that it has space and can be written, then go on with it (--resume)"


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
    except OSError as error:  # above all a disk that is full; what a process held is contained
        why = error.strerror or str(error) or type(error).__name__
        why += f" ({error.filename})" if error.filename else ""
        where = arguments.runs_dir.absolute()
        sys.stderr.write(f"{where}: the run was ended: {why}; {_DISK_FIX}\n")
        return FAILED
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
