"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

_AGAIN_SECONDS = 0.5


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended; what they raised stays in them.

    A library may lose a cancellation that arrives together with a result (`asyncio.wait_for` of Python 3.11 does), and
    the task would go on for ever. So it is cancelled again until it has ended.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_SECONDS)
