"""A real cluster as the e2e suite sees it: the API over HTTPS with the admin's certificate, kubectl, waiting.

cluster.api("GET", path)   cluster.get(kind, name, ns)   cluster.list(kind, ns, selector)
cluster.apply(object or YAML, ns)   cluster.kubectl("describe", …)
wait_until("what", probe, seconds) ─► the probe's first true value, or a failure that says what
"""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "e2e" / "cluster" / "cluster"
Object = dict[str, Any]
T = TypeVar("T")

PATHS = {
    "Namespace": "api/v1/namespaces",
    "Node": "api/v1/nodes",
    "Pod": "api/v1/pods",
    "Service": "api/v1/services",
    "ServiceAccount": "api/v1/serviceaccounts",
    "ConfigMap": "api/v1/configmaps",
    "Secret": "api/v1/secrets",
    "Event": "api/v1/events",
    "PersistentVolume": "api/v1/persistentvolumes",
    "PersistentVolumeClaim": "api/v1/persistentvolumeclaims",
    "ResourceQuota": "api/v1/resourcequotas",
    "DaemonSet": "apis/apps/v1/daemonsets",
    "Deployment": "apis/apps/v1/deployments",
    "StatefulSet": "apis/apps/v1/statefulsets",
    "Job": "apis/batch/v1/jobs",
    "Lease": "apis/coordination.k8s.io/v1/leases",
    "NetworkPolicy": "apis/networking.k8s.io/v1/networkpolicies",
    "PodDisruptionBudget": "apis/policy/v1/poddisruptionbudgets",
    "CustomResourceDefinition": "apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "RLJob": "apis/rljob.dev/v1alpha1/rljobs",
    "SandboxPool": "apis/rljob.dev/v1alpha1/sandboxpools",
}
_CLUSTER_SCOPED = {"Namespace", "Node", "PersistentVolume", "CustomResourceDefinition"}


def wait_until(what: str, probe: Callable[[], T], seconds: float, every: float = 0.5) -> T:
    """The first true value of `probe`; fails with its last value when the time is over."""
    end = time.monotonic() + seconds
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what}; last seen: {value!r}")
        time.sleep(every)


class Cluster:
    """One cluster, by its kubeconfig."""

    def __init__(self, kubeconfig: Path, kubectl: str) -> None:
        self.kubeconfig, self._kubectl = kubeconfig, kubectl
        config = yaml.safe_load(kubeconfig.read_text())
        entry, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        context = ssl.create_default_context(cadata=_pem(entry, "certificate-authority"))
        with (
            tempfile.TemporaryDirectory() as folder
        ):  # ssl reads client certificates from files only
            files = [Path(folder) / "crt", Path(folder) / "key"]
            for file, key in zip(files, ("client-certificate", "client-key"), strict=True):
                file.write_text(_pem(user, key))
            context.load_cert_chain(*files)
        self._http = httpx.Client(base_url=entry["server"], verify=context, timeout=20)

    def close(self) -> None:
        """Hang up."""
        self._http.close()

    def api(
        self,
        method: str,
        path: str,
        body: object = None,
        content_type: str = "application/json",
        **query: str,
    ) -> httpx.Response:
        """One request; the answer whatever its status. A server that is away or starts is asked again for a minute."""
        content = None if body is None else json.dumps(body).encode()
        headers, end = {"content-type": content_type}, time.monotonic() + 60
        while True:
            late = time.monotonic() > end
            try:
                answer = self._http.request(
                    method, "/" + path, content=content, params=query, headers=headers
                )
            except httpx.TransportError:
                if late:
                    raise
            else:
                if late or answer.status_code not in {429, 503}:
                    return answer
            time.sleep(0.5)

    def path(self, kind: str, namespace: str | None = None, name: str | None = None) -> str:
        """URL path of a collection or an object."""
        base, _, plural = PATHS[kind].rpartition("/")
        place = f"/namespaces/{namespace}" if namespace and kind not in _CLUSTER_SCOPED else ""
        return f"{base}{place}/{plural}" + (f"/{name}" if name else "")

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """The object; None where there is none."""
        answer = self.api("GET", self.path(kind, namespace, name))
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        return answer.json()

    def list(self, kind: str, namespace: str | None = None, selector: str = "") -> list[Object]:
        """Objects by label selector."""
        query = {"labelSelector": selector} if selector else {}
        answer = self.api("GET", self.path(kind, namespace), **query)
        answer.raise_for_status()
        return answer.json()["items"]

    def patch(
        self, kind: str, name: str, namespace: str | None, patch: Object, subresource: str = ""
    ) -> Object:
        """Merge-patch."""
        path = self.path(kind, namespace, name) + (f"/{subresource}" if subresource else "")
        answer = self.api("PATCH", path, patch, "application/merge-patch+json")
        assert answer.is_success, answer.text
        return answer.json()

    def delete(self, kind: str, name: str, namespace: str | None = None, **options: Any) -> None:
        """Delete, if it is there."""
        answer = self.api("DELETE", self.path(kind, namespace, name), options or None)
        assert answer.is_success or answer.status_code == 404, answer.text

    def apply(self, manifest: Object | str, namespace: str | None = None) -> None:
        """kubectl apply, strictly validated."""
        text = manifest if isinstance(manifest, str) else json.dumps(manifest)
        place = ["-n", namespace] if namespace else []
        self.kubectl("apply", "--validate=strict", *place, "-f", "-", stdin=text)

    def kubectl_argv(self, *args: str) -> list[str]:
        """Command line of a kubectl command that goes on for a while."""
        return [self._kubectl, "--kubeconfig", str(self.kubeconfig), *args]

    def kubectl(
        self, *args: str, stdin: str | None = None, check: bool = True, timeout: float = 120
    ) -> str:
        """Output of a kubectl command; both streams where it fails."""
        run = subprocess.run(
            self.kubectl_argv(*args),
            input=stdin, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        if check:
            assert run.returncode == 0, f"kubectl {' '.join(args)}: {run.stderr}{run.stdout}"
        return run.stdout if check else run.stdout + run.stderr


def _pem(entry: dict[str, str], key: str) -> str:
    if data := entry.get(f"{key}-data"):
        return base64.b64decode(data).decode()
    return Path(entry[key]).read_text()


def script(*args: str, timeout: float = 2400) -> subprocess.CompletedProcess[str]:
    """Run tests/e2e/cluster/cluster."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def why_no_cluster() -> str:
    """Why none can be had on this machine; empty: one can."""
    return script("possible").stderr.strip()
