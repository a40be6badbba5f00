"""The quick start's rows, demonstrations and tokenizer."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rljob_trainer.recipes.quickstart import OPTIONS, build_model, build_rows, rows
from rljob_trainer.recipes.quickstart.demonstrations import (
    ARGUMENT,
    MIX,
    Shell,
    call_text,
    demonstrate,
)
from rljob_trainer.recipes.quickstart.tokenizer import CHAT_TEMPLATE, train_tokenizer

BEST = {kind: {next(iter(mix)): 1} for kind, mix in MIX.items()}


def _bash(command: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False, timeout=10
    )
    return done.stdout


def _write(files: dict[str, str], folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    for path, text in files.items():
        (folder / path).write_text(text)


@pytest.mark.parametrize("seed", range(15))
def test_the_pretended_shell_prints_what_bash_prints(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    row = rows.make_row(rng, "train")
    _write(row.metadata["files"], tmp_path)
    for name, argument, output in demonstrate(rng, row):
        if name == "bash":
            assert _bash(argument, tmp_path) == output


@pytest.mark.parametrize("kind", rows.KINDS)
def test_the_first_strategy_of_every_kind_passes(kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(20):
        row = rows.make_row(rng, "train", kind)
        turns = demonstrate(rng, row, BEST)
        shell = Shell(row.metadata["files"])
        for name, argument, _ in turns:
            if name == "bash":
                shell.run(argument)
        assert turns[-1][1] == row.metadata["answer"]
        assert all(shell.files[p] == text for p, text in row.metadata["expect"].items())


def test_demonstrations_leave_room_to_learn() -> None:
    rng = random.Random(2)
    answers = [
        (row.metadata["answer"], demonstrate(rng, row)[-1][1])
        for row in (rows.make_row(rng, "train", "find") for _ in range(500))
    ]
    right = sum(expected == given for expected, given in answers) / len(answers)
    assert 0.3 < right < 0.7


def test_no_pair_of_a_validation_row_occurs_in_a_training_row() -> None:
    train = json.dumps([row.metadata["files"] for row in build_rows("train", OPTIONS)])
    for row in build_rows("validation", OPTIONS):
        for text in row.metadata["files"].values():
            for line in text.splitlines():
                key, value = line.split("=")
                assert key == "link" or f"{key}=" not in train
                assert key == "link" or value not in train


def test_rows_are_a_function_of_their_options() -> None:
    assert build_rows("train", OPTIONS) == build_rows("train", OPTIONS)
    assert build_rows("train", {**OPTIONS, "seed": 1}) != build_rows("train", OPTIONS)
    assert len(build_rows("validation", {**OPTIONS, "rows": 7})) == 7


def test_training_text_is_what_the_chat_template_renders() -> None:
    from rljob_trainer.recipes.quickstart.warm_start import example

    tokenizer = train_tokenizer(num_demonstrations=100)
    for seed in range(20):
        ids, _ = example(tokenizer, random.Random(seed))
        rng = random.Random(seed)
        row = rows.make_row(rng, "train")
        text = _render(row.messages(), demonstrate(rng, row))
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids


def _render(prompt: list[dict[str, object]], turns: list[tuple[str, str, str | None]]) -> str:
    messages = [{"role": "system", "content": rows.SYSTEM_PROMPT}, *prompt]
    for name, argument, output in turns:
        function = {"name": name, "arguments": {ARGUMENT[name]: argument}}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        )
        if output is not None:
            messages.append({"role": "tool", "content": output})
    tools = [
        {"function": {"name": name, "parameters": {"properties": {argument: {}}}}}
        for name, argument in ARGUMENT.items()
    ]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    whole = environment.from_string(CHAT_TEMPLATE).render(messages=messages, tools=tools)
    return whole.removesuffix("\n")


def test_words_and_tool_marks_are_single_tokens_and_marks_survive_decoding() -> None:
    tokenizer = train_tokenizer(num_demonstrations=100)
    for word in rows.ADJECTIVES + rows.TREES + ["<tool_call>", "</tool_call>"]:
        assert len(tokenizer.encode(word, add_special_tokens=False).ids) == 1, word
    ids = tokenizer.encode(call_text("bash", "ls") + "<|im_end|>", add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == call_text("bash", "ls")


@pytest.mark.verl
def test_without_warm_start_steps_the_model_stays_random(tmp_path: Path) -> None:
    build_model(tmp_path, {**OPTIONS, "warm_start_steps": 0}, lambda _line: None)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o044 == 0o044
