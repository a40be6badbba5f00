"""Why no batch comes: groups that were given up or dropped since the last one, and when to give up oneself.

A job whose every episode fails would otherwise dead-letter one prompt after the other for ever, with the reason in a
worker's log alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rljob.clock import Clock
from rljob.errors import UserError

if TYPE_CHECKING:
    from rljob.ledger import Ledger

_LOOK_SECONDS = 2.0
_FEWEST_DEAD_GROUPS = 4
_WATCHED = ("dead", "dropped", "completed")


class Drought:
    """Watches the ledger's counts while the trainer waits for one batch.

    Args:
        ledger: Where counts and dead letters are.
        groups_per_step: So many groups given up in a row, and no episode completed, ends the job.
        clock: Time between two looks.
    """

    def __init__(self, ledger: Ledger, groups_per_step: int, clock: Clock) -> None:
        self._ledger, self._clock = ledger, clock
        self._limit = max(_FEWEST_DEAD_GROUPS, groups_per_step)
        self._before: dict[str, int] | None = None
        self._looked_at = -_LOOK_SECONDS
        self._text = ""
        self._num_dead = 0
        self._last_reason = ""

    async def look(self) -> str:
        """What to say beside "groups: 3 of 16 ready"; empty where nothing is wrong.

        Raises:
            UserError: groups die one after the other and no episode completes; the line names the last reason.
        """
        now = self._clock.monotonic()
        if now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            self._text = await self._look()
        return self._text

    async def _look(self) -> str:
        counts = (await self._ledger.snapshot()).counts
        seen = {name: counts.get(name, 0) for name in _WATCHED}
        if self._before is None:
            self._before = seen
        dead, dropped, completed = (seen[name] - self._before[name] for name in _WATCHED)
        if dead > self._num_dead and (letters := await self._ledger.dead_letters()):
            self._last_reason = " ".join(letters[-1].reason.split())[:300]
        self._num_dead = dead
        if dead >= self._limit and not completed:
            raise UserError(
                "spec.tasks",
                f"{dead} groups in a row failed all their attempts; the last: {self._last_reason}",
                "see `rljob logs worker-0`",
            )
        parts = [f"; {dead} groups given up, the last: {self._last_reason}"] if dead else []
        parts += [f"; {dropped} groups dropped, their rewards agree"] if dropped else []
        return "".join(parts)
