"""The broker's HTTP API: who may claim, from which pool.

    POST   /v1/claims {request_id, pool, image, env, ttl_seconds, wait_seconds, owner, boot_id}
                      → {claim_id, sandbox_id, url, token, boot_nonce}
                      429 all places taken, 503 none ready yet, both with Retry-After; 404 no such pool or image
    DELETE /v1/claims/{id}[?broken=1]  → {}; 404 no such claim
    GET    /v1/pools                   → {pools: [...]}
    GET    /healthz                    anyone

The request id becomes the claim id: a repeated request gets the same claim, and whoever lost the answer can
still release it. A claim of an owner with a new boot id gives back what its earlier boots held.
"""

from __future__ import annotations

import asyncio
import hmac
from urllib.parse import unquote

import msgspec

from rljob_sandbox_pool.guest import checks
from rljob_sandbox_pool.guest.wire import RefusedError, Request, Response, answer
from rljob_sandbox_pool.leases import ClaimRequest, Owner
from rljob_sandbox_pool.pool import NoSandboxError, Pool

MAX_WAIT_SECONDS = 30.0
_CLAIMS = "/v1/claims"


class Broker:
    """Claims and releases over HTTP."""

    def __init__(self, pools: dict[str, Pool], token: str) -> None:
        self._pools = pools
        self._expected = f"Bearer {token}".encode()
        self._pending: dict[str, asyncio.Task[bytes]] = {}

    async def handle(self, request: Request) -> Response:
        """Answer one request. Raises RefusedError."""
        if request.path == "/healthz":
            return answer({"ok": True})
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, self._expected):
            raise RefusedError(401, "unauthorized", "the broker's token is missing or wrong")
        if (request.method, request.path) == ("POST", _CLAIMS):
            return await self._claim(request)
        if request.method == "DELETE" and request.path.startswith(_CLAIMS + "/"):
            return await self._release(
                unquote(request.path[len(_CLAIMS) + 1 :]), broken=request.query.get("broken") == "1"
            )
        if (request.method, request.path) == ("GET", "/v1/pools"):
            return Response(
                200,
                msgspec.json.encode({"pools": [pool.status() for pool in self._pools.values()]}),
            )
        raise RefusedError(404, "no_route", f"{request.method} {request.path}"[:200])

    async def _claim(self, request: Request) -> Response:
        body = checks.json_object(request.body)
        claim_id = checks.text(body, "request_id", limit=64)
        if not claim_id:
            raise checks.bad("request_id is missing")
        pool = self._pool(checks.text(body, "pool", limit=253), body.get("image"))
        owner, boot_id = (checks.text(body, name, "", limit=128) for name in ("owner", "boot_id"))
        asked = ClaimRequest(
            id=claim_id,
            env=checks.environment(body.get("env") or {}),
            ttl_seconds=checks.number(body, "ttl_seconds", 3600.0, 1.0, checks.MAX_TTL_SECONDS),
            wait_seconds=checks.number(body, "wait_seconds", 0.0, 0.0, MAX_WAIT_SECONDS),
            owner=Owner(owner, boot_id) if owner else None,
        )
        if claim_id in self._pending:
            raise RefusedError(503, "pending", "this claim is being made", {"retry-after": "0.1"})
        task = asyncio.ensure_future(pool.claim(asked))
        self._pending[claim_id] = task
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
            self._pending.pop(claim_id, None)

    def _pool(self, name: str, image: object) -> Pool:
        pool = self._pools.get(name)
        if pool is None:
            raise RefusedError(
                404,
                "unknown_pool",
                f"there is no pool {name!r}; there are {', '.join(sorted(self._pools))}",
            )
        images = [entry.image for entry in pool.spec.images]
        if image is not None and images and image not in images:
            raise RefusedError(
                404, "unknown_image", f"pool {name!r} has no image {str(image)[:200]!r}"
            )
        return pool

    async def _release(self, claim_id: str, *, broken: bool) -> Response:
        if task := self._pending.get(claim_id):
            task.cancel()
            return answer({})
        for pool in self._pools.values():
            if await pool.release(claim_id, broken=broken):
                return answer({})
        raise RefusedError(
            404, "unknown_claim", "no such claim: released, expired, or made by an earlier broker"
        )
