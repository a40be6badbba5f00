"""`rljob validate`: every fault of a manifest, one line each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(validate)


def validate(
    manifest: Annotated[Path, typer.Argument(help="The YAML file.")],
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="Override a key, e.g. rollout.schedule=sync. Repeatable.",
        ),
    ] = None,
) -> None:
    """Check a manifest.

    Every fault is one line: where, what is wrong, what to do about it.
    """
    from rljob.api.load import load

    job = load(manifest, assignments or [])
    print(f"{manifest}: {job.kind} {job.name} is valid")
