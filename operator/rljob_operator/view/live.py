"""The live view of a terminal: progress, what is flowing, what each side waits for, the state of each component."""

from __future__ import annotations

from collections import deque
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rljob_operator.view.facts import Facts, number_text, seconds_text
from rljob_operator.view.plain import staleness_text, validation_text

_STYLES = {
    "ready": "green",
    "done": "dim",
    "running": "yellow",
    "starting": "yellow",
    "waiting": "dim",
    "backing off": "red",
    "not answering": "red",
    "failed": "bold red",
}
_SPARKS = "▁▂▃▄▅▆▇█"


class LiveView:
    """Redraws the facts in place; events scroll above."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=4, transient=False)
        self._rewards: deque[float] = deque(maxlen=40)
        self._last_step = 0

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def note(self, text: str) -> None:
        """Print one event above the view."""
        self._live.console.print(Text(text, style="dim"))

    def update(self, facts: Facts) -> None:
        """Redraw."""
        if facts.step != self._last_step and facts.reward_mean is not None:
            self._rewards.append(facts.reward_mean)
            self._last_step = facts.step
        self._live.update(panel(facts, list(self._rewards)))


def panel(facts: Facts, rewards: list[float]) -> RenderableType:
    """The whole view as one renderable."""
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column()
    head.add_column(ratio=1)
    head.add_column(justify="right")
    head.add_row(
        Text(f"{facts.unit} {facts.step} of {facts.steps or '–'}", style="bold"),
        ProgressBar(total=max(1, facts.steps), completed=facts.step),
        Text(
            f"{seconds_text(facts.elapsed_seconds)} elapsed, {seconds_text(facts.eta_seconds)} to go"
        ),
    )
    body = Table.grid(expand=True, padding=(0, 2))
    body.add_column(ratio=3)
    body.add_column(ratio=2)
    body.add_row(_flow(facts, rewards), _components(facts))
    title = f"[bold]{facts.name}[/bold] · {facts.phase}" + (
        f" · policy {facts.policy_version}" if facts.policy_version else ""
    )
    parts: list[RenderableType] = [head, Text(), body]
    if facts.message:
        parts.append(Text(facts.message, style="red"))
    return Panel(Group(*parts), title=title, title_align="left")


def _flow(facts: Facts, rewards: list[float]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="cyan")
    table.add_column()
    table.add_row("reward", f"{number_text(facts.reward_mean)}  {sparkline(rewards)}")
    if facts.mode == "train":
        table.add_row("validation", validation_text(facts))
    table.add_row(
        "episodes", f"{facts.running} running, {facts.completed} completed, {facts.failed} failed"
    )
    table.add_row("turns", number_text(facts.turns_mean, 1))
    if facts.mode == "train":
        table.add_row("staleness", staleness_text(facts))
    table.add_row("tokens/s", number_text(facts.tokens_per_second, 0))
    table.add_row(
        "waiting", f"{facts.ready_groups} groups ready, {facts.backlog} episodes in the stream"
    )
    return table


def _components(facts: Facts) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column()
    table.add_column(style="dim")
    for name, state in facts.components.items():
        restarts = facts.restarts.get(name, 0)
        shown = f"{state} (restarted {restarts}×)" if restarts else state
        waiting = facts.waiting.get(name)
        table.add_row(
            name,
            Text(shown, style=_STYLES.get(state, "")),
            Text(f"waits for {waiting}" if waiting else ""),
        )
    return table


def sparkline(values: list[float], low: float = 0.0, high: float = 1.0) -> str:
    """Values as bars; the scale widens beyond [low, high] where they do."""
    if not values:
        return ""
    low, high = min(low, *values), max(high, *values)
    return "".join(
        _SPARKS[round((value - low) / (high - low) * (len(_SPARKS) - 1))] for value in values
    )
