"""Passes what is for the guest of a claim on to it, for callers who reach the broker but no sandbox.

caller ─► broker ─ claim token, boot nonce ─► guest          the answer goes back as it comes; who hangs up is
caller ◄─────────────── pieces ◄───────────── guest          hung up on
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from urllib.parse import urlencode

from rljob.http1 import HttpClient, HttpError
from rljob.sandbox import ClaimAnswer
from rljob_sandbox_pool.aserver import StreamedResponse
from rljob_sandbox_pool.guest.wire import RefusedError, Request

MAX_BODY_BYTES = 33 * 1024 * 1024
"""Largest body of a request, and all of an answer that is no stream."""
MAX_STREAM_BYTES = 2**40
"""A stream ends with its command; the client has its own bound."""
GRACE_SECONDS = 5.0
_PASSED_ON = ("content-type", "content-length", "retry-after", "x-rljob-kind", "x-rljob-next")


async def relay(
    request: Request, path: str, claim: ClaimAnswer, seconds_left: float
) -> StreamedResponse:
    """Ask the guest, and answer with what it says.

    Args:
        request: As the broker got it.
        path: What of its path is the guest's.
        claim: What opens the sandbox.
        seconds_left: How long the claim lives: what is not answered by then never is.

    Raises:
        RefusedError: the guest cannot be reached, or the path is none that is passed on.
    """
    if path == "/tunnel":
        raise RefusedError(400, "not_relayed", "a tunnel needs the sandbox's own address")
    query = urlencode(request.query, errors="surrogateescape")
    stack = AsyncExitStack()
    try:
        # A connection of its own: when the caller hangs up, the guest sees it and ends the command.
        client = HttpClient(claim.url)
        streamed = await stack.enter_async_context(
            client.stream(
                request.method,
                f"{path}?{query}" if query else path,
                request.body,
                headers=_opening(claim),
                timeout_seconds=max(0.0, seconds_left) + GRACE_SECONDS,
                max_body_bytes=MAX_STREAM_BYTES,
            )
        )
    except HttpError as error:
        raise RefusedError(502, "sandbox_lost", str(error)) from None
    except TimeoutError:
        raise RefusedError(504, "sandbox_lost", "no answer while the claim lived") from None
    passed_on = {name: text for name, text in streamed.headers.items() if _is_passed_on(name)}
    return StreamedResponse(streamed.status, passed_on, streamed.pieces, stack.aclose)


def _opening(claim: ClaimAnswer) -> dict[str, str]:
    return {
        "authorization": f"Bearer {claim.token}",
        "x-rljob-claim": claim.claim_id,
        "x-rljob-boot": claim.boot_nonce,
    }


def _is_passed_on(header: str) -> bool:
    return header in _PASSED_ON or header.startswith("x-rljob-")
