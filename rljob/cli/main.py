"""`rljob`: the commands of every installed room under one name.

A room's entry point in the group `rljob.commands` names a function `register(app)`. Its module may import typer and
nothing heavier: whatever a command needs is imported inside the command, so that `rljob --help` stays under 0.3 s.
"""

from __future__ import annotations

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


def main() -> None:
    """Run one command; bad input is one line per fault and exit code 2."""
    try:
        build()(prog_name="rljob")
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
