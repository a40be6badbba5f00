"""The broker's HTTP API: who may claim, from which pool.

    POST   /v1/claims {request_id, pool, image, env, ttl_seconds, wait_seconds, owner, boot_id}
                      → {claim_id, sandbox_id, url, token, boot_nonce}
                      429 all places taken, 503 none ready yet, both with Retry-After; 404 no such pool or image
    DELETE /v1/claims/{id}[?broken=1]  → {}; 404 no such claim
    GET    /v1/pools                   → {pools: [...]}
    GET    /healthz                    anyone
    GET    /readyz                     anyone: 503 until there is something to serve from
                      503 `standby` to everything else while another pool manager is the active one

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
from typing import Protocol
from urllib.parse import unquote

import msgspec

from rljob_sandbox_pool.guest import checks
from rljob_sandbox_pool.guest.wire import RefusedError, Request, Response, answer
from rljob_sandbox_pool.leases import ClaimRequest, Owner
from rljob_sandbox_pool.pool import NoSandboxError, Pool

MAX_WAIT_SECONDS = 30.0
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


class Broker:
    """Claims and releases over HTTP."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._pending: dict[tuple[str, str], asyncio.Task[bytes]] = {}

    async def handle(self, request: Request) -> Response:
        """Answer one request. Raises RefusedError."""
        if request.path == "/healthz":
            return answer({"ok": True})
        if request.path == "/readyz":
            if reason := self._directory.unready():
                raise RefusedError(503, "unready", reason)
            return answer({"ok": True, "standby": self._directory.standby()})
        if reason := self._directory.standby():
            raise RefusedError(503, "standby", reason, {"retry-after": "0.5"})
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        tenant = self._directory.tenant(token) if scheme == "Bearer" else None
        if tenant is None:
            raise RefusedError(401, "unauthorized", "the broker's token is missing or wrong")
        return await self._route(request, tenant)

    async def _route(self, request: Request, tenant: Tenant) -> Response:
        if (request.method, request.path) == ("POST", _CLAIMS):
            return await self._claim(request, tenant)
        if request.method == "DELETE" and request.path.startswith(_CLAIMS + "/"):
            claim_id = unquote(request.path[len(_CLAIMS) + 1 :])
            return await self._release(claim_id, tenant, broken=request.query.get("broken") == "1")
        if (request.method, request.path) == ("GET", "/v1/pools"):
            statuses = [
                msgspec.structs.replace(pool.status(), name=name)
                for name, pool in tenant.pools.items()
            ]
            return Response(200, msgspec.json.encode({"pools": statuses}))
        raise RefusedError(404, "no_route", f"{request.method} {request.path}"[:200])

    async def _claim(self, request: Request, tenant: Tenant) -> Response:
        body = checks.json_object(request.body)
        claim_id = checks.text(body, "request_id", limit=64)
        if not claim_id:
            raise checks.bad("request_id is missing")
        name, image = checks.text(body, "pool", limit=253), body.get("image")
        pool = _pool(tenant, name, image)
        owner, boot_id = (checks.text(body, name, "", limit=128) for name in ("owner", "boot_id"))
        asked = ClaimRequest(
            id=claim_id,
            env=checks.environment(body.get("env") or {}),
            ttl_seconds=checks.number(body, "ttl_seconds", 3600.0, 1.0, checks.MAX_TTL_SECONDS),
            wait_seconds=checks.number(body, "wait_seconds", 0.0, 0.0, MAX_WAIT_SECONDS),
            owner=Owner(owner, boot_id) if owner else None,
            image=str(image or ""),
            job=tenant.job,
        )
        key = (tenant.job, claim_id)
        if key in self._pending:
            raise RefusedError(503, "pending", "this claim is being made", {"retry-after": "0.1"})
        task = asyncio.ensure_future(pool.claim(asked))
        self._pending[key] = task
        try:
            return Response(200, await task)
        except NoSandboxError as none:
            headers = {"retry-after": f"{none.retry_after_seconds:.2f}"}
            raise RefusedError(
                429 if none.at_max else 503,
                "at_max" if none.at_max else "warming",
                none.message,
                headers,
            ) from None
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
        raise RefusedError(
            404, "unknown_claim", "no such claim: released, expired, or made by an earlier broker"
        )


def _pool(tenant: Tenant, name: str, image: object) -> Pool:
    pool = tenant.pools.get(name)
    if pool is None:
        known = ", ".join(sorted(tenant.pools)) or "none"
        raise RefusedError(404, "unknown_pool", f"there is no pool {name!r}; there are {known}")
    images = [entry.image for entry in pool.spec.images]
    if image is not None and images and image not in images:
        raise RefusedError(404, "unknown_image", f"pool {name!r} has no image {str(image)[:200]!r}")
    return pool
