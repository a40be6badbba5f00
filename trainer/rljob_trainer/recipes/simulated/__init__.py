"""What a job of simulated parts needs: prompts that name their answers, a real tokenizer, weights that nothing reads.

The simulated policy finds `sim-answer=WORD` in the prompt and submits it as often as its skill allows, so that such a
job has a reward curve. Built in a second, without torch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

from rljob.task_config import Row
from rljob.weights import RawTensor, write_safetensors
from rljob_trainer.recipes.quickstart.rows import TASK_NAME, VALUES

OPTIONS: Mapping[str, int] = {"rows": 0, "seed": 0}
"""rows: how many (0: 80 to train, 20 to validate). seed: of the rows."""
USES = ("rljob_trainer.recipes.quickstart",)

_DEFAULT_ROWS = {"train": 80, "validation": 20}


def build_rows(split: str, options: Mapping[str, int]) -> list[Row]:
    """Rows of one split; no answer is in both."""
    answers, count = VALUES[split].copy(), options["rows"] or _DEFAULT_ROWS[split]
    random.Random(f"{split}/{options['seed']}").shuffle(answers)
    return [_row(answers[index % len(answers)]) for index in range(count)]


def _row(answer: str) -> Row:
    metadata = {"files": {}, "answer": answer, "expect": {}}
    return Row(task=TASK_NAME, prompt=f"Submit sim-answer={answer}", metadata=metadata)


def build_model(target: Path, options: Mapping[str, int], say: Callable[[str], None]) -> None:
    """The quick start's tokenizer and chat template beside one small tensor."""
    from rljob_trainer.recipes.quickstart.tokenizer import save_tokenizer, train_tokenizer

    save_tokenizer(train_tokenizer(), target)
    (target / "config.json").write_text(json.dumps({"model_type": "simulated"}))
    write_safetensors(target / "model.safetensors", [RawTensor("weight", "F32", [4], bytes(16))])
    say("built a tokenizer and weights that nothing reads")
