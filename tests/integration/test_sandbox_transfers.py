"""Trees and connections in and out of real sandboxes: as root with a uid each, and as a user would."""

import asyncio
import contextlib
import io
import json
import os
import socket
import stat
import struct
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rljob.claimed_sandbox import ClaimedSandbox
from rljob.errors import SandboxError
from rljob.sandbox_archive import download, upload
from rljob.sandbox_client import SandboxClient
from rljob.sandbox_tunnel import tunnel
from tests.harness.local_sandboxes import guests, serving

PYTHON = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
KINDS = ("own-uid", "user-namespace")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the first kind needs root")


@pytest.fixture(params=KINDS)
async def client(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SandboxClient]:
    (tmp_path / "sandboxes").mkdir()
    limits = {"diskMib": 64, "memoryMib": 256, "pids": 96}
    async with serving(tmp_path / "sandboxes", request.param, limits=limits) as client:
        yield client


@pytest.fixture
async def box(client: SandboxClient) -> AsyncIterator[ClaimedSandbox]:
    async with client.claim("p", timeout=30) as box:
        yield box


def facts(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in root.rglob("*"):
        info = path.lstat()
        content = path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes()
        name = str(path.relative_to(root))
        found[name] = (stat.filemode(info.st_mode), info.st_mtime_ns, content)
    return found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "pkg/deep").mkdir(parents=True)
    for n in range(300):
        (tree / f"pkg/deep/{n:03}.bin").write_bytes(os.urandom(n * 50))
    (tree / "tool").write_text("#!/bin/sh\necho ran\n")
    (tree / "tool").chmod(0o755)
    (tree / "pkg/link").symlink_to("../tool")
    os.link(tree / "tool", tree / "pkg/same")
    (tree / "large").write_bytes(os.urandom(20_000_000))
    (tree / "pkg/deep").chmod(0o555)
    return tree


async def test_a_tree_goes_in_and_comes_out_the_same(
    box: ClaimedSandbox, tree: Path, tmp_path: Path
) -> None:
    await upload(box, tree, "repo")
    assert (await box.exec("./tool && ./pkg/link && stat -c %U .", cwd="repo")).exit_code == 0
    await download(box, "/workspace/repo", tmp_path / "out")
    assert facts(tmp_path / "out") == facts(tree)
    await box.exec("chmod -R u+w repo; rm -rf repo")


async def test_archives_with_the_agents_rights_only(box: ClaimedSandbox, tree: Path) -> None:
    for place in ("/usr/evil", "/etc", "/proc/1", "/run/rljob"):
        with pytest.raises(OSError):
            await upload(box, tree, place)
    with pytest.raises(OSError):
        await download(box, "/run/rljob/boot", tree / "out")
    with pytest.raises(FileNotFoundError):
        await download(box, "none", tree / "out")
    assert (await box.exec("true")).exit_code == 0


def tar(name: str, **differs: object) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        info = tarfile.TarInfo(name)
        for key, value in differs.items():
            setattr(info, key, value)
        file.addfile(info)
    return buffer.getvalue()


async def test_what_a_guest_refuses_of_archives_is_named(box: ClaimedSandbox) -> None:
    refused = {
        "leads out of the folder": [
            tar("../evil"),
            tar("/tmp/evil"),
            tar("link", type=tarfile.SYMTYPE, linkname="/etc"),
            tar("hard", type=tarfile.LNKTYPE, linkname="../../etc/passwd"),
        ],
        "neither a file": [tar("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
        "not a tar archive": [b"", b"nonsense" * 1000, tar("file")[:400]],
        "at most": [bytes(32 * 1024 * 1024 + 1)],
    }
    for words, archives in refused.items():
        for archive in archives:
            with pytest.raises(ValueError, match=words):
                await box.call("PUT", "/archive?path=in", archive)
    await box.exec("head -c 20000000 /dev/zero > big")
    with pytest.raises(ValueError, match="ask for it in parts"):
        await box.call("GET", "/archive?path=.", max_body_bytes=1 << 25)
    assert (await box.exec("ls -A in /tmp")).stdout.split() == ["/tmp:", "in:"]
    assert not box.lost


async def test_a_link_of_the_agent_does_not_lead_an_upload_elsewhere(
    box: ClaimedSandbox, tree: Path
) -> None:
    await box.exec("mkdir repo; ln -s /tmp repo/pkg")
    with pytest.raises(ValueError, match="pkg is a link there"):
        await upload(box, tree, "repo")
    assert (await box.exec("ls -A /tmp")).stdout == ""


async def test_an_agent_that_swaps_folders_for_links_meanwhile_leads_nothing_elsewhere(
    box: ClaimedSandbox, tree: Path
) -> None:
    swap = "mv -T repo/pkg away; ln -s /tmp repo/pkg; rm repo/pkg; mv -T away repo/pkg"
    swap = f"mkdir -p repo/pkg; while :; do {swap}; done"
    racing = asyncio.create_task(box.exec(swap, timeout=20))
    for _ in range(12):
        with contextlib.suppress(OSError, ValueError):
            await upload(box, tree / "pkg", "repo/pkg")
            await upload(box, tree, "repo")
    racing.cancel()
    await asyncio.gather(racing, return_exceptions=True)
    assert (await box.exec("ls -A /tmp")).stdout == ""


async def test_a_full_disk_is_named_and_gone_after_the_reset(
    client: SandboxClient, tmp_path: Path
) -> None:
    (tmp_path / "huge").write_bytes(bytes(40_000_000))
    (tmp_path / "many").mkdir()
    for n in range(6):
        (tmp_path / f"many/{n}").write_bytes(bytes(15_000_000))
    async with client.claim("p", timeout=30) as box:
        await upload(box, tmp_path / "huge", "/workspace/huge")
        for local in (tmp_path / "huge", tmp_path / "many"):
            with pytest.raises(OSError, match="No space left"):
                await upload(box, local, "/workspace/again")
        with pytest.raises(OSError, match="No space left"):
            await box.write_file("more", bytes(30_000_000))
        assert (await box.exec("true")).exit_code == 0
    async with client.claim("p", timeout=30) as again:
        assert again.id == box.id
        await upload(again, tmp_path / "huge", "/workspace/huge")
        assert (await again.exec("stat -c %s huge")).stdout == "40000000\n"


async def test_the_guest_answers_while_a_large_archive_is_at_work(
    box: ClaimedSandbox, tmp_path: Path
) -> None:
    (tmp_path / "many").mkdir()
    for n in range(3000):
        (tmp_path / f"many/{n}").write_bytes(b"x")
    uploading = asyncio.create_task(upload(box, tmp_path / "many", "many"))
    seen: set[str] = set()
    while not uploading.done():
        seen.add((await box.exec("ls many 2>/dev/null | wc -l")).stdout.strip())
    await uploading
    assert (await box.exec("ls many | wc -l")).stdout.strip() == "3000"
    assert seen - {"0", "3000"}, "nothing else was answered while it was at work"


# ── tunnels ──


class Server:
    """An HTTP server outside, of which a sandbox without a network must see this and nothing else."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head.split(" ")[1])
            length = next(
                (
                    int(line[15:])
                    for line in head.lower().split("\r\n")
                    if line[:15] == "content-length:"
                ),
                0,
            )
            body = await reader.readexactly(length)
            size = (
                int(head.split(" ")[1].rpartition("=")[2] or 0) if "=" in head.split(" ")[1] else 0
            )
            out = body + b"x" * size
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(out)
            )
            writer.write(out)
            await writer.drain()
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    server = await asyncio.start_server(found.answer, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    async with server:
        yield found


async def python(box: ClaimedSandbox, code: str, *arguments: str, timeout: float = 60) -> str:
    result = await box.exec([PYTHON, "-c", code, *arguments], timeout=timeout)
    assert result.exit_code == 0, result.stderr
    return result.stdout


FETCH = """
import sys, urllib.request
for path, body in [("/a", None), ("/b", b"sent"), ("/c?size=3000000", None)]:
    with urllib.request.urlopen(sys.argv[1] + path, body, timeout=30) as answer:
        print(answer.status, len(answer.read()))
"""
REACH = """
import socket, sys
for address in [("127.0.0.1", int(sys.argv[1])), ("127.0.0.1", int(sys.argv[2])), ("10.0.0.1", 80)]:
    try:
        socket.create_connection(address, timeout=3).close()
        print("reached", address)
    except OSError:
        pass
"""


async def test_an_agent_without_a_network_reaches_its_gateway_and_nothing_else(
    box: ClaimedSandbox, server: Server
) -> None:
    async with tunnel(box, f"http://127.0.0.1:{server.port}/v1/") as url:
        assert url.endswith("/v1")
        assert await python(box, FETCH, url) == "200 0\n200 4\n200 3000000\n"
        guest = box.url.rpartition(":")[2]
        assert await python(box, REACH, str(server.port), guest) == ""
    assert server.requests == ["/v1/a", "/v1/b", "/v1/c?size=3000000"]
    port = url.split(":")[2].partition("/")[0]
    assert await python(box, REACH, port, port) == ""


PARALLEL = """
import sys, threading, urllib.request
def fetch(n):
    body = bytes([n % 251]) * (n * 3000)
    with urllib.request.urlopen(f"{sys.argv[1]}/{n}", body, timeout=50) as answer:
        if answer.read() == body:
            print("same", flush=True)
threading.stack_size(262144)
threads = [threading.Thread(target=fetch, args=(n,)) for n in range(80)]
[each.start() for each in threads]
[each.join() for each in threads]
"""
SLOW = """
import socket, sys, time, urllib.request
port = int(sys.argv[1])
slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
for sock in slow:
    sock.sendall(b"GET /slow?size=4000000 HTTP/1.1\\r\\n\\r\\n")
time.sleep(0.3)
with urllib.request.urlopen(f"http://127.0.0.1:{port}/fast?size=2000000", timeout=30) as answer:
    print(len(answer.read()))
for sock in slow:
    sock.settimeout(30)
    data = b""
    while more := sock.recv(1 << 20):
        data += more
    print(len(data.partition(b"\\r\\n\\r\\n")[2]))
"""


async def test_many_connections_at_once_and_slow_readers_hold_nobody(
    box: ClaimedSandbox, server: Server
) -> None:
    async with tunnel(box, f"http://127.0.0.1:{server.port}") as url:
        assert await python(box, PARALLEL, url) == "same\n" * 80
        told = await python(box, SLOW, url.rpartition(":")[2])
        assert told.split() == ["2000000", *["4000000"] * 8]


async def test_one_way_may_end_before_the_other(box: ClaimedSandbox) -> None:
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"%d" % len(await reader.read(-1)))
        writer.close()

    server = await asyncio.start_server(count, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code = """
import socket, sys
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=30)
sock.sendall(b"x" * 700000)
sock.shutdown(socket.SHUT_WR)
print(sock.recv(100).decode())
"""
    async with server, tunnel(box, f"http://127.0.0.1:{port}") as url:
        assert await python(box, code, url.rpartition(":")[2]) == "700000\n"


async def test_a_gateway_that_is_away_or_hangs_up_is_a_broken_connection(
    box: ClaimedSandbox, server: Server
) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    broken = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = broken.sockets[0].getsockname()[1]
    fetch = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=20)"
    async with tunnel(box, f"http://127.0.0.1:{port}") as url:
        async with broken:
            result = await box.exec([PYTHON, "-c", fetch, url])
            assert "Connection reset by peer" in result.stderr
        result = await box.exec([PYTHON, "-c", fetch, url])
        assert "Connection reset by peer" in result.stderr
    async with tunnel(box, f"http://127.0.0.1:{server.port}", port=8080) as url:
        assert url == "http://127.0.0.1:8080"
        assert (await python(box, FETCH, url)).startswith("200")


async def test_a_tunnel_ends_with_the_claim_or_a_reset(
    client: SandboxClient, server: Server
) -> None:
    async with client.claim("p", timeout=30) as box:
        ended = tunnel(box, f"http://127.0.0.1:{server.port}", port=8080)
        await ended.__aenter__()
        await box.reset()
        await asyncio.sleep(0.1)
        with pytest.raises(SandboxError, match="ended early"):
            await ended.__aexit__(None, None, None)
        async with tunnel(box, f"http://127.0.0.1:{server.port}", port=8080):
            with pytest.raises(SandboxError, match="port_taken"):
                async with tunnel(box, f"http://127.0.0.1:{server.port}", port=8080):
                    pass
        assert (await box.exec("true")).exit_code == 0
        held = tunnel(box, f"http://127.0.0.1:{server.port}", port=8081)
        await held.__aenter__()
    async with client.claim("p", timeout=30) as again:
        assert again.id == box.id
        assert await python(again, REACH, "8080", "8081") == ""
    with pytest.raises(SandboxError, match="ended early"):
        await held.__aexit__(None, None, None)


async def test_a_client_that_dies_takes_its_port_along(box: ClaimedSandbox, server: Server) -> None:
    held = tunnel(box, f"http://127.0.0.1:{server.port}", port=8080)
    await held.__aenter__()
    assert await python(box, REACH, "8080", "8080") != ""
    (running,) = [t for t in asyncio.all_tasks() if "_Relay.run" in repr(t)]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    for _ in range(100):
        if await python(box, REACH, "8080", "8080") == "":
            break
    else:
        pytest.fail("the port is still there")
    with contextlib.suppress(asyncio.CancelledError, SandboxError):
        await held.__aexit__(None, None, None)


async def test_a_sandbox_that_dies_ends_its_tunnel_and_its_transfers(
    client: SandboxClient, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(bytes(50_000_000))
    async with client.claim("p", timeout=30) as box:
        held = tunnel(box, f"http://127.0.0.1:{server.port}")
        await held.__aenter__()
        uploading = asyncio.create_task(upload(box, tmp_path / "large", "large"))
        await asyncio.sleep(0.05)
        client.manager.pools["p"].kill(box.id)
        with pytest.raises(SandboxError):
            await uploading
        assert box.lost
        async with asyncio.timeout(10):
            while any("_Relay.run" in repr(task) for task in asyncio.all_tasks()):
                await asyncio.sleep(0.02)
        with pytest.raises(SandboxError, match="ended early"):
            await held.__aexit__(None, None, None)


async def test_a_guest_that_is_hung_up_on_keeps_nothing(
    box: ClaimedSandbox, server: Server
) -> None:
    (guest,) = guests()
    descriptors = Path(f"/proc/{guest}/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(5):
        async with tunnel(box, f"http://127.0.0.1:{server.port}") as url:
            await python(box, PARALLEL, url)
    await box.exec("true")
    assert len(list(descriptors.iterdir())) <= before + 2


CALLS = """
import sys, time, urllib.request
for _ in range(12):
    time.sleep(0.2)
    urllib.request.urlopen(sys.argv[1]).read()
"""


async def test_traffic_keeps_a_claim_that_calls_nothing(
    client: SandboxClient, server: Server
) -> None:
    box = await client.acquire("p", idle_seconds=1.0, timeout=30)
    try:
        async with tunnel(box, f"http://127.0.0.1:{server.port}") as url:
            await box.write_file("calls.py", CALLS.encode())
            await box.exec(f"{PYTHON} calls.py {url} >log 2>&1 &")
            await asyncio.sleep(2.0)
            assert len(server.requests) > 5
            assert await box.healthy()
        await asyncio.sleep(1.7)
        assert not await box.healthy()
    finally:
        await box.release()


@pytest.mark.parametrize("address", ["gateway:8080", "ftp://x", "http://", "http://x:port"])
async def test_an_address_that_is_none_is_ValueError(box: ClaimedSandbox, address: str) -> None:
    with pytest.raises(ValueError, match="not an http"):
        async with tunnel(box, address):
            pass


async def test_a_relayed_sandbox_has_no_tunnel(box: ClaimedSandbox) -> None:
    url, box.url = box.url, ""
    with pytest.raises(SandboxError, match="relays no tunnel"):
        async with tunnel(box, "http://127.0.0.1:1"):
            pass
    box.url = url
    assert json.dumps(url)
