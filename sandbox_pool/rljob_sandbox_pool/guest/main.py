"""The guest's start: one line of JSON on stdin says everything, and the end of stdin ends the sandbox.

The line: {"id", "key" (hex), "listener" (descriptor), "uid", "users", "rlimits", "env", "workspace", "folders",
"marker", "oom", "writable": [{"path", "seed", "max_mib"}], "canary"}. With `max_mib` the guest itself copies the seed
to begin with. Whoever started the sandbox holds the other end of the pipe: when it dies, however it dies, it ends.
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
from rljob_sandbox_pool.guest.archives import Archives
from rljob_sandbox_pool.guest.files import Files
from rljob_sandbox_pool.guest.folders import TooLargeError
from rljob_sandbox_pool.guest.loop import Loop, Timer
from rljob_sandbox_pool.guest.processes import Processes, Profile
from rljob_sandbox_pool.guest.reset import Canary, Reset, survivors
from rljob_sandbox_pool.guest.routes import admit
from rljob_sandbox_pool.guest.server import Server
from rljob_sandbox_pool.guest.shells import Shells
from rljob_sandbox_pool.guest.stream import Stream
from rljob_sandbox_pool.guest.tunnels import Tunnels
from rljob_sandbox_pool.guest.wire import RefusedError
from rljob_sandbox_pool.guest.writable import Writable

EXIT_EXPIRED = 3
EXIT_ABANDONED = 4
EXIT_CANARY = 5
EXIT_WRITABLE = 6


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
        self.shells = Shells(loop, self._processes.children)
        self._files = Files(user, config["workspace"])
        self.archives = Archives(loop, user, config["workspace"])
        self.tunnels = Tunnels(loop)
        self._reset = Reset(
            user,
            config["folders"],
            config.get("shared_folders", ()),
            config.get("sealed", ()),
            [_writable(user, folder) for folder in config.get("writable", ())],
        )
        self._canary = Canary(config["canary"]) if config.get("canary") else None
        self._expiry: Timer | None = None
        self._end: Callable[[], float] | None = None

    def now(self) -> float:
        """See `app.Backend`."""
        return time.monotonic()

    def execute(
        self,
        command: checks.Command,
        done: Callable[[dict[str, Any]], None],
        stream: Stream | None = None,
    ) -> None:
        """See `app.Backend`."""
        self._processes.start(command, done, stream)

    def read_file(self, path: str, max_bytes: int, offset: int | None) -> bytes:
        """See `app.Backend`."""
        return self._files.read(path, max_bytes, offset)

    def write_file(self, file: checks.NewFile) -> None:
        """See `app.Backend`."""
        self._files.write(file)

    def prepare(self) -> None:
        """Before the first claim: what the canary says of a sandbox that nobody has used. Exits where it says nothing.

        Only commands and timers are looked after meanwhile.
        """
        if self._canary is None:
            return
        complaint, heard = "", False

        def hear(result: dict[str, Any]) -> None:
            nonlocal complaint, heard
            complaint, heard = canary.expect(result), True

        canary = self._canary
        self._processes.start(canary.command, hear)
        while not heard:
            self._loop.run_once()
        if complaint or (complaint := "; ".join(self._clean())):
            sys.stderr.write(f"the canary: {complaint}\n")
            os._exit(EXIT_CANARY)

    def reset(self, done: Callable[[list[str]], None]) -> None:
        """See `app.Backend`."""
        evidence, canary = self._clean(), self._canary
        if evidence or canary is None:
            done(evidence)
            return
        try:
            # The canary is a command like any other, and leaves as much behind.
            self._processes.start(
                canary.command, lambda result: done(canary.differences(result) + self._clean())
            )
        except (OSError, RefusedError) as error:
            done([f"the canary does not start: {error}"])

    def _clean(self) -> list[str]:
        self.archives.cancel()
        self.tunnels.close()
        try:
            if left := self._processes.kill_all():
                return [survivors(left)]
            self.shells.clear()
            return self._reset.run()
        except OSError as error:
            return [f"the reset failed: {error}"]

    def usage(self) -> dict[str, int]:
        """See `app.Backend`."""
        return system.usage()

    def is_busy(self) -> bool:
        """See `app.Backend`."""
        return self._processes.is_busy() or self.shells.is_busy()

    def end_claim_at(self, when: Callable[[], float] | None) -> None:
        """See `app.Backend`: the sandbox ends with a claim that nobody released."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._end = when
        if when is None:
            self.tunnels.close()
        else:
            self._expiry = self._loop.call_at(when(), self._expire)

    def _expire(self) -> None:
        if self._end is not None and self._end() > self._loop.now():
            self.end_claim_at(self._end)
            return
        sys.stderr.write("the claim's time to live is over, or its time without a call\n")
        os._exit(EXIT_EXPIRED)


def _writable(user: system.User, folder: dict[str, Any]) -> Writable:
    """As it begins. Exits where it cannot be had."""
    writable = Writable(user, folder["path"], folder["seed"])
    try:
        if max_mib := folder.get("max_mib"):
            writable.fill(max_mib << 20)
        writable.remember()
    except (OSError, TooLargeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        sys.stderr.write(f"writable path {folder['path']}: {reason}\n")
        os._exit(EXIT_WRITABLE)
    return writable


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
        for path in [*config["folders"], *(each["path"] for each in config.get("writable", ()))]:
            os.chown(path, owner, owner)
    tainted = _booted_before(config["marker"])
    if config["users"]:
        system.enter_user_namespace(
            config["users"]["guest"], config["users"]["agent"], config["uid"]
        )
        system.harden()
    system.return_large_buffers()
    seccomp.install()
    loop = Loop()
    backend = SandboxBackend(loop, config, user)
    backend.prepare()
    guest = Guest(config["id"], bytes.fromhex(config["key"]), backend, tainted=tainted)
    Server(loop, listener, guest.handle, checks.MAX_FILE_BYTES + 1_000_000, admit(guest))
    if pipe is not None:
        _end_with(pipe, loop)
    # What lives now lives as long as the guest; a collection would only copy its pages in every forked child.
    gc.collect()
    gc.freeze()
    loop.run()
