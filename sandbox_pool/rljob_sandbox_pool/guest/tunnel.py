"""Many streams over one connection, without I/O: bytes in, events out; calls in, bytes out. Both ends use it.

    frame = stream (4 bytes) · kind (1) · number (4) · with DATA so many bytes

    OPEN    a new stream; only one of the two ends opens     END    no more DATA from here; the other way goes on
    DATA    bytes                                            RESET  the stream is no more
    WINDOW  so many bytes more may be sent

A stream starts with a window each way; who sends past it breaks the protocol. So each end holds at most a window of
each stream for a reader that is slow, and no stream waits for another. All is bounded, and nothing is believed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

OPEN, DATA, END, RESET, WINDOW = range(1, 6)
MAX_STREAMS = 64
MAX_DATA_BYTES = 32_768
"""Of one frame."""
WINDOW_BYTES = 262_144
_HEAD = struct.Struct(">IBI")
_LAST_STREAM = 0xFFFFFFFF


class ProtocolError(Exception):
    """The other end does not keep to the protocol."""


class Event(NamedTuple):
    """What the other end did: a frame, in order."""

    kind: int
    stream: int
    data: bytes = b""


@dataclass(slots=True)
class _Stream:
    credit: int = WINDOW_BYTES
    """What may still be sent."""
    window: int = WINDOW_BYTES
    """What the other end may still send."""
    taken: int = 0
    """Read since the other end was last told."""
    has_ended: bool = False
    other_has_ended: bool = False


class Mux:
    """One end of a tunnel.

    Args:
        opens: This end opens the streams.

    Attributes:
        output: Bytes for the other end; whoever sends them removes them.
    """

    def __init__(self, *, opens: bool) -> None:
        self.output = bytearray()
        self._opens = opens
        self._streams: dict[int, _Stream] = {}
        self._latest = 0
        self._input = bytearray()

    @property
    def num_streams(self) -> int:
        """Those that have not ended both ways."""
        return len(self._streams)

    def open(self) -> int:
        """A new stream's number. Raises ProtocolError where there are `MAX_STREAMS`."""
        if not self._opens or len(self._streams) >= MAX_STREAMS or self._latest == _LAST_STREAM:
            raise ProtocolError("no stream can be opened")
        self._latest += 1
        self._streams[self._latest] = _Stream()
        self._frame(OPEN, self._latest)
        return self._latest

    def room(self, stream: int) -> int:
        """How much `send` takes of this stream now."""
        known = self._streams.get(stream)
        return 0 if known is None or known.has_ended else min(known.credit, MAX_DATA_BYTES)

    def send(self, stream: int, data: bytes) -> None:
        """At most `room` bytes."""
        if not data or len(data) > self.room(stream):
            raise ProtocolError("more than there is room for")
        self._streams[stream].credit -= len(data)
        self._frame(DATA, stream, len(data))
        self.output += data

    def end(self, stream: int) -> None:
        """Nothing more is sent; what the other end sends still comes."""
        known = self._streams.get(stream)
        if known is not None and not known.has_ended:
            known.has_ended = True
            self._frame(END, stream)
            self._forget_ended(stream, known)

    def reset(self, stream: int) -> None:
        """The stream is no more, whatever is under way."""
        if self._streams.pop(stream, None) is not None:
            self._frame(RESET, stream)

    def taken(self, stream: int, num_bytes: int) -> None:
        """So much of the stream's data has been read here: as much may come again."""
        known = self._streams.get(stream)
        if known is None or known.other_has_ended:
            return
        known.taken += num_bytes
        if known.taken >= WINDOW_BYTES // 2:
            self._frame(WINDOW, stream, known.taken)
            known.window += known.taken
            known.taken = 0

    def feed(self, data: bytes) -> list[Event]:
        """Take bytes of the other end. Raises ProtocolError: the tunnel is over."""
        self._input += data
        events: list[Event] = []
        at = 0
        while len(self._input) - at >= _HEAD.size:
            stream, kind, number = _HEAD.unpack_from(self._input, at)
            size = number if kind == DATA else 0
            if size > MAX_DATA_BYTES or (number and kind not in (DATA, WINDOW)):
                raise ProtocolError("a frame is too long")
            if len(self._input) - at < _HEAD.size + size:
                break
            at += _HEAD.size
            event = Event(kind, stream, bytes(self._input[at : at + size]))
            at += size
            if self._heard(event, number):
                events.append(event)
        del self._input[:at]
        return events

    def _heard(self, event: Event, number: int) -> bool:
        """Whether there is something to do about a frame."""
        if event.kind == OPEN:
            if self._opens or event.stream != self._latest + 1 or len(self._streams) >= MAX_STREAMS:
                raise ProtocolError("a stream that cannot be opened")
            self._latest = event.stream
            self._streams[event.stream] = _Stream()
            return True
        if not 0 < event.stream <= self._latest or event.kind not in (DATA, END, RESET, WINDOW):
            raise ProtocolError("a frame of no stream, or of no kind")
        if (known := self._streams.get(event.stream)) is None:
            # Sent before the other end knew that the stream is no more.
            return False
        if event.kind == RESET:
            del self._streams[event.stream]
        elif event.kind == WINDOW:
            known.credit += number
            if known.credit > WINDOW_BYTES:
                raise ProtocolError("a window larger than it was")
        else:
            self._received(known, event)
        return True

    def _received(self, known: _Stream, event: Event) -> None:
        known.window -= len(event.data)
        if known.other_has_ended or known.window < 0:
            raise ProtocolError("more than was allowed")
        if event.kind == END:
            known.other_has_ended = True
            self._forget_ended(event.stream, known)

    def _forget_ended(self, stream: int, known: _Stream) -> None:
        if known.has_ended and known.other_has_ended:
            del self._streams[stream]

    def _frame(self, kind: int, stream: int, number: int = 0) -> None:
        self.output += _HEAD.pack(stream, kind, number)
