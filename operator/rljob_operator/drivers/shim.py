"""`python -m rljob_operator.drivers.shim PARENT_PID -- COMMAND…`: runs a command that itself makes namespaces.

The pool manager cannot live in a pid namespace of its own (bubblewrap inside one cannot mount /proc as root). So this
stands between: it adopts every orphan (subreaper), ends with its parent (PR_SET_PDEATHSIG), and kills all descendants
before it ends. If shim and driver are killed together, the command dies by its own PR_SET_PDEATHSIG, its sandboxes by
`--die-with-parent`.

    SIGTERM        → passed on; after the command has ended, the rest is killed
    SIGQUIT        → everything is killed at once
    parent is gone → as SIGQUIT
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(argv: list[str]) -> int:
    """Run the command; its exit code, or 128 + the signal that ended it."""
    parent, command = int(argv[0]), argv[2:]
    _prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        return 0
    child = _start(command)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, lambda *_: _kill_descendants())
    code = _wait_for(child)
    while _kill_descendants():
        _reap()
    return code


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _start(command: list[str]) -> int:
    shim = os.getpid()
    if child := os.fork():
        return child
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != shim:
        os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        os._exit(127)


def _wait_for(child: int) -> int:
    """Reap whatever ends until the command itself does."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _kill_descendants() -> list[int]:
    found = _descendants(os.getpid())
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return found


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in listing.read_text().split()]
        except OSError:  # the process ended while we looked
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return found


def _reap() -> None:
    try:
        os.wait()
    except ChildProcessError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
