"""Mode `eval`: the validation rows, each `samplesPerPrompt` times, scored on the prepared model.

    open_validation ─► workers ─► drain ─► validation/parts (durable) ─► forget ─► … ─► files, score ─► result.json

Waits for the episodes without a deadline of its own: the job's `progressDeadlineSeconds` watches the whole. An episode
out of attempts counts as reward 0 and lowers the completion rate; a job of which none comes back fails.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import structlog

from rljob import telemetry
from rljob.ledger.types import ValidationStatus
from rljob_trainer.collector import Collector
from rljob_trainer.metrics import append_line, mean, read_lines
from rljob_trainer.scored import Scored, ScoredEpisode
from rljob_trainer.validation import score

STEP = 0
_POLL_SECONDS = 0.5
_PART_EPISODES = 256
_PART_SECONDS = 10.0
"""A part is written when one of both is reached, and at the end."""
_FEWEST_DEAD = 8
log = structlog.get_logger()


async def score_rows(collector: Collector) -> None:
    """Score everything and write the result."""
    ledger = collector.ledger
    if STEP in (await ledger.snapshot()).validation:
        return  # scored, written and closed; only the last word was not said
    samples = _samples(collector)
    before, total = await ledger.validation(STEP), collector.num_rows * samples
    fresh = not before.open or before.total != total
    scored = await asyncio.to_thread(Scored, collector.artifacts, fresh=fresh)
    await collector.commit(STEP)
    await ledger.open_validation(
        collector.incarnation, STEP, collector.version, collector.num_rows, samples, settled=True
    )
    dead = await _drain(collector, scored)
    result = await _conclude(collector, scored, dead)
    await ledger.close_validation(collector.incarnation, STEP)
    await asyncio.to_thread(scored.clean)
    log.info("scored", score=result["score"], episodes=result["n"])


async def _drain(collector: Collector, scored: Scored) -> int:
    """Until every episode has ended; how many died."""
    ledger, clock = collector.ledger, collector.clock
    pending: list[tuple[str, bytes]] = []
    wrote = clock.monotonic()
    while True:
        status = await ledger.validation(STEP)
        after = pending[-1][0] if pending else ""
        pending += await ledger.drain_validation(collector.incarnation, STEP, after=after)
        over = status.complete
        if pending and (
            over or len(pending) >= _PART_EPISODES or clock.monotonic() - wrote > _PART_SECONDS
        ):
            await asyncio.to_thread(scored.add, [payload for _, payload in pending])
            await ledger.forget_validation(collector.incarnation, STEP, pending[-1][0])
            pending, wrote = [], clock.monotonic()
        await _tell(collector, status)
        if over:
            return status.dead
        await clock.sleep(_POLL_SECONDS)


async def _tell(collector: Collector, status: ValidationStatus) -> None:
    ended, progress = status.done + status.dead, collector.progress
    progress.waiting_for = "" if status.complete else f"episodes: {ended} of {status.total} ended"
    progress.facts.update(done=float(ended), total=float(status.total))
    if not status.done and status.dead >= min(status.total, _FEWEST_DEAD):
        reason = await collector.last_death()
        raise collector.nothing_came_back(f"{status.dead} episodes in a row", reason)


async def _conclude(collector: Collector, scored: Scored, dead: int) -> dict[str, Any]:
    """Files, metrics, result."""
    spec, episodes = collector.job.spec.data.validation, scored.episodes
    assert spec is not None
    samples, total = spec.samples_per_prompt, collector.num_rows * spec.samples_per_prompt
    result = {
        **score(episodes, total, samples, spec.pass_at),
        "rows": collector.num_rows,
        "samples_per_prompt": samples,
        "dead": dead,
        "completion_rate": len(episodes) / total,
        **_by_task(episodes),
    }
    await asyncio.to_thread(scored.write)
    metrics = collector.artifacts / "metrics" / "validation.jsonl"
    if all(line["step"] != STEP for line in read_lines(metrics)):
        head = {"step": STEP, "version": str(collector.version), "settled": True}
        append_line(metrics, {**head, "time": collector.clock.now(), **result, "asked": total})
    await collector.finish(result)
    collector.progress.facts.update(validation_score=result["score"])
    telemetry.VALIDATION_SCORE.set(float(result["score"]))
    return result


def _by_task(episodes: Sequence[ScoredEpisode]) -> dict[str, Any]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        rewards[episode.task].append(episode.reward)
    return {
        "reward_by_task": {task: mean(values) for task, values in sorted(rewards.items())},
        "outcomes": dict(Counter(episode.outcome for episode in episodes)),
        "tokens": sum(episode.num_tokens for episode in episodes),
        "action_tokens": sum(episode.num_action_tokens for episode in episodes),
    }


def _samples(collector: Collector) -> int:
    spec = collector.job.spec.data.validation
    return spec.samples_per_prompt if spec else 1
