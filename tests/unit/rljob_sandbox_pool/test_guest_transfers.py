"""Archives and tunnels of a guest on its own loop, without a sandbox around it."""

import contextlib
import io
import os
import socket
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rljob.sandbox_frames import DATA, END, OPEN, RESET, Mux
from rljob_sandbox_pool.guest import archives, checks, tunnels
from rljob_sandbox_pool.guest.archives import Archives
from rljob_sandbox_pool.guest.files import Files
from rljob_sandbox_pool.guest.loop import Loop
from rljob_sandbox_pool.guest.pack import Packed
from rljob_sandbox_pool.guest.system import User
from rljob_sandbox_pool.guest.tunnels import MAX_TUNNELS, Tunnels
from rljob_sandbox_pool.guest.wire import RefusedError


@pytest.fixture
def loop() -> Loop:
    return Loop()


def run(loop: Loop, until: Callable[[], object]) -> None:
    """The loop, until something is so."""
    deadline = time.monotonic() + 20
    while not until():
        assert time.monotonic() < deadline, "it does not come to that"
        loop.run_once(0.05)


def tar(num: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for n in range(num):
            file.addfile(tarfile.TarInfo(f"d/{n}"))
    return buffer.getvalue()


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# ── archives ──


def test_archives_are_worked_on_one_after_another(loop: Loop, tmp_path: Path) -> None:
    found: list[object] = []
    box = Archives(loop, User(None), str(tmp_path))
    box.unpack("a", tar(200), found.append, found.append)
    box.pack("a", 1 << 24, None, found.append, found.append)
    box.pack("none", 1 << 24, None, found.append, found.append)
    box.unpack("a", b"no archive" * 100, found.append, found.append)
    assert not found
    run(loop, lambda: len(found) == 4)
    assert found[0] == 200
    assert isinstance(found[1], Packed)
    assert isinstance(found[2], FileNotFoundError)
    assert isinstance(found[3], RefusedError)
    with tarfile.open(fileobj=io.BytesIO(found[1].data)) as packed:
        assert len(packed.getnames()) == 201


def test_others_have_their_turn_between(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "SLICE_SECONDS", 0.0)
    found: list[object] = []
    box = Archives(loop, User(None), str(tmp_path))
    box.unpack("a", tar(50), found.append, found.append)
    loop.run_once(0.05)
    assert not found
    run(loop, lambda: found)
    assert found == [50]


def test_a_reset_stops_them_all(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "SLICE_SECONDS", 0.0)
    failed: list[object] = []
    box = Archives(loop, User(None), str(tmp_path))
    descriptors = num_descriptors()
    for _ in range(2):
        box.unpack("a", tar(500), pytest.fail, failed.append)
    while not (tmp_path / "a/d/3").exists():
        loop.run_once(0.01)
    box.cancel()
    num = len(list((tmp_path / "a/d").iterdir()))
    for _ in range(5):
        loop.run_once(0.01)
    assert [error.error for error in failed if isinstance(error, RefusedError)] == ["resetting"] * 2
    assert len(list((tmp_path / "a/d").iterdir())) == num < 500
    assert num_descriptors() <= descriptors


# ── parts of files ──


def test_parts_of_a_file_come_together_at_its_place(tmp_path: Path) -> None:
    files = Files(User(None), str(tmp_path))
    for n in range(3):
        files.write(checks.NewFile("deep/.part", 0o600, b"%d" % n * 10, append=True))
    last = checks.NewFile(
        "deep/.part", 0o750, b"", append=True, final="deep/whole", mtime_ns=5_000_000_001
    )
    files.write(last)
    info = (tmp_path / "deep/whole").stat()
    assert (tmp_path / "deep/whole").read_bytes() == b"0" * 10 + b"1" * 10 + b"2" * 10
    assert (info.st_mode & 0o777, info.st_mtime_ns) == (0o750, 5_000_000_001)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["whole"]
    assert files.read("deep/whole", 15, 10) == b"1" * 10 + b"2" * 5
    assert files.read("deep/whole", 15, 99) == b""


def test_a_part_neither_follows_a_link_nor_waits_for_a_pipe(tmp_path: Path) -> None:
    files = Files(User(None), str(tmp_path))
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to("mine")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            files.write(checks.NewFile(name, 0o600, b"x", append=True))
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_part_that_does_not_fit_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, real, room = Files(User(None), str(tmp_path)), os.write, 14

    def write(fd: int, data: memoryview) -> int:
        nonlocal room
        if not room:
            raise OSError(28, "No space left on device")
        num = real(fd, data[:room])
        room -= num
        return num

    monkeypatch.setattr(os, "write", write)
    files.write(checks.NewFile("part", 0o600, b"0123456789", append=True))
    with pytest.raises(OSError, match="No space left on device: 'part'"):
        files.write(checks.NewFile("part", 0o600, b"0123456789", append=True))
    assert (tmp_path / "part").read_bytes() == b"0123456789"


def test_a_path_that_no_system_has_is_refused() -> None:
    for head in ({"path": "\ud800"}, {"path": "x", "final": "\udfff\ud800"}):
        with pytest.raises(RefusedError, match="no file name"):
            checks.new_files({"files": [{**head, "bytes": 0}]}, memoryview(b""))


# ── tunnels ──


class Client:
    """The other end of a tunnel, and the commands that use it."""

    def __init__(self, loop: Loop, box: Tunnels, port: int = 0) -> None:
        self.loop, self.num_used = loop, 0
        self.tunnel = box.listen(port, self.used)
        self.sock, guest = socket.socketpair(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            guest.setblocking(False)
        self.mux = Mux(opens=False)
        self.events: list[tuple[int, int, bytes]] = []
        self.sock.setblocking(False)
        self.guest, self.line = guest, b""

    def used(self) -> None:
        self.num_used += 1

    def start(self) -> None:
        self.tunnel.start(self.guest, b"")
        self.turn(lambda: self.line.endswith(b"\n"))

    def pump(self) -> None:
        if self.mux.output:
            with contextlib.suppress(BlockingIOError):
                del self.mux.output[: self.sock.send(self.mux.output)]
        with contextlib.suppress(BlockingIOError):
            data = self.sock.recv(1 << 16)
            if not self.line.endswith(b"\n"):
                line, newline, data = data.partition(b"\n")
                self.line += line + newline
            self.events += [(e.kind, e.stream, e.data) for e in self.mux.feed(data)]

    def turn(self, until: Callable[[], object]) -> None:
        def both() -> object:
            self.pump()
            return until()

        run(self.loop, both)

    def data(self, stream: int) -> bytes:
        return b"".join(
            data for kind, number, data in self.events if (kind, number) == (DATA, stream)
        )

    def kinds(self, stream: int) -> list[int]:
        return [kind for kind, number, _ in self.events if number == stream]

    def hear(self, command: socket.socket, num_bytes: int) -> bytes:
        """What a command is sent."""
        heard = bytearray()

        def enough() -> bool:
            with contextlib.suppress(BlockingIOError):
                heard.extend(command.recv(num_bytes - len(heard)))
            return len(heard) == num_bytes

        command.setblocking(False)
        self.turn(enough)
        command.settimeout(5)
        return bytes(heard)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.tunnel.port), timeout=5)


@pytest.fixture
def box(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tunnels]:
    # A pair of Unix sockets stands for the connection: it has no such options.
    for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_USER_TIMEOUT"):
        monkeypatch.setattr(socket, name, socket.SO_KEEPALIVE)
    monkeypatch.setattr(socket, "IPPROTO_TCP", socket.SOL_SOCKET)
    monkeypatch.setattr(socket, "TCP_NODELAY", socket.SO_KEEPALIVE)
    found = Tunnels(loop)
    yield found
    found.close()


@pytest.fixture
def client(loop: Loop, box: Tunnels) -> Iterator[Client]:
    found = Client(loop, box)
    found.start()
    yield found
    found.sock.close()


def test_bytes_go_both_ways_and_ends_one_by_one(client: Client) -> None:
    assert client.line == b'{"port": %d}\n' % client.tunnel.port
    with client.connect() as command:
        command.sendall(b"question")
        client.turn(lambda: client.data(1) == b"question")
        command.shutdown(socket.SHUT_WR)
        client.turn(lambda: END in client.kinds(1))
        client.mux.send(1, b"answer")
        client.mux.end(1)
        assert client.hear(command, 6) == b"answer"
        client.turn(lambda: client.mux.num_streams == 0)
        assert command.recv(100) == b""
    assert client.num_used >= 3


def test_a_command_that_reads_nothing_holds_a_window_and_no_more(client: Client) -> None:
    with client.connect(), client.connect() as other:
        client.turn(lambda: client.mux.num_streams == 2)
        num = 0
        for _ in range(200):
            while room := client.mux.room(1):
                client.mux.send(1, b"x" * room)
                num += room
            client.turn(lambda: not client.mux.output)
        assert client.mux.room(1) == 0
        assert num < 20_000_000
        client.mux.send(2, b"through")
        assert client.hear(other, 7) == b"through"


def test_a_client_that_reads_nothing_makes_commands_wait(client: Client) -> None:
    with client.connect() as command:
        client.turn(lambda: client.mux.num_streams == 1)
        command.setblocking(False)
        num = 0
        for _ in range(400):
            with contextlib.suppress(BlockingIOError):
                num += command.send(b"x" * 65_536)
            client.loop.run_once(0)
        assert num < 30_000_000
        assert len(client.tunnel._mux.output) <= 2 * tunnels.MAX_OUTPUT_BYTES


def test_a_stream_that_breaks_breaks_on_the_other_side(client: Client) -> None:
    with client.connect() as command:
        client.turn(lambda: client.mux.num_streams == 1)
        client.mux.reset(1)
        client.turn(lambda: not client.mux.output)
        run(client.loop, lambda: not client.tunnel._streams)
        with pytest.raises(ConnectionResetError):
            command.recv(1)
    with client.connect() as command:
        client.turn(lambda: client.mux.num_streams == 1)
        command.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, tunnels._BREAK)
    client.turn(lambda: RESET in client.kinds(2))


def test_more_connections_than_streams_wait_for_their_turn(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnels, "MAX_STREAMS", 3)
    commands = [client.connect() for _ in range(6)]
    client.turn(lambda: client.mux.num_streams >= 3)
    for _ in range(5):
        client.loop.run_once(0.01)
        client.pump()
    assert [kind for kind, _, _ in client.events].count(OPEN) == 3 + 1 - 1
    commands[0].close()
    client.turn(lambda: END in client.kinds(1))
    client.mux.end(1)
    client.turn(lambda: client.kinds(4) == [OPEN])
    for command in commands:
        command.close()


def test_nonsense_or_the_end_of_the_connection_closes_everything(loop: Loop, box: Tunnels) -> None:
    descriptors = num_descriptors()
    for nonsense in (b"", b"\xff" * 100):
        client = Client(loop, box)
        client.start()
        command = client.connect()
        client.turn(lambda client=client: client.mux.num_streams == 1)
        if nonsense:
            client.sock.send(nonsense)
        else:
            client.sock.close()
        run(loop, lambda: not box._open)
        with contextlib.suppress(ConnectionResetError):
            assert command.recv(10) == b""
        with pytest.raises(ConnectionRefusedError):
            client.connect()
        command.close()
        client.sock.close()
    assert num_descriptors() <= descriptors


def test_a_tunnel_whose_connection_never_comes_is_closed(
    loop: Loop, box: Tunnels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnels, "START_SECONDS", 0.05)
    tunnel = box.listen(0, lambda: None)
    run(loop, lambda: not box._open)
    left, right = socket.socketpair()
    tunnel.start(left, b"")
    assert right.recv(10) == b""
    right.close()


def test_their_number_is_bounded_and_a_port_is_one_tunnels(loop: Loop, box: Tunnels) -> None:
    first = box.listen(0, lambda: None)
    with pytest.raises(OSError, match="Address already in use"):
        box.listen(first.port, lambda: None)
    for _ in range(MAX_TUNNELS - 1):
        box.listen(0, lambda: None)
    with pytest.raises(RefusedError, match="at most"):
        box.listen(0, lambda: None)
    box.close()
    box.listen(first.port, lambda: None)
