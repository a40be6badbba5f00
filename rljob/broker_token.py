"""Bearer tokens of jobs: `NAMESPACE/JOB:MAC`, so that the broker knows every job without reading a Secret.

operator ─ job_token(key, namespace, job) ─► Secret of the job ─► worker ─► broker ─ job_of(key, token)

Who uses a pool without a job is a job named `@POOL`: no job's name begins so.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import NamedTuple


class JobKey(NamedTuple):
    """Which job."""

    namespace: str
    name: str

    @property
    def pool(self) -> str:
        """The one pool that it may see, where it is a pool's token; empty: it is a job's."""
        return self.name[1:] if self.name.startswith("@") else ""


def job_token(key: bytes, namespace: str, job: str) -> str:
    """The token of a job; only holders of the broker key can make it."""
    return f"{namespace}/{job}:{_mac(key, namespace, job)}"


def pool_token(key: bytes, namespace: str, pool: str) -> str:
    """The token of a pool that is no job's, for who claims from it by hand."""
    return job_token(key, namespace, f"@{pool}")


def job_of(key: bytes, token: str) -> JobKey | None:
    """The job that a token names, or None where it was not made with this key. Compares in constant time."""
    subject, _, mac = token.rpartition(":")
    namespace, _, job = subject.partition("/")
    genuine = hmac.compare_digest(_mac(key, namespace, job).encode(), mac.encode())
    return JobKey(namespace, job) if genuine and namespace and job else None


def _mac(key: bytes, namespace: str, job: str) -> str:
    return hmac.new(key, f"rljob broker\0{namespace}\0{job}".encode(), sha256).hexdigest()
