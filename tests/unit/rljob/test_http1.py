"""The small HTTP client: framing, reuse, deadlines, bounds, servers that break or lie."""

import asyncio
import pickle
import shutil
import ssl
import subprocess
from contextlib import asynccontextmanager

import pytest

from rljob.http1 import IDLE_SECONDS, MAX_HEAD_BYTES, HttpClient, HttpError, HungUpError


class Server:
    """Sends the next scripted bytes for each request; `None` hangs up before an answer, a function writes its own."""

    def __init__(self):
        self.answers = []
        self.num_connections = 0
        self.heads = []
        self.bodies = []

    async def handle(self, reader, writer):
        self.num_connections += 1
        try:
            while await self.answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, reader, writer):
        """Whether the connection goes on."""
        self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        length = int(self.heads[-1].partition("content-length: ")[2].split("\r\n")[0])
        self.bodies.append(await reader.readexactly(length))
        answer = self.answers.pop(0)
        if answer is None:
            return False
        if callable(answer):
            await answer(reader, writer)
            return False
        writer.write(answer)
        return b"hang up" not in answer


@asynccontextmanager
async def serving(scheme="http", **options):
    """A server that is scripted; its connections end with it."""
    server, tasks = Server(), []

    def connected(reader, writer):
        tasks.append(asyncio.create_task(server.handle(reader, writer)))

    listener = await asyncio.start_server(connected, "127.0.0.1", 0, **options)
    server.url = f"{scheme}://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def server():
    async with serving() as server:
        yield server


@pytest.fixture
async def client(server):
    client = HttpClient(server.url + "/base", {"authorization": "Bearer x"})
    yield client
    await client.aclose()


async def get(client, **options):
    return await client.request("GET", "/a", **{"timeout_seconds": 5, **options})


def sized(body, status=200):
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def chunked(*lines):
    return b"\r\n".join([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n", *lines, b""])


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: b\r\n\r\nhi"


# ── what is sent and read ──


async def test_an_answer_has_status_headers_and_body(client, server):
    server.answers = [OK]
    answer = await get(client, headers={"x-b": "c"})
    assert (answer.status, answer.headers["x-a"], answer.body) == (200, "b", b"hi")
    assert server.heads[0].startswith("GET /base/a HTTP/1.1\r\n")
    assert "authorization: Bearer x\r\n" in server.heads[0]
    assert "x-b: c\r\n" in server.heads[0]
    assert f"host: {server.url.removeprefix('http://')}\r\n" in server.heads[0]


async def test_a_body_is_sent_with_its_length(client, server):
    server.answers = [OK]
    await client.request("POST", "/a", b"line\r\nline", timeout_seconds=5)
    assert server.bodies == [b"line\r\nline"]


async def test_a_slash_at_the_end_of_the_address_is_not_doubled(server):
    client = HttpClient(server.url + "/")
    server.answers = [OK]
    await get(client)
    await client.aclose()
    assert server.heads[0].startswith("GET /a HTTP/1.1\r\n")


async def test_chunks_are_put_together(client, server):
    server.answers = [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nT: x\r\n\r\n",
        OK,
    ]
    assert (await get(client)).body == b"abcde"
    assert (await get(client)).body == b"hi"
    assert server.num_connections == 1


async def test_an_answer_without_a_length_ends_with_the_connection(client, server):
    server.answers = [b"HTTP/1.0 200 OK\r\n\r\nhang up", OK]
    assert (await get(client)).body == b"hang up"
    assert (await get(client)).body == b"hi"
    assert server.num_connections == 2


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_that_has_no_body_needs_no_length(client, server, status):
    server.answers = [f"HTTP/1.1 {status} X\r\n\r\n".encode(), OK]
    answer = await get(client)
    assert (answer.status, answer.body) == (status, b"")
    assert (await get(client)).body == b"hi"
    assert server.num_connections == 1


@pytest.mark.parametrize("headers", [{"a": "b\r\nc: d"}, {"a": "b\nc: d"}, {"a\r\n": "b"}])
async def test_a_header_cannot_smuggle_another(headers):
    client = HttpClient("http://127.0.0.1:1")
    with pytest.raises(HttpError, match="line break"):
        await client.request("GET", "/", headers=headers)
    with pytest.raises(HttpError, match="line break") as refused:
        await HttpClient("http://127.0.0.1:1", headers).request("GET", "/")
    assert not refused.value.connected


async def test_a_target_cannot_smuggle_a_header():
    with pytest.raises(HttpError, match="line break"):
        await HttpClient("http://127.0.0.1:1").request("GET", "/ HTTP/1.1\r\na: b\r\nc:")


# ── which connection a call uses, and which call is sent again ──


async def test_a_connection_is_used_again(client, server):
    server.answers = [OK] * 5
    for _ in range(5):
        await get(client)
    assert server.num_connections == 1


async def test_requests_at_once_have_connections_of_their_own(client, server):
    server.answers = [OK] * 8
    await asyncio.gather(*(get(client) for _ in range(4)))
    await asyncio.gather(*(get(client) for _ in range(4)))
    assert server.num_connections == 4


class Clock:
    time = 0.0

    def monotonic(self):
        return self.time


async def test_an_idle_connection_is_not_trusted(server):
    clock = Clock()
    client = HttpClient(server.url, clock=clock)
    server.answers = [OK, OK]
    await get(client)
    clock.time = IDLE_SECONDS + 1
    await get(client)
    await client.aclose()
    assert server.num_connections == 2


async def test_how_long_an_idle_connection_is_trusted_is_the_client_s(server):
    clock = Clock()
    client = HttpClient(server.url, clock=clock, idle_seconds=20)
    server.answers = [OK, OK, OK]
    for clock.time in (0, 19, 40):
        await get(client)
    await client.aclose()
    assert server.num_connections == 2


async def test_an_old_connection_is_closed_while_a_newer_one_serves(server):
    closed = asyncio.Event()

    async def serve_until_closed(reader, writer):
        writer.write(OK)
        while await reader.read(1000):
            writer.write(OK)
        closed.set()

    clock = Clock()
    client = HttpClient(server.url, clock=clock)
    server.answers = [serve_until_closed] * 2
    await asyncio.gather(get(client), get(client))
    for clock.time in (0.7 * IDLE_SECONDS, 1.4 * IDLE_SECONDS):
        assert not closed.is_set()
        await get(client)
    await asyncio.wait_for(closed.wait(), 5)
    await client.aclose()
    assert server.num_connections == 2


async def test_a_server_that_hung_up_while_idle_is_asked_again(client, server):
    server.answers = [OK, None, OK]
    await get(client)
    assert (await get(client)).body == b"hi"
    assert server.num_connections == 2


async def test_a_kept_connection_that_broke_is_replaced_once(client, server):
    server.answers = [OK, None, None, OK]
    assert (await get(client)).body == b"hi"
    with pytest.raises(HungUpError):
        await get(client)
    assert (len(server.heads), server.num_connections) == (3, 2)


async def test_a_call_that_may_not_be_repeated_is_sent_once(client, server):
    server.answers = [OK, None, OK]
    assert (await get(client)).body == b"hi"
    with pytest.raises(HungUpError) as hung_up:
        await client.request("POST", "/", timeout_seconds=5, repeatable=False)
    assert hung_up.value.connected
    assert len(server.heads) == 2


async def test_a_server_that_hangs_up_on_a_new_connection_is_an_error(client, server):
    server.answers = [None]
    with pytest.raises(ConnectionError):
        await get(client)
    assert len(server.heads) == 1


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nconnection: Close", b"HTTP/1.0 200 OK"])
async def test_a_connection_that_the_server_will_close_is_not_kept(client, server, head):
    server.answers = [head + b"\r\ncontent-length: 2\r\n\r\nhi", OK]
    await get(client)
    await get(client)
    assert server.num_connections == 2


async def test_a_call_that_outlives_its_client_leaves_no_connection_behind(client, server):
    closed = asyncio.Event()

    async def late(reader, writer):
        await client.aclose()
        writer.write(OK)
        await reader.read()
        closed.set()

    server.answers = [late]
    assert (await get(client)).body == b"hi"
    await asyncio.wait_for(closed.wait(), 5)


# ── deadlines and bounds ──


async def test_a_deadline_closes_the_connection(client, server):
    server.answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", OK]
    with pytest.raises(TimeoutError):
        await client.request("GET", "/a", timeout_seconds=0.1)
    assert (await get(client)).body == b"hi"
    assert server.num_connections == 2


async def test_a_byte_now_and_then_does_not_extend_the_deadline(client, server):
    async def dripping(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        while not reader.at_eof():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    server.answers = [dripping]
    with pytest.raises(TimeoutError):
        await client.request("GET", "/", timeout_seconds=0.3)


TEN = {
    "sized": sized(b"x" * 10),
    "chunked": chunked(b"6\r\nxxxxxx", b"4\r\nxxxx", b"0\r\n"),
    "to the end": b"HTTP/1.1 200 OK\r\nx-a: hang up\r\n\r\n" + b"x" * 10,
}


@pytest.mark.parametrize("answer", TEN.values(), ids=TEN.keys())
async def test_a_body_is_read_up_to_its_bound_and_no_further(client, server, answer):
    server.answers = [answer] * 2
    assert (await get(client, max_body_bytes=10)).body == b"x" * 10
    with pytest.raises(HttpError, match="limit of 9 bytes"):
        await get(client, max_body_bytes=9)


async def test_a_client_has_a_bound_for_calls_without_one(server):
    client = HttpClient(server.url, max_body_bytes=9)
    server.answers = [TEN["sized"]] * 2
    with pytest.raises(HttpError, match="limit of 9 bytes"):
        await get(client)
    assert len((await get(client, max_body_bytes=10)).body) == 10
    await client.aclose()


async def test_a_head_is_read_up_to_its_bound_and_no_further(client, server):
    start, end = b"HTTP/1.1 204 X\r\nx: ", b"\r\n\r\n"
    most = MAX_HEAD_BYTES - len(start)
    server.answers = [start + b"y" * most + end, start + b"y" * (most + 1) + end]
    assert len((await get(client)).headers["x"]) == most
    with pytest.raises(HttpError, match="head is past the limit"):
        await get(client)


# ── servers that break or lie ──


@pytest.mark.parametrize(
    "broken",
    [
        b"hang up, this is no HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhang up",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nhang up\r\n",
        b"HTTP/1.1 200 hang up",
    ],
)
async def test_a_broken_answer_is_a_connection_error(client, server, broken):
    server.answers = [broken]
    with pytest.raises(ConnectionError):
        await get(client)


LIES = {
    "another protocol": b"SSH-2.0-OpenSSH\r\n\r\n",
    "another version": b"HTTP/2.0 200 OK\r\n\r\n",
    "no status": b"HTTP/1.1 \r\n\r\n",
    "a short status": b"HTTP/1.1 20\r\n\r\n",
    "a long status": b"HTTP/1.1 2000 OK\r\n\r\n",
    "a header without a colon": b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n",
    "a negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
    "a length with a sign": b"HTTP/1.1 200 OK\r\ncontent-length: +5\r\n\r\n",
    "a unicode length": "HTTP/1.1 200 OK\r\ncontent-length: ٣\r\n\r\n".encode(),
    "a latin-1 length": b"HTTP/1.1 200 OK\r\ncontent-length: \xb2\r\n\r\n",
    "a great length": b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999\r\n\r\n",
    "a length of many digits": b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 9000 + b"\r\n\r\n",
    "two framings": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nhi",
    "an unknown framing": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nhi",
    "a negative chunk": chunked(b"-5\r\nhello", b"0\r\n"),
    "a chunk of another notation": chunked(b"0x5\r\nhello", b"0\r\n"),
    "a great chunk": chunked(b"fffffffffffffff\r\nhello"),
    "a chunk longer than it says": chunked(b"2\r\nhello", b"0\r\n"),
    "an endless chunk line": chunked(b"2;" + b"x" * 2 * MAX_HEAD_BYTES),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_a_lie_is_an_HttpError_and_its_connection_is_not_kept(client, server, lie):
    server.answers = [lie, OK]
    with pytest.raises(HttpError) as refused:
        await get(client)
    assert refused.value.connected
    assert not isinstance(refused.value, HungUpError)
    assert (await get(client)).body == b"hi"
    assert server.num_connections == 2


# ── addresses ──


async def test_nobody_listening_is_a_connection_error(free_port):
    with pytest.raises(ConnectionError):
        await HttpClient(f"http://127.0.0.1:{free_port()}").request("GET", "/", timeout_seconds=5)


async def test_nothing_listens_is_told_apart(free_port):
    client = HttpClient(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(HttpError, match="cannot connect") as refused:
        await client.request("GET", "/")
    assert not refused.value.connected


async def test_a_host_that_cannot_be_a_name_cannot_be_reached():
    with pytest.raises(HttpError, match="cannot connect") as refused:
        await HttpClient(f"http://{'x' * 100}").request("GET", "/")
    assert not refused.value.connected


@pytest.mark.parametrize(
    "url",
    ["ftp://h", "nonsense", "http://", "https://", "http://h:x", "http://h:99999", "http://["],
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(HttpError) as refused:
        HttpClient(url)
    assert not refused.value.connected


def test_an_error_survives_pickling():
    error = pickle.loads(pickle.dumps(HttpError("why", connected=False)))
    assert (type(error), str(error), error.connected) == (HttpError, "why", False)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A file with the key and the certificate of 127.0.0.1, signed by itself."""
    if not shutil.which("openssl"):
        pytest.skip("no openssl to make a certificate with")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    openssl = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=x -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [*openssl.split(), "-keyout", path, "-out", path],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return path


@pytest.fixture
async def tls_server(certificate):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    async with serving("https", ssl=context) as server:
        yield server


async def test_tls_is_spoken_with_a_server_whose_certificate_is_trusted(
    tls_server, certificate, monkeypatch
):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    client = HttpClient(tls_server.url)
    tls_server.answers = [OK, OK]
    assert (await get(client)).body == b"hi"
    assert (await get(client)).body == b"hi"
    await client.aclose()
    assert tls_server.num_connections == 1


async def test_a_certificate_that_nobody_vouches_for_is_refused(tls_server):
    with pytest.raises(HttpError, match="certificate verify failed") as refused:
        await get(HttpClient(tls_server.url))
    assert not refused.value.connected


# ── answers that come in pieces ──


async def test_pieces_of_a_stream_are_read_as_they_are_sent(client, server):
    sent_more = asyncio.Event()

    async def slowly(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n3\r\nabc\r\n")
        await sent_more.wait()
        writer.write(b"2\r\nde\r\n0\r\n\r\n")
        await writer.drain()

    server.answers = [slowly]
    async with client.stream("POST", "/a", b"body", timeout_seconds=5) as streamed:
        assert (streamed.status, streamed.headers["x-a"]) == (200, "b")
        assert await anext(streamed.pieces) == b"abc"
        sent_more.set()
        assert [piece async for piece in streamed.pieces] == [b"de"]
    assert server.bodies == [b"body"]


async def test_who_leaves_a_stream_hangs_up(client, server):
    hung_up = asyncio.Event()

    async def endless(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await reader.read()
        hung_up.set()

    server.answers = [endless]
    async with client.stream("GET", "/a", timeout_seconds=5) as streamed:
        await anext(streamed.pieces)
    async with asyncio.timeout(5):
        await hung_up.wait()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhang", "hung up"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhang", "hung up"),
        (chunked(b"6\r\nxxxxxx", b"6\r\nxxxxxx", b"0\r\n"), "past the limit of 10 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\nhang up and more", "past the limit of 10 bytes"),
        (chunked(b"-5\r\nhello"), "malformed chunk"),
    ],
)
async def test_a_stream_that_breaks_or_lies_is_named(client, server, answer, reason):
    async def once(reader, writer):
        writer.write(answer)
        await writer.drain()

    server.answers = [once]
    with pytest.raises(HttpError, match=reason):
        async with client.stream("GET", "/a", timeout_seconds=5, max_body_bytes=10) as streamed:
            [piece async for piece in streamed.pieces]


async def test_a_stream_that_never_begins_ends_at_its_deadline(client, server):
    async def silent(reader, writer):
        await reader.read()

    server.answers = [silent]
    with pytest.raises(TimeoutError):
        async with client.stream("GET", "/a", timeout_seconds=0.1):
            pass
