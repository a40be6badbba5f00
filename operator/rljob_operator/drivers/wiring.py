"""A plan made concrete for one machine: ports, folders, secrets → argv, environment and files of each component."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from rljob.errors import MachineError
from rljob.settings import PREFIX, Settings
from rljob_operator.drivers import ports
from rljob_operator.render.component import Component, fill

HOST = "127.0.0.1"
_OWN_VARIABLES = {PREFIX + name.upper() for name in Settings.__struct_fields__}
"""What a plan alone says; a value left in the person's shell must not reach a component."""


class Launch(msgspec.Struct, frozen=True):
    """What to start."""

    argv: tuple[str, ...]
    env: dict[str, str]
    files: dict[Path, str]


class Wiring:
    """Ports of all components, and how placeholders are filled in.

    Args:
        plan: All components.
        paths: artifacts, job_file, store, cache, manifest; and `work`, the parent of each component's own work folder.
        secrets: token, pool_key, redis.
        programs: Programs that the driver brings, by name.

    Raises:
        MachineError: a pinned port is in use, or there are no free ports.
    """

    def __init__(
        self,
        plan: Sequence[Component],
        paths: Mapping[str, Path],
        secrets: Mapping[str, str],
        programs: Mapping[str, str],
    ) -> None:
        self._paths, self._secrets, self._programs = paths, secrets, programs
        self.ports = _allot(plan)

    def address(self, component: str, port: str) -> tuple[str, int]:
        """Host and port."""
        return HOST, self.ports[f"{component}/{port}"]

    def work_dir(self, component: Component) -> Path:
        """The component's own scratch folder."""
        return self._paths["work"] / component.name

    def launch(self, component: Component) -> Launch:
        """Everything about a component, filled in."""

        def lookup(kind: str, name: str) -> str:
            return self._lookup(component, kind, name)

        argv = tuple(
            sys.executable if index == 0 and part == "python" else fill(part, lookup)
            for index, part in enumerate(component.command)
        )
        own = {key: fill(value, lookup) for key, value in component.env.items()}
        inherited = {key: value for key, value in os.environ.items() if key not in _OWN_VARIABLES}
        files = {
            self.work_dir(component) / name: fill(text, lookup)
            for name, text in component.files.items()
        }
        return Launch(argv, {**inherited, "PYTHONUNBUFFERED": "1", **own}, files)

    def fill(self, component: Component, template: str) -> str:
        """One template, as `component` sees it."""
        return fill(template, lambda kind, name: self._lookup(component, kind, name))

    def _lookup(self, component: Component, kind: str, name: str) -> str:
        if kind == "addr":
            return HOST if name == "bind" else f"{HOST}:{self.ports[name]}"
        if kind == "port":
            return str(self.ports[name])
        if kind == "path":
            return str(self.work_dir(component) if name == "work" else self._paths[name])
        return self._secrets[name] if kind == "secret" else self._programs[name]


def _allot(plan: Sequence[Component]) -> dict[str, int]:
    pinned = {
        f"{part.name}/{port.name}": port.pinned
        for part in plan
        for port in part.ports
        if port.pinned is not None
    }
    for where, port in pinned.items():
        if not ports.is_free(port, HOST):
            raise MachineError(
                f"{where} port {port}",
                "is in use",
                "free it, or leave the port out of the manifest to get a free one",
            )
    taken = set(pinned.values())
    free = {
        f"{part.name}/{port.name}": ports.pick(taken, HOST)
        for part in plan
        for port in part.ports
        if port.pinned is None
    }
    return pinned | free
