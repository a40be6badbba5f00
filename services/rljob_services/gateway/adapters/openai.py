"""OpenAI chat completions: what a client sends to a `Prompt`, and a finished turn to what it gets back.

The session decides how turns are sampled, so `temperature`, `top_p`, `seed` and penalties of a
request are read by nobody: log probabilities must be those of the distribution that the trainer
knows. What would change the meaning of an answer and is not there (`n` > 1, `stop`,
`response_format`, a forced `tool_choice`, images) is refused by name.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from rljob.engine import ParsedTurn
from rljob_services.gateway.chains import Prompt
from rljob_services.gateway.messages import BadRequestError, message_key, read_message

_encode_sorted = msgspec.json.Encoder(order="deterministic").encode


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options` of a request."""

    include_usage: bool | None = False


class ChatRequest(msgspec.Struct, kw_only=True):
    """client → gateway. The part of a chat completion request that matters here; other keys are not read."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    tool_choice: Any = None
    n: int | None = None
    stop: Any = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    functions: Any = None
    modalities: list[str] | None = None

    @property
    def token_limit(self) -> int | None:
        """The most tokens that the client wants, where it says so."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def is_free_text(self) -> bool:
        """Whether tool calls are not to be looked for."""
        return not self.tools or self.tool_choice == "none"


_decode_request = msgspec.json.Decoder(ChatRequest).decode


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one turn."""

    prompt_tokens: int
    completion_tokens: int

    def to_json(self) -> dict[str, int]:
        """OpenAI's form."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One assistant turn, as both the plain and the streamed form tell it."""

    id: str
    created: int
    model: str
    message: dict[str, Any]
    finish_reason: Literal["stop", "length", "tool_calls"]
    usage: Usage
    context_full: bool = False
    """No token is left in the chain."""

    def to_json(self) -> bytes:
        """The body of a plain answer."""
        choice = {
            "index": 0,
            "message": self.message,
            "finish_reason": self.finish_reason,
            "logprobs": None,
        }
        return msgspec.json.encode(
            {**self._head("chat.completion"), "choices": [choice], "usage": self.usage.to_json()}
        )

    def to_events(self, options: StreamOptions | None) -> Iterator[bytes]:
        """The body of a streamed answer: the finished turn as server-sent events."""
        delta = dict(self.message)
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        yield self._event([{"index": 0, "delta": delta, "finish_reason": None}])
        yield self._event([{"index": 0, "delta": {}, "finish_reason": self.finish_reason}])
        if options and options.include_usage:
            yield self._event([], usage=self.usage.to_json())
        yield b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: object) -> bytes:
        body = {**self._head("chat.completion.chunk"), "choices": choices, **more}
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def read_request(body: bytes) -> ChatRequest:
    """Decode a request and refuse what is not served. Raises BadRequestError."""
    try:
        request = _decode_request(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequestError(f"the body is no chat completion request: {error}") from None
    format_type = (request.response_format or {}).get("type", "text")
    for is_refused, problem in (
        (not request.messages, "messages must not be empty"),
        (request.n not in {None, 1}, "n must be 1: every turn is one sample of its session"),
        (
            bool(request.stop),
            "stop sequences are not supported: a turn ends at the model's own stop tokens",
        ),
        (
            format_type != "text",
            f"response_format {format_type!r} is not supported: sampling is not constrained",
        ),
        (
            request.tool_choice not in (None, "auto", "none"),
            "tool_choice must be auto or none: sampling is not constrained",
        ),
        (bool(request.logprobs), "logprobs are kept for the trainer and not answered"),
        (bool(request.functions), "functions are not supported: use tools"),
        (
            request.modalities not in (None, ["text"]),
            "modalities other than text are not supported",
        ),
        (
            request.token_limit is not None and request.token_limit < 1,
            "max_tokens must be at least 1",
        ),
    ):
        if is_refused:
            raise BadRequestError(problem)
    return request


def to_prompt(request: ChatRequest) -> Prompt:
    """The request's conversation, ready to be matched. Raises BadRequestError."""
    messages = [read_message(index, message) for index, message in enumerate(request.messages)]
    tools = request.tools or []
    return Prompt(
        messages=messages,
        keys=[message_key(m) for m in messages],
        tools=tools,
        tools_key=_encode_sorted(tools),
    )


def to_message(turn: ParsedTurn) -> dict[str, Any]:
    """The assistant's message as the client gets it."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": turn.content or (None if turn.tool_calls else ""),
    }
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"call_{secrets.token_hex(8)}",
                "type": "function",
                "function": {"name": c.name, "arguments": c.arguments},
            }
            for c in turn.tool_calls
        ]
    return message
