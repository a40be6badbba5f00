"""Builders that `recipe://NAME` names: a model and rows made on the spot, where no hub can be reached."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast
from urllib.parse import parse_qsl

from rljob.errors import UserError
from rljob.task_config import Row

Say = Callable[[str], None]
"""Takes one line of progress."""

RECIPES: Mapping[str, str] = {
    "quickstart": "rljob_trainer.recipes.quickstart",
    "simulated": "rljob_trainer.recipes.simulated",
}
"""Recipe name to the package that exports `OPTIONS`, `USES`, `build_model` and `build_rows`."""


class Recipe(Protocol):
    """What a recipe's package exports."""

    OPTIONS: Mapping[str, int]
    """Every option of the source's query with its default; all are whole numbers."""
    USES: Sequence[str]
    """Other recipes' packages whose source code has a part in what is built."""

    def build_model(self, target: Path, options: Mapping[str, int], say: Say) -> None:
        """Write a model directory that vLLM can serve."""
        ...

    def build_rows(self, split: str, options: Mapping[str, int]) -> list[Row]:
        """Make the rows of split "train" or "validation"."""
        ...


def parse(source: str, path: str) -> tuple[Recipe, dict[str, int]]:
    """Resolve `recipe://NAME?option=value&…`.

    Args:
        source: The manifest's source.
        path: Manifest path for the error line.

    Raises:
        UserError: unknown recipe or option, or a value that is not a whole number >= 0.
    """
    name, _, query = source.removeprefix("recipe://").partition("?")
    if name not in RECIPES:
        raise UserError(path, f"unknown recipe {name!r}", f"known: {', '.join(sorted(RECIPES))}")
    recipe = cast(Recipe, importlib.import_module(RECIPES[name]))
    options = dict(recipe.OPTIONS)
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in options:
            known = ", ".join(sorted(options))
            raise UserError(path, f"recipe {name} has no option {key!r}", f"known: {known}")
        if not value.isdecimal():
            raise UserError(path, f"option {key}={value!r} is not a whole number")
        options[key] = int(value)
    return recipe, options


def fingerprint(recipe: Recipe, options: Mapping[str, int]) -> str:
    """Hash of the recipe's source code and its options: the key of the cache."""
    digest = hashlib.sha256(repr(sorted(options.items())).encode())
    for package in (recipe, *map(importlib.import_module, recipe.USES)):
        folder = Path(inspect.getfile(cast(type, package))).parent
        for file in sorted(folder.glob("*.py")):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
