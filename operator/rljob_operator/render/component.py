"""What a plan is made of. Addresses, folders and secrets are placeholders that the driver fills in.

| placeholder | becomes |
| --- | --- |
| `${addr:NAME/PORT}` | host:port of that component's port, as seen by the one that reads it |
| `${addr:bind}` | the address to listen on |
| `${port:NAME/PORT}` | the number alone |
| `${path:artifacts}` … | a folder or file: artifacts, job_file, work (the component's own), store, cache, manifest |
| `${secret:token}` … | token, pool_key, redis |
| `${bin:valkey-server}` | a program that the driver brings |
| `$$` | a dollar sign |
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum

import msgspec


class Kind(StrEnum):
    """How a component lives."""

    SERVICE = "service"
    """Runs until the job ends; any end before is a crash."""
    PREPARE = "prepare"
    """Runs to its end before the components that depend on it start."""
    JOB = "job"
    """Its good end is the end of the job."""


class Port(msgspec.Struct, frozen=True):
    """A listening port; `pinned` where the manifest fixes it."""

    name: str
    pinned: int | None = None


class Resources(msgspec.Struct, frozen=True):
    """What the component is expected to use at its peak."""

    cpu: float
    memory_mib: int


class Probe(msgspec.Struct, frozen=True):
    """How readiness is seen: `http` GET of `path` answers 200, or `redis` answers PING, by the deadline of a start."""

    scheme: str
    port: str
    path: str = ""
    deadline_seconds: float = 120.0


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """One process (locally) or container (in a cluster)."""

    role: str
    """store, prepare, sandbox-pool, engine, gateway, worker, trainer."""
    name: str
    kind: Kind
    command: tuple[str, ...]
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    """Secret files to write into its work folder before it starts: name → content."""
    ports: tuple[Port, ...] = ()
    resources: Resources
    depends: tuple[str, ...] = ()
    """Components that must be ready (services) or done (prepare) before this one starts."""
    probe: Probe | None = None
    grace_seconds: float = 10.0
    """Between SIGTERM and SIGKILL."""
    makes_namespaces: bool = False
    """It starts sandboxes, which cannot be done from inside a namespace of one's own."""


_PLACEHOLDER = re.compile(r"\$(?:\$|\{([a-z]+):([^}]+)\})")


def fill(template: str, lookup: Callable[[str, str], str], *, dollar: str = "$") -> str:
    """Replace every placeholder by `lookup(kind, name)`; `$$` by a dollar sign, or what stands for one."""
    return _PLACEHOLDER.sub(
        lambda match: lookup(match[1], match[2]) if match[1] else dollar, template
    )


def literal(text: str) -> str:
    """A user's text, so that `fill` gives it back unchanged."""
    return text.replace("$", "$$")
