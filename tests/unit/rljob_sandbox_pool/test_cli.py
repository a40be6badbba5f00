"""`rljob sandbox`: whatever is wrong is one line with where, what and what to do, and exit code 2; nothing is left."""

import base64
import fcntl
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import structlog

from rljob import labels, sandbox_client
from rljob.cli.main import main
from rljob.errors import MachineError, UserError
from rljob.kube.config import KubeConfig
from rljob.kube.resources import Object, by_kind
from rljob.sandbox import ClaimAnswer
from rljob.testing.kube import FakeKube
from rljob_sandbox_pool.cli import execute
from rljob_sandbox_pool.cli.reap import in_cluster
from rljob_sandbox_pool.cli.state import Served, State, StoredClaim, Where
from rljob_sandbox_pool.cli.where import Options, connect

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(tmp_path / "state")


@pytest.fixture
def cli(
    state: State, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Cli]:
    """Runs a command; exit code, stdout, stderr."""
    logging = structlog.get_config()
    monkeypatch.setattr(sandbox_client, "LAST_RELEASES_SECONDS", 0.01)
    monkeypatch.setenv("RLJOB_SANDBOX_STATE", str(state.folder))
    for name in ("RLJOB_SANDBOX_URL", "RLJOB_SANDBOX_TOKEN", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(state.folder / "home"))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rljob", "sandbox", *arguments])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    yield run
    structlog.configure(**logging)


def stored(
    url: str = "http://127.0.0.1:1", token: str = "t", expires: float | None = None
) -> StoredClaim:
    return StoredClaim(
        pool="swe",
        image="",
        where=Where(url=url, token=token),
        claim=ClaimAnswer("id", "box", url, "secret", "nonce"),
        expires=time.time() + 100 if expires is None else expires,
    )


NOWHERE = "sandbox: no pools are served here; start rljob sandbox serve, or give --url or -n\n"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("serve -f no.yaml", "no.yaml: there is no such file; check the path"),
        (
            "serve -f no.yaml --warm 1",
            "--warm: has no effect beside a file; write it into the file",
        ),
        ("serve --max 0", "serve: max: 0 is out of range; it must be ≥ 1"),
        ("serve --warm -1", "serve: warm: -1 is out of range; it must be ≥ 0"),
        ("serve --warm 5 --max 4", "serve: manifest: warm 5 is above max 4"),
        ("serve --name Not_A_Name", "does not have the form it needs"),
        ("serve --port 99999", "--port: 99999 is no port; use 1 to 65535, or 0 for any free one"),
        ("pools", NOWHERE),
        ("ls", NOWHERE),
        ("claim swe", NOWHERE),
        ("pools --url nonsense", "--url: not an http:// or https:// address: 'nonsense'; give"),
        (
            "pools --url http://\udcff",
            "--url: not an http:// or https:// address: 'http://\\udcff'",
        ),
        ("pools --url http://h:99999", "--url: not an http:// or https:// address"),
        ("pools --url http://h:1", "--token: there is no token; give --token or set RLJOB_SANDBOX"),
        ("pools --url http://h:1 --token a\nb", "--token: holds what no token does; give --token"),
        ("pools --url http://h:1 -n team", "--url: an address and a namespace; give --url or -n"),
        ("pools -n team", "-n: does not say whose sandboxes; add --job JOB or --pool POOL"),
        ("pools --job j", "--job: has no effect without a namespace; add -n NAMESPACE"),
        ("pools --pool p", "--pool: has no effect without a namespace; add -n NAMESPACE"),
        ("pools -n team --job j", "kubernetes: no cluster is configured; set KUBECONFIG"),
        ("claim swe -n team", "kubernetes: no cluster is configured; set KUBECONFIG"),
        ("claim swe --env FOO", "--env: 'FOO' is no variable; write NAME=VALUE"),
        ("claim swe --env =x", "--env: '=x' is no variable; write NAME=VALUE"),
        ("claim swe --ttl 0", "--ttl: 0 is out of range; it must be between 1 and 604800"),
        ("claim swe --ttl nan", "--ttl: nan is out of range; it must be between 1 and 604800"),
        ("claim swe --idle 0", "--idle: 0 is out of range; it must be between 1 and 604800"),
        ("claim swe --priority 101", "--priority: 101 is out of range; it must be between -100"),
        ("claim swe --timeout 0", "--timeout: 0 is out of range"),
        ("exec none -- true", "claim: there is no claim 'none'; known here: known-1, old-1"),
        ("exec knwn-1 -- true", "claim: there is no claim 'knwn-1'; did you mean known-1?"),
        ("exec ../serve -- true", "claim: there is no claim '../serve'"),
        ("exec old-1 -- true", "claim old-1: its time to live is over; make another one"),
        ("exec broken-1 -- true", "broken-1.json: cannot be used"),
        ("exec known-1", "exec: there is no command; write it after --: exec CLAIM -- ls -l"),
        ("exec known-1 --timeout 0 -- true", "--timeout: 0 is out of range"),
        ("exec known-1 --env FOO -- true", "--env: 'FOO' is no variable; write NAME=VALUE"),
        ("exec known-1 -- true", "sandbox: sandbox box: cannot connect to http://127.0.0.1:1"),
        ("exec known-1 -t -- bash", "-t: stdin is no terminal; use -i to send it"),
        ("cp a b", "cp: one side is in a sandbox; write it as CLAIM:/path"),
        ("cp known-1:a known-1:b", "cp: one side is in a sandbox; write it as CLAIM:/path"),
        ("cp none:a b", "claim: there is no claim 'none'"),
        ("cp no-such-file known-1:/tmp/x", "no-such-file: No such file or directory"),
        ("cp known-1:/tmp/x here", "sandbox: sandbox box: cannot connect"),
        ("release", "claim: says not which; name the claims, or give --all"),
        ("release known-1 --all", "claim: names and --all; name the claims, or give --all"),
        ("release none", NOWHERE),
        (
            "release known-1",
            "claim known-1: the broker does not answer; try again, or: rljob sandbox reap",
        ),
        ("reap -n team", "kubernetes: no cluster is configured; set KUBECONFIG"),
    ],
)
def test_bad_input_is_one_line_with_its_fix(
    cli: Cli, state: State, command: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rljob_sandbox_pool.cli.state.secrets.token_hex", lambda size: "1")
    for pool, claim in (("known", stored()), ("old", stored(expires=1.0)), ("broken", stored())):
        state.keep(msgspec.structs.replace(claim, pool=pool))
    (state.folder / "claims" / "broken-1.json").write_text("{}")
    code, out, err = cli(*command.split(" "))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert line.rstrip("\n") in err


@pytest.mark.parametrize("token", ["\u00fc", "a\nb", " x ", "\udcff"])
def test_a_token_that_no_header_carries_opens_no_pool(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("RLJOB_SANDBOX_TOKEN", token)
    fix = "use letters and digits, or unset it"
    told = f"RLJOB_SANDBOX_TOKEN: holds what no token does; {fix}\n"
    assert cli("serve") == (2, "", told)
    assert "--token: holds what no token does" in cli("pools", "--url", "http://h:1")[2]


def test_input_that_does_not_end_has_the_time_of_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"begun")
    with os.fdopen(reader) as stdin, os.fdopen(writer, "w"):
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(UserError, match=r"^stdin: has not ended within 0\.1 s; end it"):
            execute._stdin(0.1)


def test_a_state_folder_that_cannot_be_is_one_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = cli("serve", "--state", str(tmp_path / "file" / "x"))
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be used (Not a directory); remove it, or use --state DIR" in err


def test_two_cannot_serve_in_one_state_folder(cli: Cli, state: State) -> None:
    with state.serving():
        code, _, err = cli("serve")
    assert (code, err.count("\n")) == (2, 1)
    assert "pools are served here already; stop that, or use --state" in err


def test_a_broker_that_is_not_there_is_one_line(
    cli: Cli, state: State, free_port: Callable[[], int]
) -> None:
    with state.serving():
        state.tell(Served(f"http://127.0.0.1:{free_port()}", "t", os.getpid()))
        code, _, err = cli("pools")
    assert (code, err.count("\n")) == (2, 1)
    assert "sandbox: broker: cannot connect to http://127.0.0.1:" in err


# ── the state folder ──


def test_what_is_written_is_for_its_owner_alone(state: State) -> None:
    with state.serving():
        state.tell(Served("u", "t", 1))
        name = state.keep(stored())
        for path in ("serve.json", f"claims/{name}.json"):
            assert stat.S_IMODE((state.folder / path).stat().st_mode) == 0o600
        assert stat.S_IMODE(state.folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((state.folder / "claims").stat().st_mode) == 0o700
        assert state.served() == Served("u", "t", 1)
    assert state.served() is None
    assert state.claim(name) == stored(expires=state.claim(name).expires)


def killed(state: State) -> None:
    """A `serve` that ended without a chance to clean up."""
    with state.serving():
        state.tell(Served("u", "dead", 7))
        left = (state.folder / "serve.json").read_bytes()
    (state.folder / "serve.json").write_bytes(left)
    (state.folder / "work").mkdir()


def test_reap_removes_what_a_killed_pool_manager_left(cli: Cli, state: State) -> None:
    killed(state)
    dead, alive = state.keep(stored(token="dead")), state.keep(stored(token="other"))
    assert state.served() is None
    told = f"claim {dead} {{}}\nstate of pid 7 {{}}\n"
    assert cli("reap", "--dry-run") == (0, told.replace("{}", "would be removed"), "")
    assert set(state.claims()) == {dead, alive}
    assert cli("reap") == (0, told.replace("{}", "removed"), "")
    assert set(state.claims()) == {alive}
    assert sorted(path.name for path in state.folder.iterdir()) == ["claims", "serve.lock"]
    assert cli("reap") == (0, "", "")


def test_the_next_to_serve_forgets_the_claims_of_one_that_was_killed(state: State) -> None:
    killed(state)
    dead, alive = state.keep(stored(token="dead")), state.keep(stored(token="other"))
    with state.serving():
        assert dead not in state.claims()
        assert alive in state.claims()


def test_release_gives_back_what_it_can_before_it_complains(cli: Cli, state: State) -> None:
    state.keep(stored())
    over = state.keep(stored(expires=1.0))
    code, _, err = cli("release", "--all")
    assert (code, err.count("\n")) == (2, 1)
    assert "the broker does not answer" in err
    assert over not in state.claims()


def test_reap_leaves_what_is_served_alone(cli: Cli, state: State) -> None:
    with state.serving():
        state.tell(Served("u", "t", 1))
        name = state.keep(stored())
        assert cli("reap") == (0, "", "")
        assert set(state.claims()) == {name}
        assert state.served() is not None


def test_reap_forgets_claims_whose_time_is_over(cli: Cli, state: State) -> None:
    name = state.keep(stored(expires=1.0))
    assert cli("reap") == (0, f"claim {name} removed\n", "")
    assert state.claims() == {}


def test_a_lock_that_outlives_nobody_says_who_lives(state: State) -> None:
    assert not state.is_served()
    with state.serving():
        assert state.is_served()
        with pytest.raises(MachineError), state.serving():
            pass
        assert state.is_served()
    with (state.folder / "serve.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_exec_needs_the_modules_of_no_manager() -> None:
    import subprocess

    code = (
        "import sys\nfrom rljob_sandbox_pool.cli import execute, claims, copy\n"
        "heavy = {'pydantic', 'httpx', 'fastapi', 'rljob_sandbox_pool.pool', 'prometheus_client'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ── a cluster ──


def api(kind: str, name: str, uid: str, *owners: tuple[str, str], pool: str = "swe") -> Object:
    """An object of the namespace `team` that carries a pool's label."""
    resource = by_kind(kind)
    component = {"Secret": "claims", "DaemonSet": "pre-pull"}.get(kind, "sandbox")
    references = [{"kind": owner, "name": "x", "uid": of} for owner, of in owners]
    return {
        "apiVersion": resource.api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": uid,
            "labels": {labels.POOL: pool, labels.COMPONENT: component},
            "ownerReferences": references,
        },
    }


ALIVE = ("SandboxPool", "pool-uid")
GONE = ("SandboxPool", "gone-uid")


async def test_reap_in_a_cluster_takes_what_no_living_pool_or_job_owns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = FakeKube()
    pool = api("SandboxPool", "swe", "pool-uid")
    for obj in (
        {**pool, "metadata": {**pool["metadata"], "labels": {}}},
        api("Pod", "of-a-living-pool", "1", ALIVE),
        api("Pod", "of-a-pool-that-is-gone", "2", GONE),
        api("Pod", "of-nobody", "3"),
        api("Pod", "of-another-object", "4", ("DaemonSet", "any")),
        api("Pod", "of-a-pool-of-the-same-name", "5", ("SandboxPool", "older-uid")),
        api("NetworkPolicy", "gone", "6", GONE),
        api("NetworkPolicy", "alive", "7", ALIVE),
        api("Secret", "gone-claims", "8", GONE),
        api("Secret", "swe-claims", "9", ALIVE),
    ):
        fake.put(obj)
    orphans = [
        "Pod team/of-a-pool-of-the-same-name",
        "Pod team/of-a-pool-that-is-gone",
        "Pod team/of-nobody",
        "NetworkPolicy team/gone",
        "Secret team/gone-claims",
    ]
    kube = fake.client()
    await in_cluster(kube, "team", dry_run=True)
    assert capsys.readouterr().out.splitlines() == [f"{each} would be removed" for each in orphans]
    assert fake.writes == []
    await in_cluster(kube, "team", dry_run=False)
    assert capsys.readouterr().out.splitlines() == [f"{each} removed" for each in orphans]
    assert len(fake.writes) == len(orphans)
    await in_cluster(kube, "team", dry_run=False)
    assert capsys.readouterr().out == ""
    await kube.aclose()


@pytest.mark.parametrize(
    ("options", "secret"), [({"job": "j"}, "j-secrets"), ({"pool": "swe"}, "swe-claims")]
)
async def test_in_a_cluster_the_token_comes_from_the_secret_of_job_or_pool(
    state: State, options: dict[str, str], secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeKube()
    data = {"token": base64.b64encode(b"the token").decode()}
    fake.put({**api("Secret", secret, "1"), "data": data})
    config = KubeConfig("http://fake")
    monkeypatch.setattr("rljob.kube.config.load", lambda: config)
    monkeypatch.setattr("rljob.kube.client.KubeClient", lambda config, user_agent: fake.client())
    where = Options(state, namespace="team", **options).where()
    assert where == Where(namespace="team", secret=secret, operator_namespace="rljob-system")
    async with connect(where) as client:
        assert client is not None
    with pytest.raises(MachineError, match="there is no Secret elsewhere/"):
        async with connect(msgspec.structs.replace(where, namespace="elsewhere")):
            pass
    fake.put({**api("Secret", secret, "1"), "data": {}})
    with pytest.raises(MachineError, match=f"Secret team/{secret} holds no token"):
        async with connect(where):
            pass
