"""The plugins that a manifest names: task types, agents, tools, rewards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rljob.api.problem import Problem
from rljob.api.rljob_types import RLJob, Task
from rljob.api.source import KeyPath
from rljob.errors import ManifestError

if TYPE_CHECKING:
    from rljob.plugins import Group


def unknown_plugins(job: RLJob, plugin_dir: Path) -> Iterator[Problem]:
    """Those that cannot be found here; import paths are looked up first in `plugin_dir`."""
    from rljob.plugins import resolve

    for path, group, name in plugin_names(job):
        try:
            resolve(group, name, str(plugin_dir))
        except ManifestError as error:
            yield Problem(path, error.problem, error.fix)


def plugin_names(job: RLJob) -> Iterator[tuple[KeyPath, Group, str]]:
    """Every task type, agent, tool and reward that a job names, with its path."""
    for index, task in enumerate(job.spec.tasks):
        for tail, group, name in _plugins_of(task):
            yield ("spec", "tasks", index, *tail), group, name


def _plugins_of(task: Task) -> Iterator[tuple[KeyPath, Group, str]]:
    yield ("type",), "rljob.tasks", task.type
    yield ("agent", "name"), "rljob.agents", task.agent.name
    for number, tool in enumerate(task.agent.tools):
        yield ("agent", "tools", number, "name"), "rljob.tools", tool.name
    if task.reward.name:
        yield ("reward", "name"), "rljob.rewards", task.reward.name
