"""`rljob sandbox -n …` by way of an API server: what is asked of it, and that nothing else is needed.

rljob ─► API server (this test: Secrets, and the Service's proxy) ─► broker ─► guest
"""

import asyncio
import base64
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlencode

import pytest

from rljob.api.rljob_types import SandboxPool
from rljob.http1 import HttpClient
from rljob_sandbox_pool.aserver import HttpServer, StreamedResponse
from rljob_sandbox_pool.guest.wire import Request, Response
from rljob_sandbox_pool.manager import Manager
from rljob_sandbox_pool.runtimes.bubblewrap import BubblewrapRuntime

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is missing")

PROXY = "/api/v1/namespaces/rljob-system/services/rljob-sandbox-pool:broker/proxy"
Cli = Callable[..., Awaitable[tuple[int, bytes, bytes]]]


class ApiServer:
    """Serves one Secret, and passes on to the broker what is for its Service; takes `authorization` for itself."""

    def __init__(self, broker: str, secret: str) -> None:
        self.broker = HttpClient(broker)
        data = {"token": base64.b64encode(b"the broker's").decode()}
        self._secrets = {f"/api/v1/namespaces/team/secrets/{secret}": {"data": data}}

    async def handle(self, request: Request) -> Response | StreamedResponse:
        if request.headers.get("authorization") != "Bearer mine":
            return self._status(401, "Unauthorized")
        if request.path in self._secrets:
            return Response(200, json.dumps(self._secrets[request.path]).encode())
        if not request.path.startswith(PROXY):
            return self._status(404, f"{request.path} not found")
        target = request.path.removeprefix(PROXY)
        if request.query:
            target += "?" + urlencode(request.query)
        token = {"x-rljob-token": request.headers["x-rljob-token"]}
        stack = AsyncExitStack()
        passed_on = self.broker.stream(
            request.method,
            target,
            request.body,
            headers=token,
            timeout_seconds=60,
            max_body_bytes=1 << 30,
        )
        answer = await stack.enter_async_context(passed_on)
        headers = {key: text for key, text in answer.headers.items() if key != "transfer-encoding"}
        return StreamedResponse(answer.status, headers, answer.pieces, stack.aclose)

    @staticmethod
    def _status(code: int, message: str) -> Response:
        return Response(code, json.dumps({"kind": "Status", "message": message}).encode())


@pytest.fixture
async def cli(tmp_path: Path) -> AsyncIterator[Cli]:
    """Runs a command of somebody with a kubeconfig; exit code, stdout, stderr."""
    pool = SandboxPool.model_validate({"name": "swe", "warm": 1, "max": 1})
    runtimes = {"bubblewrap": BubblewrapRuntime(tmp_path / "work")}
    manager = Manager([pool], runtimes, token="the broker's", pool_key="k")
    api = ApiServer(await manager.start("127.0.0.1", 0), "swe-claims")
    server = HttpServer(api.handle, max_body_bytes=40_000_000)
    url = f"http://127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.listen()
    kubeconfig = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "mine"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig))
    env = {key: value for key, value in os.environ.items() if not key.startswith("RLJOB_")}
    env |= {"KUBECONFIG": f"{tmp_path}/kubeconfig", "RLJOB_SANDBOX_STATE": f"{tmp_path}/state"}

    async def run(*arguments: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rljob.cli.main", "sandbox", *arguments),
            env=env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(60):
            out, err = await process.communicate(stdin)
        assert process.returncode is not None
        return process.returncode, out, err

    yield run
    server.stop()
    await api.broker.aclose()
    await manager.close()


async def test_a_sandbox_of_a_cluster_is_used_like_one_of_this_machine(
    cli: Cli, tmp_path: Path
) -> None:
    code, out, err = await cli("claim", "swe", "-n", "team", "--env", "A=b")
    assert (code, err) == (0, b"")
    name = out.decode().strip()
    script = "echo $A; cat; echo err >&2; exit 7"
    done = await cli("exec", name, "-i", "--", "sh", "-c", script, stdin=b"\0\xff")
    assert done == (7, b"b\n\0\xff", b"err\n")
    code, out, _ = await cli("exec", name, "--", "head", "-c", "9000000", "/dev/zero")
    assert (code, len(out)) == (0, 9_000_000)
    assert (await cli("exec", name, "--timeout", "0.5", "--", "sleep", "100"))[0] == 124
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "large").write_bytes(os.urandom(20_000_000))
    (tree / "run").write_text("#!/bin/sh\necho ran\n")
    (tree / "run").chmod(0o755)
    assert await cli("cp", str(tree), f"{name}:tree") == (0, b"", b"")
    assert await cli("exec", name, "--", "tree/run") == (0, b"ran\n", b"")
    assert await cli("cp", f"{name}:tree", str(tmp_path / "back")) == (0, b"", b"")
    large = (tmp_path / "back" / "sub" / "large").read_bytes()
    assert large == (tree / "sub" / "large").read_bytes()
    assert name.encode() in (await cli("ls", "-n", "team", "--pool", "swe"))[1]
    assert await cli("release", name) == (0, b"", b"")
    pools = (await cli("pools", "-n", "team", "--pool", "swe"))[1].decode().splitlines()
    assert pools[1].split()[:4] == ["swe", "bubblewrap", "1", "0"]


async def test_what_the_api_server_lacks_is_one_line(cli: Cli) -> None:
    for arguments, words in (
        (["claim", "other", "-n", "team"], "there is no Secret team/other-claims; are job, pool"),
        (["pools", "-n", "team", "--job", "j"], "there is no Secret team/j-secrets"),
        (
            ["pools", "-n", "team", "--pool", "swe", "--operator-namespace", "elsewhere"],
            "the API server says: /api/v1/namespaces/elsewhere/services/rljob-sandbox-pool:broker",
        ),
    ):
        code, out, err = await cli(*arguments)
        assert (code, out, err.count(b"\n")) == (2, b"", 1)
        assert words in err.decode()
