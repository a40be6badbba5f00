"""Which broker a command speaks with, and a client of it.

--url, --token or their variables ─► that address
-n NAMESPACE, --job or --pool ─────► the cluster of KUBECONFIG: token from a Secret, broker by way of the API server
neither ───────────────────────────► whoever serves in the state folder
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from rljob.errors import DeadlineError, InfraError, MachineError, UserError
from rljob.http1 import HttpClient, HttpError
from rljob.kube import config as kube_config
from rljob.kube.client import KubeClient
from rljob.kube.errors import ForbiddenError, KubeError, NotFoundError
from rljob.kube.proxy import ServicePort, ServiceProxy
from rljob.kube.resources import SECRET
from rljob.sandbox_client import TOKEN_ENV, SandboxClient
from rljob_sandbox_pool.cli.state import State, Where

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
        if self.job:
            raise UserError("--job", "has no effect without a namespace", "add -n NAMESPACE")
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
        if not token or not token.isascii() or not token.isprintable():
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
    """A client of a broker. Raises MachineError."""
    if where.namespace:
        config = kube_config.load()
        headers = {"x-rljob-token": await _token(config, where.namespace, where.secret)}
        target = ServicePort(where.operator_namespace, SERVICE, PORT)
        relay: ServiceProxy | HttpClient | None = ServiceProxy(config, target, headers)
    else:
        relay = HttpClient(where.url, {"x-rljob-token": where.token}) if where.relay else None
    client = SandboxClient(where.url, where.token, relay=relay)
    try:
        yield client
    finally:
        await client.aclose()


async def _token(config: kube_config.KubeConfig, namespace: str, secret: str) -> str:
    kube = KubeClient(config, user_agent="rljob")
    try:
        data = (await kube.get(SECRET, secret, namespace)).get("data") or {}
        return base64.b64decode(data["token"], validate=True).decode()
    except (KeyError, binascii.Error, UnicodeDecodeError):
        fault = f"Secret {namespace}/{secret} holds no token"
        raise MachineError("kubernetes", fault, "is it one that rljob made?") from None
    finally:
        await kube.aclose()


def call(work: Callable[[], Awaitable[_T]]) -> _T:
    """Run a command's work; what fails on the way is one line.

    Raises:
        MachineError: no broker, no cluster, no sandbox in time, or one that died.
    """

    async def run() -> _T:
        return await work()

    try:
        return asyncio.run(run())
    except NotFoundError as error:
        raise MachineError("kubernetes", str(error), "are job, pool and namespace right?") from None
    except ForbiddenError as error:
        raise MachineError("kubernetes", str(error), "ask for the rights of rljob-edit") from None
    except KubeError as error:
        raise MachineError("kubernetes", str(error), "check KUBECONFIG and the cluster") from None
    except DeadlineError as error:
        raise MachineError("sandbox", str(error), "see rljob sandbox pools") from None
    except InfraError as error:
        raise MachineError("sandbox", str(error), "see rljob sandbox ls and pools") from None
