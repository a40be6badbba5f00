"""What the model reads of a command."""

import pytest

from rljob.sandbox import ExecResult
from rljob.testing.sandbox import FakeSandbox
from rljob_rollout_worker.tools.bash import Bash, clip


async def read(result: ExecResult, **options: object) -> str:
    box = FakeSandbox(shell=lambda _box, _line: result)
    return (await Bash(**options).call(box, {"command": "x"})).text  # type: ignore[arg-type]


def result(**fields: object) -> ExecResult:
    return ExecResult(**{"exit_code": 0, "stdout": "", "stderr": "", **fields})  # type: ignore[arg-type]


async def test_output_is_read_as_it_is() -> None:
    assert await read(result(stdout="a\nb")) == "a\nb"


async def test_errors_follow_the_output_on_a_line_of_their_own() -> None:
    assert await read(result(stdout="a", stderr="b\n", exit_code=1)) == "a\nb\n"
    assert await read(result(stdout="a\n", stderr="b\n")) == "a\nb\n"


async def test_a_timeout_is_said() -> None:
    text = await read(result(stdout="a\n", exit_code=124, timed_out=True), timeout_seconds=5)
    assert text == "a\nerror: timed out after 5 s\n"


async def test_output_that_the_sandbox_cut_is_said() -> None:
    assert await read(result(stdout="a\n", truncated=True)) == "a\n[output truncated]\n"


async def test_the_exit_code_is_said_on_request() -> None:
    assert await read(result(exit_code=3), show_exit_code=True) == "[exit code 3]\n"
    assert await read(result(exit_code=0), show_exit_code=True) == ""


async def test_a_long_output_keeps_head_and_tail() -> None:
    assert await read(result(stdout="a" * 60 + "b" * 60), max_output_chars=10) == (
        "aaaaa\n[110 characters left out]\nbbbbb"
    )
    assert clip("abc", 3) == "abc"
    assert clip("abcde", 1) == "a\n[4 characters left out]\n"


@pytest.mark.parametrize("options", [{"timeout_seconds": 0}, {"max_output_chars": 0}])
def test_useless_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Bash(**options)  # type: ignore[arg-type]
