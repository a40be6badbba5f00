"""Chat messages in the one form that chains and chat templates take.

client's message ──► read_message ──► the template's form ──► message_key   is it the same message?
                                                          └─► mark_message  nothing in it can pass for a control token
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rljob.errors import TaskError
from rljob_services.gateway.vocabulary import Vocabulary

MessageKey = tuple[str, str, Any, Any]
"""What of a message must be equal for it to be the same message: role, text, tool calls, name.

Ids of tool calls are left out, since clients make up their own, and so is reasoning, which most
clients do not send back.
"""

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode


class BadRequestError(TaskError):
    """The request is none that this gateway serves; the message says which part."""


def read_message(index: int, raw: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the template's form: text content, tool calls with their arguments as objects.

    Raises:
        BadRequestError: it is no chat message of text.
    """
    where = f"messages[{index}]"
    if (role := _ROLES.get(str(raw.get("role")))) is None:
        raise BadRequestError(f"{where}.role must be one of {', '.join(_ROLES)}")
    message: dict[str, Any] = {"role": role, "content": _text(where, raw.get("content"))}
    if role == "assistant":
        if calls := raw.get("tool_calls"):
            message["tool_calls"] = _tool_calls(where, calls)
        if isinstance(reasoning := raw.get("reasoning_content") or raw.get("reasoning"), str):
            message["reasoning_content"] = reasoning
    for name in ("name", "tool_call_id"):
        if isinstance(raw.get(name), str):
            message[name] = raw[name]
    return message


def message_key(message: Mapping[str, Any]) -> MessageKey:
    """See `MessageKey`. `message` is what `read_message` gave."""
    role, content = message["role"], message["content"]
    if role != "assistant":
        return role, content, None, message.get("name")
    calls = tuple(
        (call["function"]["name"], _encode_sorted(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    )
    return role, content.strip(), calls, None


def mark_message(message: dict[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """The message with its control literals marked.

    An assistant's mark-up (`<think>`) is left to the template, which takes it apart; turn boundaries never are.
    """
    role = message["role"]
    return {**vocabulary.mark(message, only_special=role == "assistant"), "role": role}


def _text(where: str, content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[str] = []
    for part in content if isinstance(content, list) else [None]:
        if not isinstance(part, dict) or part.get("type") not in {"text", "refusal"}:
            raise BadRequestError(f"{where}.content must be text or a list of text parts")
        parts.append(str(part.get(part["type"], "")))
    return "".join(parts)


def _tool_calls(where: str, raw: object) -> list[dict[str, Any]]:
    try:
        return [_tool_call(call) for call in raw]  # type: ignore[attr-defined]
    except (TypeError, KeyError, AttributeError):
        raise BadRequestError(
            f"{where}.tool_calls must be a list of {{id, type, function: {{name, arguments}}}}"
        ) from None


def _tool_call(raw: Mapping[str, Any]) -> dict[str, Any]:
    function = raw["function"]
    return {
        "id": str(raw.get("id", "")),
        "type": "function",
        "function": {
            "name": str(function["name"]),
            "arguments": _arguments(function.get("arguments")),
        },
    }


def _arguments(raw: object) -> object:
    """Templates want the object; text that is none stays text, as the model wrote it."""
    if not isinstance(raw, str):
        return raw or {}
    try:
        decoded = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return raw
    return decoded if isinstance(decoded, dict) else raw
