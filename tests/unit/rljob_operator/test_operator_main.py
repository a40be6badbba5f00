import asyncio
import itertools
import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import kopf
import pytest

from rljob import labels
from rljob.kube.config import KubeConfig
from rljob_operator.main import Forever, KopfThread, configure, handlers, main

KUBE = KubeConfig("http://fake")
IMAGES = (
    "images: {trainer: a, rollout_worker: b, services: c, engine: d, sandbox_pool: e, sandbox: f}\n"
)


def test_kopf_has_nothing_that_makes_it_write():
    registry = handlers(print, KUBE)
    for kind in ("_changing", "_spawning", "_indexing", "_webhooks"):
        assert not getattr(registry, kind).get_all_handlers()
    assert len(registry._watching.get_all_handlers()) == 1


def test_kopf_is_told_of_timeouts_and_keeps_its_hands_off_our_finalizer():
    settings = kopf.OperatorSettings()
    configure(settings)
    watching = settings.watching
    assert watching.inactivity_timeout < watching.server_timeout < watching.client_timeout
    assert settings.persistence.finalizer != labels.FINALIZER
    assert settings.scanning.disabled
    assert not settings.posting.enabled


def test_kopf_never_gives_up():
    pauses = list(itertools.islice(Forever(), 1000))
    assert max(pauses) <= 10
    assert pauses[0] < 1


@pytest.mark.parametrize(
    ("text", "said"), [("images: {}", "images"), (IMAGES, "broker_key"), ("", "operator.yaml")]
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, text, said):
    (tmp_path / "operator.yaml").write_text(text)
    code = main(["--config", str(tmp_path / "operator.yaml"), "--keys", str(tmp_path)])
    line = capsys.readouterr().err
    assert code == 2
    assert line.count("\n") == 1
    assert said in line


def test_the_operator_imports_nothing_heavy():
    names = ("torch", "kr8s", "numpy", "matplotlib", "uvicorn")
    script = f"import sys, rljob_operator.main; print([m for m in {names} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


RLJOBS = {
    "name": "rljobs",
    "singularName": "rljob",
    "kind": "RLJob",
    "namespaced": True,
    "verbs": ["list", "watch", "patch"],
}


class _Server(BaseHTTPRequestHandler):
    """As much of an API server as kopf asks for: discovery, a list, a watch."""

    protocol_version = "HTTP/1.0"
    requests: list[tuple[str, str]]

    def do_GET(self):
        self.requests.append(("GET", self.path))
        job = {
            "metadata": {"name": "j", "namespace": "ns", "uid": "u", "resourceVersion": "1"},
            "spec": {},
        }
        version = {"groupVersion": "rljob.dev/v1alpha1", "version": "v1alpha1"}
        path, _, query = self.path.partition("?")
        answers = {
            "/api": {"versions": ["v1"]},
            "/api/v1": {"resources": [RLJOBS | {"name": "namespaces", "kind": "Namespace"}]},
            "/apis": {
                "groups": [
                    {"name": "rljob.dev", "preferredVersion": version, "versions": [version]}
                ]
            },
            "/apis/rljob.dev/v1alpha1": {"resources": [RLJOBS]},
            "/apis/rljob.dev/v1alpha1/rljobs": {
                "metadata": {"resourceVersion": "1"},
                "items": [job],
            },
        }
        if "watch=true" in query:
            more = job | {"metadata": job["metadata"] | {"resourceVersion": "2"}}
            body = json.dumps({"type": "MODIFIED", "object": more}) + "\n"
        else:
            body = json.dumps(answers.get(path, {}))
        self.send_response(200 if path in answers else 404)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(body.encode())

    def do_PATCH(self):
        self.requests.append(("PATCH", self.path))
        self.do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    handler = type("Handler", (_Server,), {"requests": []})
    made = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    made.requests = handler.requests
    Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


async def test_real_kopf_tells_of_jobs_in_our_loop_writes_nothing_and_ends_when_told(server):
    heard, loop = [], asyncio.get_running_loop()

    def hear(kind, job):
        assert asyncio.get_running_loop() is loop
        heard.append((kind, job["metadata"]["resourceVersion"]))

    watch = KopfThread(hear, KubeConfig(f"http://127.0.0.1:{server.server_port}"), [])
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(60):
        while len(heard) < 2:
            await asyncio.sleep(0.05)
    assert heard[:2] == [(None, "1"), ("MODIFIED", "2")]
    watch.stop()
    async with asyncio.timeout(60):
        await task
    assert {method for method, _ in server.requests} == {"GET"}
