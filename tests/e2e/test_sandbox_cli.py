"""`rljob sandbox` against a real cluster, through the API server alone: what a person with a kubeconfig does."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.harness.cluster import wait_until
from tests.harness.sandbox_pools import Pools


class Shell:
    """The command line of one person: a kubeconfig, a folder of claims, a namespace."""

    def __init__(self, pools: Pools, folder: Path, kubeconfig: Path | None = None) -> None:
        self.pools, self.folder = pools, folder
        self.kubeconfig = kubeconfig or pools.cluster.kubeconfig

    def try_run(
        self, command: str, *args: str, stdin: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        program = [sys.executable, "-m", "rljob.cli.main", "sandbox", command]
        return subprocess.run(
            [*program, "--state", str(self.folder), *args],
            input=stdin,
            capture_output=True,
            timeout=120,
            check=False,
            env={"KUBECONFIG": str(self.kubeconfig), "PATH": "/usr/bin:/bin"},
        )

    def run(self, *args: str) -> str:
        done = self.try_run(*args)
        assert done.returncode == 0, (args, done.stderr)
        return done.stdout.decode()


@pytest.fixture
def shell(pools: Pools, tmp_path: Path) -> Shell:
    pools.make("default", warm=1, max=2)
    pools.wait_ready("default", 1)
    wait_until(
        "its token", lambda: pools.cluster.get("Secret", "default-claims", pools.namespace), 30
    )
    return Shell(pools, tmp_path / "state")


def test_a_sandbox_is_claimed_used_and_given_back(shell: Shell, tmp_path: Path) -> None:
    place = ["-n", shell.pools.namespace]
    assert "default" in shell.run("pools", *place, "--pool", "default")
    claim = shell.run("claim", "default", *place, "--env", "A=b c").strip()
    assert shell.run("exec", claim, "--", "sh", "-c", "echo $A; pwd") == "b c\n/workspace\n"
    failed = shell.try_run("exec", claim, "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (failed.returncode, failed.stdout, failed.stderr) == (7, b"out\n", b"err\n")
    assert shell.try_run("exec", claim, "--timeout", "1", "--", "sleep", "60").returncode == 124
    binary = bytes(range(256)) * 100
    assert shell.try_run("exec", "-i", claim, "--", "cat", stdin=binary).stdout == binary
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "deep" / "run.sh").chmod(0o755)
    (tree / "large").write_bytes(b"x" * 5_000_000)
    (tree / "link").symlink_to("deep/run.sh")
    shell.run("cp", str(tree), f"{claim}:/workspace/tree")
    assert shell.run("exec", claim, "--", "/workspace/tree/link") == "ran\n"
    shell.run("cp", f"{claim}:/workspace/tree", str(tmp_path / "back"))
    assert (tmp_path / "back" / "large").read_bytes() == b"x" * 5_000_000
    assert (tmp_path / "back" / "link").readlink() == Path("deep/run.sh")
    assert (tmp_path / "back" / "deep" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert claim in shell.run("ls", *place, "--pool", "default")
    shell.run("release", claim)
    assert claim not in shell.run("ls", *place, "--pool", "default")
    assert shell.try_run("exec", claim, "--", "true").returncode == 2


def test_bad_input_is_one_line_that_names_the_fix(shell: Shell) -> None:
    for args, words in [
        (("claim", "none", "-n", shell.pools.namespace), b"none"),
        (("claim", "default", "-n", "no-such-namespace"), b"no-such-namespace"),
        (("pools", "-n", shell.pools.namespace, "--job", "none"), b"none"),
    ]:
        done = shell.try_run(*args)
        assert done.returncode == 2, (args, done)
        assert words in done.stderr
        assert done.stderr.count(b"\n") == 1, done.stderr


def test_a_user_needs_the_charts_role_and_no_more_than_edit(shell: Shell, tmp_path: Path) -> None:
    cluster, namespace, system = shell.pools.cluster, shell.pools.namespace, shell.pools.system
    user = f"{namespace}:default"
    binding = ["create", "rolebinding", "user", "--serviceaccount", user]
    cluster.kubectl(*binding, "-n", namespace, "--clusterrole", "edit")
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    token = cluster.kubectl("create", "token", "default", "-n", namespace).strip()
    config["users"] = [
        {"name": entry["name"], "user": {"token": token}} for entry in config["users"]
    ]
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    person = Shell(shell.pools, shell.folder, tmp_path / "kubeconfig")
    refused = person.try_run("claim", "default", "-n", namespace)
    assert refused.returncode == 2
    assert b"rljob-sandbox-user" in refused.stderr
    binding[2] = namespace
    cluster.kubectl(*binding, "-n", system, "--role", "rljob-sandbox-user")
    try:
        claim = person.run("claim", "default", "-n", namespace).strip()
        assert person.run("exec", claim, "--", "echo", "in") == "in\n"
        person.run("release", claim)
    finally:
        cluster.kubectl("delete", "rolebinding", namespace, "-n", system)


def test_who_holds_what_is_to_be_seen_with_kubectl(shell: Shell) -> None:
    claim = shell.run("claim", "default", "-n", shell.pools.namespace).strip()
    assert claim

    def shown() -> bool:
        columns = ["-L", "rljob.dev/state,rljob.dev/holder-job"]
        text = shell.pools.cluster.kubectl("get", "pods", "-n", shell.pools.namespace, *columns)
        return "claimed" in text

    wait_until("the label", shown, 30)
    shell.run("release", claim)
    wait_until("no label", lambda: not shown(), 30)


def test_pods_of_pools_that_are_no_more_are_reaped(shell: Shell) -> None:
    cluster, namespace = shell.pools.cluster, shell.pools.namespace
    ((name, pod),) = shell.pools.pods().items()
    orphan = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "orphan",
            "namespace": namespace,
            "labels": pod["metadata"]["labels"],
        },
        "spec": {
            key: pod["spec"][key]
            for key in ("securityContext", "containers", "volumes", "hostname")
        },
    }
    container = orphan["spec"]["containers"][0]
    container["volumeMounts"] = [
        mount for mount in container["volumeMounts"] if "serviceaccount" not in mount["mountPath"]
    ]
    cluster.apply(orphan)
    assert "orphan" in shell.run("reap", "--dry-run", "-n", namespace)
    assert cluster.get("Pod", "orphan", namespace)
    shell.run("reap", "-n", namespace)
    wait_until(
        "it goes",
        lambda: (
            (found := cluster.get("Pod", "orphan", namespace)) is None
            or found["metadata"].get("deletionTimestamp")
        ),
        60,
    )
    assert cluster.get("Pod", name, namespace)
