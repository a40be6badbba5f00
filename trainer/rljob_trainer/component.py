"""What the processes of this room share: how they start, are told to stop, and end.

Exit codes: 0 done, or SIGTERM; 2 bad input (the last line of stderr says which); 3 fenced by a newer start. Any other
end is a crash, from which the next start resumes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

import structlog

from rljob.errors import FencedError, MachineError, UserError
from rljob.settings import Settings

EXIT_FENCED = 3
log = structlog.get_logger()

Work = Callable[[Settings], Coroutine[Any, Any, None]]


def run_and_exit(name: str, work: Work) -> NoReturn:
    """Run until done, fenced or told to stop, and end the process.

    A thread may be in the middle of a step or of an import; nothing that it could still do is needed.
    """
    code = main(name, work)
    sys.stderr.flush()
    os._exit(code)


def main(name: str, work: Work) -> int:
    """The exit code of `work`."""
    from rljob.telemetry import configure_logging

    configure_logging(name)
    try:
        settings = Settings.from_env()
        settings.make_folders()
        return asyncio.run(_until_signalled(work(settings)))
    except UserError as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201 - the driver shows the last line
        return error.exit_code
    except FencedError as error:
        log.error("fenced", error=str(error))
        return EXIT_FENCED


async def _until_signalled(work: Coroutine[Any, Any, None]) -> int:
    """Every moment is a safe one to stop at. The work may use the first SIGTERM to keep what it can, not a second."""
    job = asyncio.create_task(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, job.cancel)
    try:
        await job
    except asyncio.CancelledError:
        log.info("stopped")
    except BaseExceptionGroup as group:
        raise _first(group) from group
    return 0


def _first(group: BaseExceptionGroup) -> BaseException:
    """The failure that ended a task group; being fenced outranks what followed from it."""
    fenced, rest = group.split(FencedError)
    found = fenced or rest
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found or group


def prepared_rows(artifacts: Path) -> dict[str, Any]:
    """What the prepare component says of model and rows.

    Raises:
        MachineError: nothing was prepared.
    """
    try:
        return json.loads((artifacts / "prepared" / "manifest.json").read_text())
    except OSError as error:
        raise MachineError(
            str(artifacts / "prepared"),
            f"not prepared ({error.strerror})",
            "run the prepare component first",
        ) from None
