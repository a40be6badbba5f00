"""Why a claim gets no sandbox. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rljob_sandbox_pool.guest.wire import RefusedError
from rljob_sandbox_pool.sizing import Counts
from rljob_sandbox_pool.starts import Failures


class NoSandboxError(Exception):
    """No sandbox within the time that the claim may wait.

    Args:
        error: `at_max`: all places are taken, a release helps; `at_quota`: one of the same job helps; `warming`: one is
            on its way, or starts back off.
        message: Why.
        retry_after_seconds: When to ask again.
    """

    def __init__(self, error: str, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.error, self.message, self.retry_after_seconds = error, message, retry_after_seconds


def at_quota(pool: str, most: int | None) -> NoSandboxError:
    """The job holds as many as it may."""
    words = f"this job holds {most} sandboxes of pool {pool}, as many as one job may"
    return NoSandboxError("at_quota", words, 1.0)


def exhausted(
    pool: str, counts: Counts, *, most: int, failures: Failures | None, now: float
) -> NoSandboxError:
    """Nothing became free in time.

    Args:
        pool: Its name.
        counts: Its sandboxes.
        most: How many it may have.
        failures: Of the image that was asked for.
        now: Monotonic.
    """
    if counts.total - counts.ending >= most and not counts.coming:
        return NoSandboxError("at_max", f"all {most} sandboxes of pool {pool} are taken", 1.0)
    words = f"no sandbox of pool {pool} is ready yet"
    if failures is None:
        return NoSandboxError("warming", words, 0.2)
    pause = max(0.2, min(failures.no_start_before - now, 10.0))
    return NoSandboxError("warming", f"{words} (last failure: {failures.problem})", pause)


def claimed_image(pool: str, images: Iterable[str], named: str) -> str:
    """What a claim gets that names an image, or none: the first. Raises RefusedError.

    Args:
        pool: Its name.
        images: What it has; of one without a name, which a single machine has, anything is a name.
        named: What the claim says.
    """
    known = list(images)
    if named in known:
        return named
    if named and "" not in known:
        raise RefusedError(404, "unknown_image", f"pool {pool!r} has no image {named[:200]!r}")
    return known[0]
