"""The process of a shell, with the pipes or the terminal that it is reached by."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from rljob_sandbox_pool.guest.children import Children, OnExit, Program
from rljob_sandbox_pool.guest.shell_script import Dialect
from rljob_sandbox_pool.guest.system import User


@dataclass(frozen=True)
class Terminal:
    """Size of a shell's terminal."""

    rows: int
    columns: int


class Ends(NamedTuple):
    """The shell's pid, and the guest's ends of what leads there."""

    pid: int
    control: int
    stdin: int
    stdout: int
    codes: int
    own: int
    """Of the terminal that the shell takes for its own, and whose settings it puts right when a command crashed.

    A shell without a terminal for its commands has one for itself alone: else it would complain in their output.
    """


def start(
    children: Children,
    dialect: Dialect,
    cwd: str,
    env: Mapping[str, str],
    terminal: Terminal | None,
    on_exit: OnExit,
) -> Ends:
    """Start a shell. Raises OSError."""
    with ExitStack() as theirs, ExitStack() as ours:

        def pair(one: tuple[int, int]) -> tuple[int, int]:
            """The child's end and the guest's, each closed in time."""
            theirs.callback(os.close, one[0])
            ours.callback(os.close, one[1])
            return one

        control, codes = pair(os.pipe()), pair(_backward_pipe())
        own = pair(_terminal(children.profile.user, terminal or Terminal(24, 80)))
        if terminal is None:
            stdin, stdout = pair(os.pipe()), pair(_backward_pipe())
        else:
            stdin, stdout = (pair((os.dup(own[0]), os.dup(own[1]))) for _ in range(2))
        numbers = dialect.descriptors
        given = (control, own, own, stdin, stdout, codes)
        program = Program(
            (children.profile.shell, *dialect.options),
            cwd,
            {"TERM": "dumb", **env},
            {number: ends[0] for number, ends in zip((0, 1, 2, *numbers), given, strict=True)},
            complaints=numbers[1],
            terminal=numbers[0] if terminal else None,
        )
        pid = children.start(program, on_exit)
        ours.pop_all()
        return Ends(pid, control[1], stdin[1], stdout[1], codes[1], own[1])


def _backward_pipe() -> tuple[int, int]:
    """The writing end first."""
    reader, writer = os.pipe()
    return writer, reader


def _terminal(user: User, size: Terminal) -> tuple[int, int]:
    """The program's end and the other one; without echo, lines end as they are written."""
    with user.borrowed():
        main, theirs = os.openpty()
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.ONLCR
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))
    return theirs, main
