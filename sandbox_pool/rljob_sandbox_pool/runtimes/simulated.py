"""Sandboxes that isolate nothing, because they run nothing: files are a dict, a command is one of a few words.

The API is the guest's own code (`guest.app`) over HTTP, so claims, tokens, limits and repeated requests are the real
thing. For tests of scheduling and failures. Known: `true`, `false`, `exit N`, `echo …`, `cat …`, `ls`, `pwd`, `env`,
`rm -rf -- …`, `sleep N`, joined by `;` or `&&`, with `>` and `>>`; everything else is "command not found" (127).
"""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
import shlex
from collections.abc import Callable
from typing import Any, ClassVar

from rljob.errors import MachineError, SandboxError
from rljob_sandbox_pool.aserver import HttpServer
from rljob_sandbox_pool.guest import checks
from rljob_sandbox_pool.guest.app import Guest
from rljob_sandbox_pool.guest.pipes import encoded, piece
from rljob_sandbox_pool.guest.stream import Stream
from rljob_sandbox_pool.guest.wire import RefusedError, Request, Response
from rljob_sandbox_pool.runtimes.base import LocalRuntime, LocalSandbox, SandboxSpec

WORKSPACE = "/workspace"
NOT_FOUND = 127
TIMED_OUT = 124
MAX_LIVING = 2000
"""Simulated sandboxes of all pools at once: each is a server in this process."""


class _Files:
    """A tree of files as a dict of absolute paths; folders exist by what is in them."""

    def __init__(self, limit_bytes: int) -> None:
        self.content: dict[str, bytes] = {}
        self._limit_bytes = limit_bytes

    @staticmethod
    def full(path: str) -> str:
        return posixpath.normpath(posixpath.join(WORKSPACE, path))

    def read(self, path: str) -> bytes:
        full = self.full(path)
        if full in self.content:
            return self.content[full]
        if self._is_folder(full):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def write(self, path: str, data: bytes) -> None:
        full = self.full(path)
        if self._is_folder(full) or path.endswith("/"):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not full.startswith((WORKSPACE + "/", "/tmp/")):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        parents = full.split("/")[:-1]
        if any("/".join(parents[: n + 1]) in self.content for n in range(len(parents))):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        used = sum(map(len, self.content.values())) - len(self.content.get(full, b""))
        if used + len(data) > self._limit_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        self.content[full] = data

    def _is_folder(self, full: str) -> bool:
        known = full in ("/", WORKSPACE, "/tmp")
        return known or any(path.startswith(full + "/") for path in self.content)


class _Shell:
    """A few words of shell over `_Files`."""

    def __init__(self, files: _Files, command: checks.Command) -> None:
        self._files, self._command = files, command
        self.stdout = self.stderr = b""

    async def run(self) -> int:
        """The exit code; stdout and stderr are attributes."""
        line = self._command.command
        try:
            words = (
                list(shlex.shlex(line, posix=True, punctuation_chars=True))
                if isinstance(line, str)
                else line
            )
        except ValueError as error:
            self.stderr = f"sh: {error}\n".encode()
            return 2
        code, simple, skip = 0, [], False
        for word in [*words, ";"]:
            if word not in (";", "&&"):
                simple.append(word)
                continue
            if simple and not skip:
                code = await self._simple(simple)
                if simple[0] == "exit":
                    return code
            skip = word == "&&" and code != 0
            simple = []
        return code

    async def _simple(self, words: list[str]) -> int:
        target, append = None, False
        if len(words) > 2 and words[-2] in (">", ">>"):
            target, append, words = words[-1], words[-2] == ">>", words[:-2]
        output, code = await self._word(words[0], words[1:])
        if target is None:
            self.stdout += output
            return code
        try:
            old = self._files.read(target) if append else b""
        except FileNotFoundError:
            old = b""
        self._files.write(target, old + output)
        return code

    async def _word(self, name: str, arguments: list[str]) -> tuple[bytes, int]:
        if name in ("true", "false"):
            return b"", int(name == "false")
        if name == "exit":
            return b"", int(arguments[0]) % 256 if arguments else 0
        if name == "echo":
            return " ".join(arguments).encode("utf-8", "surrogateescape") + b"\n", 0
        if name == "pwd":
            return posixpath.join(WORKSPACE, self._command.cwd).rstrip("/").encode() + b"\n", 0
        if name == "env":
            return "".join(
                f"{key}={value}\n" for key, value in self._command.env.items()
            ).encode(), 0
        if name == "sleep":
            await asyncio.sleep(float(arguments[0]))
            return b"", 0
        if name in ("cat", "ls", "rm"):
            return getattr(self, f"_{name}")(arguments)
        self.stderr += f"sh: {name}: command not found\n".encode()
        return b"", NOT_FOUND

    def _ls(self, paths: list[str]) -> tuple[bytes, int]:
        folder = posixpath.join(WORKSPACE, self._command.cwd, *paths[-1:]).rstrip("/") + "/"
        inside = [path[len(folder) :] for path in self._files.content if path.startswith(folder)]
        return "".join(
            f"{name}\n" for name in sorted({path.split("/")[0] for path in inside})
        ).encode(), 0

    def _rm(self, words: list[str]) -> tuple[bytes, int]:
        for word in words:
            full = posixpath.normpath(posixpath.join(WORKSPACE, self._command.cwd, word))
            for path in [
                path for path in self._files.content if path == full or path.startswith(full + "/")
            ]:
                del self._files.content[path]
        return b"", 0

    def _cat(self, paths: list[str]) -> tuple[bytes, int]:
        if not paths:
            return self._command.stdin, 0
        output = b""
        for path in paths:
            try:
                output += self._files.read(posixpath.join(self._command.cwd, path))
            except OSError as error:
                self.stderr += f"cat: {path}: {error.strerror}\n".encode()
                return output, 1
        return output, 0


class SimulatedBackend:
    """See `guest.app.Backend`."""

    shells = None
    archives = None
    tunnels = None

    def __init__(self, disk_bytes: int, expire: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._files = _Files(disk_bytes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._expire = expire
        self._expiry: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """See `guest.app.Backend`."""
        return self._loop.time()

    def execute(
        self,
        command: checks.Command,
        done: Callable[[dict[str, Any]], None],
        stream: Stream | None = None,
    ) -> None:
        """See `guest.app.Backend`. What is streamed comes all at once, at the end."""
        task = self._loop.create_task(self._execute(command, done, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _execute(
        self,
        command: checks.Command,
        done: Callable[[dict[str, Any]], None],
        stream: Stream | None,
    ) -> None:
        shell, began, limit = _Shell(self._files, command), self.now(), command.max_output_bytes
        timed_out = False
        try:
            async with asyncio.timeout(command.timeout_seconds):
                code = await shell.run()
        except TimeoutError:
            code, timed_out = TIMED_OUT, True
        except (OSError, ValueError, IndexError) as error:
            code, shell.stderr = 1, shell.stderr + f"sh: {error}\n".encode()
        result: dict[str, Any] = {
            "exit_code": code,
            "timed_out": timed_out,
            "truncated": max(len(shell.stdout), len(shell.stderr)) > limit,
            "seconds": self.now() - began,
        }
        for name, output in (("stdout", shell.stdout[:limit]), ("stderr", shell.stderr[:limit])):
            if stream is None:
                result[name] = encoded(output, command.encoding)
            elif output:
                stream.push(piece(name, output))
        done(result)

    def read_file(self, path: str, max_bytes: int, offset: int | None) -> bytes:
        """See `guest.app.Backend`."""
        data = self._files.read(path)
        if offset is not None:
            return data[offset : offset + max_bytes]
        if len(data) > max_bytes:
            raise RefusedError(
                413, "too_large", f"{path[:500]} holds {len(data)} bytes, more than {max_bytes}"
            )
        return data

    def write_file(self, file: checks.NewFile) -> None:
        """See `guest.app.Backend`."""
        old = self._files.content.get(self._files.full(file.path), b"") if file.append else b""
        self._files.write(file.final or file.path, old + file.data)
        if file.final:
            self._files.content.pop(self._files.full(file.path), None)

    def reset(self, done: Callable[[list[str]], None]) -> None:
        """See `guest.app.Backend`."""
        self.stop()
        self._files.content.clear()
        done([])

    def usage(self) -> dict[str, int]:
        """See `guest.app.Backend`."""
        return {}

    def is_busy(self) -> bool:
        """See `guest.app.Backend`."""
        return bool(self._tasks)

    def end_claim_at(self, when: Callable[[], float] | None) -> None:
        """See `guest.app.Backend`."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if when is not None:
            self._expiry = self._loop.call_at(when(), self._due, when)

    def _due(self, when: Callable[[], float]) -> None:
        if when() > self.now():
            self.end_claim_at(when)
        else:
            self._expire()

    def stop(self) -> None:
        """End what runs."""
        for task in self._tasks:
            task.cancel()


class SimulatedSandbox(LocalSandbox):
    """See `base.RunningSandbox`. `num_living` is of this process, where they live.

    Args:
        spec: Which sandbox.
        host: Where it listens: an address that its users can reach.
    """

    num_living: ClassVar[int] = 0

    def __init__(self, spec: SandboxSpec, host: str = "127.0.0.1") -> None:
        self.backend = SimulatedBackend(
            spec.limits.disk_mib * 1024 * 1024, lambda: self._end("expired")
        )
        self.guest = Guest(spec.id, spec.key, self.backend)
        self._server = HttpServer(self._answer, max_body_bytes=checks.MAX_FILE_BYTES + 1_000_000)
        address = f"[{host}]" if ":" in host else host
        super().__init__(f"http://{address}:{self._server.bind(host, 0)}")
        self._starting = asyncio.get_running_loop().create_task(self._server.listen())
        SimulatedSandbox.num_living += 1

    def kill(self) -> None:
        """See `base.RunningSandbox`."""
        self._end("killed")

    def _end(self, how: str) -> None:
        if self.ended.done():
            return
        SimulatedSandbox.num_living -= 1
        self.backend.stop()
        self.backend.end_claim_at(None)
        self._starting.cancel()
        self._server.stop()
        self.ended.set_result(how)

    async def _answer(self, request: Request) -> Response:
        reply: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self.guest.handle(
            request, lambda response: None if reply.done() else reply.set_result(response)
        )
        response = await reply
        return response if response.stream is None else await _whole(response, response.stream)


async def _whole(response: Response, stream: Stream) -> Response:
    """The answer when its stream has ended, in one piece."""
    ended = asyncio.Event()
    stream.on_piece = lambda: ended.set() if stream.ended else None
    if not stream.ended:
        await ended.wait()
    if stream.broken:
        raise RefusedError(409, "not_claimed", "the claim ended while this ran")
    return response._replace(body=stream.take(), stream=None)


class SimulatedRuntime(LocalRuntime):
    """See `base.Runtime`.

    Args:
        host: Where its sandboxes listen.
    """

    name = "simulated"

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host

    def limits(self) -> dict[str, str]:
        """See `base.Runtime`."""
        return {
            "network": "none",
            "disk": "simulated",
            "pids": "none",
            "memory": "none",
            "cpu": "none",
            "user": "none",
        }

    def take_starts(self, wanted: int) -> int:
        """See `Runtime`."""
        return max(0, min(wanted, MAX_LIVING - SimulatedSandbox.num_living))

    def start(self, spec: SandboxSpec) -> SimulatedSandbox:
        """See `base.Runtime`."""
        try:
            return SimulatedSandbox(spec, self._host)
        except MachineError as error:
            raise SandboxError(str(error)) from None

    def close(self) -> None:
        """See `base.Runtime`."""
