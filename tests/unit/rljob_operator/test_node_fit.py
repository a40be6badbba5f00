"""Which sandboxes nodes have room for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_operator.policies.amounts import Amounts
from rljob_operator.policies.node_fit import (
    Room,
    Wish,
    beyond_quotas,
    fit,
    refusal,
    requests,
    rooms,
    spread,
    tolerates,
)

EACH = Amounts(cpu_millis=100, memory_mib=256, disk_mib=64)


def node(name: str = "n", **spec: Any) -> dict[str, Any]:
    allocatable = {"cpu": "2", "memory": "4Gi", "ephemeral-storage": "10Gi", "pods": "20"}
    return {
        "metadata": {"name": name, "labels": {"disk": "fast"}},
        "spec": spec,
        "status": {"allocatable": allocatable},
    }


def pod(on: str = "n", *, phase: str = "Running", **spec: Any) -> dict[str, Any]:
    container = {"resources": {"requests": {"cpu": "500m", "memory": "1Gi"}}}
    return {
        "metadata": {"name": "x"},
        "spec": {"nodeName": on, "containers": [container], **spec},
        "status": {"phase": phase},
    }


def room(**fields: Any) -> Room:
    free = Amounts(cpu_millis=1000, memory_mib=1024, disk_mib=1024)
    return Room(**{"name": "n", "free": free, "pods": 50, "addresses": None, **fields})


def wish(number: int = 10, **fields: Any) -> Wish:
    return Wish(**{"pool": "p", "each": EACH, "number": number, **fields})


def test_what_runs_is_taken_off_and_what_has_ended_is_not() -> None:
    pods = [pod(), pod(phase="Succeeded"), pod(phase="Failed"), pod(on="other"), pod(on="")]
    (left,) = rooms([node()], pods)
    assert left.free == Amounts(cpu_millis=1500, memory_mib=3072, disk_mib=10240)
    assert (left.pods, left.addresses) == (19, None)


def test_a_nodes_range_of_addresses_bounds_its_pods() -> None:
    (left,) = rooms([node(podCIDR="10.0.0.0/28")], [pod(), pod(hostNetwork=True)])
    assert left.addresses == 16 - 3 - 1
    small = room(addresses=2)
    assert (fit(small, wish()).number, fit(small, wish()).short) == (2, "addresses")


def test_init_containers_run_before_the_others_and_sidecars_beside_them() -> None:
    def container(cpu: str, **more: Any) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu}}, **more}

    spec = {
        "containers": [container("100m"), container("200m")],
        "initContainers": [container("1"), container("50m", restartPolicy="Always")],
        "overhead": {"cpu": "10m"},
    }
    assert requests(spec).cpu_millis == 1010
    assert requests({**spec, "initContainers": spec["initContainers"][1:]}).cpu_millis == 360


@pytest.mark.parametrize(
    ("free", "number", "short"),
    [
        (Amounts(cpu_millis=350, memory_mib=9999, disk_mib=9999), 3, "cpu"),
        (Amounts(cpu_millis=9999, memory_mib=511, disk_mib=9999), 1, "memory"),
        (Amounts(cpu_millis=9999, memory_mib=9999, disk_mib=63), 0, "disk"),
        (Amounts(cpu_millis=-100, memory_mib=9999, disk_mib=9999), 0, "cpu"),
        (Amounts(cpu_millis=99_999, memory_mib=99_999, disk_mib=99_999), 50, "pods"),
    ],
)
def test_the_scarcest_resource_says_how_many_fit(free: Amounts, number: int, short: str) -> None:
    found = fit(room(free=free), wish())
    assert (found.number, found.short) == (number, short)


TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("toleration", "ok"),
    [
        ({"key": "gpu", "value": "yes"}, True),
        ({"key": "gpu", "value": "no"}, False),
        ({"key": "gpu"}, False),
        ({"key": "gpu", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": "cpu", "operator": "Exists"}, False),
    ],
)
def test_taints_are_tolerated_as_the_scheduler_reads_them(
    toleration: dict[str, Any], ok: bool
) -> None:
    assert tolerates(toleration, TAINT) is ok
    assert (refusal(room(taints=[TAINT]), wish(tolerations=[toleration])) == "") is ok


def test_a_cordoned_node_and_one_without_the_label_take_nothing() -> None:
    cordoned, plain = rooms([node("a", unschedulable=True), node("b")], [])
    assert refusal(cordoned, wish()) == "taint node.kubernetes.io/unschedulable"
    assert refusal(plain, wish(node_selector={"disk": "slow"})) == "has no label disk=slow"
    assert refusal(plain, wish(node_selector={"disk": "fast"})) == ""
    assert fit(cordoned, wish()).number == 0


def test_a_taint_that_only_prefers_refuses_nobody() -> None:
    assert refusal(room(taints=[{"key": "x", "effect": "PreferNoSchedule"}]), wish()) == ""


def test_the_pool_with_the_fewest_nodes_is_placed_first() -> None:
    nodes = [room(name="a", labels={"only": "here"}), room(name="b")]
    choosy = wish(4, pool="choosy", node_selector={"only": "here"})
    found = spread([wish(8, pool="any"), choosy], nodes)
    assert {
        pool: {each.node: each.number for each in fits if each.number}
        for pool, fits in found.items()
    } == {"choosy": {"a": 4}, "any": {"b": 4}}


@pytest.mark.parametrize(
    ("hard", "used", "said"),
    [
        ({"pods": "12"}, {"pods": "2"}, ""),
        ({"pods": "12"}, {"pods": "3"}, "pods 12 is 1 too small"),
        ({"requests.memory": "2Gi"}, {}, "requests.memory 2Gi is 536870912 too small"),
        ({"requests.cpu": "1"}, {"requests.cpu": "0.5"}, "requests.cpu 1 is 0.5 too small"),
        ({"limits.cpu": "0", "services": "0"}, {}, ""),
    ],
)
def test_quotas_of_the_namespace_are_bounds_too(
    hard: dict[str, str], used: dict[str, str], said: str
) -> None:
    quota = {"metadata": {"name": "q"}, "status": {"hard": hard, "used": used}}
    found = "".join(beyond_quotas([quota], [wish(10)], []))
    assert said in found
    assert bool(said) == bool(found)


def test_what_the_job_itself_uses_of_a_quota_comes_free() -> None:
    quota = {"metadata": {"name": "q"}, "status": {"hard": {"pods": "10"}, "used": {"pods": "3"}}}
    assert list(beyond_quotas([quota], [wish(10)], [pod()] * 3)) == []


AMOUNTS = st.builds(
    lambda cpu, memory, disk: Amounts(cpu_millis=cpu, memory_mib=memory, disk_mib=disk),
    st.integers(-500, 8000),
    st.integers(-500, 8000),
    st.integers(0, 8000),
)
ROOMS = st.lists(
    st.builds(
        lambda free, pods, addresses, labels: room(
            free=free, pods=pods, addresses=addresses, labels=labels
        ),
        AMOUNTS,
        st.integers(0, 60),
        st.none() | st.integers(-3, 60),
        st.sampled_from([{}, {"a": "1"}]),
    ),
    max_size=4,
).map(lambda found: [room_named(each, f"n{number}") for number, each in enumerate(found)])
WISHES = st.lists(
    st.tuples(st.integers(1, 900), st.integers(1, 900), st.integers(0, 80), st.booleans()),
    min_size=1,
    max_size=4,
)


def room_named(each: Room, name: str) -> Room:
    return room(
        name=name,
        free=each.free,
        pods=each.pods,
        addresses=each.addresses,
        labels=each.labels,
    )


@given(ROOMS, WISHES)
def test_no_node_is_ever_given_more_than_it_has(
    nodes: list[Room], made: list[tuple[int, int, int, bool]]
) -> None:
    wishes = [
        wish(
            number,
            pool=f"p{index}",
            each=Amounts(cpu_millis=cpu, memory_mib=memory),
            node_selector={"a": "1"} if choosy else {},
        )
        for index, (cpu, memory, number, choosy) in enumerate(made)
    ]
    placed = spread(wishes, nodes)
    assert placed.keys() == {each.pool for each in wishes}
    for each in nodes:
        there = [
            (one, found.number)
            for one in wishes
            for found in placed[one.pool]
            if found.node == each.name
        ]
        used = sum((one.each * number for one, number in there), Amounts())
        pods = sum(number for _, number in there)
        if pods:
            assert used.cpu_millis <= each.free.cpu_millis
            assert used.memory_mib <= each.free.memory_mib
            assert pods <= each.pods
            assert each.addresses is None or pods <= each.addresses
        assert all(not refusal(each, one) for one, number in there if number)
    for one in wishes:
        assert sum(found.number for found in placed[one.pool]) <= one.number


@given(ROOMS, st.integers(0, 80))
def test_one_pool_alone_gets_all_that_the_nodes_can_give(nodes: list[Room], number: int) -> None:
    placed = spread([wish(number)], nodes)["p"]
    possible = sum(fit(each, wish()).number for each in nodes)
    assert sum(found.number for found in placed) == min(number, possible)
