# pyright: basic
r"""ONE stand-alone file that runs inside any vLLM image: worker extension, ASGI middleware, parse route.

    vllm serve … --worker-extension-cls rljob_rollout_worker.vllm_plugin.WorkerExtension \
                 --middleware rljob_rollout_worker.vllm_plugin.Middleware

The middleware lives in the API server and is the gate in front of it; the extension lives in each worker. A version is
named by (incarnation, n) and served only after a load *in this process*, so a restarted engine never serves base
weights under it.

    empty ──switch──► switching ──► ready ──switch──► switching ─┬─► ready (new, or, where nothing was loaded, the old)
                                                                 └─► failed: /health fails, the process exits

A switch is one operation of this process; a client that disconnects does not stop it, and it has its own deadline:
  1 verify   every tensor in the directory against the manifest, and score the canary, while the old version serves
  2 close    the gate: 503 for new requests; abort those in flight (they answer what they sampled) and wait until none
             is left, so that each request is wholly by the version it was stamped with at admission
  3 load     hashing every tensor again as it is read; re-pack tied heads; reset the prefix cache
  4 canary   the only request let through; it must score like the new weights: new, old or indistinguishable
  5 open     the gate. A failure before 3 goes back to the old version; from 3 on the process exits
Imports only the standard library, torch, vllm, starlette.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.rljob")

MANIFEST = "rljob-manifest.json"
OPEN_PATHS = ("/health", "/ping", "/metrics", "/version")
"""Need no token and pass in every state (health fails in `failed`)."""
FREE_METHODS = ("GET", "HEAD", "OPTIONS")
"""Never generate."""
FREE_PATHS = ("/tokenize", "/detokenize")

NOISE = {"float32": 1e-3}
"""Mean |Δ logprob| between this engine and the trainer on the same weights, by dtype: less is no difference."""
LOW_PRECISION_NOISE = 0.03
DRAIN_POLL_SECONDS = 0.01
WATCH_SECONDS = 0.5
STALL_SECONDS = 120.0
"""No token for any of the requests in flight for so long: the core hangs while the server still answers, which health
does not show. `RLJOB_ENGINE_STALL_SECONDS` overrides it: a prompt that takes longer to read than this needs more."""
EXIT_SECONDS = 1.0
"""Between a failure that ends the process and its end: time for the answer and a last scrape."""
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


# ──── weights: what a published directory must hold ───────────────────────────────────────────────
class RefusedError(Exception):
    """A request that is not answered with 200: (status, message)."""


class OldWeightsError(RuntimeError):
    """The canary does not score like the weights that were loaded."""


def read_manifest(path: Path, version: tuple[int, int], digest: str) -> dict[str, Any]:
    """The manifest of `path`, which must be whole and name `version`. Raises RefusedError."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        named = (manifest["incarnation"], manifest["n"])
        body = {key: value for key, value in manifest.items() if key != "digest"}
        actual = hashlib.sha256(
            json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()
        if manifest["digest"] != actual or (digest and digest != actual):
            raise RefusedError(422, f"{path / MANIFEST}: its digest does not verify")
        if named != version:
            raise RefusedError(
                422, f"{path} holds version {named[0]}-{named[1]}, not {version[0]}-{version[1]}"
            )
        return manifest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RefusedError(422, f"{path / MANIFEST}: {error!r}") from None


def read_tensors(
    path: Path, hashes: dict[str, str]
) -> Iterator[tuple[str, str, list[int], bytearray]]:
    """Name, safetensors dtype, shape and bytes of every tensor in `path`, each checked as it is read.

    Raises:
        ValueError: a tensor is missing, too many, torn, or not the one that the manifest names.
    """
    missing = set(hashes)
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(header_bytes))
            header.pop("__metadata__", None)
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                begin, end = entry["data_offsets"]
                data = bytearray(end - begin)
                stream.seek(8 + header_bytes + begin)
                if stream.readinto(data) != end - begin:
                    raise ValueError(f"{file.name}: {name} is torn")
                if hashes.get(name) != tensor_hash(entry["dtype"], entry["shape"], data):
                    raise ValueError(
                        f"{file.name}: {name} is not the tensor that the manifest names"
                    )
                missing.discard(name)
                yield name, entry["dtype"], entry["shape"], data
    if missing:
        raise ValueError(f"{path}: {len(missing)} tensors are missing, {min(missing)} first")


def tensor_hash(dtype: str, shape: list[int], data: bytes | bytearray | memoryview) -> str:
    """The hash of one tensor in the manifest: of its dtype, shape and bytes."""
    digest = hashlib.sha256(f"{dtype}:{','.join(map(str, shape))}:".encode())
    digest.update(data)
    return digest.hexdigest()


class WorkerExtension:
    """Mixed into vLLM's worker class, which has these two; called by `collective_rpc` in every worker."""

    model_runner: Any
    reload_weights: Any

    def rljob_load(self, path: str, hashes: dict[str, str]) -> int:
        """Load the tensors of `path`, verified as they are read; return how many. No forward sees half a model."""
        import torch

        def tensors() -> Iterator[tuple[str, Any]]:
            for name, dtype, shape, data in read_tensors(Path(path), hashes):
                kind = getattr(torch, DTYPES[dtype])
                tensor = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
                yield name, tensor.reshape(shape)

        self.reload_weights(weights_iterator=tensors())
        self._rljob_repack_tied_heads()
        return len(hashes)

    def _rljob_repack_tied_heads(self) -> None:
        """Pack tied heads again.

        They are not in the checkpoint, so reloading never re-packs the copy that CPU kernels made of them: a head
        would silently keep the old weights.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


# ──── canary ──────────────────────────────────────────────────────────────────────────────────────
def judge(
    expected: list[float], before: list[float], after: list[float], noise: float, *, strict: bool
) -> str:
    """`new`, `old` or `indistinguishable`, from logprobs of the same tokens.

    Args:
        expected: What the trainer computed with the new weights.
        before: What this engine scored before loading.
        after: What it scores now.
        noise: Mean difference that two correct implementations may have.
        strict: More than the noise away is wrong; else (low precision) only what came less than half the way.
    """
    to_new, gap = _distance(after, expected), _distance(before, expected)
    if to_new > noise and (strict or to_new > gap / 2):
        return "old"
    return "new" if gap > noise else "indistinguishable"


def _distance(a: list[float], b: list[float]) -> float:
    total = sum(abs(x - y) for x, y in zip(a, b, strict=True)) / max(1, len(a))
    return float("inf") if math.isnan(total) else total  # NaN is far from everything


async def score(engine: Any, canary: dict[str, Any]) -> list[float]:
    """The engine's logprobs of the canary's tokens, from a request of our own past the gate."""
    from vllm import SamplingParams

    prompt = canary["prompt_ids"] + canary["token_ids"]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    last = None
    async for output in engine.generate(
        {"prompt_token_ids": prompt}, params, f"rljob-canary-{secrets.token_hex(4)}"
    ):
        last = output
    if last is None or not last.prompt_logprobs:
        raise RuntimeError("the engine did not score the canary")
    start = len(canary["prompt_ids"])
    return [last.prompt_logprobs[i][prompt[i]].logprob for i in range(start, len(prompt))]


# ──── the gate ────────────────────────────────────────────────────────────────────────────────────
class Middleware:
    """Pure ASGI middleware: gate, stamp, switch, parse."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.boot_id = secrets.token_hex(8)
        self.version: tuple[int, int] | None = None
        self.state = "empty"
        self.message = ""
        self.in_flight = 0
        self.finished = 0
        self.token = os.environ.get("RLJOB_TOKEN", "")
        self._lock = asyncio.Lock()
        self._operations: set[asyncio.Task[Any]] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._lifespan(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        if path in OPEN_PATHS:
            await self._open(scope, receive, send)
        elif not self._authorised(scope):
            await _answer(send, 401, {"error": "a bearer token is needed"})
        elif path.startswith("/rljob/v1/"):
            await self._own_route(scope, receive, send)
        elif method in FREE_METHODS or path in FREE_PATHS:
            await self.app(scope, receive, send)
        else:
            await self._admit(scope, receive, send)

    async def _lifespan(self, scope: Any, receive: Any, send: Any) -> None:
        """From the server's start to its end: look after the engine's processes."""
        if scope["type"] != "lifespan":  # a websocket: nothing of ours
            await self.app(scope, receive, send)
            return
        engine = scope["app"].state.engine_client

        async def receive_and_look() -> Any:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                end_with_engine(engine)
            return message

        self._own(watch_engine(self, engine))
        await self.app(scope, receive_and_look, send)

    async def _open(self, scope: Any, receive: Any, send: Any) -> None:
        if self.state == "failed" and scope["path"] != "/metrics":
            await _answer(send, 503, {"error": self.message}, self._headers())
        else:
            await self.app(scope, receive, send)

    def _authorised(self, scope: Any) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return not self.token or hmac.compare_digest(given, f"Bearer {self.token}".encode())

    def _headers(self) -> list[tuple[bytes, bytes]]:
        headers = [
            (b"x-rljob-boot-id", self.boot_id.encode()),
            (b"x-rljob-state", self.state.encode()),
        ]
        if self.version is not None:
            incarnation, n = self.version
            headers += [(b"x-rljob-incarnation", b"%d" % incarnation), (b"x-rljob-n", b"%d" % n)]
        return headers

    async def _admit(self, scope: Any, receive: Any, send: Any) -> None:
        if self.state != "ready":
            error = {"error": f"engine is {self.state}"}
            await _answer(send, 503, error, [*self._headers(), (b"retry-after", b"1")])
            return
        stamp = self._headers()

        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *stamp]}
            await send(message)

        self.in_flight += 1
        try:
            await self.app(scope, receive, stamped)
        finally:
            self.in_flight -= 1
            self.finished += 1

    async def _own_route(self, scope: Any, receive: Any, send: Any) -> None:
        route = {
            ("GET", "/rljob/v1/status"): self._status,
            ("POST", "/rljob/v1/switch"): self._switch,
            ("POST", "/rljob/v1/parse"): self._parse,
        }.get((scope["method"], scope["path"]))
        if route is None:
            await _answer(send, 404, {"error": "no such route"})
            return
        extra: list[tuple[bytes, bytes]] = []
        try:
            body = json.loads(await _body(receive) or b"{}")
            status, answer = 200, await route(scope["app"].state, body)
        except RefusedError as refused:
            status, answer = refused.args[0], {"error": refused.args[1]}
            extra = (
                [(b"x-rljob-verdict", b"old")]
                if isinstance(refused.__cause__, OldWeightsError)
                else []
            )
        except (ValueError, KeyError, TypeError) as error:
            status, answer = 400, {"error": f"malformed request: {error!r}"}
        await _answer(send, status, answer, [*self._headers(), *extra])

    def _own(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` whatever becomes of the client that asked for it."""
        task = asyncio.create_task(work)
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)
        return task

    async def _status(self, state: Any, _: Any) -> dict[str, Any]:
        return {
            "boot_id": self.boot_id,
            "version": self.version,
            "state": self.state,
            "vllm_version": getattr(sys.modules.get("vllm"), "__version__", ""),
            "message": self.message,
        }

    # ---- switch
    async def _switch(self, state: Any, body: Any) -> dict[str, Any]:
        version = (int(body["incarnation"]), int(body["n"]))
        path, digest = Path(body["path"]), body.get("digest", "")
        seconds = float(body["timeout_seconds"])
        operation = self._own(self._operate(state.engine_client, version, path, digest, seconds))
        return await asyncio.shield(operation)

    async def _operate(
        self, engine: Any, version: tuple[int, int], path: Path, digest: str, timeout: float
    ) -> dict[str, Any]:
        began = time.monotonic()
        async with self._lock:
            if self.state == "failed":
                raise RefusedError(500, self.message)
            if version == self.version:
                return {"verdict": "new", "seconds": 0.0, "pause_seconds": 0.0, "already": True}
            switch = Switch(self, engine, version, path, digest)
            try:
                async with asyncio.timeout(timeout):
                    verdict = await switch.run()
            except Exception as error:  # the boundary of the operation: undone or fatal
                raise await switch.failed(error) from error
            now = time.monotonic()
            logger.info("rljob: serving %d-%d after %.2f s (%s)", *version, now - began, verdict)
            return {
                "verdict": verdict,
                "seconds": now - began,
                "pause_seconds": now - switch.closed_at,
            }

    # ---- parse
    async def _parse(self, state: Any, body: Any) -> dict[str, Any]:
        return await asyncio.to_thread(parse_turn, state, body)


class Switch:
    """One switch, step by step; see the module's docstring."""

    def __init__(
        self, gate: Middleware, engine: Any, version: tuple[int, int], path: Path, digest: str
    ) -> None:
        self.gate, self.engine, self.version, self.path, self.digest = (
            gate,
            engine,
            version,
            path,
            digest,
        )
        self.loading = False
        self.closed_at = 0.0

    async def run(self) -> str:
        """Switch and return the canary's verdict, which is not `old`."""
        manifest = await asyncio.to_thread(self._verify)
        canary = manifest["canary"]
        before = await score(self.engine, canary)
        await self._close()
        self.loading = True
        counts = await self.engine.collective_rpc(
            "rljob_load", args=(str(self.path), manifest["tensors"])
        )
        await self._reset_caches()
        # without a trainer nobody knows better than the engine, which began with these very weights
        expected = canary.get("logprobs") or before
        verdict = self._judge(expected, before, await score(self.engine, canary))
        if verdict == "old":
            raise OldWeightsError(
                f"the canary does not score like version {self.version[0]}-{self.version[1]}"
            )
        logger.debug("rljob: workers loaded %s tensors", counts)
        self.gate.version, self.gate.state, self.gate.message = self.version, "ready", ""
        return verdict

    def _verify(self) -> dict[str, Any]:
        manifest = read_manifest(self.path, self.version, self.digest)
        if not manifest.get("canary"):
            raise RefusedError(422, f"{self.path / MANIFEST}: no canary to verify the load with")
        try:
            for _ in read_tensors(self.path, manifest["tensors"]):
                pass
        except (OSError, ValueError, KeyError) as error:
            raise RefusedError(422, str(error)) from None
        return manifest

    async def _close(self) -> None:
        """Close the gate and empty the engine. A request that was admitted but not yet queued is met by the loop."""
        self.gate.state = "switching"
        self.closed_at = time.monotonic()
        await self.engine.pause_generation(mode="abort", clear_cache=True)
        while self.gate.in_flight:
            await self._abort_all()
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        await (
            self.engine.resume_generation()
        )  # the gate stays closed; only the canary comes through

    async def _abort_all(self) -> None:
        processor = self.engine.output_processor
        running = [*processor.request_states, *processor.parent_requests]
        if running:
            await self.engine.abort(running, internal=True)

    async def _reset_caches(self) -> None:
        while not await self.engine.reset_prefix_cache():
            await asyncio.sleep(
                DRAIN_POLL_SECONDS
            )  # a block is still in use; the operation's deadline bounds this
        await self.engine.reset_encoder_cache()

    def _judge(self, expected: list[float], before: list[float], after: list[float]) -> str:
        dtype = str(self.engine.model_config.dtype).removeprefix("torch.")
        noise = float(os.environ.get("RLJOB_CANARY_NOISE", NOISE.get(dtype, LOW_PRECISION_NOISE)))
        return judge(expected, before, after, noise, strict=dtype in NOISE)

    async def failed(self, error: Exception) -> RefusedError:
        """Undo what can be undone, or end the process; return what the client is told."""
        message = str(error) or type(error).__name__
        logger.error("rljob: switch to %d-%d failed: %s", *self.version, message)
        gate = self.gate
        gate.message = message
        if self.loading or self.engine.errored:
            gate.state = "failed"
            asyncio.get_running_loop().call_later(EXIT_SECONDS, exit_process)
            return RefusedError(500, f"{message}; the engine restarts")
        if self.closed_at:
            with contextlib.suppress(Exception):
                await self.engine.resume_generation()
            gate.state = "ready" if gate.version is not None else "empty"
        return error if isinstance(error, RefusedError) else RefusedError(409, message)


async def watch_engine(gate: Middleware, engine: Any) -> None:
    """Look after vLLM's processes until one has died or hangs."""
    stall = StallWatch()
    limit = float(os.environ.get("RLJOB_ENGINE_STALL_SECONDS", STALL_SECONDS))
    while True:
        end_with_engine(engine)
        idle = gate.in_flight == 0 or gate.state != "ready"  # a switch has a deadline of its own
        if (
            stall.seconds(time.monotonic(), None if idle else (gate.finished, _tokens(engine)))
            > limit
        ):
            logger.error(
                "rljob: no token for %.0f s with requests in flight; the engine restarts", limit
            )
            exit_process()
        await asyncio.sleep(WATCH_SECONDS)


class StallWatch:
    """How long the same progress has been seen."""

    def __init__(self) -> None:
        self._progress: Any = None
        self._since = 0.0

    def seconds(self, now: float, progress: Any) -> float:
        """Seconds since `progress` changed; None is nothing to progress with, and never a stall."""
        if progress is None or progress != self._progress:
            self._progress, self._since = progress, now
        return now - self._since


def _tokens(engine: Any) -> int:
    states = list(engine.output_processor.request_states.values())
    return sum(len(state.detokenizer.output_token_ids) for state in states if state.detokenizer)


def end_with_engine(engine: Any) -> None:
    """End this process when one of vLLM's has died. vLLM would end too, but with code 0 as if its work were done."""
    manager = getattr(getattr(engine.engine_core, "resources", None), "engine_manager", None)
    codes = [process.exitcode for process in getattr(manager, "processes", [])]
    if any(code not in {None, 0, -signal.SIGTERM} for code in codes):
        logger.error("rljob: an engine process died (exit codes %s); the engine restarts", codes)
        exit_process()


def exit_process() -> None:
    """End this process and every process under it, at once: whatever they hold must not be served."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os._exit(1)


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, children before grandchildren."""
    found: list[int] = []
    todo = [pid]
    while todo:
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
                below = [int(child) for child in children.read_text().split()]
                found += below
                todo += below
    return found


# ──── parse ───────────────────────────────────────────────────────────────────────────────────────
def parse_turn(state: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Content, reasoning and tool calls of one assistant turn, by the parsers that vLLM was started with."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    tokenizer = state.engine_client.get_tokenizer()
    text = body.get("text")
    if text is None:
        ids = body["token_ids"]
        ids = ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
        text = tokenizer.decode(ids, skip_special_tokens=False)
    tools: Any = body.get("tools") or None
    request: Any = ChatCompletionRequest.model_validate(
        {"messages": [], "tools": tools, "model": "policy"}
    )
    reasoning, content = _reasoning(state.args, tokenizer, text, request)
    calls: list[dict[str, str]] = []
    if request.tools and content and (name := state.args.tool_call_parser):
        from vllm.tool_parsers import ToolParserManager

        found = ToolParserManager.get_tool_parser(name)(
            tokenizer, request.tools
        ).extract_tool_calls(content, request)
        if found.tools_called:
            content = found.content
            calls = [
                {"name": call.function.name, "arguments": call.function.arguments}
                for call in found.tool_calls
            ]
    return {"content": content, "reasoning": reasoning, "tool_calls": calls}


def _reasoning(args: Any, tokenizer: Any, text: str, request: Any) -> tuple[str | None, str | None]:
    name = args.structured_outputs_config.reasoning_parser or getattr(args, "reasoning_parser", "")
    if not name:
        return None, text
    from vllm.reasoning import ReasoningParserManager

    return ReasoningParserManager.get_reasoning_parser(name)(tokenizer).extract_reasoning(
        text, request
    )


# ──── ASGI odds and ends ──────────────────────────────────────────────────────────────────────────
async def _body(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return body
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def _answer(
    send: Any, status: int, body: Any, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    head = [(b"content-type", b"application/json"), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
