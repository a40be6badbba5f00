"""Which broker a command speaks with, and a client of it.

    --url, --token or their variables ─► that address
    -n NAMESPACE, --job or --pool ─────► the cluster of KUBECONFIG: token from a Secret, broker by way of the API server
    neither ───────────────────────────► whoever serves in the state folder

What a command was told explicitly comes before what the environment says.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from rljob.claimed_sandbox import ClaimedSandbox
from rljob.errors import InfraError, MachineError, UserError
from rljob.http1 import HttpClient, HttpError, Transport
from rljob.sandbox_client import TOKEN_ENV, SandboxClient
from rljob_sandbox_pool.cli.arguments import is_token
from rljob_sandbox_pool.cli.state import State, StoredClaim, Where

URL_ENV = "RLJOB_SANDBOX_URL"
SERVICE, PORT = "rljob-sandbox-pool", "broker"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Options:
    """What a command was told about where."""

    state: State
    url: str | None = None
    token: str | None = None
    relay: bool = False
    namespace: str | None = None
    job: str | None = None
    pool: str | None = None
    operator_namespace: str = "rljob-system"

    def where(self) -> Where:
        """See the picture above. Raises UserError."""
        if self.url and self.namespace:
            raise UserError("--url", "an address and a namespace", "give --url or -n, not both")
        if self.namespace:
            return self._in_cluster(self.namespace)
        if self.job or self.pool:
            option = "--job" if self.job else "--pool"
            raise UserError(option, "has no effect without a namespace", "add -n NAMESPACE")
        url = self.url or os.environ.get(URL_ENV, "")
        if url:
            return self._at(url)
        if served := self.state.served():
            return Where(url=served.url, token=served.token)
        raise MachineError(
            "sandbox", "no pools are served here", "start rljob sandbox serve, or give --url or -n"
        )

    def _at(self, url: str) -> Where:
        try:
            HttpClient(url)
        except HttpError as error:
            raise UserError("--url", str(error), "give http://HOST:PORT") from None
        token = os.environ.get(TOKEN_ENV, "") if self.token is None else self.token
        if not is_token(token):
            problem = "there is no token" if not token else "holds what no token does"
            raise UserError("--token", problem, f"give --token or set {TOKEN_ENV}")
        return Where(url=url, token=token, relay=self.relay)

    def _in_cluster(self, namespace: str) -> Where:
        if not (self.job or self.pool):
            raise UserError("-n", "does not say whose sandboxes", "add --job JOB or --pool POOL")
        return Where(
            namespace=namespace,
            secret=f"{self.job}-secrets" if self.job else f"{self.pool}-claims",
            operator_namespace=self.operator_namespace,
        )


@asynccontextmanager
async def connect(where: Where) -> AsyncIterator[SandboxClient]:
    """A client of a broker. Raises MachineError, KubeError."""
    relay: Transport | None = None
    if where.namespace:
        relay = await _service(where)
    elif where.relay:
        relay = HttpClient(where.url, {"x-rljob-token": where.token})
    client = SandboxClient(where.url, where.token, relay=relay)
    try:
        yield client
    finally:
        await client.aclose()


@asynccontextmanager
async def attached(stored: StoredClaim, what: str) -> AsyncIterator[ClaimedSandbox]:
    """The sandbox of a claim that was written down; it stays claimed.

    Raises:
        UserError: what the sandbox refuses, or this machine, about `what`.
    """
    async with connect(stored.where) as client:
        box = client.attach(stored.claim)
        try:
            yield box
        except (OSError, ValueError) as error:
            if isinstance(error, BrokenPipeError):  # who reads our output has seen enough
                raise
            where = str(getattr(error, "filename", None) or what)
            words = str(getattr(error, "strerror", None) or error)
            raise UserError(where, words, _fix(error)) from None
        finally:
            await box.aclose()


def _fix(error: OSError | ValueError) -> str:
    if isinstance(error, ValueError):
        return "leave it out, or make it smaller"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room there"
    if error.errno == errno.EAGAIN:
        return "wait for what runs there"
    return "see the path and its permissions"


async def _service(where: Where) -> Transport:
    """The broker by way of the API server."""
    from rljob.kube import config
    from rljob.kube.client import KubeClient
    from rljob.kube.proxy import ServicePort, ServiceProxy
    from rljob.kube.resources import SECRET

    server = config.load()
    kube = KubeClient(server, user_agent="rljob")
    try:
        secret = await kube.find(SECRET, where.secret, where.namespace)
    finally:
        await kube.aclose()
    name = f"Secret {where.namespace}/{where.secret}"
    if secret is None:
        fix = "are job, pool and namespace right?"
        raise MachineError("kubernetes", f"there is no {name}", fix)
    try:
        token = base64.b64decode(secret["data"]["token"], validate=True).decode()
    except (KeyError, TypeError, ValueError):
        fault = f"{name} holds no token"
        raise MachineError("kubernetes", fault, "is it one that rljob made?") from None
    target = ServicePort(where.operator_namespace, SERVICE, PORT)
    return ServiceProxy(server, target, {"x-rljob-token": token})


def call(work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run a command's work; what fails on the way is one line. Who is told to end tidies up first.

    Raises:
        MachineError: no broker, no cluster, no sandbox in time, or one that died.
        SystemExit: a signal ended it.
    """
    told: list[int] = []

    async def ending() -> _T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            told.append(number)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
                loop.add_signal_handler(number, end, number)
        return await work()

    try:
        return asyncio.run(ending())
    except asyncio.CancelledError:
        if not told:
            raise
        raise SystemExit(128 + told[0]) from None
    except InfraError as error:
        raise _line(error) from None


def silence() -> None:
    """What a client would log it also raises, and a command's errors say all there is to say."""
    import structlog

    def drop(_logger: Any, _method: str, _event: Any) -> NoReturn:
        raise structlog.DropEvent

    structlog.configure(processors=[drop])


def _line(error: InfraError) -> MachineError:
    # by its attributes: the Kubernetes client costs 0.2 s, and is needed for a cluster only
    status = getattr(error, "status", None)
    if status is None:
        return MachineError("sandbox", str(error), "see rljob sandbox ls, and pools")
    fixes = {
        401: "check the credentials of KUBECONFIG",
        403: "ask for `get` of that Secret, and for the Role rljob-sandbox-user where rljob is installed",
        404: "are job, pool and namespace right?",
    }
    return MachineError("kubernetes", str(error), fixes.get(status, "check KUBECONFIG"))
