"""The broker's HTTP API: who may claim, from which pool.

    POST   /v1/claims {request_id, pool, image, env, ttl_seconds, idle_seconds, wait_seconds, priority, owner, boot_id}
                      → {claim_id, sandbox_id, url, token, boot_nonce}
                      429 all places taken, 503 none ready yet, both with Retry-After; 404 no such pool or image
    GET    /v1/claims                  → {claims: [...]}: what the job holds
    DELETE /v1/claims/{id}[?broken=1]  → {}; 404 no such claim
    ANY    /v1/claims/{id}/guest/PATH  → what the guest of the claim answers (`relay.py`); 502 it cannot be reached
    GET    /v1/pools                   → {pools: [...]}
    GET    /healthz                    anyone
    GET    /readyz                     anyone: 503 until there is something to serve from
                      503 `standby` to everything else while another pool manager is the active one

The token comes as `authorization: Bearer`, or as `x-rljob-token` where something in between takes the former away.
Who may see which pools is the directory's to say: on one machine one token opens all of them, in a cluster a job's
token opens the job's own and those that its namespace shares.
The request id becomes the claim id: a repeated request gets the same claim, and whoever lost the answer can still
release it. A claim of an owner with a new boot id gives back what its earlier boots held.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

import msgspec

from rljob.sandbox import ClaimAnswer, ClaimStatus, PoolStatus
from rljob_sandbox_pool.aserver import SMALL_BYTES, HttpServer, StreamedResponse
from rljob_sandbox_pool.guest import checks
from rljob_sandbox_pool.guest.wire import RefusedError, Request, Response, answer
from rljob_sandbox_pool.leases import ClaimRequest, Owner
from rljob_sandbox_pool.pool import NoSandboxError, Pool
from rljob_sandbox_pool.relay import MAX_BODY_BYTES, relay

MAX_WAIT_SECONDS = 30.0
MAX_PRIORITY = 100
MAX_PENDING = 1024
"""Claims of one job that wait at once: a quarter of the connections, which all jobs share."""
STRANGERS_BYTES = 16_384
"""Largest body of who has shown no token."""
_CLAIMS = "/v1/claims"


@dataclass(frozen=True)
class Tenant:
    """Who asks, and what it may see."""

    job: str
    """Namespace and name; empty where there is but one."""
    pools: Mapping[str, Pool]
    """By the name that a task gives."""


class Directory(Protocol):
    """Who is who, and has which pools."""

    def tenant(self, token: str) -> Tenant | None:
        """Whose token it is; None: nobody's."""
        ...

    def standby(self) -> str:
        """Why nothing is served now; empty: it is."""
        ...

    def unready(self) -> str:
        """Why this process could not even stand by; empty: it can."""
        ...


class OneJob:
    """The directory of one machine."""

    def __init__(self, pools: Mapping[str, Pool], token: str) -> None:
        self._tenant, self._token = Tenant("", pools), token.encode()

    def tenant(self, token: str) -> Tenant | None:
        """See `Directory`."""
        given = token.encode("utf-8", "replace")
        return self._tenant if hmac.compare_digest(given, self._token) else None

    def standby(self) -> str:
        """See `Directory`."""
        return ""

    def unready(self) -> str:
        """See `Directory`."""
        return ""


def make_server(directory: Directory) -> HttpServer:
    """The broker's server, which listens nowhere yet."""
    broker = Broker(directory)
    return HttpServer(broker.handle, max_body_bytes=MAX_BODY_BYTES, admit=broker.admit)


class Broker:
    """Claims and releases over HTTP."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._pending: dict[tuple[str, str], asyncio.Task[bytes]] = {}

    async def handle(self, request: Request) -> Response | StreamedResponse:
        """Answer one request. Raises RefusedError."""
        if request.path == "/healthz":
            return answer({"ok": True})
        if request.path == "/readyz":
            if reason := self._directory.unready():
                raise RefusedError(503, "unready", reason)
            return answer({"ok": True, "standby": self._directory.standby()})
        if reason := self._directory.standby():
            raise RefusedError(503, "standby", reason, {"retry-after": "0.5"})
        return await self._route(request, self._tenant(request.headers))

    def admit(self, method: str, target: str, headers: Mapping[str, str], length: int) -> None:
        """Only a job's body may be of some size, only what is passed on to a guest large. Raises RefusedError."""
        if length > STRANGERS_BYTES:
            self._tenant(headers)
        if length > SMALL_BYTES and _guest_path(target.partition("?")[0]) is None:
            raise RefusedError(413, "too_large", f"a body is at most {SMALL_BYTES} bytes")

    def _tenant(self, headers: Mapping[str, str]) -> Tenant:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        token = headers.get("x-rljob-token", bearer if scheme == "Bearer" else "")
        tenant = self._directory.tenant(token) if token else None
        if tenant is None:
            raise RefusedError(401, "unauthorized", "the broker's token is missing or wrong")
        return tenant

    async def _route(self, request: Request, tenant: Tenant) -> Response | StreamedResponse:
        method, path = request.method, request.path
        if (method, path) == ("POST", _CLAIMS):
            return await self._claim(request, tenant)
        if (method, path) == ("GET", _CLAIMS):
            return Response(200, msgspec.json.encode({"claims": _claims(tenant)}))
        if (method, path) == ("GET", "/v1/pools"):
            return Response(200, msgspec.json.encode({"pools": _pools(tenant)}))
        if guest := _guest_path(path):
            return await relay(request, guest.path, *_held(tenant, guest.claim_id))
        if method == "DELETE" and path.startswith(_CLAIMS + "/"):
            claim_id = unquote(path[len(_CLAIMS) + 1 :])
            return await self._release(claim_id, tenant, broken=request.query.get("broken") == "1")
        raise RefusedError(404, "no_route", f"{method} {path}"[:200])

    async def _claim(self, request: Request, tenant: Tenant) -> Response:
        body = checks.json_object(request.body)
        claim_id = _text(body, "request_id", limit=64)
        if not claim_id:
            raise checks.bad("request_id is missing")
        name, image = checks.text(body, "pool", limit=253), body.get("image")
        pool = _pool(tenant, name, image)
        owner, boot_id = (_text(body, name, limit=128) for name in ("owner", "boot_id"))
        asked = ClaimRequest(
            id=claim_id,
            env=checks.environment(body.get("env") or {}),
            ttl_seconds=checks.number(body, "ttl_seconds", 3600.0, 1.0, checks.MAX_TTL_SECONDS),
            wait_seconds=checks.number(body, "wait_seconds", 0.0, 0.0, MAX_WAIT_SECONDS),
            owner=Owner(owner, boot_id) if owner else None,
            image=str(image or ""),
            job=tenant.job,
            idle_seconds=_idle_seconds(body),
            priority=int(checks.number(body, "priority", 0, -MAX_PRIORITY, MAX_PRIORITY)),
        )
        key = (tenant.job, claim_id)
        if key in self._pending:
            raise RefusedError(503, "pending", "this claim is being made", {"retry-after": "0.1"})
        if sum(job == tenant.job for job, _ in self._pending) >= MAX_PENDING:
            words = f"{MAX_PENDING} claims of this job wait already"
            raise RefusedError(429, "busy", words, {"retry-after": "1"})
        task = asyncio.ensure_future(pool.claim(asked))
        self._pending[key] = task
        try:
            return Response(200, await task)
        except NoSandboxError as none:
            headers = {"retry-after": f"{none.retry_after_seconds:.2f}"}
            status = 503 if none.error == "warming" else 429
            raise RefusedError(status, none.error, none.message, headers) from None
        finally:
            task.cancel()
            self._pending.pop(key, None)

    async def _release(self, claim_id: str, tenant: Tenant, *, broken: bool) -> Response:
        # One that cannot be cancelled any more has just been granted, though nobody was told yet.
        if (task := self._pending.get((tenant.job, claim_id))) and task.cancel():
            return answer({})
        for pool in tenant.pools.values():
            if await pool.release(claim_id, job=tenant.job, broken=broken):
                return answer({})
        raise _unknown_claim()


class _GuestPath(NamedTuple):
    claim_id: str
    path: str


def _guest_path(path: str) -> _GuestPath | None:
    """`/v1/claims/{id}/guest/…`, apart."""
    claim_id, found, rest = path.removeprefix(_CLAIMS + "/").partition("/guest/")
    if not path.startswith(_CLAIMS + "/") or not found or "/" in claim_id:
        return None
    return _GuestPath(unquote(claim_id), "/" + rest)


def _held(tenant: Tenant, claim_id: str) -> tuple[ClaimAnswer, float]:
    for pool in tenant.pools.values():
        if held := pool.held(claim_id, job=tenant.job):
            return held
    raise _unknown_claim()


def _unknown_claim() -> RefusedError:
    return RefusedError(
        404, "unknown_claim", "no such claim: released, expired, or made by an earlier broker"
    )


def _claims(tenant: Tenant) -> list[ClaimStatus]:
    return [
        msgspec.structs.replace(claim, pool=name)
        for name, pool in tenant.pools.items()
        for claim in pool.claims(tenant.job)
    ]


def _pools(tenant: Tenant) -> list[PoolStatus]:
    return [
        msgspec.structs.replace(pool.status(), name=name) for name, pool in tenant.pools.items()
    ]


def _text(body: Mapping[str, Any], name: str, *, limit: int) -> str:
    """A string that is UTF-8: it is told the guest, the API server and whoever asks for claims."""
    value = checks.text(dict(body), name, "", limit=limit)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise checks.bad(f"{name} holds a character that UTF-8 has not") from None
    return value


def _idle_seconds(body: Mapping[str, Any]) -> float:
    """0: a claim that is not used does not end."""
    if body.get("idle_seconds") is None:
        return 0.0
    return checks.number(dict(body), "idle_seconds", 0.0, 1.0, checks.MAX_TTL_SECONDS)


def _pool(tenant: Tenant, name: str, image: object) -> Pool:
    pool = tenant.pools.get(name)
    if pool is None:
        known = ", ".join(sorted(tenant.pools)) or "none"
        raise RefusedError(404, "unknown_pool", f"there is no pool {name!r}; there are {known}")
    images = [entry.image for entry in pool.spec.images]
    if image is not None and images and image not in images:
        raise RefusedError(404, "unknown_image", f"pool {name!r} has no image {str(image)[:200]!r}")
    return pool
