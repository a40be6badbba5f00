"""The small HTTP client: framing, reuse, deadlines, broken servers."""

import asyncio

import pytest

from rljob.http_pool import IDLE_SECONDS, HttpPool


class Server:
    """Sends the next scripted bytes for each request; `None` hangs up before an answer."""

    def __init__(self):
        self.answers = []
        self.num_connections = 0
        self.heads = []

    async def handle(self, reader, writer):
        self.num_connections += 1
        try:
            while True:
                self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
                answer = self.answers.pop(0)
                if answer is None:
                    break
                writer.write(answer)
                if b"hang up" in answer:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def server():
    server = Server()
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener:
        yield server
        listener.close()


@pytest.fixture
async def pool(server):
    pool = HttpPool(server.url + "/base", {"authorization": "Bearer x"})
    yield pool
    await pool.aclose()


async def get(pool, **options):
    return await pool.request("GET", "/a", timeout_seconds=5, **options)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: b\r\n\r\nhi"


async def test_an_answer_has_status_headers_and_body(pool, server):
    server.answers = [OK]
    reply = await get(pool, headers={"x-b": "c"})
    assert (reply.status, reply.headers["x-a"], reply.body) == (200, "b", b"hi")
    assert server.heads[0].startswith("GET /base/a HTTP/1.1\r\n")
    assert "authorization: Bearer x\r\n" in server.heads[0]
    assert "x-b: c\r\n" in server.heads[0]


async def test_a_connection_is_used_again(pool, server):
    server.answers = [OK] * 5
    for _ in range(5):
        await get(pool)
    assert server.num_connections == 1


async def test_requests_at_once_have_connections_of_their_own(pool, server):
    server.answers = [OK] * 8
    await asyncio.gather(*(get(pool) for _ in range(4)))
    await asyncio.gather(*(get(pool) for _ in range(4)))
    assert server.num_connections == 4


async def test_an_idle_connection_is_not_trusted(server):
    class Clock:
        time = 0.0

        def monotonic(self):
            return self.time

    pool = HttpPool(server.url, clock=Clock())
    server.answers = [OK, OK]
    await get(pool)
    Clock.time = IDLE_SECONDS + 1
    await get(pool)
    await pool.aclose()
    assert server.num_connections == 2


async def test_a_server_that_hung_up_while_idle_is_asked_again(pool, server):
    server.answers = [OK, None, OK]
    await get(pool)
    assert (await get(pool)).body == b"hi"
    assert server.num_connections == 2


async def test_a_server_that_hangs_up_on_a_new_connection_is_an_error(pool, server):
    server.answers = [None]
    with pytest.raises(ConnectionError):
        await get(pool)


async def test_chunks_are_put_together(pool, server):
    server.answers = [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nT: x\r\n\r\n",
        OK,
    ]
    assert (await get(pool)).body == b"abcde"
    assert (await get(pool)).body == b"hi"
    assert server.num_connections == 1


async def test_an_answer_without_a_length_ends_with_the_connection(pool, server):
    server.answers = [b"HTTP/1.0 200 OK\r\n\r\nhang up", OK]
    assert (await get(pool)).body == b"hang up"
    assert (await get(pool)).body == b"hi"
    assert server.num_connections == 2


@pytest.mark.parametrize(
    "broken",
    [
        b"hang up, this is no HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhang up",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nhang up\r\n",
        b"HTTP/1.1 200 hang up",
    ],
)
async def test_a_broken_answer_is_a_connection_error(pool, server, broken):
    server.answers = [broken]
    with pytest.raises(ConnectionError):
        await get(pool)


async def test_a_deadline_closes_the_connection(pool, server):
    server.answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", OK]
    with pytest.raises(TimeoutError):
        await pool.request("GET", "/a", timeout_seconds=0.1)
    assert (await get(pool)).body == b"hi"
    assert server.num_connections == 2


async def test_nobody_listening_is_a_connection_error(free_port):
    with pytest.raises(ConnectionError):
        await HttpPool(f"http://127.0.0.1:{free_port()}").request("GET", "/", timeout_seconds=5)
