"""A body in pieces: made by one, sent by another, and never much of it in memory."""

from __future__ import annotations

from collections.abc import Callable

MAX_BUFFERED_BYTES = 262_144


def _nobody() -> None:
    """Nobody has asked to be called."""


class Stream:
    """`push` … `end` by who makes the body, `take` by who sends it; each calls the other where there is news.

    Attributes:
        ended: No piece comes any more.
        broken: It ended before it was whole.
        on_piece: Set by the sender: there is something to `take`, or the end.
        on_room: Set by the maker: a stream that was full has room again.
        on_gone: Set by the maker: nobody reads any more.
    """

    def __init__(self) -> None:
        self.ended = self.broken = False
        self._is_gone = False
        self.on_piece: Callable[[], None] = _nobody
        self.on_room: Callable[[], None] = _nobody
        self.on_gone: Callable[[], None] = _nobody
        self._waiting = bytearray()

    @property
    def full(self) -> bool:
        """The maker is to stop until there is room."""
        return len(self._waiting) >= MAX_BUFFERED_BYTES

    @property
    def pending(self) -> bool:
        """There is something to send."""
        return bool(self._waiting) or self.ended

    def push(self, piece: bytes) -> None:
        """More of the body; dropped where nobody reads any more."""
        if not self._is_gone:
            self._waiting += piece
            self.on_piece()

    def end(self, *, broken: bool = False) -> None:
        """The body is whole, or will never be."""
        self.ended, self.broken = True, broken
        self.on_piece()

    def take(self) -> bytes:
        """What waits to be sent."""
        was_full, data = self.full, bytes(self._waiting)
        self._waiting.clear()
        if was_full:
            self.on_room()
        return data

    def hang_up(self) -> None:
        """The sender's peer has gone."""
        self._is_gone, self.on_piece = True, _nobody
        self._waiting.clear()
        if not self.ended:
            self.on_gone()
