"""Where the API server is and who we are: a service account in a pod, or a kubeconfig.

explicit path ─► KUBECONFIG ─► the pod's service account ─► ~/.kube/config          the first that is there
"""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rljob.errors import MachineError

SERVICE_ACCOUNT_PATH = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_FIX = "set KUBECONFIG, or run in a pod with a service account"


@dataclass(frozen=True)
class KubeConfig:
    """One API server and one identity."""

    server: str
    """https://HOST:PORT, without a slash at its end."""
    namespace: str = "default"
    """Of the pod, or of the kubeconfig's context."""
    token: Callable[[], str] | None = None
    """Gives the bearer token; called again from time to time, since a pod's token is replaced every hour."""
    tls: ssl.SSLContext | None = field(default=None, repr=False)


def load(path: Path | None = None) -> KubeConfig:
    """See the picture above. Raises MachineError."""
    if path is not None:
        return from_kubeconfig(path)
    if named := os.environ.get("KUBECONFIG"):
        return from_kubeconfig(Path(named.split(os.pathsep)[0]))
    if "KUBERNETES_SERVICE_HOST" in os.environ and SERVICE_ACCOUNT_PATH.exists():
        return in_cluster()
    home = Path.home() / ".kube" / "config"
    if home.exists():
        return from_kubeconfig(home)
    raise MachineError("kubernetes", "no cluster is configured", _FIX)


def in_cluster(folder: Path = SERVICE_ACCOUNT_PATH) -> KubeConfig:
    """What the kubelet gives every pod that has a service account. Raises MachineError."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    token = folder / "token"
    try:
        tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        namespace = (folder / "namespace").read_text().strip()
        token.read_bytes()
    except (OSError, ssl.SSLError) as error:
        raise MachineError(str(folder), f"cannot be read ({error})", _FIX) from None
    host = f"[{host}]" if ":" in host else host
    return KubeConfig(f"https://{host}:{port}", namespace, lambda: token.read_text().strip(), tls)


def from_kubeconfig(path: Path) -> KubeConfig:
    """The current context of a kubeconfig. Commands that make tokens (exec plug-ins) are not run.

    Raises:
        MachineError: it cannot be read, or asks for what is not supported.
    """
    import yaml

    try:
        document = yaml.safe_load(path.read_text())
        context = _named(document, "contexts", document["current-context"])["context"]
        cluster = _named(document, "clusters", context["cluster"])["cluster"]
        user = _named(document, "users", context["user"])["user"]
        tls = _tls(cluster, user, path.parent)
        server = str(cluster["server"]).rstrip("/")
    except OSError as error:
        raise MachineError(str(path), f"cannot be read ({error.strerror or error})", _FIX) from None
    except (KeyError, TypeError, ValueError, StopIteration, yaml.YAMLError) as error:
        raise MachineError(
            str(path), f"is no kubeconfig that can be used ({error!r})", _FIX
        ) from None
    token = _token(user, path)
    if token is None and not {"client-certificate", "client-certificate-data"} & user.keys():
        problem = f"its user {context['user']!r} has neither a certificate nor a token"
        raise MachineError(str(path), problem, "commands that make tokens are not run; add a token")
    return KubeConfig(server, str(context.get("namespace") or "default"), token, tls)


def _named(document: Any, section: str, name: str) -> dict[str, Any]:
    return next(entry for entry in document[section] if entry["name"] == name)


def _token(user: dict[str, Any], path: Path) -> Callable[[], str] | None:
    if file := user.get("tokenFile"):
        token_path = path.parent / file
        return lambda: token_path.read_text().strip()
    if token := user.get("token"):
        return lambda: str(token)
    return None


def _tls(cluster: dict[str, Any], user: dict[str, Any], folder: Path) -> ssl.SSLContext:
    authority = _bytes(cluster, "certificate-authority", folder)
    tls = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    certificate, key = (_bytes(user, f"client-{part}", folder) for part in ("certificate", "key"))
    if certificate and key:
        # The ssl module takes a certificate only from a file.
        with tempfile.NamedTemporaryFile(prefix="rljob-") as file:
            file.write(certificate + b"\n" + key)
            file.flush()
            tls.load_cert_chain(file.name)
    return tls


def _bytes(section: dict[str, Any], name: str, folder: Path) -> bytes:
    if data := section.get(f"{name}-data"):
        return base64.b64decode(data, validate=True)
    if file := section.get(name):
        return (folder / file).read_bytes()
    return b""
