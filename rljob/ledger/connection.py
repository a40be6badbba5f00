"""The store as scripts see it: by hash, bounded retries, errors with our names.

    call ──► retry until the deadline ──► exchange over an idle connection (at most 32) ──► answers, or it is closed

Every script may be repeated, so a call whose answer was lost is simply made again. Of redis-py this uses the
connection (URLs, TLS, authentication, the protocol), not the client: its layers cost more per call than all of ours
together, and before Python 3.12 they forget a cancellation that arrives with an answer (bpo-37658). Nothing above this
file sees its classes.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from redis import exceptions
from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from rljob.errors import FencedError, ManifestError, StateError, StoreError

T = TypeVar("T")
Argument = str | int | float | bytes

SCRIPTS = Path(__file__).with_name("scripts")
MAX_CONNECTIONS = 32
"""Per process. More only queue inside the server, which runs one script at a time."""
EXCHANGE_SECONDS = 10.0
"""An answer that takes longer is asked for again; the longest script, over 100,000 leases, takes below 1 s."""
BODY_SECONDS = 600
"""A payload that no script took over (its worker died in between) leaves the store after so long."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 1.0

# The store is away, loading, failing over or full: all of these end by themselves or by the trainer's next `archived`.
TRANSIENT = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,
    OSError,
)
# Wrong password or a user without rights: asking again cannot help.
PERMANENT = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.NoPermissionError,
)


@cache
def script_source(name: str) -> str:
    """What the server gets for `name`: the shared functions, then the call's own file."""
    return (SCRIPTS / "common.lua").read_text() + "\n" + (SCRIPTS / f"{name}.lua").read_text()


@cache
def script_hash(name: str) -> str:
    """SHA-1 of `script_source`, as EVALSHA wants it."""
    return hashlib.sha1(script_source(name).encode(), usedforsecurity=False).hexdigest()


def script_names() -> list[str]:
    """Every call there is."""
    return sorted(path.stem for path in SCRIPTS.glob("*.lua") if path.stem != "common")


class Store:
    """A job's keys in one Redis or Valkey."""

    def __init__(self, url: str, job: str, deadline_seconds: float) -> None:
        self.job = job
        self.prefix = f"rljob:{{{job}}}:"
        self.deadline_seconds = deadline_seconds
        try:
            self._factory = ConnectionPool.from_url(
                url,
                protocol=2,
                socket_timeout=None,  # `exchange` has the deadline
                socket_connect_timeout=5.0,
                retry=Retry(NoBackoff(), 0),  # ours is the only retry loop
            )
            self._factory.make_connection()  # only this looks at the URL's query
        except (ValueError, TypeError, exceptions.RedisError):
            # its own words may hold what it took for a port: a part of the password
            raise ManifestError(
                "spec.store.redis.url",
                "is no URL of a Redis",
                "write redis://, rediss:// or unix://, a port that is a number, and a password in %-encoding",
            ) from None
        self._idle: list[AbstractConnection] = []
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)
        self._closed = False

    async def close(self) -> None:
        """Close every connection: idle ones now, others when their call ends."""
        self._closed = True
        await self._close_idle()

    async def _close_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect()

    async def call(self, script: str, *arguments: Argument) -> Any:
        """Run one script; its MessagePack answer decoded, or None where it has none."""
        answer = await self.retry(script, lambda: self._evaluate(script, arguments))
        return None if answer is None else msgspec.msgpack.decode(answer)

    async def call_with_payload(self, script: str, payload: bytes, *arguments: Argument) -> Any:
        """Run one script with a payload laid beside it, in one round trip; its key is the script's first argument.

        The script takes the payload over; one that a crash left behind leaves the store by itself. Each try has a key
        of its own: the one before may have been accepted although its answer was lost.
        """

        async def send() -> bytes:
            body = f"b:{secrets.token_hex(8)}"
            store = ("SET", self.prefix + body, payload, "EX", BODY_SECONDS)
            return await self._evaluate(script, (body, *arguments), store)

        return msgspec.msgpack.decode(await self.retry(script, send))

    async def command(self, *words: Argument) -> Any:
        """One command that is safe to repeat."""

        async def send() -> Any:
            (answer,) = await self._exchange(words)
            return answer

        return await self.retry(str(words[0]), send)

    async def read_bodies(self, keys: Sequence[str]) -> list[bytes | None]:
        """The payloads of these keys, in one round trip; None for one that is not there."""
        return await self.command("MGET", *(self.prefix + key for key in keys)) if keys else []

    async def read_stream(
        self, stream: str, after: str, count: int
    ) -> list[tuple[str, dict[bytes, bytes]]]:
        """Up to `count` entries of a stream past the id `after` ("" from the first on)."""
        start = f"({after}" if after else "-"
        rows = await self.command("XRANGE", self.prefix + stream, start, "+", "COUNT", count)
        return [
            (entry.decode(), dict(zip(flat[::2], flat[1::2], strict=True))) for entry, flat in rows
        ]

    async def keys(self, name: str = "") -> list[bytes]:
        """Every key of the job whose name begins so. Of glob characters the prefix holds only braces: literal ones."""
        found: list[bytes] = []
        cursor = b"0"
        while True:
            pattern = f"{self.prefix}{name}*"
            cursor, some = await self.command("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            found += some
            if cursor == b"0":
                return found

    async def delete_all(self) -> None:
        """Remove every key of the job."""
        for key in await self.keys():
            await self.command("UNLINK", key)

    async def retry(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat `attempt` while the store is away.

        Raises:
            StoreError: the deadline passed, or the store answered what no retry can help.
            FencedError: see `rljob.errors`.
            StateError: see `rljob.errors`.
        """
        started, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        while True:
            left = self.deadline_seconds - (time.monotonic() - started)
            try:
                async with asyncio.timeout(max(0.001, left)):
                    return await attempt()
            except PERMANENT as error:
                raise StoreError(f"{what}: the store refused this client: {error}") from error
            except (*TRANSIENT, TimeoutError) as error:
                if time.monotonic() + pause - started >= self.deadline_seconds:
                    problem = f"{what}: no answer from the store within {self.deadline_seconds:g} s"
                    raise StoreError(f"{problem} ({type(error).__name__}: {error})") from error
            except exceptions.ResponseError as error:
                raise _named(what, str(error)) from error
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _evaluate(
        self, script: str, arguments: Sequence[Argument], *before: Sequence[Argument]
    ) -> Any:
        """Run the commands of `before` and then the script, in one round trip; the script's answer."""
        rest = (1, self.prefix, *arguments)
        try:
            return (await self._exchange(*before, ("EVALSHA", script_hash(script), *rest)))[-1]
        except exceptions.NoScriptError:
            # A restarted or failed-over server has no scripts; EVAL runs and keeps them in one step.
            return (await self._exchange(*before, ("EVAL", script_source(script), *rest)))[-1]

    async def _exchange(self, *commands: Sequence[Argument]) -> list[Any]:
        """Send commands over one connection and read their answers; the first that is an error is raised."""
        async with self._free:
            connection = self._idle.pop() if self._idle else self._factory.make_connection()
            try:
                async with asyncio.timeout(EXCHANGE_SECONDS):
                    if not connection.is_connected:
                        await connection.connect()
                    packed = connection.pack_commands(commands)
                    await connection.send_packed_command(packed, check_health=False)
                    answers = [await _answer(connection) for _ in commands]
            except BaseException as error:
                # An answer may still be under way: never use it again. A server that is gone took the idle ones along.
                await connection.disconnect(nowait=True)
                if isinstance(error, Exception):
                    await self._close_idle()
                raise
            self._idle.append(connection)
            if self._closed:
                await self._close_idle()
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers


async def _answer(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response(disable_decoding=True)
    except exceptions.ResponseError as error:
        return error


def _named(what: str, text: str) -> Exception:
    """Our scripts raise `FENCED …`, `STATE …` and `CONFIG …`; anything else is the store's own."""
    for word, kind in (("FENCED ", FencedError), ("STATE ", StateError)):
        if word in text:
            return kind(f"{what}: {text.partition(word)[2]}")
    if "OOM" in text:
        return StoreError(f"{what}: the store is full: {text}")
    return StoreError(f"{what}: {text}")
