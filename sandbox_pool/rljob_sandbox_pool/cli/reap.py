"""`rljob sandbox reap`: removes what is left of pools and pool managers that are no more."""

from __future__ import annotations

import shutil
import sys

from rljob_sandbox_pool.cli.state import State


def main(state: State, namespace: str | None, *, dry_run: bool) -> None:
    """Say what goes, and remove it unless it is a dry run. Raises UserError."""
    _local(state, dry_run=dry_run)


def _local(state: State, *, dry_run: bool) -> None:
    """Claims on a pool manager that was killed, and its scratch: its sandboxes ended with it."""
    dead = state.was_served()
    if dead is None:
        return
    for name, stored in state.claims().items():
        if stored.where.token == dead.token:
            _tell(f"claim {name}", dry_run=dry_run)
            if not dry_run:
                state.forget(name)
    _tell(f"state of pid {dead.pid}", dry_run=dry_run)
    if not dry_run:
        shutil.rmtree(state.work, ignore_errors=True)
        state.forget_served()


def _tell(what: str, *, dry_run: bool) -> None:
    sys.stdout.write(f"{what} {'would be removed' if dry_run else 'removed'}\n")
