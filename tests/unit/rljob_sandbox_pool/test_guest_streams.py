"""What comes in pieces: streamed answers, pipes, kept output, connections that are handed over."""

import os
import socket
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_sandbox_pool.guest import server as server_module
from rljob_sandbox_pool.guest.loop import Loop
from rljob_sandbox_pool.guest.pipes import Inlet, Outlet, Output
from rljob_sandbox_pool.guest.server import Server
from rljob_sandbox_pool.guest.shell import whole_characters
from rljob_sandbox_pool.guest.stream import MAX_BUFFERED_BYTES, Stream
from rljob_sandbox_pool.guest.wire import Request, Response

ASK = b"POST /exec HTTP/1.1\r\n\r\n"
Reply = Callable[[Response], None]


class Peer:
    """A server on a loop of this test, and one client."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.requests: list[tuple[Request, Reply]] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.server = Server(
            self.loop, listener, lambda *request: self.requests.append(request), 1000
        )
        self.client = socket.create_connection(listener.getsockname())
        self.client.setblocking(False)
        self._listener = listener

    def turn(self, times: int = 5) -> None:
        for _ in range(times):
            self.loop.run_once(0.01)

    def ask(self, data: bytes = ASK) -> Reply:
        self.client.send(data)
        self.turn()
        return self.requests[-1][1]

    def heard(self) -> bytes:
        data = b""
        while True:
            self.turn(2)
            try:
                more = self.client.recv(1 << 20)
            except BlockingIOError:
                return data
            if not more:
                return data + b"<end>"
            data += more

    def close(self) -> None:
        self.client.close()
        for connection in list(self.server.connections):
            connection.close()
        self._listener.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def streamed(reply: Reply) -> Stream:
    stream = Stream()
    reply(Response(200, b"", "text/plain", stream=stream))
    return stream


def test_a_streamed_answer_is_chunks_as_they_come_and_the_connection_is_kept(peer: Peer) -> None:
    stream = streamed(peer.ask())
    head = peer.heard()
    assert b"transfer-encoding: chunked" in head
    assert b"content-length" not in head
    stream.push(b"one")
    assert peer.heard() == b"3\r\none\r\n"
    stream.push(b"two")
    stream.push(b"three")
    stream.end()
    assert peer.heard() == b"8\r\ntwothree\r\n0\r\n\r\n"
    peer.ask()(Response(200, b"next"))
    assert peer.heard().endswith(b"next")


def test_a_request_sent_ahead_waits_for_the_streams_end(peer: Peer) -> None:
    stream = streamed(peer.ask(ASK + ASK))
    assert len(peer.requests) == 1
    stream.end()
    peer.turn()
    assert len(peer.requests) == 2


def test_a_stream_that_breaks_is_not_ended_but_cut(peer: Peer) -> None:
    stream = streamed(peer.ask())
    peer.heard()
    stream.push(b"x")
    stream.end(broken=True)
    assert peer.heard() == b"1\r\nx\r\n<end>"


def test_who_hangs_up_is_noticed_while_nothing_comes(peer: Peer) -> None:
    stream = streamed(peer.ask())
    gone = []
    stream.on_gone = lambda: gone.append(True)
    peer.turn()
    peer.client.close()
    peer.turn()
    assert gone == [True]
    stream.push(b"nobody reads this")
    assert not stream.pending
    assert not peer.server.connections


def test_an_answer_to_who_has_gone_is_a_stream_that_is_gone(peer: Peer) -> None:
    reply = peer.ask()
    peer.client.close()
    peer.turn()
    stream, gone = Stream(), []
    stream.on_gone = lambda: gone.append(True)
    reply(Response(200, b"", stream=stream))
    assert gone == [True]


def test_a_reader_that_takes_nothing_fills_the_stream_and_loses_its_connection(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "REQUEST_SECONDS", 0.05)
    stream = streamed(peer.ask())
    gone: list[bool] = []
    stream.on_gone = lambda: gone.append(True)
    filled = False
    for _ in range(1000):
        if gone:
            break
        filled = filled or stream.full
        if not stream.full:
            stream.push(b"x" * 65_536)
        peer.turn(1)
    assert (filled, gone) == (True, [True])
    assert not peer.server.connections


def test_more_requests_than_may_wait_end_a_stream(peer: Peer) -> None:
    stream = streamed(peer.ask())
    gone = []
    stream.on_gone = lambda: gone.append(True)
    peer.client.send(ASK * 50)
    peer.turn()
    assert gone == [True]


def test_a_connection_is_handed_over_with_what_came_after_the_request(peer: Peer) -> None:
    taken: list[tuple[socket.socket, bytes]] = []
    reply = peer.ask(ASK + b"\x00\x01")
    reply(Response(101, b"", upgrade=lambda sock, rest: taken.append((sock, rest))))
    ((sock, rest),) = taken
    assert rest == b"\x00\x01"
    assert peer.heard().startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
    assert not peer.server.connections
    sock.close()


def test_what_a_stream_holds_is_bounded_by_who_asks() -> None:
    stream, room = Stream(), []
    stream.on_room = lambda: room.append(True)
    stream.push(b"x" * (MAX_BUFFERED_BYTES - 1))
    assert (stream.full, stream.take()[:1], room) == (False, b"x", [])
    stream.push(b"x" * MAX_BUFFERED_BYTES)
    assert stream.full
    stream.take()
    assert (stream.full, room) == (False, [True])


def test_an_inlet_sends_as_fast_as_it_is_taken_and_then_closes() -> None:
    loop, (reader, writer) = Loop(), os.pipe()
    inlet, data = Inlet(loop, writer), os.urandom(300_000)
    inlet.send(data[:200_000])
    inlet.send(data[200_000:])
    inlet.end()
    assert inlet.waiting_bytes > 0
    heard = b""
    while more := os.read(reader, 65_536):
        heard += more
        loop.run_once(0)
    os.close(reader)
    assert heard == data


def test_an_inlet_whose_reader_has_gone_is_closed_and_takes_no_more() -> None:
    loop, (reader, writer) = Loop(), os.pipe()
    inlet = Inlet(loop, writer)
    os.close(reader)
    inlet.send(b"x")
    inlet.send(b"y")
    inlet.end()
    inlet.close()
    assert inlet.waiting_bytes == 0


def test_an_outlet_hands_on_pauses_and_ends() -> None:
    loop, (reader, writer) = Loop(), os.pipe()
    heard, ends = [], []
    outlet = Outlet(loop, reader, heard.append, lambda: ends.append(True))
    os.write(writer, b"one")
    loop.run_once(0)
    outlet.pause()
    os.write(writer, b"two")
    loop.run_once(0)
    assert heard == [b"one"]
    outlet.resume()
    os.close(writer)
    loop.run_once(0)
    outlet.drain()
    assert (heard, ends) == ([b"one", b"two"], [True])


@given(st.lists(st.binary(max_size=20), max_size=10), st.integers(0, 60), st.booleans())
def test_output_keeps_its_beginning_however_it_is_taken(
    pieces: list[bytes], limit: int, taken: bool
) -> None:
    output, kept = Output(limit), b""
    for piece in pieces:
        output.add(piece)
        kept += output.take() if taken else b""
    kept += output.take()
    whole = b"".join(pieces)
    assert kept == whole[:limit]
    assert output.truncated == (len(whole) > limit)


@given(st.text(), st.integers(0, 4))
def test_text_is_cut_between_characters(text: str, cut: int) -> None:
    data = text.encode("utf-8", "replace")
    data = data[: max(0, len(data) - cut)]
    whole = whole_characters(data)
    assert data[:whole].decode() == data.decode("utf-8", "ignore")
    assert len(data) - whole < 4


@given(st.binary(max_size=12))
def test_garbage_is_held_back_by_three_bytes_at_most(data: bytes) -> None:
    assert len(data) - 3 <= whole_characters(data) <= len(data)
