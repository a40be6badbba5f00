import pytest

from rljob.ledger import Ledger, LedgerConfig, Report
from rljob.testing.clock import ManualClock
from rljob_operator.ledgers import Address, Ledgers


@pytest.fixture
async def ledger(valkey_url, job_name):
    async with await Ledger.connect(valkey_url, job_name) as made:
        config = LedgerConfig(
            job=job_name, group_size=2, groups_per_step=2, steps=10, max_staleness=1,
            max_concurrent_episodes=10, num_rows=5, data_hash="abc",
        )  # fmt: skip
        await made.initialise(config)
        yield made


@pytest.fixture
async def ledgers():
    made = Ledgers(ManualClock())
    yield made
    await made.aclose()


async def test_a_look_is_kept_for_a_few_seconds_and_then_made_again(ledgers, ledger, valkey_url):
    address = Address(valkey_url, ledger.job)
    assert (await ledgers.view("u", address)).snapshot.incarnation == 0
    await ledger.open_trainer("t")
    assert (await ledgers.view("u", address)).snapshot.incarnation == 0
    await ledgers._clock.advance(3.5)
    view = await ledgers.view("u", address)
    assert (view.snapshot.incarnation, view.age_seconds, view.error) == (1, 0, "")
    assert ledgers.last("u") is view.snapshot


async def test_a_store_that_is_away_leaves_the_last_view_with_its_age_and_the_reason(
    ledgers, ledger, valkey_url, monkeypatch
):
    monkeypatch.setattr("rljob_operator.ledgers.CALL_SECONDS", 0.1)
    await ledgers.view("u", Address(valkey_url, ledger.job))
    await ledgers._clock.advance(4)
    view = await ledgers.view("u", Address("redis://127.0.0.1:1/0", ledger.job))
    assert view.snapshot is not None
    assert view.age_seconds == 4
    assert "no answer from the store" in view.error
    entry = ledgers._entries["u"]
    assert entry.next_look == pytest.approx(6.0), "and a pause before the next look"
    view = await ledgers.view("u", Address(valkey_url, ledger.job))
    assert view.error == "", "a new address is looked at at once"


async def test_a_store_that_is_not_asked_has_the_last_view_and_no_error(
    ledgers, ledger, valkey_url
):
    assert ledgers.unasked("u").snapshot is None
    await ledgers.view("u", Address(valkey_url, ledger.job))
    view = ledgers.unasked("u")
    assert (view.snapshot is None, view.error) == (False, "")


async def test_destroying_removes_every_key_of_the_job_alone(ledgers, ledger, valkey_url):
    async with await Ledger.connect(valkey_url, "other") as other:
        await other.report("x", Report(waiting_for="nothing"))
    assert await ledgers.destroy(Address(valkey_url, ledger.job)) == ""
    keys = await ledger._store.command("KEYS", "*")
    assert keys
    assert all(b"{other}" in key for key in keys)


async def test_destroying_what_cannot_be_reached_says_so_in_time(ledgers, monkeypatch):
    monkeypatch.setattr("rljob_operator.ledgers.DESTROY_SECONDS", 0.2)
    assert "0.2 s" in await ledgers.destroy(Address("redis://127.0.0.1:1/0", "j"))


async def test_a_url_that_is_none_is_an_error_of_the_view(ledgers):
    view = await ledgers.view("u", Address("http://nonsense", "j"))
    assert "spec.store.redis.url" in view.error


@pytest.mark.parametrize(
    "rest", ["host:1?unknown=1", "host:1?ssl_cert_reqs=x", ":s3cret/word@host"]
)
async def test_a_url_that_cannot_be_read_is_an_error_without_its_password(ledgers, rest):
    address = Address(f"rediss://{rest}", "j")
    for error in ((await ledgers.view("u", address)).error, await ledgers.destroy(address)):
        assert error.startswith("spec.store.redis.url: is no URL of a Redis")
        assert "s3cret" not in error


async def test_forgetting_closes_the_connection(ledgers, ledger, valkey_url):
    await ledgers.view("u", Address(valkey_url, ledger.job))
    connected = ledgers._entries["u"].ledger
    await ledgers.forget("u")
    assert connected._store._closed
    assert ledgers.last("u") is None
