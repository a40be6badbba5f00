"""Which sandboxes the nodes of a cluster have room for, beside what runs there. Pure.

nodes: allocatable, taints, labels ─┐
pods: requests of those that run ───┴─► room per node ─► how many fit, and what runs short first
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from rljob_operator.policies.amounts import Amounts
from rljob_operator.render.quantities import parse

Object = Mapping[str, Any]

_BLOCKING = frozenset({"NoSchedule", "NoExecute"})
_CORDONED = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
_RESERVED_ADDRESSES = 3
"""Of a node's range: the network, the bridge and broadcast."""


class Room(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What is left on one node."""

    name: str
    free: Amounts
    pods: int
    addresses: int | None
    """None where the node names no range of its own: the network plugin knows."""
    labels: dict[str, str] = {}
    taints: list[dict[str, Any]] = []


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """Sandboxes of one pool that look for places."""

    pool: str
    each: Amounts
    """Overhead of the RuntimeClass included."""
    number: int
    node_selector: Mapping[str, str] = {}
    tolerations: Sequence[Mapping[str, Any]] = ()


class Fit(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Sandboxes of one pool on one node, and why no more."""

    node: str
    number: int
    short: str


def rooms(nodes: Iterable[Object], pods: Iterable[Object]) -> list[Room]:
    """What the pods that run, or are bound to run, leave of each node."""
    held: dict[str, list[Object]] = {}
    for pod in pods:
        if pod.get("status", {}).get("phase") not in {"Succeeded", "Failed"}:
            held.setdefault(pod["spec"].get("nodeName") or "", []).append(pod)
    return sorted(
        (_room(node, held.get(node["metadata"]["name"], [])) for node in nodes),
        key=lambda room: room.name,
    )


def _room(node: Object, pods: Sequence[Object]) -> Room:
    allocatable = node.get("status", {}).get("allocatable", {})
    spec = node.get("spec", {})
    taints: list[dict[str, Any]] = list(spec.get("taints") or ())
    if spec.get("unschedulable") and all(taint["key"] != _CORDONED["key"] for taint in taints):
        taints.append(_CORDONED)
    used = sum((requests(pod["spec"]) for pod in pods), Amounts())
    on_network = sum(not pod["spec"].get("hostNetwork") for pod in pods)
    ranges = [
        ipaddress.ip_network(text).num_addresses
        for text in spec.get("podCIDRs") or [spec.get("podCIDR")]
        if text
    ]
    addresses = min(ranges) - _RESERVED_ADDRESSES - on_network if ranges else None
    return Room(
        name=node["metadata"]["name"],
        free=Amounts.of(allocatable, down=True) - used,
        pods=int(allocatable.get("pods", 0)) - len(pods),
        addresses=addresses,
        labels=dict(node["metadata"].get("labels") or {}),
        taints=taints,
    )


def requests(spec: Object) -> Amounts:
    """Of a pod, as the scheduler counts them."""
    inits: Sequence[Object] = spec.get("initContainers") or ()
    always = sum(
        (
            Amounts.requested(each.get("resources") or {})
            for each in [
                *(spec.get("containers") or ()),
                *(each for each in inits if each.get("restartPolicy") == "Always"),
            ]
        ),
        Amounts(),
    )
    for each in inits:
        always = always.most(Amounts.requested(each.get("resources") or {}))
    return always + Amounts.of(spec.get("overhead") or {})


def refusal(room: Room, wish: Wish) -> str:
    """Why no sandbox of the pool may run on the node; empty: it may."""
    for key, value in wish.node_selector.items():
        if room.labels.get(key) != value:
            return f"has no label {key}={value}"
    for taint in room.taints:
        if taint["effect"] in _BLOCKING and not any(
            tolerates(toleration, taint) for toleration in wish.tolerations
        ):
            return f"taint {taint['key']}"
    return ""


def tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    """As the scheduler reads it: without an effect all of them, without a key (operator Exists) every taint."""
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    key, same = toleration.get("key"), toleration.get("key") == taint["key"]
    if toleration.get("operator", "Equal") == "Exists":
        return not key or same
    return same and toleration.get("value", "") == taint.get("value", "")


def fit(room: Room, wish: Wish) -> Fit:
    """How many of the pool's sandboxes the node takes, were there no others."""
    if why := refusal(room, wish):
        return Fit(node=room.name, number=0, short=why)
    number, short = wish.each.times_in(room.free)
    for have, name in ((room.pods, "pods"), (room.addresses, "addresses")):
        if have is not None and max(0, have) < number:
            number, short = max(0, have), name
    return Fit(node=room.name, number=number, short=short)


def spread(wishes: Iterable[Wish], nodes: Sequence[Room]) -> dict[str, list[Fit]]:
    """Pool → how many of its sandboxes go where, the pools with the fewest nodes first, then the largest.

    The scheduler may find a better way; it finds none for a pool that has none of its own here.
    """
    left = {room.name: room for room in nodes}
    found: dict[str, list[Fit]] = {}
    for wish in sorted(wishes, key=lambda wish: _choosiness(wish, nodes)):
        wanted, placed = wish.number, list[Fit]()
        for room in sorted(left.values(), key=lambda room: (-fit(room, wish).number, room.name)):
            possible = fit(room, wish)
            taken = min(wanted, possible.number)
            wanted -= taken
            placed.append(msgspec.structs.replace(possible, number=taken))
            left[room.name] = _without(room, wish.each, taken)
        found[wish.pool] = placed
    return found


def beside_pulls(nodes: Sequence[Room], pulled: Sequence[Wish]) -> list[Room]:
    """What is left beside the pods that pull a pool's images: one for each such pool on each node that may run it."""
    return [
        _without(room, Amounts(), sum(not refusal(room, wish) for wish in pulled)) for room in nodes
    ]


def beyond_quotas(
    quotas: Iterable[Object], wishes: Sequence[Wish], mine: Sequence[Object]
) -> Iterator[str]:
    """ResourceQuotas of the namespace that are too small for all wishes; what `mine` (pods) use of them comes free."""
    total = sum((wish.each * wish.number for wish in wishes), Amounts())
    wanted = _by_quota_key(total, sum(wish.number for wish in wishes))
    given_back = _by_quota_key(
        sum((requests(pod["spec"]) for pod in mine), Amounts()),
        len(mine),
    )
    for quota in quotas:
        status = quota.get("status") or {}
        for key, most in (status.get("hard") or {}).items():
            name = key.removeprefix("requests.").removeprefix("count/")
            if name in wanted:
                used = parse((status.get("used") or {}).get(key, 0), key)[0] - given_back[name]
                if (short := used + wanted[name] - parse(most, key)[0]) > 0:
                    problem = (
                        f"{key} {most} is {short.normalize():f} too small for all pods at once"
                    )
                    yield f"ResourceQuota {quota['metadata']['name']}: {problem}; raise it, or ask for less"


def _by_quota_key(amounts: Amounts, pods: int) -> dict[str, Decimal]:
    return {
        "pods": Decimal(pods),
        "cpu": Decimal(amounts.cpu_millis) / 1000,
        "memory": Decimal(amounts.memory_mib * 2**20),
        "ephemeral-storage": Decimal(amounts.disk_mib * 2**20),
    }


def _choosiness(wish: Wish, nodes: Sequence[Room]) -> tuple[int, int, str]:
    takers = sum(fit(room, wish).number > 0 for room in nodes)
    return takers, -wish.each.memory_mib, wish.pool


def _without(room: Room, each: Amounts, number: int) -> Room:
    return msgspec.structs.replace(
        room,
        free=room.free - each * number,
        pods=room.pods - number,
        addresses=None if room.addresses is None else room.addresses - number,
    )
