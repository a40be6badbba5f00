"""Who we are and where the API server is, and one line for each way in which that cannot be found out."""

import base64
import ssl
from pathlib import Path

import pytest
import yaml

from rljob.errors import MachineError
from rljob.kube import config


def kubeconfig(folder: Path, user: dict[str, str], **cluster: str) -> Path:
    path = folder / "config"
    document = {
        "current-context": "c",
        "contexts": [
            {"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "team"}},
        ],
        "clusters": [{"name": "k", "cluster": {"server": "https://h:6443/", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_kubeconfig_with_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kubeconfig(tmp_path, {"token": "t"}, **{"insecure-skip-tls-verify": True})
    monkeypatch.setenv("KUBECONFIG", str(path))
    found = config.load()
    assert (found.server, found.namespace) == ("https://h:6443", "team")
    assert found.token is not None
    assert found.token() == "t"
    assert found.tls is not None
    assert found.tls.verify_mode is ssl.CERT_NONE


def test_a_token_file_is_read_each_time(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one\n")
    found = config.load(kubeconfig(tmp_path, {"tokenFile": "token"}))
    assert found.token is not None
    assert found.token() == "one"
    (tmp_path / "token").write_text("two\n")
    assert found.token() == "two"


def test_a_pod_finds_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Path(ssl.get_default_verify_paths().openssl_cafile)
    if not authority.exists():
        pytest.skip("this machine has no certificate authorities")
    (tmp_path / "ca.crt").write_text(authority.read_text())
    (tmp_path / "token").write_text("t")
    (tmp_path / "namespace").write_text("rljob-system")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    found = config.in_cluster(tmp_path)
    assert (found.server, found.namespace) == ("https://[fd00::1]:443", "rljob-system")


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ({}, "neither a certificate nor a token"),
        ({"exec": "aws"}, "commands that make tokens are not run"),
        ({"client-certificate-data": "%%%", "client-key-data": ""}, "is no kubeconfig"),
        (
            {"client-certificate-data": base64.b64encode(b"x").decode(), "client-key-data": "eA=="},
            "cannot be read",
        ),
        ({"client-certificate": "missing.crt"}, "No such file"),
    ],
)
def test_who_we_are_must_be_said(tmp_path: Path, user: dict[str, str], words: str) -> None:
    with pytest.raises(MachineError, match=words):
        config.load(kubeconfig(tmp_path, user))


@pytest.mark.parametrize("text", ["", "a: [", "clusters: []", "current-context: x\ncontexts: []"])
def test_what_is_no_kubeconfig_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(MachineError, match="is no kubeconfig that can be used") as refused:
        config.load(tmp_path / "config")
    assert "\n" not in str(refused.value)


def test_no_cluster_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(MachineError, match="no cluster is configured; set KUBECONFIG"):
        config.load()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(MachineError, match="No such file"):
        config.load()
