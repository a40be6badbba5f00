"""The images from images/ in restricted pods: a number for a user, a root that is read-only, every module imports."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.cluster import Cluster, wait_until

LOOK = """
import importlib, json, os, pkgutil, sys, time
begun = time.monotonic()
names = sys.argv[1:]
for package in [importlib.import_module(name) for name in sys.argv[1:]]:
    names += [found.name for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
try:
    open("/opt/rljob/written", "w")
    writable = True
except OSError:
    writable = False
print(json.dumps({
    "uid": os.getuid(), "modules": len(names), "writable": writable, "python": sys.version_info[:2],
    "torch": "torch" in sys.modules, "seconds": round(time.monotonic() - begun, 1),
}))
"""


@pytest.fixture
def look(cluster: Cluster, namespace: str, images: None) -> Callable[..., str]:
    """What a command prints in a pod of an image."""

    def run(image: str, *command: str, seconds: float = 60, **extra: Any) -> str:
        container = {
            "name": "main", "image": f"localhost/rljob-{image}:dev", "imagePullPolicy": "Never", "command": command,
            "securityContext": {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            },
            "env": [{"name": "HOME", "value": "/scratch/home"}],
            "volumeMounts": [{"name": "work", "mountPath": "/scratch"}, {"name": "tmp", "mountPath": "/tmp"}],
        }  # fmt: skip
        user = {
            "runAsNonRoot": True,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        spec = {
            "restartPolicy": "Never", "automountServiceAccountToken": False, "securityContext": user,
            "containers": [container], "volumes": [{"name": "work", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
        }  # fmt: skip
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": image}, "spec": spec | extra}
        cluster.apply(pod, namespace)

        def ended() -> str:
            seen = cluster.get("Pod", image, namespace) or {}
            phase = seen.get("status", {}).get("phase", "")
            return phase if phase in ("Succeeded", "Failed") else ""

        phase = wait_until(f"pod {image} ends", ended, seconds)
        printed = cluster.kubectl("logs", image, "-n", namespace)
        assert phase == "Succeeded", printed[-3000:]
        return printed

    return run


@pytest.mark.parametrize(
    ("image", "packages"),
    [
        ("operator", ["rljob", "rljob_operator"]),
        ("sandbox-pool", ["rljob", "rljob_sandbox_pool"]),
        ("rollout-worker", ["rljob", "rljob_rollout_worker"]),
        ("services", ["rljob", "rljob_services"]),
    ],
)
def test_every_module_of_a_small_image_imports_without_torch(
    image: str, packages: list[str], look: Callable[..., str]
) -> None:
    seen = json.loads(look(image, "python", "-c", LOOK, *packages).splitlines()[-1])
    assert seen["uid"] == 10001
    assert not seen["writable"]
    assert not seen["torch"]
    assert seen["python"] == [3, 11]
    assert seen["modules"] > 40


def test_every_module_of_the_trainer_imports(look: Callable[..., str]) -> None:
    seen = json.loads(
        look("trainer", "python", "-c", LOOK, "rljob", "rljob_trainer", seconds=180).splitlines()[
            -1
        ]
    )
    assert seen["torch"]
    assert not seen["writable"]


def test_the_services_image_brings_valkey(look: Callable[..., str]) -> None:
    assert "v=9." in look("services", "valkey-server", "--version")


def test_the_workers_image_lends_its_source_without_bytecode_and_with_its_entry_points(
    look: Callable[..., str],
) -> None:
    walk = "import os; [print(os.path.join(d, f)) for d, _, fs in os.walk('/opt/rljob/extension') for f in fs]"
    files = look("rollout-worker", "python", "-c", walk).split()
    assert {file.split("/")[4].partition("-")[0] for file in files} == {
        "rljob",
        "rljob_rollout_worker",
    }
    assert "/opt/rljob/extension/rljob_rollout_worker/vllm_plugin.py" in files
    assert not [file for file in files if file.endswith(".pyc")]


def test_the_guest_of_the_pool_managers_image_starts_with_its_own_interpreter(
    look: Callable[..., str],
) -> None:
    guest = "/opt/rljob/guest"
    loader = [f"{guest}/lib/loader", "--library-path", f"{guest}/lib"]
    python = [f"{guest}/bin/python3", "-I", "-S", "-c", "print(6 * 7)"]
    assert look("sandbox-pool", *loader, *python).strip() == "42"
