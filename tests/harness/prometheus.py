"""A real Prometheus (Debian's package) on loopback that scrapes a local run as PodMonitors have a cluster's scraped.

program("prometheus") ─► of PATH, else of the unpacked package under ~/.cache/rljob
Prometheus(folder) ─ scrape(targets) ─► .query_range(expression) · .query(expression)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import _die_with_parent, _free_port

CACHE = Path.home() / ".cache" / "rljob" / "debian"
START_SECONDS = 30
FETCH_SECONDS = 180
Series = dict[str, Any]
CONFIG: dict[str, Any] = {
    "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
    "scrape_configs": [
        {
            "job_name": "rljob",
            "honor_labels": True,
            "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": "1s"}],
        }
    ],
}


@cache
def program(name: str) -> str:
    """prometheus or promtool. Where they cannot be had, tests that need them are skipped, but never in CI."""
    unpacked = CACHE / "usr" / "bin" / name
    if found := shutil.which(name) or (unpacked.exists() and str(unpacked)):
        return found
    problem = _unpack("prometheus")
    if not problem:
        return str(unpacked)
    if os.environ.get("CI"):
        pytest.fail(problem)
    pytest.skip(problem)


def _unpack(package: str) -> str:
    """Bring a Debian package without installing it, so that no service starts; what went wrong, or nothing."""
    if not shutil.which("apt-get"):
        return f"{package} is missing and this is no Debian: install it"
    with tempfile.TemporaryDirectory() as folder:
        commands = [["apt-get", "download", "-q", package], ["apt-get", "update", "-q"]]
        for command in (commands[0], commands[1], commands[0]):
            run = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=FETCH_SECONDS
            )
            if archive := next(Path(folder).glob("*.deb"), None):
                CACHE.mkdir(parents=True, exist_ok=True)
                subprocess.run(["dpkg-deb", "-x", archive, CACHE], check=True, timeout=60)
                return ""
    return f"apt-get cannot bring {package}: {run.stderr.strip()[-300:]}"


class Prometheus:
    """One server in a folder of its own. A context manager."""

    def __init__(self, folder: Path, relabel: Sequence[dict[str, Any]] = ()) -> None:
        self._relabel = list(relabel)
        """What is done to the labels of every series."""
        self._folder, self._port = folder, _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.scrape([], {})

    def scrape(self, ports: list[int], labels: dict[str, str]) -> None:
        """From now on these ports of loopback, under these labels."""
        targets = [{"targets": [f"127.0.0.1:{port}" for port in sorted(ports)], "labels": labels}]
        part = self._folder / "targets.part"
        part.write_text(json.dumps(targets if ports else []))
        part.rename(self._folder / "targets.json")

    def __enter__(self) -> Prometheus:
        config = self._folder / "prometheus.yml"
        jobs = [job | {"metric_relabel_configs": self._relabel} for job in CONFIG["scrape_configs"]]
        config.write_text(json.dumps(CONFIG | {"scrape_configs": jobs}))
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    program("prometheus"),
                    f"--config.file={config}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 (one call into libc, no lock)
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self._folder / "log").read_text()[-2000:])
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait(20)

    def query_range(self, expression: str, start: float, end: float) -> list[Series]:
        """Series over time; raises where Prometheus refuses the expression."""
        return self._ask("query_range", query=expression, start=start, end=end, step="1s")

    def query(self, expression: str, at: float) -> list[Series]:
        """Series at one moment."""
        return self._ask("query", query=expression, time=at)

    def _ask(self, path: str, **parameters: Any) -> list[Series]:
        body = urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(self._url(f"api/v1/{path}"), body, timeout=30) as answer:
                return json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters['query']}: {json.load(error)['error']}") from None

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self._url("-/ready"), timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._port}/{path}"
