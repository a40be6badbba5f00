"""The frames of a tunnel: nothing is lost, mixed up or held without bound, however bytes arrive; nonsense ends it."""

import struct
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rljob import sandbox_frames
from rljob_sandbox_pool.guest import tunnel
from rljob_sandbox_pool.guest.tunnel import (
    DATA,
    END,
    MAX_DATA_BYTES,
    MAX_STREAMS,
    OPEN,
    RESET,
    WINDOW,
    WINDOW_BYTES,
    Mux,
    ProtocolError,
)


def test_both_ends_use_the_same_code() -> None:
    ends = [Path(str(module.__file__)).read_text() for module in (tunnel, sandbox_frames)]
    assert ends[0] == ends[1]


def frame(stream: int, kind: int, number: int = 0, data: bytes = b"") -> bytes:
    return struct.pack(">IBI", stream, kind, number or len(data)) + data


@dataclass
class End:
    """One end, and what its user knows."""

    mux: Mux | sandbox_frames.Mux
    sent: dict[int, bytearray] = field(default_factory=dict)
    heard: dict[int, bytearray] = field(default_factory=dict)
    unread: dict[int, int] = field(default_factory=dict)
    has_ended: set[int] = field(default_factory=set)
    heard_end: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)

    def add(self, stream: int) -> None:
        self.sent[stream], self.heard[stream] = bytearray(), bytearray()
        self.unread[stream] = 0

    def feed(self, data: bytes) -> None:
        for event in self.mux.feed(data):
            if event.kind == OPEN:
                self.add(event.stream)
            elif event.kind == DATA:
                self.heard[event.stream] += event.data
                self.unread[event.stream] += len(event.data)
            elif event.kind == END:
                self.heard_end.add(event.stream)
            elif event.kind == RESET:
                self.gone.add(event.stream)


class Tunnel(RuleBasedStateMachine):
    """Two ends that send, read, end and reset at will, and a connection that delivers bytes in any pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = End(Mux(opens=True)), End(sandbox_frames.Mux(opens=False))
        self.ends = (self.inside, self.outside)
        self.count = 0

    def deliver(self, number: int, size: int) -> None:
        source, target = self.ends[number], self.ends[1 - number]
        data = bytes(source.mux.output[:size])
        del source.mux.output[:size]
        target.feed(data)

    @rule()
    @precondition(lambda self: self.inside.mux.num_streams < 6)
    def open(self) -> None:
        self.inside.add(self.inside.mux.open())

    @rule(number=st.integers(0, 1), pick=st.integers(0, 99), size=st.integers(1, MAX_DATA_BYTES))
    def send(self, number: int, pick: int, size: int) -> None:
        end = self.ends[number]
        if end.sent:
            stream = sorted(end.sent)[pick % len(end.sent)]
            if size := min(size, end.mux.room(stream)):
                self.count += 1
                data = bytes([self.count % 251]) * size
                end.mux.send(stream, data)
                end.sent[stream] += data

    @rule(number=st.integers(0, 1), size=st.integers(1, 200_000))
    def pass_on(self, number: int, size: int) -> None:
        self.deliver(number, size)

    @rule(number=st.integers(0, 1), pick=st.integers(0, 99), part=st.integers(1, 4))
    def read(self, number: int, pick: int, part: int) -> None:
        end = self.ends[number]
        if end.unread:
            stream = sorted(end.unread)[pick % len(end.unread)]
            size = -(-end.unread[stream] // part)
            end.unread[stream] -= size
            end.mux.taken(stream, size)

    @rule(number=st.integers(0, 1), pick=st.integers(0, 99), breaks=st.booleans())
    def stop(self, number: int, pick: int, breaks: bool) -> None:
        end = self.ends[number]
        if end.sent:
            stream = sorted(end.sent)[pick % len(end.sent)]
            if breaks:
                end.gone.add(stream)
                end.mux.reset(stream)
            else:
                end.has_ended.add(stream)
                end.mux.end(stream)

    @invariant()
    def nothing_is_mixed_up_or_held_without_bound(self) -> None:
        for end, other in (self.ends, self.ends[::-1]):
            for stream, heard in end.heard.items():
                assert other.sent.get(stream, bytearray()).startswith(heard)
                assert end.unread[stream] <= WINDOW_BYTES
                if stream in end.heard_end:
                    assert stream in other.has_ended
                    assert heard == other.sent[stream]

    def teardown(self) -> None:
        for _ in range(3):
            self.deliver(0, 1 << 30)
            self.deliver(1, 1 << 30)
        gone = self.inside.gone | self.outside.gone
        for end, other in (self.ends, self.ends[::-1]):
            for stream, sent in end.sent.items():
                if stream not in gone:
                    assert other.heard[stream] == sent
        alive = {
            stream
            for stream in self.inside.sent
            if stream not in gone
            and not (stream in self.inside.has_ended and stream in self.outside.has_ended)
        }
        assert self.inside.mux.num_streams == self.outside.mux.num_streams == len(alive)


TestTunnel = Tunnel.TestCase
TestTunnel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_slow_stream_holds_no_other() -> None:
    sender, receiver = Mux(opens=True), Mux(opens=False)
    slow, fast = sender.open(), sender.open()
    while room := sender.room(slow):
        sender.send(slow, b"s" * room)
    num_bytes = 0
    for _ in range(50):
        sender.send(fast, b"f" * MAX_DATA_BYTES)
        for event in receiver.feed(bytes(sender.output)):
            if event.stream == fast:
                num_bytes += len(event.data)
                receiver.taken(fast, len(event.data))
        sender.output.clear()
        sender.feed(bytes(receiver.output))
        receiver.output.clear()
    assert num_bytes == 50 * MAX_DATA_BYTES
    assert sender.room(slow) == 0


def test_the_number_of_streams_is_bounded_and_places_come_back() -> None:
    sender = Mux(opens=True)
    streams = [sender.open() for _ in range(MAX_STREAMS)]
    with pytest.raises(ProtocolError):
        sender.open()
    sender.reset(streams[7])
    assert sender.open() == MAX_STREAMS + 1


def opened() -> Mux:
    mux = Mux(opens=False)
    mux.feed(frame(1, OPEN))
    return mux


BROKEN = {
    "no such stream": frame(2, DATA, data=b"x"),
    "stream 0": frame(0, END),
    "opened twice": frame(1, OPEN),
    "opened out of turn": frame(3, OPEN),
    "no such kind": frame(1, 9),
    "too long": frame(1, DATA, MAX_DATA_BYTES + 1),
    "an end with a number": frame(1, END, 5),
    "a window that was never used": frame(1, WINDOW, 1),
    "past the window": frame(1, DATA, data=b"x" * MAX_DATA_BYTES) * 9,
    "data after the end": frame(1, END) + frame(1, DATA, data=b"x"),
    "ended twice": frame(1, END) * 2,
    "too many": b"".join(frame(n, OPEN) for n in range(2, MAX_STREAMS + 2)),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_protocol_ends_the_tunnel(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        opened().feed(data)


def test_only_one_end_opens() -> None:
    with pytest.raises(ProtocolError):
        Mux(opens=True).feed(frame(1, OPEN))
    with pytest.raises(ProtocolError):
        Mux(opens=False).open()


def test_frames_of_a_stream_that_is_no_more_are_nothing() -> None:
    mux = opened()
    mux.reset(1)
    assert mux.feed(frame(1, DATA, data=b"late") + frame(1, WINDOW, 4) + frame(1, END)) == []


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=40), st.tuples(st.integers(0, 3), st.integers(0, 6)))))
def test_any_bytes_are_frames_or_an_end(pieces: list[bytes | tuple[int, int]]) -> None:
    mux = opened()
    held = 0
    try:
        for piece in pieces:
            data = piece if isinstance(piece, bytes) else frame(*piece)
            held += sum(len(event.data) for event in mux.feed(data))
    except ProtocolError:
        return
    assert held <= WINDOW_BYTES * MAX_STREAMS
