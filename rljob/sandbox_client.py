"""Client of the sandbox broker: claims sandboxes and gives them back. What a claimed one does: `claimed_sandbox`.

client = SandboxClient(broker_url, token)
async with client.claim("default", env={"LANG": "C.UTF-8"}) as box:
    result = await box.exec("ls -l")
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import quote

from rljob import telemetry
from rljob.claimed_sandbox import CALL_SECONDS, GRACE_SECONDS, IDLE_SECONDS, ClaimedSandbox
from rljob.errors import DeadlineError, MachineError, ManifestError, SandboxError
from rljob.http1 import Answer, HttpClient, HttpError, Transport
from rljob.sandbox import ClaimAnswer, ClaimStatus, PoolStatus
from rljob.sandbox_wire import Claims, Pools, decode, encode, is_away, refusal_of

TOKEN_ENV = "RLJOB_SANDBOX_TOKEN"
"""Environment variable with the token of a client that is given none."""
BROKER_WAIT_SECONDS = 10.0
"""How long the broker may hold one claim request while no sandbox is ready."""
RELEASE_AGAIN_SECONDS = 120.0
"""For how long a broker that is away is told about a release again."""
LAST_RELEASES_SECONDS = 2.0
"""How long a client that is closed still tries."""

_T = TypeVar("_T")


class SandboxClient:
    """Claims sandboxes from one broker for one job. Belongs to the event loop that first uses it.

    Args:
        broker_url: Address of the broker.
        token: The job's bearer token; without it that of the environment variable RLJOB_SANDBOX_TOKEN.
        job: The job's name.
        owner: Who claims. The first claim of an owner with a new boot id gives back what its earlier boots held.
        boot_id: Which start of the owner's process this is.
        relay: Reaches the broker and carries its token, for who reaches neither broker nor sandboxes directly: what is
            for a sandbox then goes by way of the broker, too.
    """

    def __init__(
        self,
        broker_url: str,
        token: str | None = None,
        job: str = "",
        *,
        owner: str = "",
        boot_id: str = "",
        relay: Transport | None = None,
    ) -> None:
        self.url = broker_url
        token = os.environ.get(TOKEN_ENV, "") if token is None else token
        headers = {"authorization": f"Bearer {token}", "x-rljob-job": job}
        self._relay = relay
        self._http = relay or HttpClient(broker_url, headers, idle_seconds=IDLE_SECONDS)
        self._owner = {"owner": owner, "boot_id": boot_id} if owner else {}
        self._releasing: set[asyncio.Task[bool]] = set()
        self._num_open = 0
        """Claims of `claim` that are not left yet."""
        self._is_closed = False

    async def acquire(
        self,
        pool: str,
        *,
        image: str | None = None,
        env: Mapping[str, str] | None = None,
        ttl_seconds: float = 3600.0,
        idle_seconds: float | None = None,
        priority: int = 0,
        timeout: float = 600.0,
    ) -> ClaimedSandbox:
        """Claim a sandbox; the caller must `release` it.

        Args:
            pool: A pool's name.
            image: Image to claim; without it the pool's first.
            env: Environment of every command of this claim.
            ttl_seconds: After so long the sandbox ends by itself, whatever becomes of the caller.
            idle_seconds: Without any call for so long it ends by itself as well; None: it does not.
            priority: Among those that wait, who comes first; -100 to 100.
            timeout: Seconds to wait for a free sandbox; a broker that restarts meanwhile is waited for as well.

        Raises:
            DeadlineError: no sandbox within `timeout`.
            ManifestError: the broker knows no such pool or image.
            MachineError: the API server lets nobody with these credentials through to the broker.
            SandboxError: the broker refused or answered nonsense.
        """
        request = {
            "request_id": secrets.token_hex(16),
            "pool": pool,
            "image": image,
            "env": dict(env or {}),
            "ttl_seconds": ttl_seconds,
            "idle_seconds": idle_seconds,
            "priority": priority,
            **self._owner,
        }
        return self.attach(await self._acquire(request, timeout))

    def attach(self, claim: ClaimAnswer) -> ClaimedSandbox:
        """A sandbox that was claimed before, maybe by another process. Raises SandboxError."""
        return ClaimedSandbox(self, claim, self._relay)

    async def _acquire(self, request: Mapping[str, Any], timeout: float) -> ClaimAnswer:
        try:
            return await self._granted(request, timeout)
        except BaseException:
            # The broker may have granted it all the same: an answer lost, or this task cancelled while it was read.
            self._keep(self.release_claim(request["request_id"]))
            raise

    async def _granted(self, request: Mapping[str, Any], timeout: float) -> ClaimAnswer:
        loop = asyncio.get_running_loop()
        deadline, reason = loop.time() + timeout, "no answer"
        while (left := deadline - loop.time()) > 0:
            wait = min(left, BROKER_WAIT_SECONDS)
            try:
                body = encode({**request, "wait_seconds": round(wait, 3)})
                answer = await self._call(
                    "POST", "/v1/claims", body, timeout=min(left, wait) + GRACE_SECONDS
                )
            except (HttpError, TimeoutError) as error:
                reason, pause = str(error) or "no answer in time", 0.2
            else:
                if answer.status == 200:
                    return decode(answer, ClaimAnswer)
                reason, pause = self._why_not(answer)
            await asyncio.sleep(min(pause, max(0.0, deadline - loop.time())))
        raise DeadlineError(
            f"acquire: no sandbox of pool {request['pool']!r} within {timeout:g} s ({reason})"
        )

    @asynccontextmanager
    async def claim(
        self,
        pool: str,
        *,
        image: str | None = None,
        env: Mapping[str, str] | None = None,
        ttl_seconds: float = 3600.0,
        idle_seconds: float | None = None,
        priority: int = 0,
        timeout: float = 600.0,
    ) -> AsyncIterator[ClaimedSandbox]:
        """`acquire` on entry, `release` on exit; a client that does nothing else needs no `aclose`."""
        self._num_open += 1
        try:
            box = await self.acquire(
                pool,
                image=image,
                env=env,
                ttl_seconds=ttl_seconds,
                idle_seconds=idle_seconds,
                priority=priority,
                timeout=timeout,
            )
            try:
                yield box
            finally:
                await box.release()
        finally:
            self._num_open -= 1
            if not self._num_open and isinstance(self._http, HttpClient):
                self._http.close_idle()

    async def pools(self) -> list[PoolStatus]:
        """What the broker holds. Raises SandboxError."""
        return (await self._list("/v1/pools", Pools)).pools

    async def claims(self) -> list[ClaimStatus]:
        """What the job holds. Raises SandboxError."""
        return (await self._list("/v1/claims", Claims)).claims

    async def _list(self, target: str, kind: type[_T]) -> _T:
        try:
            answer = await self._call("GET", target, timeout=CALL_SECONDS)
        except (HttpError, TimeoutError) as error:
            raise SandboxError(f"broker: {str(error) or 'no answer in time'}") from None
        if answer.status != 200:
            raise SandboxError(f"broker: {refusal_of(answer).message or answer.status}")
        return decode(answer, kind)

    async def aclose(self) -> None:
        """Close the connections to the broker. Claims stay as they are; releases under way get a few seconds more."""
        deadline = asyncio.get_running_loop().time() + LAST_RELEASES_SECONDS
        while releasing := set(self._releasing):
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            _, late = await asyncio.wait(releasing, timeout=left)
            for task in late:
                task.cancel()
            await asyncio.gather(*releasing, return_exceptions=True)
        self._is_closed = True
        await self._http.aclose()

    async def release_claim(self, claim_id: str, *, broken: bool = False) -> bool:
        """Give a claim back.

        False where the broker could not be told: it is told again in the background, as a broker is away for some
        seconds while another takes over; failing that too, the time to live ends the claim.
        """
        answer = await self._release(claim_id, broken=broken)
        if answer.status in (200, 404):
            return True
        reason = answer.headers.get("reason") or f"answered {answer.status}"
        telemetry.get_logger().warning("claim_not_released", claim=claim_id, reason=reason)
        if is_away(answer) and not self._is_closed:
            self._keep(self._release_later(claim_id, broken=broken))
        return False

    async def _release_later(self, claim_id: str, *, broken: bool) -> bool:
        deadline, pause = asyncio.get_running_loop().time() + RELEASE_AGAIN_SECONDS, 0.5
        while asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(pause)
            answer = await self._release(claim_id, broken=broken)
            if not is_away(answer):
                return answer.status in (200, 404)
            pause = min(5.0, pause * 2)
        return False

    async def _release(self, claim_id: str, *, broken: bool) -> Answer:
        """Tell the broker; status 0 and a reason where it does not answer."""
        target = f"/v1/claims/{quote(claim_id, safe='')}" + ("?broken=1" if broken else "")
        try:
            return await self._call("DELETE", target, timeout=CALL_SECONDS)
        except (HttpError, TimeoutError) as error:
            return Answer(0, {"reason": str(error) or "no answer in time"}, b"")

    def _keep(self, releasing: Coroutine[Any, Any, bool]) -> None:
        task = asyncio.ensure_future(releasing)
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _call(self, method: str, target: str, body: bytes = b"", *, timeout: float) -> Answer:
        return await self._http.request(method, target, body, timeout_seconds=timeout)

    def _why_not(self, answer: Answer) -> tuple[str, float]:
        """Reason and pause of a refusal that time may cure; raises for the others."""
        refusal = refusal_of(answer)
        if answer.status in (429, 503):
            try:
                pause = float(answer.headers.get("retry-after", "1"))
            except ValueError:
                pause = 1.0
            return refusal.message or refusal.error, min(max(pause, 0.05), 10.0)
        if refusal.error in ("unknown_pool", "unknown_image"):
            raise ManifestError(
                "sandbox", refusal.message or refusal.error, "name a pool of spec.sandboxPools"
            )
        if refusal.error == "kubernetes" and answer.status == 403:
            raise MachineError(
                "kubernetes",
                refusal.message,
                "ask for the Role rljob-sandbox-user where rljob is installed",
            )
        raise SandboxError(
            f"broker refused the claim: {refusal.message or refusal.error} ({answer.status})"
        )
