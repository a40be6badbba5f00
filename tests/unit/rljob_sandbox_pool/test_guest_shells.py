"""What a shell is told, and the routes of shells and streams: without any process."""

import json
import subprocess
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_sandbox_pool.guest import shell_script
from rljob_sandbox_pool.guest.app import Guest
from rljob_sandbox_pool.guest.claims import proof, sandbox_key
from rljob_sandbox_pool.guest.routes import find
from rljob_sandbox_pool.guest.shell import Done, Patience
from rljob_sandbox_pool.guest.stream import Stream
from rljob_sandbox_pool.guest.wire import RefusedError, Request, Response

KEY = sandbox_key("pool key", "box-1")
ENDED = {"exit_code": 0, "timed_out": False, "truncated": False, "seconds": 0.0}
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@settings(max_examples=30, deadline=None)
@given(TEXT)
@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/sh"])
def test_a_command_reaches_the_shell_as_it_is_and_its_report_is_the_only_one(
    shell: str, text: str
) -> None:
    spoken = shell_script.dialect(shell)
    stdin, stdout, codes = spoken.descriptors
    quoted = "'" + text.replace("'", "'\\''") + "'"
    script = shell_script.greeting(spoken) + shell_script.command(
        spoken, 7, f"printf %s {quoted}; (exit 3)"
    )
    descriptors = f"{stdin}</dev/null {stdout}>&1 {codes}>&2"
    ran = subprocess.run(
        ["bash", "-c", f"exec {shell} {descriptors}"],
        input=script,
        capture_output=True,
        check=False,
    )
    assert ran.stdout == text.encode()
    assert ran.stderr == b"0 0\n7 3\n"


@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/sh"])
@pytest.mark.parametrize("wrong", ["echo 'x", "if", ")", "${", "x=(", "\\", "<<E"])
def test_what_is_no_shell_is_reported_and_the_next_command_runs(shell: str, wrong: str) -> None:
    spoken = shell_script.dialect(shell)
    stdin, stdout, codes = spoken.descriptors
    script = shell_script.greeting(spoken) + shell_script.command(spoken, 1, wrong)
    script += shell_script.command(spoken, 2, "(exit 5)")
    descriptors = f"{stdin}</dev/null {stdout}>/dev/null {codes}>&1"
    options = " ".join(spoken.options)
    ran = subprocess.run(
        ["setsid", "bash", "-c", f"exec {shell} {options} {descriptors}"],
        input=script,
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert ran.stdout.endswith(b"\n2 5\n")


@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/sh"])
def test_functions_named_like_what_runs_commands_change_nothing(shell: str) -> None:
    spoken = shell_script.dialect(shell)
    stdin, stdout, codes = spoken.descriptors
    script = shell_script.greeting(spoken)
    script += shell_script.command(spoken, 1, "printf() { :; }")
    # Where `eval` may be no function, that says so and goes on.
    script += shell_script.command(spoken, 2, "eval() { :; }")
    script += shell_script.command(spoken, 3, "echo here; (exit 5)")
    ran = subprocess.run(
        ["bash", "-c", f"exec {shell} {stdin}</dev/null {stdout}>&2 {codes}>&1"],
        input=script,
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert ran.stdout.endswith(b"\n3 5\n")
    assert ran.stderr.endswith(b"here\n")


def test_a_command_that_is_no_text_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        shell_script.command(shell_script.dialect("/bin/sh"), 1, "\ud800")


@given(st.binary(max_size=40))
def test_garbage_is_no_report_or_one_within_bounds(line: bytes) -> None:
    if found := shell_script.reported(line):
        assert shell_script.report(found[0]).startswith(b"__rljob ")


@pytest.mark.parametrize(
    ("path", "pattern", "given"),
    [
        ("/shells", "/shells", ""),
        ("/shells/s1", "/shells/{id}", "s1"),
        ("/shells/s1/run", "/shells/{id}/run", "s1"),
        ("/shells//run", None, ""),
        ("/shells/s1/run/more", None, ""),
        ("/shells/", None, ""),
        ("//s1", None, ""),
    ],
)
def test_a_path_has_one_handler_and_one_id(path: str, pattern: str | None, given: str) -> None:
    def handler(*_: object) -> None:
        pass

    routes = {("GET", path): handler for path in ("/shells", "/shells/{id}", "/shells/{id}/run")}
    found, value, known = find(routes, "GET", path)
    assert (found is not None, value, known) == (pattern is not None, given, pattern is not None)
    assert find(routes, "PUT", path)[::2] == (None, pattern is not None)


class FakeShell:
    """Says what it was asked."""

    pid = 5

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.done: Done | None = None

    def run(self, command: str, patience: Patience, done: Done) -> None:
        self.asked.append(("run", command, patience))
        self.done = done

    def wait(self, patience: Patience, done: Done) -> None:
        self.asked.append(("wait", patience))
        self.done = done

    def input(self, data: bytes, *, ends: bool) -> None:
        self.asked.append(("input", data, ends))

    def signal(self, number: int) -> bool:
        self.asked.append(("signal", number))
        return True


class FakeShells:
    """One shell, s1."""

    def __init__(self) -> None:
        self.shell = FakeShell()
        self.opened: list[Any] = []

    def open(self, cwd: str, env: dict[str, str], terminal: Any, started: Any) -> None:
        self.opened.append((cwd, env, terminal))
        started("s1", None)

    def get(self, name: str) -> FakeShell:
        if name != "s1":
            raise RefusedError(404, "no_shell", name)
        return self.shell

    def close(self, name: str) -> None:
        self.get(name)

    def facts(self) -> list[dict[str, Any]]:
        return [{"shell_id": "s1"}]


class Backend:
    """Commands that are streamed to the test; shells that are fakes."""

    def __init__(self) -> None:
        self.shells: FakeShells | None = FakeShells()
        self.running: list[tuple[Any, Done, Stream | None]] = []

    def now(self) -> float:
        return 0.0

    def execute(self, command: Any, done: Done, stream: Stream | None = None) -> None:
        if command.command == "busy":
            raise RefusedError(429, "busy", "too many")
        self.running.append((command, done, stream))

    def end_claim_at(self, when: object) -> None:
        pass

    def reset(self, done: Any) -> None:
        done([])

    def usage(self) -> dict[str, int]:
        return {}

    def is_busy(self) -> bool:
        return False


class Box:
    """A claimed guest."""

    def __init__(self) -> None:
        self.backend = Backend()
        self.guest = Guest("box-1", KEY, self.backend)
        self.pool = {"x-rljob-pool": proof(KEY, "pool", self.guest.boot_nonce)}
        self.owner = {
            "x-rljob-claim": "c",
            "authorization": "Bearer t",
            "x-rljob-boot": self.guest.boot_nonce,
        }
        claim = {"claim_id": "c", "token": "t", "env": {"A": "claim", "B": "claim"}}
        self.call("POST", "/claim", claim, self.pool)

    def call(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> list[Response]:
        replies: list[Response] = []
        raw = json.dumps(body or {}).encode()
        self.guest.handle(
            Request(method, path, {}, self.owner if headers is None else headers, raw),
            replies.append,
        )
        return replies

    def status(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        (reply,) = self.call(method, path, body)
        return reply.status, json.loads(reply.body).get("error", "")


@pytest.fixture
def box() -> Box:
    return Box()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/shells"), ("GET", "/shells"), ("DELETE", "/shells/s1"), ("POST", "/shells/s1/run"),
        ("POST", "/shells/s1/wait"), ("POST", "/shells/s1/input"), ("POST", "/shells/s1/signal"),
    ],
)  # fmt: skip
def test_shells_need_the_claim_and_a_sandbox_that_has_them(
    box: Box, method: str, path: str
) -> None:
    (reply,) = box.call(method, path, {"request_id": "r"}, {})
    assert reply.status == 409
    (reply,) = box.call(method, path, {"request_id": "r"}, {**box.owner, "authorization": ""})
    assert reply.status == 401
    box.backend.shells = None
    body = {"request_id": "r2", "command": "x", "number": 2}
    assert box.status(method, path, body) == (501, "no_shells")


def test_a_shell_has_the_claims_environment_under_its_own_and_a_terminal_in_bounds(
    box: Box,
) -> None:
    body = {"request_id": "r", "env": {"B": "own"}, "cwd": "/usr", "pty": True, "rows": 1e9}
    (reply,) = box.call("POST", "/shells", body)
    assert json.loads(reply.body) == {"shell_id": "s1", "pid": 5}
    assert box.backend.shells
    ((cwd, env, terminal),) = box.backend.shells.opened
    assert (cwd, env) == ("/usr", {"A": "claim", "B": "own"})
    assert (terminal.rows, terminal.columns) == (1000, 80)
    assert box.call("POST", "/shells", body) == [reply]
    assert len(box.backend.shells.opened) == 1


def test_a_command_is_run_once_however_often_it_is_asked_for(box: Box) -> None:
    assert box.backend.shells
    body = {"request_id": "r", "command": "x", "on_timeout": "leave", "quiet": 0.5}
    first = box.call("POST", "/shells/s1/run", body)
    second = box.call("POST", "/shells/s1/run", body)
    shell = box.backend.shells.shell
    assert shell.asked == [("run", "x", Patience(60.0, 1_000_000, True, 0.5))]
    assert shell.done
    shell.done({"output": b"\xff", "timed_out": True})
    assert first == second == box.call("POST", "/shells/s1/run", body)
    assert json.loads(first[0].body) == {"output": "\ufffd", "timed_out": True}
    assert box.guest.counts["timeouts"] == 1


def test_what_a_shell_says_after_its_claim_is_told_to_nobody(box: Box) -> None:
    assert box.backend.shells
    replies = box.call("POST", "/shells/s1/wait", {"request_id": "r", "encoding": "base64"})
    box.call("POST", "/release")
    done = box.backend.shells.shell.done
    assert done
    done({"output": b"secret", "timed_out": False})
    assert [reply.status for reply in replies] == [409]


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("run", {}),
        ("run", {"command": "nul\0"}),
        ("run", {"command": "x" * 1_000_001}),
        ("run", {"command": "x", "on_timeout": "hope"}),
        ("run", {"command": "x", "encoding": "rot13"}),
        ("run", {"command": "x", "timeout": "soon"}),
        ("run", {"command": "x", "quiet": "please"}),
        ("wait", {"max_output_bytes": []}),
        ("input", {"data": "not base64!"}),
        ("input", {"eof": "yes"}),
        ("signal", {}),
        ("signal", {"number": 0}),
        ("signal", {"number": "KILL"}),
    ],
)
def test_a_malformed_request_is_400_and_asks_no_shell(
    box: Box, what: str, body: dict[str, Any]
) -> None:
    assert box.backend.shells
    assert box.status("POST", f"/shells/s1/{what}", {"request_id": "r", **body})[0] == 400
    assert box.backend.shells.shell.asked == []


def test_a_shell_that_is_not_there_is_404(box: Box) -> None:
    body = {"request_id": "r", "command": "x"}
    assert box.status("POST", "/shells/s2/run", body) == (404, "no_shell")
    assert box.status("DELETE", "/shells/s2") == (404, "no_shell")
    assert box.status("DELETE", "/shells/s1") == (200, "")


def test_a_streamed_command_ends_with_its_result_and_is_not_repeated(box: Box) -> None:
    body = {"request_id": "r", "command": "x", "stream": True, "max_output_bytes": 1e8}
    (reply,) = box.call("POST", "/exec", body)
    ((command, done, stream),) = box.backend.running
    assert reply.stream is stream is not None
    assert command.max_output_bytes == 100_000_000
    assert box.status("POST", "/exec", body) == (409, "streamed")
    done(ENDED)
    assert json.loads(stream.take()) == {"result": ENDED}
    assert (stream.ended, stream.broken) == (True, False)
    assert box.status("POST", "/exec", body) == (409, "streamed")
    assert len(box.backend.running) == 1


def test_a_stream_whose_claim_has_ended_breaks(box: Box) -> None:
    box.call("POST", "/exec", {"request_id": "r", "command": "x", "stream": True})
    box.call("POST", "/release")
    ((_, done, stream),) = box.backend.running
    done(ENDED)
    assert stream
    assert (stream.take(), stream.broken) == (b"", True)


def test_a_streamed_command_that_cannot_run_is_refused_like_any_other(box: Box) -> None:
    body = {"request_id": "r", "command": "busy", "stream": True}
    assert box.status("POST", "/exec", body) == (429, "busy")
