"""Chains: which conversation a request continues, and the tokens that were sampled in it.

    request's messages ──► keys ──► the longest idle chain whose keys are their prefix, with the same tools
                                    none: a new chain (edited history, compaction, sub-agent, sibling)

Chains only grow, turn by turn: context tokens that new messages add, then sampled tokens. A turn
that fails adds nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rljob.ids import PolicyVersion
from rljob.trajectory import Chain, FinishReason, VersionSpan
from rljob_services.gateway.messages import MessageKey

BYTES_PER_TOKEN = 8
"""int32 id and, for sampled ones, float32 log probability."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A request's conversation, ready to be matched."""

    messages: list[dict[str, Any]]
    """As the chat template takes them (`read_message`)."""
    keys: list[MessageKey]
    """One per message."""
    tools: list[dict[str, Any]]
    tools_key: bytes
    """Equal for identical tool schemas."""


class Sampled(msgspec.Struct, kw_only=True):
    """What the engine sampled in one turn, over however many submissions it took."""

    token_ids: list[int] = []
    logprobs: list[float] = []
    versions: list[tuple[int, PolicyVersion]] = []
    """(tokens, the version that sampled them), in order."""
    finish_reason: FinishReason = "abort"


class OpenChain:
    """One linear conversation of a session.

    Args:
        tools: Its tools, control literals marked.
        tools_key: What tells them from others.
        agent_id: Which agent of the episode speaks in it.
    """

    def __init__(self, tools: list[dict[str, Any]], tools_key: bytes, agent_id: str) -> None:
        self.tools, self.tools_key, self.agent_id = tools, tools_key, agent_id
        self.keys: list[MessageKey] = []
        """Of the messages so far; the last one is the assistant's."""
        self.messages: list[dict[str, Any]] = []
        """The same, control literals marked."""
        self.is_busy = False
        """A turn of it is being sampled."""
        self.tokens = array("i")
        self._logprobs = array("f")
        self._spans: list[VersionSpan] = []
        self._prompt_length = 0
        self.finish_reason: FinishReason = "abort"

    @property
    def has_actions(self) -> bool:
        """Whether anything was sampled in it."""
        return bool(self._spans)

    @property
    def num_bytes(self) -> int:
        """About what the chain holds in memory."""
        text = sum(len(message["content"]) for message in self.messages)
        return BYTES_PER_TOKEN * len(self.tokens) + text

    def continues(self, prompt: Prompt) -> bool:
        """Whether `prompt` is this conversation and at least one message more."""
        known = len(self.keys)
        return (
            known < len(prompt.keys)
            and self.tools_key == prompt.tools_key
            and prompt.keys[:known] == self.keys
        )

    def append(self, context: Sequence[int], sampled: Sampled) -> None:
        """Add the tokens of a finished turn: those that the request's new messages add, then the sampled ones."""
        self.tokens.extend(context)
        if not self._spans:
            self._prompt_length = len(self.tokens)
        start = len(self.tokens)
        for length, version in sampled.versions:
            self._add_span(start, length, version)
            start += length
        self.tokens.extend(sampled.token_ids)
        self._logprobs.extend(sampled.logprobs)
        self.finish_reason = sampled.finish_reason

    def record(self) -> Chain:
        """The chain as it crosses the wire."""
        mask = [False] * len(self.tokens)
        for span in self._spans:
            mask[span.start : span.start + span.length] = [True] * span.length
        return Chain(
            tokens=self.tokens.tolist(),
            prompt_length=self._prompt_length,
            action_mask=mask,
            logprobs=self._logprobs.tolist(),
            version_spans=self._spans,
            finish_reason=self.finish_reason,
            agent_id=self.agent_id,
        )

    def _add_span(self, start: int, length: int, version: PolicyVersion) -> None:
        if not length:
            return
        last = self._spans[-1] if self._spans else None
        if last and last.start + last.length == start and (last.incarnation, last.n) == version:
            start, length = last.start, last.length + length
            self._spans.pop()
        self._spans.append(VersionSpan(start, length, *version))


def find_chain(chains: Iterable[OpenChain], prompt: Prompt) -> OpenChain | None:
    """The longest idle chain that `prompt` continues; the newest of equals."""
    fitting = [chain for chain in chains if not chain.is_busy and chain.continues(prompt)]
    return max(reversed(fitting), key=lambda chain: len(chain.keys), default=None)
