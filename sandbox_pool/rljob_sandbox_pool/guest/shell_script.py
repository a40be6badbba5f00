"""What a shell is told: a command as one line that its output, its input and its syntax cannot break out of.

The shell is interactive, so that an interrupt ends a command and never the shell; it reads its lines from a pipe that
no command sees. A command's input and output are descriptors of their own, and its exit code comes over another pipe,
as `number code`: nothing is looked for in the output.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class Dialect(NamedTuple):
    """How one kind of shell is started and spoken to."""

    options: tuple[str, ...]
    descriptors: tuple[int, int, int]
    """In the shell: input, output and exit codes of commands."""
    preparation: str


_BASH = Dialect(
    ("--norc", "--noprofile", "--noediting", "-i"),
    (250, 251, 252),
    "set +o history +H; unset HISTFILE; shopt -s expand_aliases\n",
)
# The standard wants one digit only. Busybox takes a child's end while it reads for the end of what it reads.
_POSIX = Dialect(("-i",), (7, 8, 9), "set -o ignoreeof\n")

_EVALUATE = "command eval"
"""Runs a string, whatever functions there are of that name; its syntax errors do not end the shell."""
_REPORT = "__rljob"
MAX_CODE = 255


def dialect(shell: str) -> Dialect:
    """Of the shell at that path."""
    return _BASH if os.path.basename(shell) == "bash" else _POSIX


def greeting(spoken: Dialect) -> bytes:
    """The first lines: the report of command 0 says that the shell is there."""
    codes = spoken.descriptors[2]
    # The code is returned, so that the next command finds it in $?.
    define = f'{_REPORT}() {{ command printf \'%s %s\\n\' "$1" "$2" >&{codes}; return "$2"; }}\n'
    return ("exec >/dev/null 2>&1\n" + spoken.preparation + define).encode() + report(0)


def command(spoken: Dialect, number: int, text: str) -> bytes:
    """The lines that run a command and report its end. Raises UnicodeEncodeError."""
    stdin, stdout, codes = spoken.descriptors
    hidden = f"{stdin}<&- {stdout}>&- {codes}>&-"
    quoted = "'" + text.replace("'", "'\\''") + "'"
    line = f"{_EVALUATE} {quoted} <&{stdin} >&{stdout} 2>&1 {hidden}\n"
    return line.encode("utf-8", "surrogateescape") + report(number)


def report(number: int) -> bytes:
    """The line that reports the end of a command. A shell that was interrupted may have lost it, and is told again."""
    return f"{_REPORT} {number} $?\n".encode()


def reported(line: bytes) -> tuple[int, int] | None:
    """Number and exit code of a report; None: it is none."""
    number, _, code = line.partition(b" ")
    if number.isdigit() and code.isdigit() and len(line) < 32 and int(code) <= MAX_CODE:
        return int(number), int(code)
    return None
