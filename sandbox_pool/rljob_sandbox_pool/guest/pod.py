"""The guest's start in a pod: one variable of its environment says everything, and it listens itself.

    RLJOB_SANDBOX = {"id", "key" (hex), "port", "env", "workspace", "folders", "shared_folders", "sealed", "rlimits",
                     "marker", "writable", "canary"}

Guest and commands are the same user here. What protects the guest: it is PID 1, so no signal from inside its namespace
ends or stops it; it is not dumpable, so nobody reads its memory, environment or descriptors; the reset compares what
that user could change of it. The sandbox ends with its pod, or by the guest's own hand when a claim's time is over.

With podSecurity baseline that user is the image's root. Whoever is not dumpable is looked into by SYS_PTRACE alone, and
that, like SYS_ADMIN and SYS_RESOURCE, no pod has: root may change owners and users and end what it started, which the
guest needs too to bring everything back. What root may write besides (/etc/hosts, /dev, PID 1's oom_score_adj) the
reset compares. Its processes are counted only in a user namespace (hostUsers: false) or by the node.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from rljob_sandbox_pool.guest import main as start
from rljob_sandbox_pool.guest import system

VARIABLE = "RLJOB_SANDBOX"
_BACKLOG = 256


def main() -> None:
    """Serve until the end."""
    system.harden()
    system.forbid_new_privileges()
    config: dict[str, Any] = json.loads(os.environ.pop(VARIABLE))
    os.umask(0o022)
    listener = socket.create_server(("0.0.0.0", config["port"]), backlog=_BACKLOG)
    start.serve({"uid": None, "users": None, "oom": False, **config}, listener)
