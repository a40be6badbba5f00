"""One connection pool to the store: scripts by hash, bounded retries, errors with our names.

Every script may be repeated, so a call whose answer was lost is simply made again until the deadline. Nothing above this file
sees a class of redis-py.
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
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from rljob.errors import FencedError, ManifestError, StateError, StoreError

T = TypeVar("T")
Argument = str | int | float | bytes

SCRIPTS = Path(__file__).with_name("scripts")
MAX_CONNECTIONS = 32
"""Per process. More only queue inside the server, which runs one script at a time."""
SOCKET_SECONDS = 10.0
"""An answer that takes longer is asked for again; the longest script (a forfeit over 100,000 leases) takes below 1 s."""
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
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                timeout=deadline_seconds,
                socket_timeout=SOCKET_SECONDS,
                socket_connect_timeout=5.0,
                retry=Retry(NoBackoff(), 0),  # ours is the only retry loop
                protocol=2,
            )
        except ValueError as error:
            raise ManifestError(
                "spec.store.redis.url", str(error), "use redis://, rediss:// or unix://"
            ) from None
        self._redis = Redis(connection_pool=pool)
        self._pool = pool

    async def close(self) -> None:
        """Close every connection."""
        await self._redis.aclose()
        await self._pool.disconnect()

    async def ping(self) -> None:
        """Reach the store, or raise `StoreError` at the deadline."""
        await self.retry("ping", lambda: self._redis.ping())

    async def call(self, script: str, *arguments: Argument) -> Any:
        """Run one script; its MessagePack answer decoded, or None where it has none."""
        answer = await self.retry(script, lambda: self._evaluate(script, arguments))
        return None if answer is None else msgspec.msgpack.decode(answer)

    async def call_with_payload(self, script: str, payload: bytes, *arguments: Argument) -> Any:
        """Run one script with a payload laid beside it, in one round trip; the script gets its key as first argument.

        The script takes the payload over; one that a crash left behind leaves the store by itself. Each try has a key of
        its own: the one before may have been accepted although its answer was lost.
        """

        async def send() -> bytes:
            body = f"b:{secrets.token_hex(8)}"
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.execute_command("SET", self.prefix + body, payload, "EX", BODY_SECONDS)
                pipe.execute_command(
                    "EVALSHA", script_hash(script), 1, self.prefix, body, *arguments
                )
                stored, answer = await pipe.execute(raise_on_error=False)
            if isinstance(answer, exceptions.NoScriptError) and not isinstance(stored, Exception):
                return await self._evaluate(script, (body, *arguments))
            for outcome in (stored, answer):
                if isinstance(outcome, Exception):
                    raise outcome
            return answer

        return msgspec.msgpack.decode(await self.retry(script, send))

    async def read_bodies(self, keys: Sequence[str]) -> list[bytes | None]:
        """The payloads of these keys, in one round trip; None for one that is not there."""
        names = [self.prefix + key for key in keys]
        return await self.retry("read", lambda: self._redis.mget(names))

    async def read_stream(
        self, stream: str, after: str, count: int
    ) -> list[tuple[str, dict[bytes, bytes]]]:
        """Up to `count` entries of a stream past the id `after` ("" from the first on)."""
        start = f"({after}" if after else "-"
        command = ("XRANGE", self.prefix + stream, start, "+", "COUNT", count)
        entries = await self.retry("read", lambda: self._redis.execute_command(*command))
        return [(entry[0].decode(), _fields(entry)) for entry in entries]

    async def delete_all(self) -> int:
        """Remove every key of the job; how many there were."""

        async def sweep() -> int:
            removed = 0
            # The prefix holds no glob character but the braces, which Redis reads literally.
            async for key in self._redis.scan_iter(match=self.prefix + "*", count=1000):
                removed += int(await self._redis.unlink(key))
            return removed

        return await self.retry("destroy", sweep)

    async def retry(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat `attempt` while the store is away.

        Raises:
            StoreError: the deadline passed, or the store answered what no retry can help.
            FencedError: see `rljob.errors`.
            StateError: see `rljob.errors`.
        """
        started, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        while True:
            try:
                async with asyncio.timeout(
                    max(0.001, self.deadline_seconds - (time.monotonic() - started))
                ):
                    return await _cancellable(attempt())
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

    async def _evaluate(self, script: str, arguments: Sequence[Argument]) -> bytes | None:
        try:
            return await self._redis.execute_command(
                "EVALSHA", script_hash(script), 1, self.prefix, *arguments
            )
        except exceptions.NoScriptError:
            # A restarted or failed-over server has no scripts; EVAL runs and keeps them in one step.
            return await self._redis.execute_command(
                "EVAL", script_source(script), 1, self.prefix, *arguments
            )


async def _cancellable(call: Awaitable[T]) -> T:
    """Await `call`; a cancellation that came meanwhile is raised even where it was lost.

    redis-py waits with `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that arrives together with the
    answer (bpo-37658): every second one, on loopback. The task would then go on for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    answer = await call
    if task and task.cancelling() > before:
        raise asyncio.CancelledError
    return answer


def _fields(entry: Sequence[Any]) -> dict[bytes, bytes]:
    flat = entry[1]
    return dict(flat) if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))


def _named(what: str, text: str) -> Exception:
    """Our scripts raise `FENCED …`, `STATE …` and `CONFIG …`; anything else is the store's own."""
    for word, kind in (("FENCED ", FencedError), ("STATE ", StateError)):
        if word in text:
            return kind(f"{what}: {text.partition(word)[2]}")
    if "OOM" in text:
        return StoreError(f"{what}: the store is full: {text}")
    return StoreError(f"{what}: {text}")
