"""Under which name a job's keys stand."""

from __future__ import annotations

from pathlib import Path

from rljob.api.load import load
from rljob.ledger.types import LedgerConfig

MANIFEST = Path(__file__).parents[4] / "examples" / "simulated" / "rljob.yaml"


def test_a_job_without_a_namespace_is_named_by_its_name() -> None:
    assert load(MANIFEST, ["metadata.name=one"]).ledger_name == "one"


def test_jobs_of_the_same_name_in_two_namespaces_have_ledgers_of_their_own() -> None:
    job = load(MANIFEST, ["metadata.name=one", "metadata.namespace=team-a"])
    assert job.ledger_name == "team-a.one"
    assert LedgerConfig.from_job(job, 3, "d").job == "team-a.one"
