"""What the guest asks of the kernel: not dumpable, the agent's user for a while, limits of a child."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CLONE_NEWUSER = 0x10000000
_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 1 << 18
_LIBC = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def harden() -> None:
    """Nobody reads this process's memory or takes its descriptors; it dies with bwrap's outer process.

    The kernel drops both whenever the process changes its user, hence again after each time.
    """
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def return_large_buffers() -> None:
    """What is large goes back to the system when it is freed: bodies come and go, and the sandbox needs its memory."""
    _LIBC.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def enter_user_namespace(guest_uid: int, agent_uid: int, agent: int) -> None:
    """From root to nobody in particular: root of a user namespace that holds two users of no other use outside.

    Inside, this process is 0 and commands run as `agent`; outside they are `guest_uid` and `agent_uid`. The maps are
    written by a child that stays outside, since only there the right to do so is held.
    """
    os.setgroups([])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(writer)
            os.read(reader, 1)
            for name in ("uid_map", "gid_map"):
                with open(f"/proc/{os.getppid()}/{name}", "w") as file:
                    file.write(f"0 {guest_uid} 1\n{agent} {agent_uid} 1\n")
            code = 0
        finally:
            os._exit(code)
    os.close(reader)
    entered = _LIBC.unshare(_CLONE_NEWUSER) == 0
    os.close(writer)
    _, status = os.waitpid(child, 0)
    if not entered or status != 0:
        raise OSError(ctypes.get_errno(), "cannot enter a user namespace")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def forbid_new_privileges() -> None:
    """No set-uid program gives this process or its children anything."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


class User:
    """Whom commands run as, and whose rights file operations have. Without a uid of its own: the guest's user."""

    def __init__(self, uid: int | None) -> None:
        self.uid = uid

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Act as the user: the kernel decides about every path as it would for the agent's own commands."""
        if self.uid is None:
            yield
            return
        os.setegid(self.uid)
        os.seteuid(self.uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)
            harden()

    def become(self) -> None:
        """In a forked child: for good, without a way back."""
        if self.uid is not None:
            os.setgroups([])
            os.setresgid(self.uid, self.uid, self.uid)
            os.setresuid(self.uid, self.uid, self.uid)


def limit_child(rlimits: Mapping[str, int]) -> None:
    """Set limits (`RLIMIT_NPROC`: 128 …) that the calling process cannot raise again."""
    for name, value in rlimits.items():
        kind, limit = getattr(resource, name), value
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            limit = min(value, hard)
        resource.setrlimit(kind, (limit, limit))


def preferred_by_oom_killer() -> None:
    """In a forked child: where memory runs out, commands go before the guest.

    Only what is dumpable owns its files in /proc; whoever could look in would have to be the guest's user, and the
    change of user that follows makes it undumpable again.
    """
    _prctl(_PR_SET_DUMPABLE, 1)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def usage() -> dict[str, int]:
    """What this process holds, and how many others there are."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "memory_bytes": pages * resource.getpagesize(),
        "processes": sum(name.isdigit() for name in os.listdir("/proc")) - 1,
    }


def default_signals() -> None:
    """In a forked child: what Python ignores, commands expect to have its default action."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
