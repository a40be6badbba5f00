"""The chart as helm renders it: objects to look into, and what the restricted Pod Security Standard says of a pod."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "rljob"
NAMESPACE = "rljob-system"
Object = dict[str, Any]

HARMLESS_VOLUMES = set(
    "configMap csi downwardAPI emptyDir ephemeral persistentVolumeClaim projected secret".split()
)
CLUSTER_SCOPED = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}


@cache
def helm_binary() -> str:
    """The pinned helm, fetched if need be. Where it cannot be had, tests that need it are skipped, but never in CI."""
    tool = _load_tool()
    try:
        return str(tool.program())
    except OSError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no helm: {error}")


def _load_tool() -> Any:
    loader = SourceFileLoader("helm_tool", str(ROOT / "tests" / "e2e" / "helm"))
    spec = importlib.util.spec_from_loader("helm_tool", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm without a cluster."""
    return subprocess.run(
        [helm_binary(), *arguments],
        env={**os.environ, "KUBECONFIG": os.devnull},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


E2E_VALUES = ROOT / "tests" / "e2e" / "values.yaml"


@cache
def image_options() -> tuple[str, ...]:
    """Options of helm for the images that the suite built: a changed image has another tag, and so other pods."""
    build = ROOT / "tests" / "e2e" / "images" / "build"
    run = subprocess.run(
        [sys.executable, build, "helm"], capture_output=True, text=True, timeout=60, check=True
    )
    return ("-f", str(E2E_VALUES), *run.stdout.split())


class Rendered:
    """All objects of one rendering."""

    def __init__(self, *options: str) -> None:
        run = helm("template", "rljob", str(CHART), "-n", NAMESPACE, *options)
        assert run.returncode == 0, run.stderr
        self.objects: list[Object] = [one for one in yaml.safe_load_all(run.stdout) if one]

    def all(self, kind: str) -> list[Object]:
        """Objects of a kind."""
        return [one for one in self.objects if one["kind"] == kind]

    def one(self, kind: str, name: str, namespace: str | None = None) -> Object:
        """Exactly one object."""
        found = [
            one
            for one in self.all(kind)
            if one["metadata"]["name"] == name
            and namespace in {None, one["metadata"].get("namespace")}
        ]
        assert len(found) == 1, f"{len(found)} of {kind} {name}"
        return found[0]

    def pods(self) -> Iterator[tuple[str, Object]]:
        """Name → pod or pod template, as (metadata, spec) holders."""
        for one in self.objects:
            if one["kind"] == "Deployment":
                yield one["metadata"]["name"], one["spec"]["template"]
            elif one["kind"] == "Pod":
                yield one["metadata"]["name"], one


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    """Whether matchLabels fit; an empty selector selects everything."""
    return selector.items() <= labels.items()


def restricted_faults(pod: Object) -> list[str]:
    """What the restricted Pod Security Standard would refuse, and what we ask beyond it."""
    faults = [name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    security = pod.get("securityContext", {})
    if security.get("runAsNonRoot") is not True or not security.get("runAsUser"):
        faults.append("may run as root")
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        faults.append("no seccomp profile")
    faults += [
        f"volume {one['name']}"
        for one in pod.get("volumes", [])
        if not set(one) - {"name"} <= HARMLESS_VOLUMES
    ]
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            faults.append(f"{container['name']}: privilege escalation")
        if own.get("capabilities") != {"drop": ["ALL"]}:
            faults.append(f"{container['name']}: capabilities")
        if own.get("readOnlyRootFilesystem") is not True:
            faults.append(f"{container['name']}: writable root")
        if not container.get("resources", {}).get("requests"):
            faults.append(f"{container['name']}: no requests")
    return faults


def rights(roles: list[Object]) -> set[tuple[str, str, str]]:
    """(group, resource, verb) of some roles."""
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
