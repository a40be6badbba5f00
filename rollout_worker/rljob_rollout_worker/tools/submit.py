"""`submit`: hands in the answer and ends the episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rljob.sandbox import Sandbox
from rljob.task_config import ToolResult


class Submit:
    """Ends the episode with an answer."""

    name = "submit"
    description = "Submit the final answer and end the task."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The answer."}},
        "required": ["answer"],
        "additionalProperties": False,
    }

    async def call(self, box: Sandbox, arguments: Mapping[str, Any]) -> ToolResult:
        """See `rljob.task_config.Tool.call`."""
        return ToolResult(text="submitted\n", done=True, answer=arguments["answer"])
