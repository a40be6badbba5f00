"""The whole process over an API server in memory; kopf's place is taken by an informer."""

import asyncio
import contextlib
import threading
import urllib.error
import urllib.request

import pytest

from rljob.errors import MachineError
from rljob.kube.config import KubeConfig
from rljob.kube.informer import Informer
from rljob.kube.lease import LeaderLease
from rljob.kube.resources import RLJOB
from rljob.testing.clock import ManualClock
from rljob.testing.kube import FakeKube
from rljob_operator import process as process_module
from rljob_operator.leader import LeaseGuard
from rljob_operator.process import MissingRightsError, OperatorProcess, Options
from tests.unit.rljob_operator.conftest import manifest
from tests.unit.rljob_operator.reconcile_bench import BROKER_KEY, CONFIG

KUBE = KubeConfig("http://fake")


class InformerWatch:
    """Tells of RLJobs without kopf."""

    def __init__(self, fake, hear):
        def change(old, new):
            hear("DELETED" if new is None else "MODIFIED", new or old)

        self.informer = Informer(fake.client(), RLJOB, on_change=change)
        self.stopped = asyncio.Event()
        self.error = None

    async def run(self):
        task = asyncio.ensure_future(self.informer.run())
        await self.stopped.wait()
        task.cancel()
        if self.error:
            raise self.error

    def stop(self):
        self.stopped.set()


class Replica:
    def __init__(self, fake, name, port=0):
        self.watches = []

        def watch(hear):
            self.watches.append(InformerWatch(fake, hear))
            return self.watches[-1]

        options = Options(CONFIG, BROKER_KEY, name, "127.0.0.1", port)
        self.process = OperatorProcess(options, KUBE, watch, transport=fake)
        self.task = asyncio.create_task(self.process.run())

    @property
    def leads(self):
        return bool(self.watches) and self.process._lease.leads and self.process._health.ready

    async def end(self):
        self.process.stop()
        return await self.task


@pytest.fixture
def fake():
    made = FakeKube()
    made.put(manifest() | {"metadata": {"name": "j", "namespace": "ns"}})
    return made


@pytest.fixture
async def replicas(fake):
    made = []

    def start(name, **options):
        made.append(Replica(fake, name, **options))
        return made[-1]

    yield start
    for replica in made:
        replica.process.stop()
    await asyncio.gather(*(replica.task for replica in made), return_exceptions=True)


async def until(true, seconds=60.0):
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


async def test_a_leader_brings_up_a_job_and_then_writes_nothing(fake, replicas):
    replica = replicas("a")
    await until(lambda: fake.get("StatefulSet", "j-store"))
    await until(lambda: (fake.get("RLJob", "j").get("status") or {}).get("phase") == "Pending")
    await asyncio.sleep(0.5)
    before = [write for write in fake.writes if "leases" not in write[1]]
    await asyncio.sleep(1.5)
    assert [write for write in fake.writes if "leases" not in write[1]] == before
    assert await replica.end() == 0


async def test_of_two_replicas_one_leads_and_the_other_takes_over_when_it_ends(fake, replicas):
    first = replicas("a")
    await until(lambda: first.leads)
    second = replicas("b")
    await until(lambda: second.process._health.ready)
    assert not second.leads
    uid = fake.get("RLJob", "j")["metadata"]["uid"]
    await until(lambda: fake.get("StatefulSet", "j-store"))
    store = fake.get("StatefulSet", "j-store")["metadata"]["uid"]
    assert await first.end() == 0
    await until(lambda: second.leads)
    fake.remove("Service", "j-store")
    await until(lambda: fake.get("Service", "j-store"))
    assert fake.get("StatefulSet", "j-store")["metadata"]["uid"] == store
    assert fake.get("RLJob", "j")["metadata"]["uid"] == uid


async def test_missing_rights_are_named_and_nothing_is_begun(fake, replicas):
    fake.denied = {("create", "jobs"), ("list", "pods")}
    with pytest.raises(MissingRightsError) as caught:
        await replicas("a").task
    assert caught.value.exit_code == 2
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert all(line.startswith("rbac: the operator may not ") for line in lines)
    assert not fake.writes


async def test_missing_crds_are_named(fake, replicas):
    fake.served -= {("rljob.dev", "sandboxpools")}
    with pytest.raises(MachineError, match=r"CRD sandboxpools\.rljob\.dev is not installed"):
        await replicas("a").task


async def test_a_watch_of_jobs_that_ends_ends_the_process_and_gives_the_lease_back(fake, replicas):
    replica = replicas("a")
    await until(lambda: replica.leads)
    replica.watches[0].error = RuntimeError("kopf ended")
    replica.watches[0].stop()
    with pytest.raises(RuntimeError, match="kopf ended"):
        await replica.task
    assert fake.get("Lease", "rljob-operator", "rljob-system")["spec"]["holderIdentity"] == ""


async def test_a_watch_that_ends_without_a_word_is_an_error_too(replicas):
    replica = replicas("a")
    await until(lambda: replica.leads)
    replica.watches[0].stop()
    with pytest.raises(RuntimeError, match="kopf ended, and may not"):
        await replica.task


async def test_a_lease_that_somebody_took_ends_the_process_at_once(fake, replicas, monkeypatch):
    ended = asyncio.Event()
    monkeypatch.setattr(process_module, "end_now", ended.set)
    replica = replicas("a")
    await until(lambda: replica.leads)
    lease = fake.get("Lease", "rljob-operator", "rljob-system")
    fake.put(lease | {"spec": lease["spec"] | {"holderIdentity": "b"}})
    async with asyncio.timeout(60):
        await ended.wait()
    with contextlib.suppress(RuntimeError):
        await replica.end()


async def test_health_readiness_and_metrics_are_served(fake, replicas, free_port):
    port = free_port()
    replica = replicas("a", port=port)
    await until(lambda: replica.leads)

    def get(path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    assert await asyncio.to_thread(get, "/healthz") == (200, "ok\n")
    assert await asyncio.to_thread(get, "/readyz") == (200, "ok\n")
    assert (await asyncio.to_thread(get, "/nothing"))[0] == 404
    _, text = await asyncio.to_thread(get, "/metrics")
    for name in ("leader 1.0", 'watch_age_seconds{kind="Pod"}', 'jobs{phase="', "reconciles_total"):
        assert f"rljob_operator_{name}" in text
    replica.process._health.problem = "the watch of Pod is silent"
    assert await asyncio.to_thread(get, "/healthz") == (503, "the watch of Pod is silent\n")
    replica.process._health.ready = False
    assert (await asyncio.to_thread(get, "/readyz"))[0] == 503


class Lease:
    leads = True


def test_the_guard_ends_the_process_when_the_lease_was_not_renewed():
    lease, lost = Lease(), threading.Event()
    guard = LeaseGuard(lease, lost.set)
    assert not lost.wait(0.7)
    lease.leads = False
    assert lost.wait(2)
    guard.close()


def test_the_guard_says_nothing_once_it_is_closed():
    lease, lost = Lease(), threading.Event()
    guard = LeaseGuard(lease, lost.set)
    guard.close()
    lease.leads = False
    assert not lost.wait(0.7)


async def test_no_two_candidates_ever_lead_whatever_fails():
    """Cuts and lost answers at every second; each candidate judges by its own clock."""
    fake, clock = FakeKube(), ManualClock()
    leases = [
        LeaderLease(fake.client(deadline_seconds=0.05), "ns", "l", name, clock=clock)
        for name in "abc"
    ]
    handovers, leader = 0, None

    async def candidate(lease):
        while True:
            await lease.acquire()
            with contextlib.suppress(Exception):
                await lease.hold()
            lease._ours = None

    tasks = [asyncio.create_task(candidate(lease)) for lease in leases]
    for second in range(200):
        fake.down = 40 <= second % 100 < 70
        if second % 17 == 0:
            fake.lose_answer("PUT", "leases")
        await clock.advance(1)
        await asyncio.sleep(0.02)
        leading = [lease.identity for lease in leases if lease.leads]
        assert len(leading) <= 1
        if leading and leading != leader:
            handovers, leader = handovers + 1, leading
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert handovers >= 1
