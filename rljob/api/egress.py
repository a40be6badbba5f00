"""What a sandbox may reach, as the egress rules of a NetworkPolicy: for the operator and the pool manager alike.

none      nothing                                  gateway   the gateways' data port of the pool's job
dns       the cluster's DNS                        custom    the pool's own rules, as they are
public    DNS, and every address that is nobody's own: no private, link-local, shared, reserved or multicast one
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rljob.api.sandboxpool_types import SandboxPoolSpec
from rljob.labels import GATEWAY_PORT

NOT_PUBLIC_V4: Final = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4",
)  # fmt: skip
NOT_PUBLIC_V6: Final = ("::/96", "fc00::/7", "fe80::/10", "ff00::/8")
NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"
_DNS_PORT: Final = 53
_NO_DNS: Final = {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}


def rules(
    pool: SandboxPoolSpec, *, dns_namespace: str, gateways: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """The rules; none: nothing goes out.

    Args:
        pool: The pool.
        dns_namespace: Where the cluster's DNS runs.
        gateways: A peer: the rollout pods of the pool's job; None: it has no job.
    """
    match pool.egress:
        case "none":
            return []
        case "dns":
            return [_dns(dns_namespace)]
        case "gateway":
            ports = [{"port": GATEWAY_PORT, "protocol": "TCP"}]
            return [{"to": [dict(gateways)], "ports": ports}] if gateways else []
        case "public":
            return [_dns(dns_namespace), _public()]
        case "custom":
            return [dict(rule) for rule in pool.egress_rules]


def dns_of_pod(pool: SandboxPoolSpec) -> dict[str, Any]:
    """Keys of a pod's spec. Where no DNS can be reached a look-up fails at once instead of after its time-outs."""
    return {} if pool.egress in ("dns", "public", "custom") else dict(_NO_DNS)


def _dns(namespace: str) -> dict[str, Any]:
    return {
        "to": [{"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: namespace}}}],
        "ports": [{"port": _DNS_PORT, "protocol": protocol} for protocol in ("UDP", "TCP")],
    }


def _public() -> dict[str, Any]:
    return {
        "to": [
            {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(NOT_PUBLIC_V4)}},
            {"ipBlock": {"cidr": "::/0", "except": list(NOT_PUBLIC_V6)}},
        ]
    }
