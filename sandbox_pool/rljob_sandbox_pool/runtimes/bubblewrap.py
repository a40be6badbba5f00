"""Sandboxes as bubblewrap namespaces on this machine: no network, the machine's /usr, everything writable in memory.

    pool manager ── pipe (config; when it ends, so does the sandbox) ──► bwrap ─► guest (PID 1) ─► commands
          └─ opens the listener and hands its descriptor through: a namespace without a network cannot be dialled

As root, every sandbox gets two uids of its own. bwrap makes its namespaces with root's rights; then the guest leaves
root for a user namespace in which it is the one uid and commands are the other: they can neither signal nor trace nor
limit it. Otherwise both run as the calling user in a user namespace: then PID 1 is protected by being PID 1 and by not
being dumpable.
"""

from __future__ import annotations

import asyncio
import compileall
import json
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rljob.errors import MachineError, SandboxError
from rljob_sandbox_pool.runtimes import cgroups, namespace
from rljob_sandbox_pool.runtimes.base import LocalRuntime, LocalSandbox, SandboxSpec

GUEST_MEMORY_BYTES = 128 * namespace.MIB
"""What the guest itself may need beside the commands: requests, answers and output in flight."""
GUEST_PIDS = 4
"""bwrap's two processes and the guest, and one to spare."""
FIRST_UID = 1 << 30
"""Far above the users of any machine."""
UIDS_PER_MANAGER = 4096
NUM_OPEN_FILES = 4096
_CLEAN_UP_TRIES = 250
_CLEAN_UP_SECONDS = 0.02
_STOP_TRIES = 200
_STOP_SECONDS = 0.0005
_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "HOME": namespace.WORKSPACE,
    "PWD": namespace.WORKSPACE,
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
}
_ENTER_GROUPS = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs" || exit 125; shift; done; shift; exec "$@"'
"""A process enters its cgroups before it becomes bwrap: nothing of the sandbox ever runs outside of them."""


class BubblewrapSandbox(LocalSandbox):
    """One running bwrap. See `base.RunningSandbox`."""

    def __init__(
        self, process: subprocess.Popen[bytes], url: str, groups: list[Path], log: Path
    ) -> None:
        super().__init__(url)
        self._process, self._groups, self._log = process, groups, log
        self._inner: list[int] = []
        self._pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    def kill(self) -> None:
        """See `base.RunningSandbox`. The inner process first: its death is everybody's in the namespace.

        bwrap is stopped before one looks for it, so that it does not make it meanwhile.
        """
        if self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGSTOP)
        self._inner = _children_of_stopped(self._process.pid)
        for pid in self._inner:
            _kill(pid)
        self._process.kill()

    def _exited(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        words: list[str] = []
        with suppress(OSError):  # somebody has tidied up
            words = self._log.read_text("utf-8", "replace").strip().splitlines()
            self._log.unlink()
        self._clean_up(
            f"exit code {code}" + (f": {words[-1][:500]}" if words else ""), _CLEAN_UP_TRIES
        )

    def _clean_up(self, how: str, tries: int) -> None:
        # The last processes of the namespace leave their cgroup a moment after bwrap has gone, or have to be told.
        if tries < _CLEAN_UP_TRIES:
            cgroups.kill(self._groups)
        left = [pid for pid in self._inner if _state(pid) not in "ZX"]
        if (not left and cgroups.remove(self._groups)) or tries == 0:
            self.ended.set_result(how)
        else:
            asyncio.get_running_loop().call_later(_CLEAN_UP_SECONDS, self._clean_up, how, tries - 1)


class BubblewrapRuntime(LocalRuntime):
    """See `base.Runtime`.

    Args:
        work_dir: A folder of the pool manager's own.
        use_cgroups: False: resource limits only, as on a machine without writable cgroups.
        own_uids: False: a user namespace, as for a caller who is not root. None: as the machine allows.

    Raises:
        MachineError: bubblewrap is missing, or forbidden to make namespaces.
    """

    name = "bubblewrap"

    def __init__(
        self, work_dir: Path, *, use_cgroups: bool = True, own_uids: bool | None = None
    ) -> None:
        self._bwrap = namespace.find_bwrap()
        self._own_uids = _own_uids_work(self._bwrap) if own_uids is None else own_uids
        complaint = namespace.complaint(self._bwrap, own_uid=False)
        self._maps_users = self._own_uids and complaint is None
        if not self._own_uids and complaint:
            fix = "allow user namespaces (sysctl user.max_user_namespaces) or run as root"
            raise MachineError(
                "user namespaces", f"bubblewrap cannot isolate here ({complaint})", fix
            )
        self._work_dir = work_dir
        self._work_dir.mkdir(parents=True, exist_ok=True)
        self._hierarchies = cgroups.find() if use_cgroups else []
        cgroups.sweep(self._hierarchies)
        compileall.compile_dir(namespace.guest_folder(), maxlevels=0, quiet=2)

    def limits(self) -> dict[str, str]:
        """See `base.Runtime`."""
        return {
            "network": "none",
            "disk": "tmpfs",
            "pids": "cgroup" if self._by_cgroup("pids_file") else self._pids_without_cgroup(),
            "memory": "cgroup" if self._by_cgroup("memory_file") else "rlimit per process",
            "cpu": "rlimit per process",
            "user": "own uid" if self._own_uids else "user namespace",
        }

    def start(self, spec: SandboxSpec) -> BubblewrapSandbox:
        """See `base.Runtime`."""
        for path in spec.writable_paths:
            namespace.check_writable_path(path)
        groups: list[Path] = []
        log = self._work_dir / f"{spec.id}.log"
        try:
            self._work_dir.mkdir(parents=True, exist_ok=True)
            with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
                for hierarchy in self._hierarchies:
                    groups.append(self._group(hierarchy, spec))
                process = self._spawn(spec, listener.fileno(), groups, log)
                # pass_fds keeps the number.
                self._configure(process, spec, listener.fileno())
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        except OSError as error:
            cgroups.remove(groups)
            raise SandboxError(f"sandbox {spec.id} does not start: {error}") from None
        return BubblewrapSandbox(process, url, groups, log)

    def close(self) -> None:
        """See `base.Runtime`."""
        cgroups.sweep(self._hierarchies)

    def _pids_without_cgroup(self) -> str:
        # The kernel exempts root from RLIMIT_NPROC, in a user namespace of root's too.
        return "none" if os.geteuid() == 0 and not self._own_uids else "rlimit"

    def _by_cgroup(self, file: str) -> bool:
        return any(getattr(hierarchy, file) for hierarchy in self._hierarchies)

    def _uid(self, spec: SandboxSpec) -> int | None:
        if not self._own_uids:
            return None
        return namespace.AGENT if self._maps_users else self._users(spec)[1]

    @staticmethod
    def _users(spec: SandboxSpec) -> tuple[int, int]:
        """The uids of a guest and of its commands on this machine."""
        manager = (cgroups.pid_namespace() * 31 + os.getpid()) % (1 << 18)
        first = FIRST_UID + manager * UIDS_PER_MANAGER + 2 * spec.index % UIDS_PER_MANAGER
        return first, first + 1

    def _group(self, hierarchy: cgroups.Hierarchy, spec: SandboxSpec) -> Path:
        limits = spec.limits
        writable = namespace.writable_bytes(
            limits.disk_mib * namespace.MIB, len(spec.writable_paths)
        )
        memory_bytes = limits.memory_mib * namespace.MIB + writable + GUEST_MEMORY_BYTES
        return hierarchy.make(spec.id, pids=limits.pids + GUEST_PIDS, memory_bytes=memory_bytes)

    def _spawn(
        self, spec: SandboxSpec, listener_fd: int, groups: list[Path], log: Path
    ) -> subprocess.Popen[bytes]:
        passwd, group = (_memory_file(text) for text in namespace.user_files(self._uid(spec)))
        try:
            argv = namespace.isolation(self._bwrap, own_uid=self._own_uids)
            argv += namespace.view(
                spec.limits.disk_mib * namespace.MIB,
                passwd,
                group,
                own_uid=self._own_uids,
                writable_paths=spec.writable_paths,
            )
            argv += ["--", *namespace.guest_command()]
            if groups:
                argv = ["/bin/sh", "-c", _ENTER_GROUPS, "sh", *map(str, groups), "--", *argv]
            with log.open("wb") as stderr:
                return subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=(listener_fd, passwd, group),
                    env={"PATH": _ENV["PATH"]},
                    start_new_session=True,
                )
        finally:
            os.close(passwd)
            os.close(group)

    def _configure(
        self, process: subprocess.Popen[bytes], spec: SandboxSpec, listener_fd: int
    ) -> None:
        config: dict[str, Any] = {
            "id": spec.id,
            "key": spec.key.hex(),
            "listener": listener_fd,
            "uid": self._uid(spec),
            "users": dict(zip(("guest", "agent"), self._users(spec), strict=True))
            if self._maps_users
            else None,
            "rlimits": self._rlimits(spec),
            "env": _ENV,
            "workspace": namespace.WORKSPACE,
            "folders": namespace.FOLDERS,
            "writable": [
                {
                    "path": path,
                    "seed": namespace.seed_path(number),
                    "max_mib": spec.limits.disk_mib,
                }
                for number, path in enumerate(spec.writable_paths)
            ],
            "canary": spec.canary,
            # Where commands run as the guest's user they could write there, and would find it after a reset.
            "marker": f"{namespace.BOOT_FOLDER}/booted" if self._own_uids else None,
            "oom": self._own_uids,
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(config).encode() + b"\n")
        process.stdin.flush()

    def _rlimits(self, spec: SandboxSpec) -> dict[str, int]:
        rlimits = {
            "RLIMIT_CORE": 0,
            "RLIMIT_MSGQUEUE": 0,  # a POSIX queue would outlive the episode, and no list of them can be had
            "RLIMIT_NOFILE": NUM_OPEN_FILES,
            "RLIMIT_NPROC": spec.limits.pids,
        }
        if spec.limits.cpu_seconds is not None:
            rlimits["RLIMIT_CPU"] = spec.limits.cpu_seconds
        if not self._by_cgroup("memory_file"):
            rlimits["RLIMIT_AS"] = spec.limits.memory_mib * namespace.MIB
        return rlimits


def _state(pid: int) -> str:
    """One letter; X where the process is no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _children_of_stopped(pid: int) -> list[int]:
    """The children of a process that was just sent SIGSTOP, once it stands."""
    for _ in range(_STOP_TRIES):
        if _state(pid) in "TtZX":
            break
        time.sleep(_STOP_SECONDS)
    with suppress(OSError):
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    return []


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def probe(work_dir: Path) -> dict[str, str]:
    """Which limits hold on this machine, and by what. Raises MachineError where no sandbox can be had at all."""
    return BubblewrapRuntime(work_dir).limits()


def _own_uids_work(bwrap: str) -> bool:
    return os.geteuid() == 0 and namespace.complaint(bwrap, own_uid=True) is None


def _memory_file(text: str) -> int:
    fd = os.memfd_create("rljob")
    os.write(fd, text.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
