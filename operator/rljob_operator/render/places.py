"""A component's placeholders, filled in for a pod.

${addr:…}    same pod: 127.0.0.1 and the fixed port; store: its Service; sandbox-pool: the cluster's broker
${path:…}    the fixed folders of `rljob.labels`
${secret:…}  $(RLJOB_SECRET_…), which the kubelet expands from the job's Secret
$$           stays: the kubelet makes a dollar sign of it, so that a person's text is never expanded
"""

from __future__ import annotations

from urllib.parse import urlsplit

from rljob import labels
from rljob_operator.render.component import Component, fill
from rljob_operator.render.context import Context

ANYWHERE = "0.0.0.0"
PORTS = {
    "engine/http": labels.ENGINE_PORT,
    "gateway/data": labels.GATEWAY_PORT,
    "gateway/control": labels.GATEWAY_CONTROL_PORT,
    "gateway/metrics": labels.GATEWAY_METRICS_PORT,
    "worker/metrics": labels.METRICS_PORT,
    "trainer/metrics": labels.METRICS_PORT,
    "collector/metrics": labels.METRICS_PORT,
    "prepare/metrics": labels.METRICS_PORT,
    "store/redis": labels.STORE_PORT,
}
"""role/port → number; metrics ports differ within a pod."""
PATHS = {
    "artifacts": labels.ARTIFACTS_PATH,
    "cache": f"{labels.ARTIFACTS_PATH}/cache",
    "job_file": labels.JOB_FILE_PATH,
    "manifest": f"{labels.WORK_PATH}/manifest",
    "store": labels.STORE_PATH,
}


def variable(secret: str) -> str:
    """The environment variable that holds a secret."""
    return f"RLJOB_SECRET_{secret.upper()}"


def filled(context: Context, component: Component, template: str) -> str:
    """One template of `component`, as it stands in its container."""
    return fill(template, lambda kind, name: _lookup(context, component, kind, name), dollar="$$")


def store_host(context: Context) -> str:
    """Where the job's own Valkey is reached, from any namespace."""
    return f"{context.name('store')}.{context.owner.namespace}.svc"


def port(place: str) -> int:
    """Number of `COMPONENT/PORT`; rollout components carry an index that plays no part in a pod."""
    component, _, name = place.partition("/")
    role, _, index = component.rpartition("-")
    return PORTS[f"{role if index.isdigit() else component}/{name}"]


def _lookup(context: Context, component: Component, kind: str, name: str) -> str:
    if kind == "addr":
        return _address(context, name)
    if kind == "port":
        return str(port(name))
    if kind == "path":
        return _work(component) if name == "work" else PATHS[name]
    return f"$({variable(name)})" if kind == "secret" else name


def _address(context: Context, name: str) -> str:
    if name == "bind":
        return ANYWHERE
    if name == "sandbox-pool/broker":
        return urlsplit(context.config.broker_url).netloc
    host = store_host(context) if name.startswith("store/") else "127.0.0.1"
    return f"{host}:{port(name)}"


def _work(component: Component) -> str:
    """Its own scratch folder; the store's files are a Secret's, and lie where that is mounted."""
    return (
        labels.SECRETS_PATH if component.role == "store" else f"{labels.WORK_PATH}/{component.role}"
    )
