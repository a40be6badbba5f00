"""The operator's configuration file and keys. A fault is one line with the path, and exit code 2."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rljob.errors import MachineError
from rljob_operator.observed import ClusterConfig

_FIX = "the chart writes this file; see its values"
_NAMESPACE = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")


def load_config(path: Path) -> ClusterConfig:
    """Read the file.

    Raises:
        MachineError: it cannot be read, is no YAML, or a key of it is wrong.
    """
    try:
        document: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MachineError(str(path), f"cannot be read ({error.strerror})", _FIX) from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        problem = str(error).replace("\n", " ")
        raise MachineError(str(path), f"is not YAML ({problem})", _FIX) from None
    try:
        config = msgspec.convert(document, ClusterConfig)
    except msgspec.ValidationError as error:
        raise MachineError(str(path), _in_words(str(error)), _FIX) from None
    for index, namespace in enumerate([config.operator_namespace, *config.namespaces]):
        if not _NAMESPACE.match(namespace):
            key = "operator_namespace" if index == 0 else f"namespaces[{index - 1}]"
            raise MachineError(f"{path}: {key}", f"{namespace!r} is no name of a namespace", _FIX)
    return config


def load_key(folder: Path, name: str) -> bytes:
    """A key that the chart generated. Raises MachineError."""
    file = folder / name
    fix = "mount the Secret rljob-keys of the operator's namespace there"
    try:
        key = file.read_bytes().strip()
    except OSError as error:
        raise MachineError(str(file), f"cannot be read ({error.strerror})", fix) from None
    if len(key) < 16:
        raise MachineError(str(file), "holds fewer than 16 characters", fix)
    return key


def _in_words(text: str) -> str:
    """``Expected `str`, got `int` - at `$.images.trainer` `` → ``images.trainer: expected `str`, got `int` ``."""
    problem, _, where = text.partition(" - at ")
    key = where.strip("`").removeprefix("$").lstrip(".")
    problem = problem[:1].lower() + problem[1:]
    return f"{key}: {problem}" if key else problem
