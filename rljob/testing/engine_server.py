"""A simulated engine over HTTP: the routes, headers and states of `vllm_plugin`, without torch and without a model.

    starting ─► empty ─► ready ⇄ switching          (a verdict `old` ends the process, as in the real one)

It is a bare ASGI app: `uvicorn` serves it, or `httpx.ASGITransport` calls it inside a test.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from rljob.engine import (
    HEADER_BOOT_ID,
    HEADER_INCARNATION,
    HEADER_N,
    HEADER_STATE,
    HEADER_VERDICT,
    EngineState,
    Verdict,
)
from rljob.ids import PolicyVersion, new_boot_id
from rljob.testing import simulated_policy as policy

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_MAX_SEEN_PROMPTS = 100_000
_SLICES = 10


class SimulatedEngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs, each the variable `RLJOB_SIM_` + its name (in `engine.env` of a manifest). Times are seconds."""

    turn_seconds: float = 0.05
    """One whole turn; aborted turns take their share."""
    start_seconds: float = 0.0
    """After which the routes leave `starting`."""
    switch_seconds: float = 0.01
    turns: int = 2
    """Assistant turns of an episode: `bash` calls, then `submit`."""
    skill: float = 0.3
    """Chance of a right answer at n = 0."""
    skill_gain: float = 0.03
    """Added per training step."""
    verdict: Verdict = "new"
    """What every canary says; `old` makes the engine exit at its first switch."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> SimulatedEngineOptions:
        """Read `RLJOB_SIM_*`. Raises msgspec.ValidationError on a malformed value."""
        names = {f"RLJOB_SIM_{name.upper()}": name for name in cls.__struct_fields__}
        return msgspec.convert(
            {names[key]: value for key, value in env.items() if key in names}, cls, strict=False
        )


class _RefusedError(Exception):
    """An answer other than 200: (status, message, headers)."""


class SimulatedEngine:
    """The ASGI app.

    Args:
        options: Speed and skill.
        token: Bearer token asked for on every route but /health; empty: none.
        tokenizer: That of the prepared model; bytes without one.
        exit_process: Called when the engine must restart; the default ends the process.
    """

    def __init__(
        self,
        options: SimulatedEngineOptions | None = None,
        *,
        token: str = "",
        tokenizer: policy.Tokenizer | None = None,
        exit_process: Callable[[int], Any] = os._exit,
    ) -> None:
        self.options = options or SimulatedEngineOptions()
        self.boot_id = new_boot_id()
        self.version: PolicyVersion | None = None
        self.num_switches = 0
        self._token = token
        self._tokenizer = tokenizer or policy.ByteTokenizer()
        self._exit_process = exit_process
        self._began = time.monotonic()
        self._state: EngineState = "empty"
        self._abort = asyncio.Event()
        self._switch_lock = asyncio.Lock()
        self._switches: set[asyncio.Task[dict[str, Any]]] = set()
        self._seen: Counter[int] = Counter()
        self._running = 0

    @property
    def state(self) -> EngineState:
        """See `EngineState`."""
        return (
            "starting"
            if time.monotonic() - self._began < self.options.start_seconds
            else self._state
        )

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        try:
            body, headers = await self._route(scope, await _read_body(receive))
            status = 200
        except _RefusedError as refused:
            status, message, headers = refused.args
            body = {"error": message}
        raw = [
            (b"content-type", b"application/json"),
            *((k.encode(), str(v).encode()) for k, v in headers.items()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    async def _route(
        self, scope: MutableMapping[str, Any], raw: bytes
    ) -> tuple[Any, dict[str, Any]]:
        routes: dict[tuple[str, str], Callable[[Any], Awaitable[tuple[Any, dict[str, Any]]]]] = {
            ("GET", "/rljob/v1/status"): self._status,
            ("POST", "/rljob/v1/switch"): self._switch,
            ("POST", "/rljob/v1/parse"): self._parse,
            ("POST", "/v1/completions"): self._complete,
        }
        if scope["path"] in {"/health", "/healthz"}:
            return {}, {}
        if (
            self._token
            and dict(scope["headers"]).get(b"authorization") != f"Bearer {self._token}".encode()
        ):
            raise _RefusedError(401, "a bearer token is needed", {})
        if (handler := routes.get((scope["method"], scope["path"]))) is None:
            raise _RefusedError(404, f"no route {scope['method']} {scope['path']}", {})
        try:
            body = json.loads(raw) if raw else {}
        except ValueError:
            raise _RefusedError(400, "the body is no JSON", {}) from None
        try:
            return await handler(body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _RefusedError(400, f"malformed request: {error!r}", {}) from None

    async def _status(self, _: Any) -> tuple[Any, dict[str, Any]]:
        return {"boot_id": self.boot_id, "version": self.version, "state": self.state}, {}

    async def _parse(self, body: Any) -> tuple[Any, dict[str, Any]]:
        text = body.get("text")
        text = self._tokenizer.decode(body["token_ids"]) if text is None else text
        return policy.parse(text, bool(body.get("tools"))), {}

    async def _complete(self, body: Any) -> tuple[Any, dict[str, Any]]:
        version = self.version
        if version is None or self.state != "ready":
            raise _RefusedError(
                503, f"engine is {self.state}", {"retry-after": "1", HEADER_STATE: self.state}
            )
        self._running += 1
        try:
            choice = await self._sample(body, version, self._abort)
        finally:
            self._running -= 1
        headers = {
            HEADER_BOOT_ID: self.boot_id,
            HEADER_INCARNATION: version.incarnation,
            HEADER_N: version.n,
        }
        return {"choices": [choice]}, headers

    async def _sample(
        self, body: Any, version: PolicyVersion, abort: asyncio.Event
    ) -> dict[str, Any]:
        prompt, options = body["prompt"], self.options
        key = hash(tuple(prompt))
        self._seen[key] += 1
        ask = self._seen[key]
        if len(self._seen) > _MAX_SEEN_PROMPTS:
            self._seen.clear()
        is_right = policy.chance(prompt, version, ask) < policy.skill(
            version.n, options.skill, options.skill_gain
        )
        ids = (
            policy.continuation(self._tokenizer, prompt, options.turns, is_right)
            + list(body["stop_token_ids"])[:1]
        )
        reason = "stop" if len(ids) <= body["max_tokens"] else "length"
        ids = ids[: body["max_tokens"]]
        for done in range(_SLICES):
            if abort.is_set():
                reason, ids = "abort", ids[: len(ids) * done // _SLICES]
                break
            await asyncio.sleep(options.turn_seconds / _SLICES)
        logprobs = [
            -0.01 - policy.chance(version, position, token) for position, token in enumerate(ids)
        ]
        return {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}

    async def _switch(self, body: Any) -> tuple[Any, dict[str, Any]]:
        task = asyncio.create_task(
            self._switch_to(PolicyVersion(body["incarnation"], body["n"]), body)
        )
        self._switches.add(task)
        task.add_done_callback(self._switches.discard)
        return await asyncio.shield(task), {}

    async def _switch_to(self, version: PolicyVersion, body: Any) -> dict[str, Any]:
        began = time.monotonic()
        async with self._switch_lock:
            if version == self.version:
                return {"verdict": "new", "seconds": 0.0, "pause_seconds": 0.0, "already": True}
            _check_manifest(Path(body["path"]), version, body.get("digest", ""))
            paused = time.monotonic()
            self._state = "switching"
            self._abort.set()
            while self._running:
                await asyncio.sleep(0.001)
            await asyncio.sleep(self.options.switch_seconds)
            if self.options.verdict == "old":
                self._state = "failed"
                self._exit_process(1)
                raise _RefusedError(
                    500,
                    "the canary scored like the old weights",
                    {HEADER_STATE: "failed", HEADER_VERDICT: "old"},
                )
            self.version, self._state, self._abort = version, "ready", asyncio.Event()
            self.num_switches += 1
            now = time.monotonic()
            return {
                "verdict": self.options.verdict,
                "seconds": now - began,
                "pause_seconds": now - paused,
            }


def _check_manifest(path: Path, version: PolicyVersion, digest: str) -> None:
    try:
        manifest = json.loads((path / "rljob-manifest.json").read_bytes())
    except (OSError, ValueError) as error:
        raise _RefusedError(422, f"{path}: {error}", {}) from None
    if (manifest["incarnation"], manifest["n"]) != version:
        raise _RefusedError(
            422, f"{path} holds {manifest['incarnation']}-{manifest['n']}, not {version}", {}
        )
    if digest and manifest["digest"] != digest:
        raise _RefusedError(422, f"{path} has another digest", {})


async def _read_body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


def serve(host: str, port: int, *, token: str, model_dir: Path, env: Mapping[str, str]) -> None:
    """Serve until SIGTERM.

    Args:
        host: Address to bind.
        port: Port to bind.
        token: Bearer token of the job.
        model_dir: The prepared model; its tokenizer is used where it has one.
        env: Where the knobs are read from.
    """
    import uvicorn  # tests call the app without a server

    file = model_dir / "tokenizer.json"
    app = SimulatedEngine(
        SimulatedEngineOptions.from_env(env),
        token=token,
        tokenizer=policy.FileTokenizer(file) if file.exists() else None,
    )
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False, lifespan="off")
