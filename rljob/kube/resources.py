"""The kinds that rljob reads and writes, and where the API serves them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

Object = dict[str, Any]
"""An object as the API server gives it."""


class Resource(NamedTuple):
    """One kind."""

    group: str
    """Empty: the core group."""
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """`apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """Path of the collection, of an object, or of its subresource; without a namespace, of all namespaces."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        place = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return "/".join(filter(None, (f"{root}{place}/{self.plural}", name, subresource)))


POD: Final = Resource("", "v1", "pods", "Pod")
SERVICE: Final = Resource("", "v1", "services", "Service")
SECRET: Final = Resource("", "v1", "secrets", "Secret")
CONFIG_MAP: Final = Resource("", "v1", "configmaps", "ConfigMap")
PVC: Final = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
SERVICE_ACCOUNT: Final = Resource("", "v1", "serviceaccounts", "ServiceAccount")
CORE_EVENT: Final = Resource("", "v1", "events", "Event")
NAMESPACE: Final = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
NODE: Final = Resource("", "v1", "nodes", "Node", namespaced=False)
RESOURCE_QUOTA: Final = Resource("", "v1", "resourcequotas", "ResourceQuota")
RUNTIME_CLASS: Final = Resource(
    "node.k8s.io", "v1", "runtimeclasses", "RuntimeClass", namespaced=False
)
JOB: Final = Resource("batch", "v1", "jobs", "Job")
STATEFUL_SET: Final = Resource("apps", "v1", "statefulsets", "StatefulSet")
DAEMON_SET: Final = Resource("apps", "v1", "daemonsets", "DaemonSet")
DEPLOYMENT: Final = Resource("apps", "v1", "deployments", "Deployment")
NETWORK_POLICY: Final = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
PDB: Final = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
LEASE: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease")
EVENT: Final = Resource("events.k8s.io", "v1", "events", "Event")
POD_MONITOR: Final = Resource("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor")
RLJOB: Final = Resource("rljob.dev", "v1alpha1", "rljobs", "RLJob")
SANDBOX_POOL: Final = Resource("rljob.dev", "v1alpha1", "sandboxpools", "SandboxPool")
CRD: Final = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)  # fmt: skip
ACCESS_REVIEW: Final = Resource(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", namespaced=False
)  # fmt: skip


def by_kind(kind: str) -> Resource:
    """The kind of that name among the above (`Event` is that of events.k8s.io). Raises KeyError."""
    return _BY_KIND[kind]


_BY_KIND = {
    value.kind: value
    for name, value in list(globals().items())
    if isinstance(value, Resource) and name != "CORE_EVENT"
}


def name_of(obj: Object) -> str:
    """metadata.name."""
    return str(obj["metadata"]["name"])


def namespace_of(obj: Object) -> str:
    """metadata.namespace; empty for what lives in none."""
    return str(obj["metadata"].get("namespace", ""))


def uid_of(obj: Object) -> str:
    """metadata.uid."""
    return str(obj["metadata"].get("uid", ""))
