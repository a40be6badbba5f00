"""The bwrap command line: what a sandbox sees, and how this machine can isolate it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rljob.errors import MachineError, SandboxError
from rljob_sandbox_pool import guest

WORKSPACE = "/workspace"
FOLDERS = (WORKSPACE, "/tmp", "/dev/shm")
GUEST_ROOT = "/run/rljob"
BOOT_FOLDER = f"{GUEST_ROOT}/boot"
SEED_FOLDER = f"{GUEST_ROOT}/seed"
MIB = 1024 * 1024
_SHM_MIB = 16
_PROBE_SECONDS = 20
AGENT = 1000
"""Uid of commands as they see it themselves; where they share one, the guest's too."""
_LAUNCHER = f"import sys; sys.path.insert(0, {GUEST_ROOT!r}); from {guest.__name__}.main import main; main()"
_NEEDED = (sys.base_prefix, "/usr/lib", "/usr/lib64", "/lib", "/lib64")
_TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = (
    "alternatives ld.so.cache ld.so.conf ld.so.conf.d localtime nsswitch.conf mime.types magic protocols services "
    "ssl/certs ca-certificates terminfo inputrc"
).split()
_ROOT_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_CHOWN")
"""What the guest keeps where commands have a uid of their own: become that uid, signal it, hand it the folders."""


def find_bwrap() -> str:
    """Path of bubblewrap. Raises MachineError."""
    if path := shutil.which("bwrap"):
        return path
    raise MachineError(
        "bubblewrap",
        "bwrap is not installed",
        "install it (apt-get install bubblewrap) or set runtime: simulated",
    )


def isolation(bwrap: str, *, own_uid: bool) -> list[str]:
    """The part of the command line that isolates.

    Not with `--die-with-parent`: where bwrap's outer process dies between making the inner one and waking it, the inner
    one sleeps for ever. The guest ends with the pipe that its starter holds, which has no such moment.
    """
    argv = [
        bwrap,
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    argv += ["--as-pid-1", "--new-session", "--hostname", "sandbox"]
    if not own_uid:
        return [*argv, "--unshare-user", "--uid", str(AGENT), "--gid", str(AGENT)]
    argv += ["--cap-drop", "ALL"]
    for capability in _ROOT_CAPABILITIES:
        argv += ["--cap-add", capability]
    return argv


def view(
    disk_bytes: int,
    passwd_fd: int,
    group_fd: int,
    *,
    own_uid: bool,
    writable_paths: Sequence[str] = (),
) -> list[str]:
    """The part of the command line that says what is to be seen: the machine's /usr, and writable folders in memory."""
    argv = [
        "--ro-bind",
        "/usr",
        "/usr",
        *_top_folders(),
        "--perms",
        "0755",
        "--dir",
        "/etc",
        "--perms",
        "0755",
        "--dir",
        GUEST_ROOT,
    ]
    for name in _ETC:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    argv += ["--perms", "0644", "--ro-bind-data", str(passwd_fd), "/etc/passwd"]
    argv += ["--perms", "0644", "--ro-bind-data", str(group_fd), "/etc/group"]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    prefix = Path(sys.base_prefix)
    if not prefix.is_relative_to("/usr"):
        argv += [*_parents(prefix), "--ro-bind", str(prefix), str(prefix)]
    argv += [
        "--ro-bind",
        str(guest_folder()),
        f"{GUEST_ROOT}/{guest.__name__.replace(chr(46), chr(47))}",
    ]
    if own_uid:
        argv += ["--perms", "0700", "--size", "65536", "--tmpfs", BOOT_FOLDER]
    argv += _writable_folders(disk_bytes, writable_paths)
    return [*argv, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORKSPACE]


def _writable_folders(disk_bytes: int, paths: Sequence[str]) -> list[str]:
    """A file system each; beside the pool's own paths, what they begin with."""
    shm = str(min(disk_bytes, _SHM_MIB * MIB))
    argv = ["--perms", "0755", "--size", str(disk_bytes), "--tmpfs", WORKSPACE]
    argv += ["--perms", "1777", "--size", str(disk_bytes), "--tmpfs", "/tmp"]
    argv += ["--perms", "1777", "--size", shm, "--tmpfs", "/dev/shm"]
    for number, path in enumerate(paths):
        argv += _parents(Path(path))
        argv += ["--perms", "0755", "--size", str(disk_bytes), "--tmpfs", path]
        argv += ["--perms", "0755", "--dir", seed_path(number)]
        argv += ["--ro-bind-try", path, seed_path(number)]
    return argv


def _parents(path: Path) -> Iterable[str]:
    """They may be closed outside (/root): here they hold nothing else."""
    for parent in reversed(path.parents[:-1]):
        yield from ("--perms", "0755", "--dir", str(parent))


def seed_path(number: int) -> str:
    """Where the machine's own folder is seen that a writable path begins with."""
    return f"{SEED_FOLDER}/{number}"


def check_writable_path(path: str) -> None:
    """What the pool's own checks cannot know of. Raises SandboxError."""
    if (real := os.path.realpath(path)) != path:
        raise SandboxError(f"writablePaths: {path} leads to {real} on this machine; name {real}")
    covered = [each for each in _NEEDED if f"{each}/".startswith(f"{path}/")]
    if covered or f"{path}/".startswith(f"{sys.base_prefix}/"):
        raise SandboxError(
            f"writablePaths: {path} would cover what the guest itself runs on; name a folder beside it"
        )


def writable_bytes(disk_bytes: int, num_paths: int) -> int:
    """What the writable folders together may hold, `num_paths` of them the pool's own."""
    return (2 + num_paths) * disk_bytes + min(disk_bytes, _SHM_MIB * MIB)


def guest_command() -> list[str]:
    """What runs as PID 1: this very interpreter, isolated from the sandbox's files and environment."""
    python = (
        Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    )
    return [str(python), "-I", "-S", "-c", _LAUNCHER]


def guest_folder() -> Path:
    """The guest's package on this machine."""
    return Path(guest.__file__).parent


def user_files(uid: int | None) -> tuple[str, str]:
    """/etc/passwd and /etc/group of a sandbox."""
    number = AGENT if uid is None else uid
    passwd = f"root:x:0:0:root:/:/usr/sbin/nologin\nagent:x:{number}:{number}:agent:{WORKSPACE}:/bin/bash\n"
    return passwd, f"root:x:0:\nagent:x:{number}:\n"


def complaint(bwrap: str, *, own_uid: bool) -> str | None:
    """What bwrap says when it is to make such a namespace here; None: it works."""
    argv = [*isolation(bwrap, own_uid=own_uid), "--ro-bind", "/usr", "/usr", *_top_folders()]
    argv += ["--proc", "/proc", "--dev", "/dev", "/usr/bin/true"]
    try:
        done = subprocess.run(
            argv, capture_output=True, timeout=_PROBE_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    words = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return words[-1] if words else f"bwrap: exit code {done.returncode}"


def _top_folders() -> Iterable[str]:
    for name in _TOP:
        path = Path("/") / name
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
