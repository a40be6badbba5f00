"""Services, and who may talk to the job's pods. Policies judge pod addresses and container ports, never a Service's.

J-store      port 6379: the job's own pods and the operator
J-pods       prepare, trainer, rollout: nobody but metrics; engine, gateway and worker meet inside their pod
J-trainer    the trainer's pods among themselves
J-sandboxes  nothing out; in: the guest's port, from the job's rollout pods and the pool manager
J-P-egress   what the sandboxes of pool P may reach besides; J-gateway: lets those of pools with egress gateway in
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rljob import labels
from rljob.api import egress
from rljob_operator.observed import Object
from rljob_operator.render.context import JOB_WIDE, Context

WORKING = ("prepare", "rollout", "trainer")
"""Components whose pods work on the job."""
OPERATOR, POOL_MANAGER = "operator", "sandbox-pool"
"""`app.kubernetes.io/component` of the chart's own pods."""


def services(context: Context) -> list[Object]:
    """Names for the pods that are dialled or named."""
    found = [
        _headless(context, "trainer", "metrics", labels.METRICS_PORT),
        _headless(context, "rollout", "metrics", labels.METRICS_PORT),
    ]
    if context.own_store:
        ports = [_port("redis", labels.STORE_PORT)]
        spec = {"selector": _selector(context, "store"), "ports": ports}
        found.append(context.child("v1", "Service", "store", "store", {"spec": spec}))
    return found


def _headless(context: Context, component: str, port: str, number: int) -> Object:
    spec = {
        "clusterIP": "None",
        "selector": _selector(context, component),
        # Ray's head must be found before it is ready
        "publishNotReadyAddresses": True,
        "ports": [_port(port, number)],
    }
    return context.child("v1", "Service", component, component, {"spec": spec})


def _selector(context: Context, component: str) -> dict[str, str]:
    return context.pods_of(component)["matchLabels"]


def _port(name: str, number: int) -> dict[str, Any]:
    return {"name": name, "port": number, "targetPort": number, "protocol": "TCP"}


def policies(context: Context) -> list[Object]:
    """The NetworkPolicies of a job."""
    metrics = [labels.METRICS_PORT, labels.GATEWAY_METRICS_PORT]
    pods = _policy(context, "pods", JOB_WIDE, WORKING, [{"ports": _allowed(metrics)}])
    among = [{"from": [{"podSelector": context.pods_of("trainer")}]}]
    trainer = _policy(context, "trainer", "trainer", ("trainer",), among)
    rollouts = {"podSelector": context.pods_of("rollout")}
    guests = [
        {
            "from": [rollouts, _system(context, POOL_MANAGER)],
            "ports": _allowed([labels.GUEST_PORT]),
        }
    ]
    sandboxes = _policy(context, "sandboxes", "sandbox", ("sandbox",), guests, egress=False)
    return [pods, trainer, sandboxes, *_egress(context), *_store_policy(context)]


def _egress(context: Context) -> list[Object]:
    """Policies add up: J-sandboxes closes every pool, these open what a pool asks for."""
    found: list[Object] = []
    gateways = {"podSelector": context.pods_of("rollout")}
    dns = context.config.dns_namespace
    for pool in context.job.spec.sandbox_pools:
        if rules := egress.rules(pool, dns_namespace=dns, gateways=gateways):
            spec = {
                "podSelector": _sandboxes_of(context, [pool.name]),
                "policyTypes": ["Egress"],
                "egress": rules,
            }
            found.append(_network_policy(context, f"{pool.name}-egress", "sandbox", spec))
    guests = [pool.name for pool in context.job.spec.sandbox_pools if pool.egress == "gateway"]
    if guests:
        peers = [{"podSelector": _sandboxes_of(context, guests)}]
        rule = {"from": peers, "ports": _allowed([labels.GATEWAY_PORT])}
        found.append(_policy(context, "gateway", "rollout", ("rollout",), [rule]))
    return found


def _sandboxes_of(context: Context, pools: Sequence[str]) -> dict[str, Any]:
    names = [labels.pool_name(context.owner.name, pool) for pool in pools]
    anyone = {"key": labels.POOL, "operator": "In", "values": names}
    return {**context.pods_of("sandbox"), "matchExpressions": [anyone]}


def _store_policy(context: Context) -> list[Object]:
    if not context.own_store:
        return []
    friends = [{"podSelector": context.pods_of(*WORKING)}, _system(context, OPERATOR)]
    rule = {"from": friends, "ports": _allowed([labels.STORE_PORT])}
    return [_policy(context, "store", "store", ("store",), [rule])]


def _policy(
    context: Context,
    suffix: str,
    component: str,
    of: Sequence[str],
    ingress: list[dict[str, Any]],
    *,
    egress: bool = True,
) -> Object:
    """Only `ingress` comes in; without `egress` nothing goes out either."""
    spec: dict[str, Any] = {
        "podSelector": context.pods_of(*of),
        "policyTypes": ["Ingress"] if egress else ["Ingress", "Egress"],
        "ingress": ingress,
    }
    return _network_policy(context, suffix, component, spec)


def _network_policy(context: Context, suffix: str, component: str, spec: dict[str, Any]) -> Object:
    body = {"spec": spec}
    return context.child("networking.k8s.io/v1", "NetworkPolicy", suffix, component, body)


def _allowed(ports: Sequence[int]) -> list[dict[str, Any]]:
    return [{"port": port, "protocol": "TCP"} for port in ports]


def _system(context: Context, component: str) -> dict[str, Any]:
    """Pods of the chart."""
    namespace = {"matchLabels": {egress.NAMESPACE_NAME: context.config.operator_namespace}}
    pods = {"matchLabels": {labels.COMPONENT: component}}
    return {"namespaceSelector": namespace, "podSelector": pods}
