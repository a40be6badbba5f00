"""The Task Configs of a job, resolved once: what a row's task name means here.

Every plugin of the manifest is resolved and constructed at the worker's start, so that a wrong name
or option ends it with one line before anything is leased. Tasks and rewards are shared by all
episodes; agents and tools are made anew for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, SupportsFloat, cast, runtime_checkable

import msgspec

from rljob.api.rljob_types import RLJob, ToolRef
from rljob.api.rljob_types import Task as TaskConfig
from rljob.errors import DataError, ManifestError
from rljob.plugins import Group, construct, resolve
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


class Ref(Protocol):
    """A name with options, as the manifest has them."""

    @property
    def name(self) -> str:
        """Entry point or import path."""
        ...

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the constructor."""
        ...


@runtime_checkable
class CheckingTask(Protocol):
    """A task that can tell a malformed row without a sandbox."""

    def check(self, row: Row) -> None:
        """Raises DataError."""
        ...


class RewardError(ValueError):
    """A reward that nothing can be trained on."""


class Plugin:
    """A plugin of the manifest: resolved once (that is slow), constructed as often as needed.

    Raises:
        ManifestError: unknown name, or a module that does not import.
    """

    def __init__(
        self, group: Group, ref: Ref, search_path: str, where: str, key: str = "name"
    ) -> None:
        self._name, self._options, self._where = ref.name, ref.options, f"{where}.options"
        self.found: Any = resolve(group, ref.name, search_path, where=f"{where}.{key}")

    def make(self) -> Any:
        """A new instance. Raises ManifestError where the constructor refuses the options."""
        return construct(self.found, self._name, self._options, where=self._where)


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
        task_ref = ToolRef(name=config.type, options=config.options)
        self.task: Task = Plugin("rljob.tasks", task_ref, search_path, where, "type").make()
        self._reward = self._find_reward()
        self._agent = Plugin("rljob.agents", config.agent, search_path, f"{where}.agent")
        self._tools = [
            Plugin("rljob.tools", ref, search_path, f"{where}.agent.tools[{i}]")
            for i, ref in enumerate(config.agent.tools)
        ]
        if config.reward.fresh_sandbox and not isinstance(self.task, ExportingTask):
            problem = f"{config.type} cannot export what is to be scored"
            fix = "give the task export() and load(), or leave the key out"
            raise ManifestError(f"{where}.reward.freshSandbox", problem, fix)
        # refuse wrong options now, not in the first episode
        self.agent()
        self.tools()

    @property
    def exporting(self) -> ExportingTask | None:
        """The task as an exporting one where rewards want a fresh sandbox."""
        fresh = self._config.reward.fresh_sandbox
        return self.task if fresh and isinstance(self.task, ExportingTask) else None

    def agent(self) -> Agent:
        """A new agent. Raises ManifestError."""
        return self._agent.make()

    def tools(self) -> list[Tool]:
        """New tools. Raises ManifestError."""
        tools: list[Tool] = [tool.make() for tool in self._tools]
        names = [tool.name for tool in tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            problem, fix = (
                f"two tools call themselves {twice[0]!r}",
                "the model tells tools apart by name",
            )
            raise ManifestError(f"{self._where}.agent.tools", problem, fix)
        return tools

    def check(self, row: Row) -> None:
        """Refuse a malformed row before anything runs. Raises DataError."""
        self.plan(row)
        if isinstance(self.task, CheckingTask):
            self.task.check(row)

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
        """The reward of a finished episode, as a `Reward`. Raises RewardError for what is no finite number."""
        given = await self._reward(box, row, result)
        reward = given if isinstance(given, Reward) else Reward(value=given)
        for name, value in {"the reward": reward.value, **reward.parts}.items():
            if not _is_finite(value):
                raise RewardError(f"{name} is {value!r:.100}, not a finite number")
        parts = {name: float(value) for name, value in reward.parts.items()}
        return Reward(value=float(reward.value), parts=parts)

    def _find_reward(self) -> RewardFunction:
        ref, where = self._config.reward, f"{self._where}.reward"
        if ref.name is None:
            return self.task.reward
        named = ToolRef(name=ref.name, options=ref.options)
        plugin = Plugin("rljob.rewards", named, self._path, where)
        # a class is constructed with the options; a plain async function takes none
        if isinstance(plugin.found, type):
            made = plugin.make()
            if not callable(made):
                problem = f"{ref.name} makes a {type(made).__name__}, which cannot be called"
                raise ManifestError(f"{where}.name", problem, "give the class async __call__()")
            return cast("RewardFunction", made)
        if ref.options:
            problem = f"{ref.name} is a function"
            raise ManifestError(f"{where}.options", problem, "only a class takes options")
        return plugin.found


def benches(job: RLJob, search_path: str) -> Mapping[str, Bench]:
    """All Task Configs of a job by name. Raises ManifestError."""
    return {
        task.name: Bench(task, search_path, f"spec.tasks[{i}]")
        for i, task in enumerate(job.spec.tasks)
    }


def _is_finite(value: object) -> bool:
    """Whether a reward, as user code gave it, is a number to train on (numpy's and bools count)."""
    try:
        return isinstance(value, SupportsFloat) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):  # an array, an int beyond any float
        return False
