"""`bash`: one shell command in the sandbox.

Each call is a shell of its own: files persist from call to call, `cd` and variables do not. What
the model reads is what a person at a terminal would: standard output, then standard error, cut in
the middle when it is long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rljob.sandbox import ExecResult, Sandbox
from rljob.task_config import ToolResult


class Bash:
    """Runs a command.

    Args:
        timeout_seconds: After so long the command and all its children are killed; the model reads that it timed out.
        max_output_chars: Longer output is cut in the middle, where it says how much is missing.
        show_exit_code: Also say the exit code where it is not 0.
    """

    name = "bash"
    description = "Run a shell command. Files persist between calls; the working directory and variables do not."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "The command line."}},
        "required": ["command"],
        "additionalProperties": False,
    }

    def __init__(
        self,
        timeout_seconds: float = 60.0,
        max_output_chars: int = 16_000,
        show_exit_code: bool = False,
    ) -> None:
        if timeout_seconds <= 0 or max_output_chars < 1:
            raise ValueError("timeout_seconds and max_output_chars must be positive")
        self._timeout_seconds, self._max_output_chars, self._show_exit_code = (
            timeout_seconds,
            max_output_chars,
            show_exit_code,
        )

    async def call(self, box: Sandbox, arguments: Mapping[str, Any]) -> ToolResult:
        """See `rljob.task_config.Tool.call`."""
        # 4 bytes a character is the most UTF-8 needs; the sandbox drops the rest before it crosses the wire
        result = await box.exec(
            arguments["command"],
            timeout=self._timeout_seconds,
            max_output_bytes=4 * self._max_output_chars,
        )
        return ToolResult(text=self._observation(result), timed_out=result.timed_out)

    def _observation(self, result: ExecResult) -> str:
        text = result.stdout
        if result.stderr:
            text += ("" if not text or text.endswith("\n") else "\n") + result.stderr
        text = clip(text, self._max_output_chars)
        if result.timed_out:
            return f"{text}error: timed out after {self._timeout_seconds:g} s\n"
        if result.truncated:
            text += "[output truncated]\n"
        if self._show_exit_code and result.exit_code:
            text += f"[exit code {result.exit_code}]\n"
        return text


def clip(text: str, max_chars: int) -> str:
    """Keep the head and the tail of a long text."""
    if len(text) <= max_chars:
        return text
    head, tail = (max_chars + 1) // 2, max_chars // 2
    return (
        f"{text[:head]}\n[{len(text) - max_chars} characters left out]\n{text[len(text) - tail :]}"
    )
