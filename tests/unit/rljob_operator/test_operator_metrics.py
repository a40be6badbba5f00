from prometheus_client import CollectorRegistry, generate_latest

from rljob_operator.operator_metrics import JOB_GAUGES, JobCollector
from tests.unit.rljob_operator.conftest import snapshot


def job(name, phase=None):
    metadata = {"name": name, "namespace": "ns", "uid": name}
    return {"metadata": metadata} | ({"status": {"phase": phase}} if phase else {})


def scrape(*facts):
    registry = CollectorRegistry()
    registry.register(JobCollector(lambda: facts))
    return generate_latest(registry).decode()


def test_every_job_has_its_numbers_by_namespace_and_name():
    ledger = snapshot(step=3, counts={"completed": 8, "failed": 2, "running": 4}, reward_mean=0.5)
    text = scrape((job("a", "Running"), ledger), (job("b"), None))
    assert 'rljob_job_step{job="a",namespace="ns"} 3.0' in text
    assert 'rljob_job_completion_rate{job="a",namespace="ns"} 0.8' in text
    assert 'rljob_job_episodes_running{job="a",namespace="ns"} 4.0' in text
    assert 'rljob_operator_jobs{phase="Running"} 1.0' in text
    assert 'rljob_operator_jobs{phase="Unknown"} 1.0' in text
    assert 'job="b"' not in text, "of a ledger that was never seen there are no numbers"


def test_every_gauge_that_there_can_be_is_described():
    ledger = snapshot(
        counts={"completed": 1}, staleness={"mean": 1.0, "max": 2.0}, reward_mean=1.0,
        turns_recent=2.0, validation={0: 0.1, 8: 0.4},
    )  # fmt: skip
    text = scrape((job("a"), ledger))
    assert all(f"\n{name}{{" in text for name in JOB_GAUGES)
    assert 'rljob_job_validation_score{job="a",namespace="ns"} 0.4' in text


def test_no_jobs_are_no_series():
    assert "rljob_job" not in scrape()
