"""`rljob`: the commands of every installed room under one name.

A room's entry point in the group `rljob.commands` names a function `register(app)`. Its module may import typer and
nothing heavier: whatever a command needs is imported inside the command, so that `rljob --help` stays under 0.3 s.
"""

from __future__ import annotations

import errno
import os
import sys
from importlib.metadata import entry_points

import typer

from rljob.cli import validate
from rljob.errors import UserError

GROUP = "rljob.commands"
INTERRUPTED = 130


def build() -> typer.Typer:
    """The whole command line."""
    # rich help costs 0.2 s at each start
    app = typer.Typer(
        name="rljob",
        help="Trains LLM agents with reinforcement learning from one manifest.",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    validate.register(app)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        entry.load()(app)
    return app


def _open_missing() -> None:
    """Whoever started us may have closed what every program has."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def main() -> None:
    """Run one command; bad input is one line per fault and exit code 2."""
    _open_missing()
    try:
        try:
            build()(prog_name="rljob")
        finally:
            sys.stdout.flush()
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        # Or it is tried again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(f"stdout: {error.strerror}; make room there\n")
        sys.exit(UserError.exit_code)


if __name__ == "__main__":
    main()
