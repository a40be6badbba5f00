"""What a sandbox may reach: exact addresses."""

from ipaddress import ip_address, ip_network

import pytest

from rljob.api.egress import dns_of_pod, rules
from rljob.api.sandboxpool_types import SandboxPoolSpec

GATEWAYS = {"podSelector": {"matchLabels": {"a": "b"}}}


def made(egress: str, **more: object) -> list[dict[str, object]]:
    pool = SandboxPoolSpec.model_validate({"egress": egress, **more})
    return rules(pool, dns_namespace="kube-system", gateways=GATEWAYS)


def is_public(address: str) -> bool:
    (public,) = [rule for rule in made("public") if "ports" not in rule]
    blocks = [peer["ipBlock"] for peer in public["to"]]  # type: ignore[attr-defined]
    where = ip_address(address)
    return any(
        where in ip_network(block["cidr"])
        and not any(where in ip_network(hole) for hole in block["except"])
        for block in blocks
    )


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "100.127.255.255", "169.254.169.254",
     "127.0.0.1", "224.0.0.1", "239.255.255.255", "255.255.255.255", "0.0.0.0", "198.18.0.1",
     "::1", "fc00::1", "fd12::1", "fe80::1", "ff02::1"],
)  # fmt: skip
def test_public_reaches_no_address_that_is_private(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "172.15.0.1", "172.32.0.1", "100.128.0.1", "223.255.255.255", "2606::1"]
)
def test_public_reaches_the_internet(address: str) -> None:
    assert is_public(address)


def test_every_hole_lies_in_its_block() -> None:
    (public,) = [rule for rule in made("public") if "ports" not in rule]
    for peer in public["to"]:  # type: ignore[attr-defined]
        block = ip_network(peer["ipBlock"]["cidr"])
        assert all(ip_network(hole).subnet_of(block) for hole in peer["ipBlock"]["except"])


def test_the_words_mean_what_they_say() -> None:
    assert made("none") == []
    (dns,) = made("dns")
    assert {(port["port"], port["protocol"]) for port in dns["ports"]} == {(53, "UDP"), (53, "TCP")}  # type: ignore[attr-defined]
    (gateway,) = made("gateway")
    assert gateway == {"to": [GATEWAYS], "ports": [{"port": 8001, "protocol": "TCP"}]}
    given = [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]
    assert made("custom", egressRules=given) == given


@pytest.mark.parametrize(
    ("egress", "asks"),
    [("none", False), ("gateway", False), ("dns", True), ("public", True), ("custom", True)],
)
def test_only_who_may_ask_the_dns_is_told_where_it_is(egress: str, asks: bool) -> None:
    pool = SandboxPoolSpec.model_validate({"egress": egress})
    assert (dns_of_pod(pool) == {}) is asks
