"""The `shell_files` verifier: all or nothing, and nothing that a sandbox holds can confuse it."""

from typing import Any

import pytest

from rljob.errors import DataError, SandboxError
from rljob.task_config import AgentResult, ExportingTask, Row, Task
from rljob.testing.sandbox import FakeSandbox
from rljob_rollout_worker.tasks.shell_files import ShellFiles


def row(**metadata: Any) -> Row:
    base = {"files": {"data/a": "k=v\n"}, "answer": "done", "expect": {"data/a": "k=w\n"}}
    return Row(task="t", prompt="Set k to w.", metadata=base | metadata)


def submitted(answer: str | None) -> AgentResult:
    return AgentResult(outcome="completed", turns=1, tool_calls=1, answer=answer)


async def score(answer: str | None, files: dict[str, bytes], **metadata: Any) -> float:
    box = FakeSandbox()
    box.files = files
    return (await ShellFiles().reward(box, row(**metadata), submitted(answer))).value


async def test_setup_writes_the_files_and_asks_the_question() -> None:
    box = FakeSandbox()
    messages = await ShellFiles().setup(box, row())
    assert box.files == {"data/a": b"k=v\n"}
    assert messages == [{"role": "user", "content": "Set k to w."}]


async def test_right_answer_and_right_files_are_worth_one() -> None:
    assert await score("done", {"data/a": b"k=w\n"}) == 1.0
    assert await score(" done\n", {"data/a": b"k=w\n"}) == 1.0
    assert await score("done", {}, expect={}) == 1.0


async def test_anything_less_is_worth_nothing() -> None:
    assert await score("Done", {"data/a": b"k=w\n"}) == 0.0
    assert await score(None, {"data/a": b"k=w\n"}) == 0.0
    assert await score("done", {"data/a": b"k=v\n"}) == 0.0
    assert await score("done", {"data/a": b"\xff"}) == 0.0
    assert await score("done", {}) == 0.0


async def test_a_file_that_grew_past_all_bounds_is_wrong() -> None:
    box = FakeSandbox()
    box.files["data/a"] = b"k=w\n"
    reward = await ShellFiles(max_file_bytes=2).reward(box, row(), submitted("done"))
    assert (reward.value, reward.parts) == (0.0, {"answer": 1.0, "files": 0.0})


async def test_a_lost_sandbox_is_no_verdict() -> None:
    async def fault(_operation: str) -> None:
        raise SandboxError("gone")

    with pytest.raises(SandboxError):
        await ShellFiles().reward(FakeSandbox(fault=fault), row(), submitted("done"))


async def test_the_result_is_carried_into_a_fresh_sandbox() -> None:
    task, old, new = ShellFiles(), FakeSandbox(), FakeSandbox()
    old.files["data/a"] = b"k=w\n"
    exported = await task.export(old, row())
    await task.setup(new, row())
    await task.load(new, row(), exported)
    assert (await task.reward(new, row(), submitted("done"))).value == 1.0


async def test_a_deleted_file_is_deleted_in_the_fresh_sandbox_too() -> None:
    task, old, new = ShellFiles(), FakeSandbox(), FakeSandbox()
    exported = await task.export(old, row())
    await task.setup(new, row())
    await task.load(new, row(), exported)
    assert new.files == {}


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"answer": 3}, "Expected `str`, got `int`"),
        ({"wanted": ""}, "unknown field `wanted`"),
        ({"files": {"/etc/passwd": ""}}, "leaves the sandbox's working directory"),
        ({"expect": {"../a": ""}}, "leaves the sandbox's working directory"),
    ],
)
async def test_a_malformed_row_is_refused(metadata: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        await ShellFiles().setup(FakeSandbox(), row(**metadata))


def test_it_is_a_task_that_exports() -> None:
    assert isinstance(ShellFiles(), Task)
    assert isinstance(ShellFiles(), ExportingTask)
