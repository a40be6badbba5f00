"""A simulated job under its real driver, and hands that kill its processes. Shared by integration and fault tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "simulated"


def make_model(folder: Path) -> Path:
    """A model directory that simulated parts accept: a real tokenizer and template, weights that nothing multiplies."""
    import numpy as np
    from safetensors.numpy import save_file

    from rljob_trainer.recipes.quickstart.tokenizer import save_tokenizer, train_tokenizer

    folder.mkdir(parents=True)
    save_tokenizer(train_tokenizer(), folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "simulated"}))
    save_file(
        {"weight": np.zeros(4, dtype=np.float32)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


class Job:
    """One run of the simulated manifest, or of its like in another mode, in a folder of its own."""

    def __init__(self, root: Path, model: Path, mode: str = "train", **changes: Any) -> None:
        data = yaml.safe_load((EXAMPLE / "rljob.yaml").read_text())
        data["spec"]["model"]["source"] = f"file://{model}"
        if mode != "train":
            _to_mode(data["spec"], mode)
        for path, value in changes.items():
            _set(data, path.split("__"), value)
        self.name = data["metadata"]["name"]
        self.root, self.folder = root, root / "runs" / self.name
        self.manifest = root / "rljob.yaml"
        self.manifest.write_text(yaml.safe_dump(data))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str, **env: str) -> None:
        """Start the driver as `rljob run` does."""
        command = [sys.executable, "-m", "rljob_operator.local", str(self.manifest), *options]
        with (self.root / "output").open("ab") as output:
            self.process = subprocess.Popen(
                [*command, "--runs-dir", str(self.root / "runs")],
                cwd=self.root,
                env={**os.environ, **env},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return (self.root / "output").read_text()

    @property
    def alive(self) -> bool:
        assert self.process
        return self.process.poll() is None

    def read(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.folder / name).read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    @property
    def step(self) -> int:
        return self.read("status.json").get("step", 0)

    def until(self, what: Callable[[], Any], seconds: float = 90) -> Any:
        """Wait until something is true, as long as the job lives."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := what():
                return found
            assert self.alive, self.output
            time.sleep(0.005)
        raise AssertionError(f"did not happen within {seconds} s\n{self.output}")

    def end(self, seconds: float = 240) -> int:
        assert self.process
        return self.process.wait(seconds)

    def pid(self, component: str) -> int | None:
        """The component's own process, not its wrapper."""
        home = self.folder / ("store" if component == "store" else f"work/{component}")
        # a store that has just started has not changed into its folder yet, and must not be missed: both count
        homes = {str(home), str(self.folder / "work" / component)}
        found = [pid for pid in self.processes() if _cwd(pid) in homes and not _is_wrapper(pid)]
        return min(found, default=None)

    def processes(self) -> list[int]:
        """Every process of this run but the driver. Some overwrite their environment, none leaves its folder."""
        mark, own = str(self.folder), self.process.pid if self.process else 0
        return [
            pid
            for pid in _pids()
            if pid != own
            and (_cwd(pid).startswith(mark) or mark.encode() in read_proc(pid, "environ"))
        ]

    def family(self) -> set[tuple[int, str]]:
        """Every descendant of the driver, sandboxes included, by pid and start time."""
        assert self.process
        parents = {pid: stat[1] for pid in _pids() if (stat := _stat(pid))}
        found = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if int(parent) in found} - found:
            found |= more
        return {(pid, _stat(pid)[19]) for pid in found - {self.process.pid} if _stat(pid)}

    def kill(self, component: str) -> bool:
        """SIGKILL; whether there was something to kill."""
        pid = self.pid(component)
        if pid is None:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        if self.process and self.alive:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def _set(data: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        data = data.setdefault(part, {})
    data[path[-1]] = value


def _to_mode(spec: dict[str, Any], mode: str) -> None:
    """Without what has no effect there."""
    spec["mode"] = mode
    for key in ("trainer", "rollout/maxStaleness", *_WITHOUT[mode]):
        *parents, last = key.split("/")
        here = spec
        for parent in parents:
            here = here[parent]
        here.pop(last)


_WITHOUT = {
    "eval": ("data/train", "data/validation/everySteps", "rollout/groupSize"),
    "rollout": ("data/validation",),
}


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def read_proc(pid: int, name: str) -> bytes:
    """A file of /proc/PID; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def alive(family: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """Those of a family that still live."""
    return {
        (pid, start)
        for pid, start in family
        if (stat := _stat(pid)) and stat[19] == start and stat[0] != "Z"
    }


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; [] where there is no such process."""
    return read_proc(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def _cwd(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return ""


def _is_wrapper(pid: int) -> bool:
    command = read_proc(pid, "cmdline").split(b"\0")
    return command[0] in {b"", b"bwrap"} or b"rljob_operator.drivers.shim" in command
