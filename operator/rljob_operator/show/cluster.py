"""`rljob apply`, `rljob status -n`, `rljob logs -n`: the same commands against a cluster.

    KUBECONFIG ─► KubeClient ─► RLJobs and pods of one namespace ─► what the local commands print, too

A job's containers are named as the local driver names its components: trainer, prepare, store, engine-0, gateway-0,
worker-0.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table

from rljob import labels
from rljob.errors import MachineError, ManifestError
from rljob.kube.client import KubeClient
from rljob.kube.config import load as load_config
from rljob.kube.errors import ForbiddenError, InvalidError, KubeError, NotFoundError
from rljob.kube.resources import POD, RLJOB
from rljob_operator.show.runs import unknown
from rljob_operator.view.facts import number_text, seconds_text

Object = dict[str, Any]
T = TypeVar("T")

_CALL_SECONDS = 20.0
_FIELD_MANAGER = "rljob"
_ROLLOUT = ("engine", "gateway", "worker")


class Source(NamedTuple):
    """One container's log."""

    component: str
    pod: str
    container: str


def call(namespace: str | None, work: Callable[[KubeClient, str], Awaitable[T]]) -> T:
    """Run `work(client, namespace)`; a refusal of the API server is one line.

    Raises:
        MachineError: no cluster, it cannot be reached, or it refuses.
    """

    async def run() -> T:
        config = load_config()
        client = KubeClient(config, user_agent="rljob", deadline_seconds=_CALL_SECONDS)
        try:
            return await work(client, namespace or config.namespace)
        except ForbiddenError as error:
            raise MachineError(
                "kubernetes", str(error), "ask for the rights of rljob-view or rljob-edit"
            ) from None
        except NotFoundError as error:
            raise MachineError(
                "kubernetes", str(error), "is the chart installed, and the name right?"
            ) from None
        except KubeError as error:
            raise MachineError(
                "kubernetes", str(error), "check KUBECONFIG and the cluster"
            ) from None
        finally:
            await client.aclose()

    return asyncio.run(run())


# ── apply ──


def apply(manifest: Path, assignments: Sequence[str], namespace: str | None) -> None:
    """Check a manifest here, then hand it to the API server, which checks it again."""
    from rljob.api.load import load

    job = load(manifest, assignments)
    body = job.model_dump(mode="json", exclude_unset=True)
    place = namespace or job.metadata.namespace

    async def work(client: KubeClient, space: str) -> str:
        before = await client.find(RLJOB, job.name, space)
        body["metadata"]["namespace"] = space
        try:
            after = await client.apply(RLJOB, body, space, field_manager=_FIELD_MANAGER)
        except InvalidError as error:
            raise ManifestError(str(manifest), error.message, "correct it") from None
        return _what_changed(before, after)

    sys.stdout.write(f"rljob.rljob.dev/{job.name} {call(place, work)}\n")


def _what_changed(before: Object | None, after: Object) -> str:
    if before is None:
        return "created"
    same = before["metadata"].get("generation") == after["metadata"].get("generation")
    return "unchanged" if same else "configured"


# ── status ──


def status(name: str | None, namespace: str | None) -> None:
    """The jobs of a namespace, or one of them with its conditions and pods."""

    async def work(client: KubeClient, space: str) -> tuple[list[Object], list[Object]]:
        jobs, _ = await client.list(RLJOB, space)
        if name is None:
            return jobs, []
        if name not in (known := [job["metadata"]["name"] for job in jobs]):
            raise unknown("job", name, known)
        pods, _ = await client.list(POD, space, label_selector=f"{labels.JOB}={name}")
        return [job for job in jobs if job["metadata"]["name"] == name], pods

    jobs, pods = call(namespace, work)
    console = Console()
    if name is None:
        console.print(_table(jobs))
        return
    _describe(console, jobs[0], pods)


def _table(jobs: Sequence[Object]) -> Table:
    table = Table(box=None, header_style="cyan")
    for column in ("job", "phase", "step", "age", "reward", "validation", "rollouts", "message"):
        table.add_column(column)
    for job in jobs:
        told = job.get("status", {})
        rollouts = told.get("rollouts", {})
        table.add_row(
            job["metadata"]["name"],
            told.get("phase", "Pending"),
            f"{told.get('step', 0)}/{told.get('steps', '–')}",
            seconds_text(_age_seconds(job["metadata"]["creationTimestamp"])),
            number_text(told.get("rewardMean")),
            number_text(told.get("validation", {}).get("score")),
            f"{rollouts.get('completed', 0)} done",
            told.get("message", ""),
        )
    return table


def _describe(console: Console, job: Object, pods: Sequence[Object]) -> None:
    told = job.get("status", {})
    rollouts, staleness = told.get("rollouts", {}), told.get("staleness", {})
    validation, boxes = told.get("validation", {}), told.get("sandboxes", {})
    lines = [
        ("phase", f"{told.get('phase', 'Pending')} {told.get('message', '')}".rstrip()),
        (
            "step",
            f"{told.get('step', 0)} of {told.get('steps', '–')}, policy {told.get('policyVersion') or '–'}",
        ),
        ("reward", number_text(told.get("rewardMean"))),
        (
            "validation",
            f"{number_text(validation.get('score'))} at step {validation.get('step', '–')}",
        ),
        (
            "episodes",
            f"{rollouts.get('running', 0)} running, {rollouts.get('completed', 0)} completed,"
            f" {rollouts.get('failed', 0)} failed attempts",
        ),
        (
            "staleness",
            f"{number_text(staleness.get('mean'), 1)} (max {number_text(staleness.get('max'), 0)})",
        ),
        ("sandboxes", f"{boxes.get('warm', 0)} warm, {boxes.get('claimed', 0)} claimed"),
        ("age", seconds_text(_age_seconds(job["metadata"]["creationTimestamp"]))),
    ]
    for key, value in lines:
        console.print(f"{key:12} {value}", markup=False, highlight=False, soft_wrap=True)
    for condition in told.get("conditions", []):
        text = f"{condition['type']:16} {condition['status']:7} {condition['reason']} {condition.get('message', '')}"
        console.print(text.rstrip(), markup=False, highlight=False, soft_wrap=True)
    for source in sources(pods):
        state = next(
            _state(pod, source.container) for pod in pods if pod["metadata"]["name"] == source.pod
        )
        console.print(
            f"{source.component:16} {state}", markup=False, highlight=False, soft_wrap=True
        )


def _state(pod: Object, container: str) -> str:
    told = pod.get("status", {})
    for entry in [*told.get("initContainerStatuses", []), *told.get("containerStatuses", [])]:
        if entry["name"] == container:
            kind, detail = next(iter(entry.get("state", {}).items()), ("waiting", {}))
            restarts = f", {entry['restartCount']} restarts" if entry.get("restartCount") else ""
            return f"{detail.get('reason') or kind}{restarts}"
    return told.get("phase", "Pending")


def _age_seconds(timestamp: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(timestamp)).total_seconds()


# ── logs ──


def logs(
    component: str | None, *, follow: bool, lines: int, name: str | None, namespace: str | None
) -> None:
    """Print what components wrote; with `follow`, until their containers end or the person stops it."""

    async def work(client: KubeClient, space: str) -> None:
        job = name or await _newest(client, space)
        pods, _ = await client.list(POD, space, label_selector=f"{labels.JOB}={job}")
        found = sources(pods)
        if component is not None and component not in (known := [s.component for s in found]):
            raise unknown("component", component, known)
        chosen = [source for source in found if component in {None, source.component}]
        for source in chosen if not follow else ():
            text = await _tail(client, space, source, lines)
            _print(source.component, text.splitlines(), many=component is None)
        if follow:
            await asyncio.gather(
                *(
                    _follow(client, space, source, lines, many=component is None)
                    for source in chosen
                )
            )

    call(namespace, work)


async def _newest(client: KubeClient, namespace: str) -> str:
    jobs, _ = await client.list(RLJOB, namespace)
    if not jobs:
        raise MachineError(
            f"namespace {namespace}", "holds no RLJob", "rljob apply, or name another with -n"
        )
    return max(jobs, key=lambda job: job["metadata"]["creationTimestamp"])["metadata"]["name"]


def sources(pods: Sequence[Object]) -> list[Source]:
    """The logs of a job's own pods, sandboxes left out, in a reader's order."""
    found: list[Source] = []
    for pod in sorted(pods, key=lambda pod: pod["metadata"]["creationTimestamp"]):
        marks, name = pod["metadata"]["labels"], pod["metadata"]["name"]
        role = marks.get(labels.COMPONENT, "")
        if role == "rollout":
            index = marks.get("apps.kubernetes.io/pod-index", name.rpartition("-")[2])
            found += [Source(f"{part}-{index}", name, part) for part in _ROLLOUT]
        elif role in {"trainer", "prepare", "store"}:
            found.append(Source(role, name, role))
    newest = {source.component: source for source in found}
    return list(newest.values())


async def _tail(client: KubeClient, namespace: str, source: Source, lines: int) -> str:
    try:
        return await client.logs(
            namespace, source.pod, container=source.container, tail_lines=lines
        )
    except KubeError as error:
        if error.status == 400:  # it has not started yet
            return ""
        raise


async def _follow(
    client: KubeClient, namespace: str, source: Source, lines: int, *, many: bool
) -> None:
    params = {"container": source.container, "tailLines": str(lines), "follow": "true"}
    path = f"/api/v1/namespaces/{namespace}/pods/{source.pod}/log"
    try:
        async with aclosing(client.lines(path, params=params)) as stream:
            async for line in stream:
                _print(source.component, [line.decode(errors="replace")], many=many)
    except KubeError as error:
        _print(source.component, [f"(not followed: {error})"], many=many)


def _print(component: str, lines: Sequence[str], *, many: bool) -> None:
    for line in lines:
        sys.stdout.write(f"{component:13}│ {line}\n" if many else f"{line}\n")
    sys.stdout.flush()
