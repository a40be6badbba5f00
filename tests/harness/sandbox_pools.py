"""SandboxPool objects of one namespace, and the broker as a job of it would use it."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from rljob import labels
from rljob.broker_token import job_token
from rljob.http1 import HttpClient
from rljob.sandbox_client import SandboxClient
from tests.harness.cluster import Cluster, wait_until

MANAGER = "app.kubernetes.io/component=sandbox-pool"
SANDBOXES = f"{labels.COMPONENT}=sandbox"
JOB = "job-1"
CLAIM_SECONDS = 60.0


class Pools:
    """Pools of one namespace, and the broker as a job of it would use it."""

    def __init__(self, cluster: Cluster, system: str, namespace: str) -> None:
        self.cluster, self.system, self.namespace = cluster, system, namespace
        secret = wait_until("the keys", lambda: cluster.get("Secret", "rljob-keys", system), 30)
        self.key = base64.b64decode(secret["data"]["broker_key"]).strip()

    def make(self, name: str, *, job: str = "", **spec: Any) -> None:
        metadata: dict[str, Any] = {"name": name, "namespace": self.namespace}
        if job:
            metadata["labels"] = {labels.JOB: job}
        kind = {"apiVersion": "rljob.dev/v1alpha1", "kind": "SandboxPool"}
        self.cluster.apply({**kind, "metadata": metadata, "spec": {"warm": 2, "max": 3, **spec}})

    def pods(self) -> dict[str, dict[str, Any]]:
        found = self.cluster.list("Pod", self.namespace, SANDBOXES)
        return {pod["metadata"]["name"]: pod for pod in found}

    def status(self, name: str) -> dict[str, Any]:
        return (self.cluster.get("SandboxPool", name, self.namespace) or {}).get("status") or {}

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        found = self.status(name).get("conditions") or []
        return next((each for each in found if each["type"] == kind), {})

    def wait_ready(self, name: str, number: int, seconds: float = 90) -> None:
        wait_until(f"{number} warm", lambda: self.status(name).get("ready") == number, seconds)

    def active(self) -> str:
        """The pod that serves claims."""
        return wait_until("an active pool manager", self.active_now, 60)

    def active_now(self) -> str:
        """The same, or empty: none at the moment."""
        pods = self.cluster.list("Pod", self.system, f"{MANAGER},rljob.dev/active=true")
        living = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
        return living[0]["metadata"]["name"] if len(living) == 1 else ""

    @asynccontextmanager
    async def client(self, job: str = JOB, *, relayed: bool = False, **more: str) -> Any:
        """Claims for a job; `relayed`: reaches sandboxes by way of the broker, as policies let nobody else do."""
        token = job_token(self.key, self.namespace, job)
        with self.broker() as address:
            relay = HttpClient(address, {"authorization": f"Bearer {token}"}) if relayed else None
            client = SandboxClient(address, token, job, relay=relay, **more)
            try:
                yield client
            finally:
                await client.aclose()

    @contextmanager
    def broker(self) -> Iterator[str]:
        """Its address on this machine, past all policies, for as long as the active pod lives."""
        argv = self.cluster.kubectl_argv("-n", self.system, "port-forward", self.active(), ":8080")
        forward = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        try:
            assert forward.stdout is not None
            line = forward.stdout.readline()
            assert "127.0.0.1:" in line, line
            yield f"http://{line.split()[2]}"
        finally:
            forward.terminate()
            forward.communicate(timeout=30)
