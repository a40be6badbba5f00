"""Bearer tokens of jobs: `NAMESPACE/JOB:MAC`, so that the broker knows every job without reading a Secret.

operator ─ job_token(key, namespace, job) ─► Secret of the job ─► worker ─► broker ─ job_of(key, token)
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import NamedTuple


class JobKey(NamedTuple):
    """Which job."""

    namespace: str
    name: str


def job_token(key: bytes, namespace: str, job: str) -> str:
    """The token of a job; only holders of the broker key can make it."""
    return f"{namespace}/{job}:{_mac(key, namespace, job)}"


def job_of(key: bytes, token: str) -> JobKey | None:
    """The job that a token names, or None where it was not made with this key. Compares in constant time."""
    subject, _, mac = token.rpartition(":")
    namespace, _, job = subject.partition("/")
    genuine = hmac.compare_digest(_mac(key, namespace, job).encode(), mac.encode())
    return JobKey(namespace, job) if genuine and namespace and job else None


def _mac(key: bytes, namespace: str, job: str) -> str:
    return hmac.new(key, f"rljob broker\0{namespace}\0{job}".encode(), sha256).hexdigest()
