"""The job as lines, for logs and pipes: one per step, one every ten seconds, one per event worth reading."""

from __future__ import annotations

from collections.abc import Callable

from rljob_operator.view.facts import Facts, number_text, seconds_text

EVERY_SECONDS = 10.0


class PlainView:
    """Prints facts when there is something new to say."""

    def __init__(self, write: Callable[[str], None], every_seconds: float = EVERY_SECONDS) -> None:
        self._write, self._every = write, every_seconds
        self._last_time, self._last_step = float("-inf"), -1
        self._last_phase = ""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def note(self, text: str) -> None:
        """Print one event."""
        self._write(text)

    def update(self, facts: Facts) -> None:
        """Print the facts if a step was committed, the phase changed or ten seconds went by."""
        # without training every episode would be a line
        new_step = facts.mode == "train" and facts.step != self._last_step and facts.step > 0
        if not (
            new_step
            or facts.phase != self._last_phase
            or facts.elapsed_seconds - self._last_time >= self._every
        ):
            return
        self._last_time, self._last_step, self._last_phase = (
            facts.elapsed_seconds,
            facts.step,
            facts.phase,
        )
        self._write(line(facts))


def line(facts: Facts) -> str:
    """All facts in one line."""
    parts = [
        f"[{seconds_text(facts.elapsed_seconds)}] {facts.phase.lower()}",
        f"{facts.unit} {facts.step}/{facts.steps or '–'}",
        f"eta {seconds_text(facts.eta_seconds)}",
        f"reward {number_text(facts.reward_mean)}",
        *([f"validation {validation_text(facts)}"] if facts.mode == "train" else []),
        f"episodes {facts.running} running {facts.completed} completed {facts.failed} failed",
        *([f"staleness {staleness_text(facts)}"] if facts.mode == "train" else []),
        f"{number_text(facts.tokens_per_second, 0)} tokens/s",
    ]
    if not_up := [
        f"{name} {state}"
        for name, state in facts.components.items()
        if state not in {"ready", "done", "waiting", "stopped"}
    ]:
        parts.append(", ".join(not_up))
    if facts.waiting:
        parts.append(", ".join(f"{name} waits for {what}" for name, what in facts.waiting.items()))
    return " | ".join(parts)


def staleness_text(facts: Facts) -> str:
    """`0.8 (max 2)`."""
    return f"{number_text(facts.staleness_mean, 1)} (max {number_text(facts.staleness_max, 0)})"


def validation_text(facts: Facts) -> str:
    """`0.31 → 0.62 (step 8)`, and what is being scored."""
    scores = facts.validation
    text = "–" if not scores else number_text(scores[0].score)
    if len(scores) > 1:
        text += f" → {number_text(scores[-1].score)} (step {scores[-1].step})"
    return f"{text}, scoring {facts.validation_running}" if facts.validation_running else text
