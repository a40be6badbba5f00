"""Shells that keep their state from command to command.

run ──► control pipe ──► shell ──► exit codes' pipe ──► result
input ──► pipe or terminal ──► command ──► pipe or terminal ──► output

idle ──run──► running ──its end, reported──► idle          (a timeout with `leave` answers and leaves it running)
                 └─timeout──► SIGINT ──2 s──► SIGKILL to what the command started ──2 s──► SIGKILL to the shell
any ──the shell ends──► ended
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rljob_sandbox_pool.guest import shell_process, shell_script
from rljob_sandbox_pool.guest.children import Children, pids, send
from rljob_sandbox_pool.guest.loop import Loop, Timer
from rljob_sandbox_pool.guest.pipes import Inlet, Outlet, Output
from rljob_sandbox_pool.guest.shell_process import Terminal
from rljob_sandbox_pool.guest.wire import RefusedError

START_SECONDS = 10.0
INTERRUPT_SECONDS = 2.0
"""How long what was interrupted may take to end, before it is killed."""
MAX_IDLE_OUTPUT_BYTES = 65_536
"""What background jobs say while no command runs is kept for the next answer, so much of it."""
MAX_WAITING_INPUT_BYTES = 4 * 1024 * 1024
TIMEOUT_EXIT_CODE = 124
_AGAIN_SECONDS, _PRESS_SECONDS = 0.02, 0.06
_END_OF_FILE, _INTERRUPT = b"\x04", b"\x03"
"""On a terminal."""


@dataclass(frozen=True)
class Patience:
    """How somebody waits for a command."""

    timeout_seconds: float
    max_output_bytes: int
    leave: bool
    """At the timeout the command goes on; otherwise it is interrupted."""
    quiet_seconds: float | None
    """Answer as well when there was output and then none for so long."""


Done = Callable[[dict[str, Any]], None]


class Shell:
    """One shell. `started` is called with None once it is there, else with why not."""

    def __init__(
        self,
        loop: Loop,
        children: Children,
        cwd: str,
        env: dict[str, str],
        terminal: Terminal | None,
        started: Callable[[str | None], None],
    ) -> None:
        self._loop, self._children = loop, children
        self._dialect = shell_script.dialect(children.profile.shell)
        self._started: Callable[[str | None], None] | None = started
        self._number = 0
        self.running = True
        """A command runs; at first: the shell's own start."""
        self.exit_code: int | None = None
        """Of the shell, once it has ended."""
        self._end_is_told = False
        self._last_code = 0
        self._timed_out = self._interrupted = self._synchronizing = False
        self._spared: frozenset[int] = frozenset(pids())
        self._output = Output(MAX_IDLE_OUTPUT_BYTES)
        self._reports = b""
        self._waiter: tuple[Patience, Done] | None = None
        self._timer: Timer | None = None
        self._quiet: Timer | None = None
        self._heard = 0.0
        self.has_terminal = terminal is not None
        ends = shell_process.start(children, self._dialect, cwd, env, terminal, self._exited)
        self.pid, self._own = ends.pid, ends.own
        self._control = Inlet(loop, ends.control)
        self._stdin = Inlet(loop, ends.stdin)
        self._outlet = Outlet(loop, ends.stdout, self._hear)
        self._codes = Outlet(loop, ends.codes, self._report, self._deaf)
        self._control.send(shell_script.greeting(self._dialect))
        self._later(START_SECONDS, self.kill)

    def run(self, command: str, patience: Patience, done: Done) -> None:
        """Run a command; `done` gets the result's fields. Raises RefusedError."""
        self._check_alive()
        if self.running:
            raise RefusedError(409, "shell_busy", "a command of this shell is running")
        try:
            lines = shell_script.command(self._dialect, self._number + 1, command)
        except UnicodeEncodeError:
            raise RefusedError(400, "bad_request", "command is not text") from None
        self._number += 1
        self.running, self._timed_out = True, False
        self._spared, self._heard = frozenset(pids()), self._loop.now()
        self._control.send(lines)
        self.wait(patience, done)

    def wait(self, patience: Patience, done: Done) -> None:
        """More of a command that was left running; at once where none is. Raises RefusedError."""
        if self._end_is_told:
            self._check_alive()
        if self._waiter is not None:
            raise RefusedError(409, "shell_busy", "somebody waits for this shell already")
        self._output.limit_bytes = patience.max_output_bytes
        self._waiter = patience, done
        if not self.running:
            self._answer()
            return
        self._later(patience.timeout_seconds, self._late)
        if self._output.kept_bytes:
            self._watch_quiet()

    def input(self, data: bytes, *, ends: bool) -> None:
        """What commands read; the end of it is for good, but on a terminal. Raises RefusedError."""
        self._check_alive()
        if self._stdin.waiting_bytes + len(data) > MAX_WAITING_INPUT_BYTES:
            raise RefusedError(429, "busy", "nobody reads what was sent before")
        self._stdin.send(data + (_END_OF_FILE if ends and self.has_terminal else b""))
        if ends and not self.has_terminal:
            self._stdin.end()
        if self.has_terminal and _INTERRUPT in data:
            self._expect_interrupt()

    def signal(self, number: int) -> bool:
        """Send it to the command; False: there was nobody to send it to. Raises RefusedError."""
        self._check_alive()
        if not self.running:
            return False
        if number == signal.SIGINT:
            return self._interrupt()
        family = self._children.family(self.pid, self._spared)
        return sum(send(pid, number) for pid in family) > 0

    def close(self) -> None:
        """End it and everything that it started."""
        if self.exit_code is None:
            self._children.kill_family(self.pid, frozenset(), orphans=False)
            self._children.forget(self.pid)
            self._exited(128 + signal.SIGKILL)

    def kill(self) -> None:
        """End the shell."""
        send(self.pid, signal.SIGKILL)

    def _check_alive(self) -> None:
        if self.exit_code is not None:
            words = f"the shell has ended with exit code {self.exit_code}"
            raise RefusedError(409, "shell_ended", words)

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._loop.now() + seconds, what)

    def _late(self) -> None:
        if self._waiter is not None and self._waiter[0].leave:
            self._answer()
            return
        self._timed_out = True
        self._press(self._loop.now())

    def _press(self, since: float, told: frozenset[int] = frozenset()) -> None:
        """End the command, ever more firmly.

        A shell takes no notice of an interrupt where its child ends by itself in that moment: it is told often, with
        what it starts meanwhile. What ran when the time was over (`told`) may be doing what an interrupt asks for: it
        is told twice.
        """
        seconds = self._loop.now() - since
        if seconds >= 2 * INTERRUPT_SECONDS:
            self.kill()
            return
        if not told:
            told = frozenset(pids())
            self._interrupt()
            self._once_more(INTERRUPT_SECONDS / 2, self._interrupt)
        else:
            for pid in (*self._children.family(self.pid, told), self.pid):
                send(pid, signal.SIGINT)
            self._once_more(_AGAIN_SECONDS, lambda: self._report_again(INTERRUPT_SECONDS))
        if seconds >= INTERRUPT_SECONDS:
            self._kill_command()
        self._later(_PRESS_SECONDS, lambda: self._press(since, told))

    def _interrupt(self) -> bool:
        """SIGINT to what is in the foreground. False: that changes right now, and will be tried again."""
        foreground = self._foreground()
        sent = send(-foreground, signal.SIGINT)
        if foreground != self.pid:
            # A loop in the shell goes on after a command that was interrupted, unless the shell knows.
            send(self.pid, signal.SIGINT)
        self._expect_interrupt()
        if not sent:
            self._once_more(_AGAIN_SECONDS, self._interrupt)
        return sent

    def _expect_interrupt(self) -> None:
        self._interrupted = True
        self._report_again(_AGAIN_SECONDS)

    def _report_again(self, seconds: float) -> None:
        """Some shells forget what they have read when they are interrupted: the report, and the next one too."""
        self._control.send(shell_script.report(self._number))
        if seconds < INTERRUPT_SECONDS:
            self._once_more(seconds, lambda: self._report_again(4 * seconds))

    def _once_more(self, seconds: float, what: Callable[[], object]) -> None:
        """Do it later, if the same command still runs."""
        number = self._number

        def later() -> None:
            if self.running and self._number == number:
                what()

        self._loop.call_at(self._loop.now() + seconds, later)

    def _foreground(self) -> int:
        if self.has_terminal:
            with suppress(OSError):
                return self._outlet.foreground() or self.pid
        return self.pid

    def _kill_command(self) -> None:
        # The shell itself would see that they are stopped first, and take that for the command's end.
        send(self.pid, signal.SIGSTOP)
        self._children.kill_family(self.pid, self._spared | {self.pid})
        send(self.pid, signal.SIGCONT)

    def _hear(self, data: bytes) -> None:
        self._output.add(data)
        self._heard = self._loop.now()
        if self._quiet is None:
            self._watch_quiet()

    def _watch_quiet(self) -> None:
        """Answer once it is quiet, where somebody waits for that."""
        self._quiet = None
        if self._waiter is None or self._timed_out:
            return
        if (seconds := self._waiter[0].quiet_seconds) is None:
            return
        if (when := self._heard + seconds) <= self._loop.now():
            self._answer()
        else:
            self._quiet = self._loop.call_at(when, self._watch_quiet)

    def _report(self, data: bytes) -> None:
        *lines, self._reports = (self._reports + data).split(b"\n")
        self._reports = self._reports[-64:]
        for line in lines:
            found = shell_script.reported(line)
            if found is None or found[0] != self._number or not self.running:
                continue
            if not self._synchronizing:
                self._last_code = found[1]
            if self._interrupted:
                self._synchronize()
            else:
                self.running = self._synchronizing = False
                self._settle()

    def _synchronize(self) -> None:
        """An interrupt may still be on its way to the shell: see it arrive, lest it ends the next command."""
        self._interrupted, self._synchronizing = False, True
        self._number += 1
        self._report_again(_AGAIN_SECONDS)
        self._later(INTERRUPT_SECONDS, self.kill)

    def _deaf(self) -> None:
        """Exit codes come no more: the shell ends, or a command has closed their pipe.

        One that has taken the shell's place (`exec`) runs for as long as any other.
        """
        if self.exit_code is None and not self.running:
            self._later(INTERRUPT_SECONDS, self.kill)

    def _exited(self, code: int) -> None:
        self._outlet.drain()
        self.exit_code, self.running = code, False
        for end in (self._control, self._stdin, self._outlet, self._codes):
            end.close()
        os.close(self._own)
        self._settle()

    def _settle(self) -> None:
        """A command, or the shell, has come to its end."""
        # What the command wrote is there: it was written before its end was reported.
        self._outlet.drain()
        if self._timer is not None:
            self._timer.cancel()
        if self._started is not None:
            started, self._started = self._started, None
            words = self._output.take().decode("utf-8", "replace").strip()
            self._output = Output(MAX_IDLE_OUTPUT_BYTES)
            started(None if self.exit_code is None else words or "it ends at once")
        if self._waiter is not None:
            self._answer()

    def _answer(self) -> None:
        """Tell who waits how things are."""
        if self._waiter is None:
            return
        (patience, done), self._waiter = self._waiter, None
        for timer in (self._timer, self._quiet):
            if timer is not None:
                timer.cancel()
        self._quiet = None
        self._end_is_told = self.exit_code is not None
        self._outlet.drain()
        kept = self._output
        limit = patience.max_output_bytes if self.running else MAX_IDLE_OUTPUT_BYTES
        self._output = Output(limit)
        data = kept.take()
        if self.running:
            whole = whole_characters(data)
            self._output.add(data[whole:])
            data = data[:whole]
        timed_out, self._timed_out = self._timed_out, self._timed_out and self.running
        code = self._last_code if self.exit_code is None else self.exit_code
        if timed_out:
            code = TIMEOUT_EXIT_CODE
        done(
            {
                "output": data,
                "exit_code": None if self.running else code,
                "timed_out": timed_out,
                "truncated": kept.truncated,
                "alive": self.exit_code is None,
                "running": self.running,
            }
        )


def whole_characters(data: bytes) -> int:
    """How much of it ends with a whole character of UTF-8."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            needs = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if needs > back else len(data)
        if byte < 0x80:
            break
    return len(data)
