"""Answers that are kept, so that a request whose answer was lost may be repeated."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from rljob_sandbox_pool.guest.wire import RefusedError, Response

MAX_ANSWERS = 256
MAX_BYTES = 8 * 1024 * 1024


class Memory:
    """Per request id: who waits for the answer, then the answer. Bounded in number and bytes, oldest dropped first."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Callable[[Response], None]]] = {}
        self._answers: OrderedDict[str, Response | None] = OrderedDict()
        self._bytes = 0

    def begin(self, request_id: str, reply: Callable[[Response], None]) -> bool:
        """True: run it, then `finish`. False: it ran or runs, and `reply` gets that answer."""
        if request_id in self._waiting:
            self._waiting[request_id].append(reply)
            return False
        if request_id in self._answers:
            if (kept := self._answers[request_id]) is None:
                raise RefusedError(
                    409, "answer_dropped", "this request was answered; the answer is not kept"
                )
            reply(kept)
            return False
        self._waiting[request_id] = [reply]
        return True

    def finish(self, request_id: str, response: Response) -> None:
        """The answer, to everyone who asked and will ask."""
        for reply in self._waiting.pop(request_id, []):
            reply(response)
        self._answers[request_id] = response
        self._bytes += len(response.body)
        self._shrink()

    def clear(self) -> None:
        """Forget everything; whoever still waits is told that the claim has ended."""
        waiting, self._waiting = self._waiting, {}
        self._answers.clear()
        self._bytes = 0
        gone = RefusedError(409, "not_claimed", "the claim ended while this ran").response()
        for replies in waiting.values():
            for reply in replies:
                reply(gone)

    def _shrink(self) -> None:
        # A dropped answer leaves its id, so that a repeat is refused instead of run a second time.
        for request_id, kept in list(self._answers.items()):
            if self._bytes <= MAX_BYTES:
                break
            if kept is not None:
                self._bytes -= len(kept.body)
                self._answers[request_id] = None
        while len(self._answers) > MAX_ANSWERS:
            _, kept = self._answers.popitem(last=False)
            self._bytes -= len(kept.body) if kept is not None else 0
