"""The quick start: a tiny Qwen3 that has to find, read and edit small files through a shell.

Nothing here is downloaded. The warm start imitates a *mixture* of good, weak and useless strategies,
so that the model knows the format and passes about a third; reinforcement learning then shifts
probability to what works. It discovers no command that the demonstrations lack. "Unseen" validation
rows hold keys and values (pairs of known words) of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from rljob.task_config import Row
from rljob_trainer.recipes.quickstart.rows import make_rows

OPTIONS: Mapping[str, int] = {"rows": 0, "seed": 0, "warm_start_steps": 260}
"""rows: how many (0: 4096 to train, 150 to validate). seed: of rows or of the model.
warm_start_steps: 0 leaves it random."""
USES = ()

_DEFAULT_ROWS = {"train": 4096, "validation": 150}


def build_rows(split: str, options: Mapping[str, int]) -> list[Row]:
    """Rows of one split, kinds in rotation."""
    return make_rows(options["rows"] or _DEFAULT_ROWS[split], split, options["seed"])


def build_model(target: Path, options: Mapping[str, int], say: Callable[[str], None]) -> None:
    """Train the tokenizer, warm-start the model, write both as one Hugging Face directory."""
    from rljob_trainer.recipes.quickstart.warm_start import build

    build(target, seed=options["seed"], steps=options["warm_start_steps"], say=say)
