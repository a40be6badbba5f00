"""One trajectory, turn by turn: what the model was shown, what it sampled, how likely, and by which policy version.

prompt tokens   dim, decoded
sampled tokens  on a ground that is greener the likelier they were, with version and log probabilities per turn
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rljob.trajectory import Chain, Trajectory

Decode = Callable[[list[int]], str]


class Segment(NamedTuple):
    """A run of tokens of one kind: context (mask 0), or one span sampled by one version (mask 1)."""

    start: int
    length: int
    version: str | None
    """`incarnation-n` of sampled tokens."""
    logprobs: list[float]


def segments(chain: Chain) -> Iterator[Segment]:
    """A chain cut where the mask or the version changes."""
    at = used = 0
    for span in chain.version_spans:
        if span.start > at:
            yield Segment(at, span.start - at, None, [])
        yield Segment(
            span.start,
            span.length,
            f"{span.incarnation}-{span.n}",
            chain.logprobs[used : used + span.length],
        )
        used += span.length
        at = span.start + span.length
    if at < len(chain.tokens):
        yield Segment(at, len(chain.tokens) - at, None, [])


def render(record: Trajectory, model: Path, *, trained_at: int) -> RenderableType:
    """The whole trajectory."""
    decode = decoder(model)
    parts: list[RenderableType] = [_head(record, trained_at)]
    for number, chain in enumerate(record.chains):
        parts.append(
            Rule(
                f"chain {number} · {chain.agent_id} · ended by {chain.finish_reason}", style="cyan"
            )
        )
        parts += [_segment(chain, segment, decode) for segment in segments(chain)]
    return Group(*parts)


def decoder(model: Path) -> Decode:
    """Text of tokens by the prepared model's tokenizer; the bare ids where there is none."""
    if not (model / "tokenizer.json").exists():
        return lambda ids: " ".join(map(str, ids))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def _head(record: Trajectory, trained_at: int) -> RenderableType:
    low, high = record.version_range
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan")
    grid.add_column()
    facts = {
        "episode": f"{record.episode}, attempt {record.attempt}, row {record.row_index}",
        "task": record.task,
        "reward": f"{record.reward:g}"
        + (f"  {record.reward_parts}" if record.reward_parts else ""),
        "outcome": f"{record.outcome} after {record.turns} turns, {record.tool_calls} tool calls",
        "tokens": f"{record.num_tokens}, of which {record.num_action_tokens} sampled by versions n = {low} to {high}",
        "step": str(trained_at),
        "seconds": ", ".join(
            f"{stage} {seconds:.2f}" for stage, seconds in record.stage_seconds.items()
        ),
        "where": f"worker {record.worker}, sandbox {record.sandbox}",
    }
    for key, value in facts.items():
        grid.add_row(key, Text(value))
    return Panel(grid, title=record.job, title_align="left")


def _segment(chain: Chain, segment: Segment, decode: Decode) -> RenderableType:
    ids = chain.tokens[segment.start : segment.start + segment.length]
    if segment.version is None:
        return Group(
            Text(f"── {segment.length} tokens of context (mask 0) at {segment.start}", style="dim"),
            Text(decode(ids), style="dim"),
        )
    mean = sum(segment.logprobs) / len(segment.logprobs)
    what = f"── {segment.length} sampled tokens (mask 1) at {segment.start}"
    title = Text(
        f"{what} by version {segment.version}, mean logprob {mean:.3f}",
        style="bold",
    )
    return Group(
        title, _colored(ids, segment.logprobs, decode), _numbers(ids, segment.logprobs, decode)
    )


def _colored(ids: list[int], logprobs: list[float], decode: Decode) -> Text:
    """Each token on a ground that says how likely it was."""
    text = Text()
    for token, logprob in zip(ids, logprobs, strict=True):
        text.append(decode([token]), style=f"black on {_ground(logprob)}")
    return text


def _ground(logprob: float) -> str:
    probability = math.exp(min(0.0, logprob))
    return f"rgb({round(255 - 115 * probability)},{round(150 + 80 * probability)},{140})"


def _numbers(ids: list[int], logprobs: list[float], decode: Decode) -> Text:
    """`id 'text' logprob` per token."""
    text = Text(style="dim")
    for token, logprob in zip(ids, logprobs, strict=True):
        text.append(f"{token} {decode([token])!r} {logprob:.3f}   ")
    return text
