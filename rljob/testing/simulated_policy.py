"""A policy without weights: what a simulated engine says, a function of prompt, version and how often it was asked.

Turns of an episode: `bash` calls first, then one `submit`. The answer is right with a chance that rises with the
version, where the prompt names it (`sim-answer=WORD` anywhere in it), so that a simulated job has a reward curve.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

_ANSWER = re.compile(r"sim-answer=([^\s\"'<]+)")
_ASSISTANT = re.compile(r"<\|im_start\|>assistant")
WRONG_ANSWER = "wrong"


class Tokenizer(Protocol):
    """What the simulated policy needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Text to ids, special tokens recognised."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, special tokens kept."""
        ...


class ByteTokenizer:
    """One id per UTF-8 byte; ids from 256 on decode to nothing. For engines without a prepared model."""

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class FileTokenizer:
    """The tokenizer of a prepared model.

    Args:
        path: `tokenizer.json`.
    """

    def __init__(self, path: Path) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def tool_call(name: str, arguments: dict[str, object]) -> str:
    """An assistant turn that calls one tool, in the form that hermes-style parsers read."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def chance(*parts: object) -> float:
    """A number in [0, 1) that is a pure function of `parts`."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def skill(n: int, start: float, gain: float) -> float:
    """Chance of a right answer after n training steps; at most 0.95."""
    return min(0.95, start + gain * n)


def reply(text: str, num_turns: int, is_right: bool) -> str:
    """What the policy says after the prompt `text` (which ends where its turn begins)."""
    turn = max(0, len(_ASSISTANT.findall(text)) - 1)
    if turn < num_turns - 1:
        return tool_call("bash", {"command": "ls"})
    named = _ANSWER.findall(text)
    return tool_call("submit", {"answer": named[-1] if named and is_right else WRONG_ANSWER})


def continuation(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], num_turns: int, is_right: bool
) -> list[int]:
    """The rest of the turn that `prompt_ids` ends in, without a stop token. A turn begun in another mind is ended."""
    text = tokenizer.decode(prompt_ids)
    begins = [match.end() for match in _ASSISTANT.finditer(text)]
    head = text[: begins[-1]].rstrip("\n") + "\n" if begins else text
    said = text[begins[-1] :].lstrip("\n") if begins else ""
    for right in (is_right, not is_right):
        whole = reply(head, num_turns, right)
        if whole.startswith(said):
            return tokenizer.encode(whole[len(said) :])
    return []


def parse(text: str, with_tools: bool) -> dict[str, object]:
    """Take a turn apart as `ParsedTurn` names it."""
    text = text.replace("<|im_end|>", "")
    reasoning = re.search(r"<think>(.*?)</think>\s*", text, re.S)
    rest = text.replace(reasoning.group(0), "", 1) if reasoning else text
    calls = _tool_calls(rest) if with_tools else []
    content = rest.split("<tool_call>", 1)[0].strip() if calls else rest
    return {
        "content": content or None,
        "reasoning": reasoning.group(1) if reasoning else None,
        "tool_calls": calls,
    }


def _tool_calls(text: str) -> list[dict[str, str]]:
    calls: list[dict[str, str]] = []
    for body in re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.S):
        try:
            call = json.loads(body)
            calls.append({"name": str(call["name"]), "arguments": json.dumps(call["arguments"])})
        except (ValueError, KeyError, TypeError):
            return []  # as vLLM's hermes parser: one bad call makes the whole turn plain text
    return calls
