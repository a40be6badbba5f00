"""The engine as everybody else sees it: what crosses its wire, and the client.

    gateway ── generate(prompt ids) ──► engine   token ids, logprobs and, in headers, the version that sampled them
    gateway ── parse(text, tools) ────► engine   vLLM's own tool and reasoning parsers
    engine agent ── switch(version) ──► engine   one operation, owned by the engine: pause, load, verify, reopen

A turn in flight when a switch begins comes back at once with `finish_reason` "abort" and the tokens sampled so
far, all by the version in its headers; the caller submits the prefix again. While an engine has no version (just
started) or is switching, `generate` raises `EngineNotReadyError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import msgspec

from rljob.clock import Clock, SystemClock
from rljob.errors import CorruptError, DeadlineError, EngineError, EngineNotReadyError, RLJobError
from rljob.ids import PolicyVersion

MODEL_NAME = "policy"
"""The one model name that an engine serves."""

HEADER_BOOT_ID = "x-rljob-boot-id"
HEADER_INCARNATION = "x-rljob-incarnation"
HEADER_N = "x-rljob-n"
HEADER_STATE = "x-rljob-state"
HEADER_VERDICT = "x-rljob-verdict"

KEEPALIVE_SECONDS = 2.0
"""Idle connections are dropped before the server (5 s by default) can, or a request could meet a closing socket."""

EngineState = Literal["starting", "empty", "ready", "switching", "failed"]
"""starting: routes answer, nothing else yet; empty: no version loaded in this process; failed: about to restart."""

Verdict = Literal["new", "old", "indistinguishable"]
"""What the canary scored like. `old` is an error: the engine restarts."""


class GenerateRequest(msgspec.Struct, kw_only=True, frozen=True):
    """gateway → engine. One turn, or the rest of one. No seed: it kills the pinned engine."""

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: Sequence[int] = ()


class Generation(msgspec.Struct, kw_only=True, frozen=True):
    """engine → gateway. Sampled tokens, every one of them by `version`."""

    token_ids: list[int]
    """[A] the stop token included, where one was sampled."""
    logprobs: list[float]
    """[A] of the tempered distribution that was sampled from."""
    finish_reason: Literal["stop", "length", "abort"]
    """abort: a switch began; the caller submits prompt and tokens again for the rest."""
    version: PolicyVersion
    boot_id: str


class EngineStatus(msgspec.Struct, kw_only=True, frozen=True):
    """engine → engine agent, gateway."""

    boot_id: str
    """Names one start of the engine: a new one has no version, whatever was loaded before."""
    version: PolicyVersion | None
    state: EngineState
    vllm_version: str = ""
    """Empty for a simulated engine."""
    message: str = ""
    """Why the last switch failed."""


class SwitchResult(msgspec.Struct, kw_only=True, frozen=True):
    """engine → engine agent. How a switch ended."""

    verdict: Verdict
    seconds: float
    """The whole operation."""
    pause_seconds: float
    """How long no request was admitted."""
    already: bool = False
    """The engine was on this version; nothing was done."""


class ParsedToolCall(msgspec.Struct, frozen=True):
    """A tool call as the model wrote it."""

    name: str
    arguments: str
    """JSON text; not checked against any schema."""


class ParsedTurn(msgspec.Struct, kw_only=True, frozen=True):
    """engine → gateway. An assistant turn, taken apart by vLLM's parsers."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ParsedToolCall] = []


class OldWeightsError(EngineError):
    """After a load the canary did not score like the new weights (verdict `old`): the engine restarts."""


class EngineClient:
    """Client of one engine. Safe to share between tasks; `aclose` when done.

    Args:
        url: Base URL, no trailing slash.
        token: Bearer token of the job; empty where the engine asks for none.
        clock: Time, for waits.
        transport: For tests: an ASGI app instead of a socket (`httpx.ASGITransport`).
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        clock: Clock | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url
        self._clock = clock or SystemClock()
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {token}"} if token else {},
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=None,
                keepalive_expiry=KEEPALIVE_SECONDS,
            ),
            transport=transport,
            trust_env=False,
            verify=url.startswith(
                "https"
            ),  # loading certificates costs 20 ms and loopback has none
        )

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def generate(
        self, request: GenerateRequest, *, timeout_seconds: float = 300.0
    ) -> Generation:
        """Sample up to `max_tokens` tokens.

        Raises:
            EngineNotReadyError: no version is being served now (empty, switching); wait and submit again.
            EngineError: the engine died, or refused the request.
            DeadlineError: `timeout_seconds` passed; the engine drops the request.
        """
        body = {
            "model": MODEL_NAME,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": -1,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "stop_token_ids": list(request.stop_token_ids),
        }
        response = await self._call("POST", "/v1/completions", body, timeout_seconds)
        return _generation(response)

    async def parse(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_seconds: float = 30.0,
    ) -> ParsedTurn:
        """Take an assistant turn apart: content, reasoning, tool calls. Give its text or its token ids.

        Args:
            tools: The tools of the request, in OpenAI's form; without any no tool call is looked for.
            text: The turn, decoded with special tokens kept.
            token_ids: The turn as sampled; the engine decodes it.
            timeout_seconds: How long to wait.
        """
        body = {
            "tools": list(tools),
            "text": text,
            "token_ids": None if token_ids is None else list(token_ids),
        }
        return _decode(
            await self._call("POST", "/rljob/v1/parse", body, timeout_seconds), ParsedTurn
        )

    async def status(self, *, timeout_seconds: float = 10.0) -> EngineStatus:
        """Who the engine is and what it serves. Raises EngineError when it cannot be reached."""
        return _decode(
            await self._call("GET", "/rljob/v1/status", None, timeout_seconds), EngineStatus
        )

    async def switch(
        self,
        version: PolicyVersion,
        path: Path | str,
        digest: str = "",
        *,
        timeout_seconds: float = 300.0,
    ) -> SwitchResult:
        """Serve `version` from the directory `path` (as the engine sees it) from now on.

        The engine finishes or undoes the operation by itself whether or not this client lives; asking again for
        the same version waits for a running switch and does nothing after it.

        Args:
            version: The name of the weights.
            path: Directory with safetensors files and `rljob-manifest.json`.
            digest: The manifest's digest; where given, a directory with another one is refused.
            timeout_seconds: Deadline of the operation, kept by the engine too.

        Raises:
            CorruptError: the directory does not verify; the engine goes on serving what it served.
            OldWeightsError: the canary's verdict was `old`; the engine restarts.
            EngineError: the switch failed: before loading began the old version goes on, after it the engine restarts.
        """
        body = {
            "incarnation": version.incarnation,
            "n": version.n,
            "path": str(path),
            "digest": digest,
            "timeout_seconds": timeout_seconds,
        }
        return _decode(
            await self._call("POST", "/rljob/v1/switch", body, timeout_seconds + 10.0), SwitchResult
        )

    async def wait_ready(self, deadline_seconds: float, *, poll_seconds: float = 0.1) -> float:
        """Wait until the engine serves a version; return the seconds waited. Raises DeadlineError past the deadline."""
        began = self._clock.monotonic()
        last = "unreachable"
        while (waited := self._clock.monotonic() - began) < deadline_seconds:
            try:
                status = await self.status()
                if status.state == "ready":
                    return self._clock.monotonic() - began
                last = status.state
            except EngineError as error:
                last = str(error)
            await self._clock.sleep(poll_seconds)
        raise DeadlineError(f"no engine was ready within {waited:.0f} s ({last})")

    async def _call(
        self, method: str, path: str, body: object | None, timeout_seconds: float
    ) -> httpx.Response:
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            async with asyncio.timeout(timeout_seconds):
                response = await self._http.request(
                    method, path, content=content, headers=headers, timeout=None
                )
        except TimeoutError:
            raise DeadlineError(
                f"engine did not answer {path} within {timeout_seconds:.0f} s"
            ) from None
        except httpx.TransportError as error:
            raise EngineError(
                f"engine at {self.url} is unreachable: {type(error).__name__} {error}".rstrip()
            ) from error
        if response.status_code != 200:
            raise _refusal(path, response)
        return response


def _refusal(path: str, response: httpx.Response) -> RLJobError:
    """The error that an answer other than 200 stands for."""
    state = response.headers.get(HEADER_STATE, "")
    text = response.text[:500]
    if response.status_code == 503 and state in {
        "starting",
        "empty",
        "switching",
    }:
        return EngineNotReadyError(state, float(response.headers.get("retry-after", "1")))
    if response.status_code == 422 and path.endswith("/switch"):
        return CorruptError(text)
    if response.headers.get(HEADER_VERDICT) == "old":
        return OldWeightsError(text)
    return EngineError(f"engine refused {path}: {response.status_code} {text}")


_T = TypeVar("_T")


def _decode(response: httpx.Response, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.MsgspecError as error:
        raise EngineError(f"engine answered what its protocol does not allow: {error}") from None


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    finish_reason: Literal["stop", "length", "abort"]
    token_ids: list[int] = []
    logprobs: _Logprobs | None = None
    """Absent where a request was aborted before its first token."""


class _Completion(msgspec.Struct):
    choices: list[_Choice]


def _generation(response: httpx.Response) -> Generation:
    choice = _decode(response, _Completion).choices[0]
    logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
    if len(logprobs) != len(choice.token_ids):
        raise EngineError(
            f"engine answered {len(choice.token_ids)} tokens but {len(logprobs)} logprobs"
        )
    try:
        version = PolicyVersion(
            int(response.headers[HEADER_INCARNATION]), int(response.headers[HEADER_N])
        )
        boot_id = response.headers[HEADER_BOOT_ID]
    except (KeyError, ValueError):
        raise EngineError(
            "engine answered without a policy version in its headers: is vllm_plugin loaded?"
        ) from None
    return Generation(
        token_ids=choice.token_ids,
        logprobs=logprobs,
        finish_reason=choice.finish_reason,
        version=version,
        boot_id=boot_id,
    )
