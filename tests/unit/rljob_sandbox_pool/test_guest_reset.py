"""What a reset notices that no folder shows."""

import resource

import pytest

from rljob_sandbox_pool.guest.reset import Snapshot


@pytest.mark.parametrize("name", ["CORE", "DATA", "MEMLOCK", "MSGQUEUE", "NOFILE", "STACK"])
def test_any_limit_of_the_guest_that_was_changed_is_evidence(name: str) -> None:
    kind = getattr(resource, f"RLIMIT_{name}")
    soft, hard = before = resource.getrlimit(kind)
    pristine = Snapshot.take([])
    lower = {-1: 1 << 40, 0: min(hard, 1) if hard >= 0 else 1}.get(soft, soft - 1)
    try:
        resource.setrlimit(kind, (lower, hard))
        found = pristine.differences(Snapshot.take([]))
    finally:
        resource.setrlimit(kind, before)
    assert found == ["the guest's own limits, priority or scheduling have changed"]
    assert not pristine.differences(Snapshot.take([]))
