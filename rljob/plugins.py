"""Finds a task, agent, tool or reward by name: an entry point (`react`) or an import path (`my_pkg.tasks:MyTask`).

Light on purpose: `rljob validate` asks for every name of a manifest before anything heavy is
imported. Import paths are looked up first in the manifest's own folder, so that a user's code needs
no packaging.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from importlib.metadata import entry_points
from typing import Any, Literal

from rljob.errors import ManifestError

Group = Literal["rljob.tasks", "rljob.agents", "rljob.tools", "rljob.rewards"]

KINDS: dict[str, str] = {
    "rljob.tasks": "task type",
    "rljob.agents": "agent",
    "rljob.tools": "tool",
    "rljob.rewards": "reward",
}


def names(group: Group) -> list[str]:
    """The installed names of a group, sorted."""
    return sorted({entry.name for entry in entry_points(group=group)})


def resolve(group: Group, name: str, search_path: str = "", *, where: str = "") -> Any:
    """The class or function behind `name`.

    Args:
        group: Which kind of plugin.
        name: Entry point name or `module:attribute`.
        search_path: Folder where import paths are looked up first (the manifest's); empty: only the installed packages.
        where: Path in the manifest, for the message.

    Raises:
        ManifestError: unknown name (close matches are suggested), a module that does not import, or a name of
            something that cannot be called.
    """
    where = where or KINDS[group]
    found = (
        _import(group, name, search_path, where) if ":" in name else _installed(group, name, where)
    )
    if not callable(found):
        problem = f"{KINDS[group]} {name!r} is a {type(found).__name__}, not a class or function"
        raise ManifestError(where, problem, "name what can be called")
    return found


def construct(factory: Any, name: str, options: dict[str, Any], *, where: str) -> Any:
    """Call what `resolve` gave with the options of the manifest.

    Raises:
        ManifestError: the constructor refuses them.
    """
    try:
        return factory(**options)
    except (TypeError, ValueError) as error:
        problem = f"{name} refuses its options: {error}"
        raise ManifestError(where, problem, "see its constructor") from error


def _installed(group: Group, name: str, where: str) -> Any:
    found = [entry for entry in entry_points(group=group) if entry.name == name]
    if not found:
        known = names(group)
        close = difflib.get_close_matches(name, known, n=1)
        hint = (
            f"did you mean {close[0]}?"
            if close
            else f"known: {', '.join(known) or 'none'}; or give an import path module:attribute"
        )
        raise ManifestError(where, f"unknown {KINDS[group]} {name!r}", hint)
    try:
        return found[0].load()
    except Exception as error:  # boundary: any error of a plugin's import is the user's to read
        raise ManifestError(
            where,
            f"{KINDS[group]} {name!r} does not import: {_describe(error)}",
            f"it is {found[0].value}",
        ) from error


def _import(group: Group, name: str, search_path: str, where: str) -> Any:
    module_name, _, attribute = name.partition(":")
    _search_first(search_path)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        fix = f"looked in {search_path or 'the installed packages'} first"
        raise ManifestError(
            where, f"{KINDS[group]} {name!r}: no module {error.name!r}", fix
        ) from error
    except Exception as error:  # boundary: as above
        raise ManifestError(
            where, f"{KINDS[group]} {name!r} does not import: {_describe(error)}", "fix the module"
        ) from error
    if not hasattr(module, attribute):
        public = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
        ]
        close = difflib.get_close_matches(attribute, public, n=1)
        raise ManifestError(
            where,
            f"{module_name} has no {attribute!r}",
            f"did you mean {close[0]}?" if close else f"it has {', '.join(public)}",
        )
    return getattr(module, attribute)


def _search_first(folder: str) -> None:
    """Put `folder` first on the path and leave it there: a plugin may import its neighbours later, too."""
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
        importlib.invalidate_caches()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
