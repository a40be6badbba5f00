"""A filter on system calls, for the guest and all that it starts.

Refused is what a command has no use for and what would outlive a reset or reach past the sandbox: kernel keyrings (they
stay with the user), new user namespaces (most holes in kernels of late were behind one), handles of files by number,
and a few large interfaces to the kernel's inside. Everything else is allowed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import NamedTuple

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _JUMP_GREATER, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in the kernel's `seccomp_data`; of an argument, the low half (little endian)."""
_CLONE_NEWUSER = 0x10000000
_X32 = 0x40000000
"""System calls from this number on are those of a second interface of x86-64, which nobody uses."""


class _Table(NamedTuple):
    """Numbers of one architecture."""

    audit: int
    clone: int
    clone3: int
    refused: tuple[int, ...]
    """In the order: add_key request_key keyctl unshare setns bpf perf_event_open userfaultfd kexec_load
    open_by_handle_at io_uring_setup."""


_TABLES = {
    "x86_64": _Table(0xC000003E, 56, 435, (248, 249, 250, 272, 308, 321, 298, 323, 246, 304, 425)),
    "aarch64": _Table(0xC00000B7, 220, 435, (217, 218, 219, 97, 268, 280, 241, 282, 104, 265, 425)),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def program(machine: str) -> bytes:
    """The filter for a machine (`os.uname().machine`); empty where its numbers are not known."""
    if (table := _TABLES.get(machine)) is None:
        return b""
    refuse, missing = _step(_RETURN, _ERRNO | errno.EPERM), _step(_RETURN, _ERRNO | errno.ENOSYS)
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_JUMP_EQUAL, table.audit, if_true=1),
        missing,
        _step(_LOAD, _NUMBER),
        _step(_JUMP_GREATER, _X32, if_false=1),
        missing,
    ]
    for number in table.refused:
        steps += [_step(_JUMP_EQUAL, number, if_false=1), refuse]
    # clone3 hides its flags behind a pointer: libraries fall back to clone where it is missing.
    steps += [_step(_JUMP_EQUAL, table.clone3, if_false=1), missing]
    steps += [
        _step(_JUMP_EQUAL, table.clone, if_false=3),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_JUMP_ANY_BIT, _CLONE_NEWUSER, if_false=1),
        refuse,
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(steps)


def install() -> bool:
    """For this process and all its children, for good; False where this machine's numbers are not known.

    Raises:
        OSError: the kernel refused the filter.
    """
    steps = program(os.uname().machine)
    if not steps:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    head = _Program(len(steps) // 8, steps)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(head), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return True
