"""Quantities in the form in which the API server prints them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.errors import ManifestError
from rljob_operator.render.quantities import canonical, parse, resources, with_defaults
from tests.unit.rljob_operator.children_cases import PRINTED


@pytest.mark.parametrize(("given", "printed"), PRINTED.items())
def test_a_quantity_is_written_as_the_api_server_prints_it(given: str, printed: str) -> None:
    assert canonical(given, "x") == printed


@pytest.mark.parametrize("value", [2, 0.5])
def test_numbers_are_quantities_too(value: float) -> None:
    assert canonical(value, "x") == {2: "2", 0.5: "500m"}[value]


@pytest.mark.parametrize(
    "value", ["lots", "", "1 Gi", "1gi", "Gi", "1ki", True, None, [], "10E", "1e99"]
)
def test_what_is_no_quantity_is_refused_with_its_path(value: object) -> None:
    with pytest.raises(ManifestError, match=r"^spec\.x: .*(no quantity|too large)"):
        canonical(value, "spec.x")


suffixes = st.sampled_from(["", "m", "k", "M", "G", "Ki", "Mi", "Gi", "e2", "e-2"])


@given(st.integers(0, 10**6), suffixes)
def test_the_canonical_form_is_the_same_amount_and_its_own_canonical_form(
    number: int, suffix: str
) -> None:
    written = canonical(f"{number}{suffix}", "x")
    assert parse(written, "x")[0] == parse(f"{number}{suffix}", "x")[0]
    assert canonical(written, "x") == written


def test_a_person_who_names_gpus_still_gets_our_requests_for_the_rest() -> None:
    assert with_defaults({"limits": {"nvidia.com/gpu": 8}}, "x", cpu="250m", memory_mib=3072) == {
        "limits": {"nvidia.com/gpu": "8"},
        "requests": {"cpu": "250m", "memory": "3Gi"},
    }


def test_a_limit_of_ones_own_is_not_undercut_by_our_request() -> None:
    assert with_defaults(
        {"limits": {"memory": "1Gi", "cpu": 1}}, "x", cpu="2", memory_mib=3072
    ) == {"limits": {"memory": "1Gi", "cpu": "1"}}


FAULTS = {
    "x.limit": {"limit": {"cpu": 1}},
    "x.limits": {"limits": "lots"},
    "x.limits.cpu": {"limits": {"cpu": "-1"}},
    "x.limits.nvidia.com/gpu": {"limits": {"nvidia.com/gpu": "0.5"}},
    "x.requests.nvidia.com/gpu": {"requests": {"nvidia.com/gpu": 1}},
    "x.requests.memory": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}},
}


@pytest.mark.parametrize(("path", "given"), FAULTS.items())
def test_requirements_that_kubernetes_would_refuse_are_refused_with_their_path(
    path: str, given: dict[str, object]
) -> None:
    with pytest.raises(ManifestError) as caught:
        resources(given, "x")
    assert caught.value.path == path
