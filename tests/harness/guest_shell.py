"""A shell of the guest as PID 1 of a namespace, without broker and sandbox: `python guest_shell.py SHELL pipes|pty`.

Reads commands, a JSON object a line: {"command", "timeout"}; prints each result as one.
"""

import json
import os
import sys

from rljob_sandbox_pool.guest import system
from rljob_sandbox_pool.guest.children import Children, Profile
from rljob_sandbox_pool.guest.loop import Loop
from rljob_sandbox_pool.guest.shell import Patience, Shell
from rljob_sandbox_pool.guest.shell_process import Terminal


def main() -> None:
    """Until stdin ends."""
    # What ends a command here ends every process that it finds.
    assert os.getpid() == 1
    loop = Loop()
    user, env = system.User(None), {"PATH": os.environ["PATH"]}
    children = Children(loop, Profile(user, {}, env, "/", sys.argv[1], adjust_oom=False))
    terminal = Terminal(24, 80) if sys.argv[2] == "pty" else None
    started: list[str | None] = []
    shell = Shell(loop, children, "", {}, terminal, started.append)
    while not started:
        loop.run_once()
    assert started == [None]
    for line in sys.stdin:
        order = json.loads(line)
        results: list[dict[str, object]] = []
        patience = Patience(order["timeout"], 1_000_000, leave=False, quiet_seconds=None)
        shell.run(order["command"], patience, results.append)
        while not results:
            loop.run_once()
        text = results[0]["output"].decode("utf-8", "replace")
        sys.stdout.write(json.dumps({**results[0], "output": text}) + "\n")


if __name__ == "__main__":
    main()
