"""The guest's start: one line of JSON on stdin says everything, and the end of stdin ends the sandbox.

The line: {"id", "key" (hex), "listener" (descriptor), "uid", "users", "rlimits", "env", "workspace", "folders",
"marker", "oom"}. Whoever started the sandbox holds the other end of the pipe: when it dies, however it
dies, the pipe ends.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from rljob_sandbox_pool.guest import checks, seccomp, system
from rljob_sandbox_pool.guest.app import Guest
from rljob_sandbox_pool.guest.files import Files
from rljob_sandbox_pool.guest.loop import Loop, Timer
from rljob_sandbox_pool.guest.processes import Processes, Profile
from rljob_sandbox_pool.guest.reset import Reset
from rljob_sandbox_pool.guest.server import Server

EXIT_EXPIRED = 3
EXIT_ABANDONED = 4


class SandboxBackend:
    """The real thing: processes and files of this namespace."""

    def __init__(self, loop: Loop, config: dict[str, Any], user: system.User) -> None:
        self._loop = loop
        shells = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
        shell = next((path for path in shells if os.access(path, os.X_OK)), "sh")
        profile = Profile(
            user, config["rlimits"], config["env"], config["workspace"], shell, config["oom"]
        )
        self._processes = Processes(loop, profile)
        self._files = Files(user, config["workspace"])
        self._reset = Reset(
            user, config["folders"], config.get("shared_folders", ()), config.get("sealed", ())
        )
        self._expiry: Timer | None = None

    def now(self) -> float:
        """See `app.Backend`."""
        return time.monotonic()

    def execute(self, command: checks.Command, done: Callable[[dict[str, Any]], None]) -> None:
        """See `app.Backend`."""
        self._processes.start(command, done)

    def read_file(self, path: str, max_bytes: int) -> bytes:
        """See `app.Backend`."""
        return self._files.read(path, max_bytes)

    def write_file(self, file: checks.NewFile) -> None:
        """See `app.Backend`."""
        self._files.write(file)

    def reset(self) -> list[str]:
        """See `app.Backend`."""
        if left := self._processes.kill_all():
            return [f"{len(left)} processes do not end"]
        return self._reset.run()

    def end_claim_at(self, seconds: float | None) -> None:
        """See `app.Backend`: the sandbox ends with a claim that nobody released."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if seconds is not None:
            self._expiry = self._loop.call_at(seconds, _expire)


def _expire() -> None:
    sys.stderr.write("the claim's time to live is over\n")
    os._exit(EXIT_EXPIRED)


def _read_config() -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n"):
        # Byte by byte would do as well: nothing follows the line.
        if not (data := os.read(0, 65_536)):
            os._exit(EXIT_ABANDONED)
        line += data
    return json.loads(line)


def _end_with(fd: int, loop: Loop) -> None:
    def ended() -> None:
        if not os.read(fd, 4096):
            os._exit(EXIT_ABANDONED)

    loop.watch(fd, read=ended)


def _booted_before(marker: str | None) -> bool:
    """Where PID 1 ends the namespace there is no second boot, and no marker is needed."""
    if marker is None:
        return False
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return True
    return False


def main() -> None:
    """Serve until the end, or that of the pipe."""
    system.harden()
    system.forbid_new_privileges()
    config = _read_config()
    listener = socket.socket(fileno=config["listener"])
    listener.set_inheritable(False)
    serve(config, listener, pipe=0)


def serve(config: dict[str, Any], listener: socket.socket, *, pipe: int | None = None) -> None:
    """Answer on `listener` until the end; with a pipe, until its other end is closed."""
    user = system.User(config["uid"])
    if user.uid is not None:
        owner = config["users"]["agent"] if config["users"] else user.uid
        for path in config["folders"]:
            os.chown(path, owner, owner)
    tainted = _booted_before(config["marker"])
    if config["users"]:
        system.enter_user_namespace(
            config["users"]["guest"], config["users"]["agent"], config["uid"]
        )
        system.harden()
    seccomp.install()
    loop = Loop()
    backend = SandboxBackend(loop, config, user)
    guest = Guest(config["id"], bytes.fromhex(config["key"]), backend, tainted=tainted)
    Server(loop, listener, guest.handle, checks.MAX_FILE_BYTES + 1_000_000)
    if pipe is not None:
        _end_with(pipe, loop)
    # What lives now lives as long as the guest; a collection would only copy its pages in every forked child.
    gc.collect()
    gc.freeze()
    loop.run()
