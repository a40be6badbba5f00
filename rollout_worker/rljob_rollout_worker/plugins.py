"""The Task Configs of a job, resolved once: what a row's task name means here.

Every plugin of the manifest is resolved and constructed at the worker's start, so that a wrong name or option ends it with
one line before anything is leased. Tasks and rewards are shared by all episodes; agents and tools are made anew for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rljob.api.rljob_types import RLJob
from rljob.api.rljob_types import Task as TaskConfig
from rljob.errors import DataError, ManifestError
from rljob.plugins import build, resolve
from rljob.sandbox import Sandbox
from rljob.task_config import (
    Agent,
    AgentResult,
    ExportingTask,
    Message,
    Reward,
    RewardFunction,
    Row,
    Task,
    Tool,
)


class Overrides(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """What a row may replace of its Task Config."""

    max_turns: int | None = None
    image: str | None = None
    env: dict[str, str] = {}
    """Added to the task's own environment."""


class RowPlan(msgspec.Struct, kw_only=True, frozen=True):
    """Where and how long one row runs."""

    pool: str
    image: str | None
    env: dict[str, str]
    max_turns: int


class Bench:
    """One Task Config, ready to run rows.

    Args:
        config: The Task Config.
        search_path: Folder where import paths are looked up first.
        where: Its path in the manifest.
    """

    def __init__(self, config: TaskConfig, search_path: str, where: str) -> None:
        self._config, self._path, self._where = config, search_path, where
        self.name = config.name
        self.task: Task = build(
            "rljob.tasks", config.type, config.options, search_path, where=f"{where}.type"
        )
        self._reward = self._build_reward()
        if config.reward.fresh_sandbox and not isinstance(self.task, ExportingTask):
            problem = f"{config.type} cannot export what is to be scored"
            raise ManifestError(
                f"{where}.reward.freshSandbox",
                problem,
                "give the task export() and load(), or leave the key out",
            )
        self.agent(), self.tools()  # refuse wrong options now, not in the first episode

    @property
    def exporting(self) -> ExportingTask | None:
        """The task as an exporting one where rewards want a fresh sandbox."""
        fresh = self._config.reward.fresh_sandbox
        return self.task if fresh and isinstance(self.task, ExportingTask) else None

    def agent(self) -> Agent:
        """A new agent. Raises ManifestError."""
        ref = self._config.agent
        return build(
            "rljob.agents", ref.name, ref.options, self._path, where=f"{self._where}.agent.name"
        )

    def tools(self) -> list[Tool]:
        """New tools. Raises ManifestError."""
        where = f"{self._where}.agent.tools"
        refs = self._config.agent.tools
        tools: list[Tool] = [
            build("rljob.tools", ref.name, ref.options, self._path, where=f"{where}[{i}].name")
            for i, ref in enumerate(refs)
        ]
        names = [tool.name for tool in tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ManifestError(
                where,
                f"two tools call themselves {twice[0]!r}",
                "the model tells tools apart by name",
            )
        return tools

    def plan(self, row: Row) -> RowPlan:
        """The Task Config with the row's overrides. Raises DataError."""
        try:
            over = msgspec.convert(row.overrides, Overrides)
        except msgspec.ValidationError as error:
            raise DataError(
                "overrides", str(error), "a row may override maxTurns, image and env"
            ) from None
        if over.max_turns is not None and not 1 <= over.max_turns <= 1000:
            raise DataError(
                "overrides.maxTurns", f"{over.max_turns} is out of range", "use 1 to 1000"
            )
        box, agent = self._config.sandbox, self._config.agent
        return RowPlan(
            pool=box.pool,
            image=over.image or box.image,
            env={**box.env, **over.env},
            max_turns=over.max_turns or agent.max_turns,
        )

    def opening(self, messages: list[Message]) -> list[Message]:
        """The task's opening messages under the configured system prompt, which replaces the task's own."""
        prompt = self._config.agent.system_prompt
        if prompt is None:
            return messages
        return [
            {"role": "system", "content": prompt},
            *(m for m in messages if m.get("role") != "system"),
        ]

    async def score(self, box: Sandbox, row: Row, result: AgentResult) -> Reward:
        """The reward of a finished episode, as a `Reward`."""
        value = await self._reward(box, row, result)
        return value if isinstance(value, Reward) else Reward(value=float(value))

    def _build_reward(self) -> RewardFunction:
        ref = self._config.reward
        if ref.name is None:
            return self.task.reward
        where = f"{self._where}.reward.name"
        found: Any = resolve("rljob.rewards", ref.name, self._path, where=where)
        # a class is constructed with the options; a plain async function takes none
        if isinstance(found, type):
            return build("rljob.rewards", ref.name, ref.options, self._path, where=where)
        if ref.options:
            raise ManifestError(
                f"{self._where}.reward.options",
                f"{ref.name} is a function",
                "only a class takes options",
            )
        return found


def benches(job: RLJob, search_path: str) -> Mapping[str, Bench]:
    """All Task Configs of a job by name. Raises ManifestError."""
    return {
        task.name: Bench(task, search_path, f"spec.tasks[{i}]")
        for i, task in enumerate(job.spec.tasks)
    }
