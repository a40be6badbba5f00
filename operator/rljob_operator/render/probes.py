"""Probes of a container: the plan says when a start has failed, here it becomes what the kubelet asks.

startup     from the plan's deadline: nothing else is asked, and no later container starts, before it has passed
readiness   the same question
liveness    only where a hang shows in the answer: the engine's /health fails when a switch of weights has, the worker
            and the gateway stop answering when their process hangs
"""

from __future__ import annotations

import math
from typing import Any

from rljob_operator.render.component import Component
from rljob_operator.render.places import port

PERIOD_SECONDS = 5
GPU_START_SECONDS = 2700.0
"""A large model is read from a volume, compiled and captured in CUDA graphs: 45 minutes have been seen."""
ENGINE_PATH = "/health"
"""What the engine answers without the job's token, which the kubelet does not have."""
LIVENESS = {"periodSeconds": 20, "timeoutSeconds": 10, "failureThreshold": 9}
"""Three minutes: a loaded machine must not restart what is only slow."""
ALIVE = ("engine", "gateway", "worker")


def probes(component: Component, *, gpu: bool = False) -> dict[str, Any]:
    """The probe fields of a component's container."""
    probe = component.probe
    if probe is None:
        return {}
    number = port(f"{component.name}/{probe.port}")
    if probe.scheme == "redis":  # a PING would need the password
        ask: dict[str, Any] = {"tcpSocket": {"port": number}}
    else:
        path = ENGINE_PATH if component.role == "engine" else probe.path
        ask = {"httpGet": {"path": path, "port": number}}
    seconds = max(probe.deadline_seconds, GPU_START_SECONDS) if gpu else probe.deadline_seconds
    found = {
        "startupProbe": {
            **ask,
            "periodSeconds": PERIOD_SECONDS,
            "timeoutSeconds": 5,
            "failureThreshold": math.ceil(seconds / PERIOD_SECONDS),
        },
        "readinessProbe": {
            **ask,
            "periodSeconds": PERIOD_SECONDS,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
    }
    return {**found, "livenessProbe": {**ask, **LIVENESS}} if component.role in ALIVE else found
