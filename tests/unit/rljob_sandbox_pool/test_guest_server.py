"""The guest's connections: dawdlers are hung up on, floods are refused, and large bodies need a claim."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rljob_sandbox_pool.guest import server as server_module
from rljob_sandbox_pool.guest.loop import Loop
from rljob_sandbox_pool.guest.server import Server
from rljob_sandbox_pool.guest.wire import RefusedError, Request, Response

Connect = Callable[[], socket.socket]


def refuse_large(method: str, target: str, headers: object, length: int) -> None:
    if length > 1000:
        raise RefusedError(401, "wrong_claim", "who are you")


def answer(request: Request, reply: Callable[[Response], None]) -> None:
    if request.path != "/never":
        reply(Response(200, request.body))


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Connections to a server whose deadlines are short."""
    for name, value in {"IDLE_SECONDS": 1.5, "REQUEST_SECONDS": 0.3, "MAX_CONNECTIONS": 4}.items():
        monkeypatch.setattr(server_module, name, value)
    loop, listener = Loop(), socket.create_server(("127.0.0.1", 0))
    server = Server(loop, listener, answer, 10_000, refuse_large)
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            loop.run_once(0.02)
        for connection in list(server.connections):
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    opened: list[socket.socket] = []

    def connect() -> socket.socket:
        opened.append(socket.create_connection(listener.getsockname(), timeout=10))
        return opened[-1]

    yield connect
    over.set()
    thread.join()
    listener.close()
    loop._selector.close()
    for sock in opened:
        sock.close()


def is_hung_up(sock: socket.socket) -> bool:
    """Whether the next thing that comes is the end."""
    try:
        return sock.recv(1000) == b""
    except ConnectionResetError:
        return True


def drip(sock: socket.socket, num_bytes: int) -> None:
    for _ in range(num_bytes):
        sock.sendall(b"x")
        time.sleep(0.02)


def test_who_says_nothing_is_hung_up_on(connect: Connect) -> None:
    assert is_hung_up(connect())


def test_a_request_that_drips_in_is_not_waited_for_longer(connect: Connect) -> None:
    sock = connect()
    with pytest.raises(OSError):
        drip(sock, 500)


def test_a_body_that_drips_in_is_not_waited_for_longer(connect: Connect) -> None:
    sock = connect()
    sock.sendall(b"PUT /x HTTP/1.1\r\ncontent-length: 900\r\n\r\n")
    with pytest.raises(OSError):
        drip(sock, 500)


def test_who_asks_again_in_time_stays(connect: Connect) -> None:
    sock = connect()
    for _ in range(5):
        sock.sendall(b"GET /x HTTP/1.1\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        time.sleep(0.4)


def asks(sock: socket.socket, path: bytes = b"/x") -> None:
    sock.sendall(b"GET " + path + b" HTTP/1.1\r\n\r\n")


def test_one_connection_too_many_takes_the_place_of_who_said_nothing_for_longest(
    connect: Connect,
) -> None:
    silent, *others = [connect() for _ in range(4)]
    for sock in others:
        asks(sock)
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")
    newest = connect()
    asks(newest)
    assert newest.recv(1000).startswith(b"HTTP/1.1 200")
    assert is_hung_up(silent)
    for sock in others:
        asks(sock)
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")


def test_who_waits_for_an_answer_keeps_the_place(connect: Connect) -> None:
    socks = [connect() for _ in range(4)]
    for sock in socks:
        asks(sock, b"/never")
    time.sleep(0.1)
    assert is_hung_up(connect())
    for sock in socks:
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)


def test_a_large_body_is_refused_by_its_head(connect: Connect) -> None:
    sock = connect()
    sock.sendall(b"PUT /x HTTP/1.1\r\ncontent-length: 2000\r\n\r\n")
    assert sock.recv(1000).startswith(b"HTTP/1.1 401")
    assert is_hung_up(sock)
    sock = connect()
    sock.sendall(b"PUT /x HTTP/1.1\r\ncontent-length: 900\r\n\r\n" + b"x" * 900)
    assert sock.recv(2000).startswith(b"HTTP/1.1 200")
