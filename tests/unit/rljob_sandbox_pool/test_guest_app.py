"""Who may call what, the claim as a lock, and one answer per request id: the guest without any process."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rljob_sandbox_pool.guest import checks
from rljob_sandbox_pool.guest.app import Guest
from rljob_sandbox_pool.guest.claims import proof, sandbox_key
from rljob_sandbox_pool.guest.memory import MAX_BYTES, Memory
from rljob_sandbox_pool.guest.wire import RefusedError, Request, Response

KEY = sandbox_key("pool key", "box-1")
RESULT = {
    "exit_code": 0,
    "stdout": "",
    "stderr": "",
    "timed_out": False,
    "truncated": False,
    "seconds": 0.0,
}


class Backend:
    """Commands end when the test says so; a reset finds what the test says."""

    shells = None
    archives = None
    tunnels = None

    def __init__(self) -> None:
        self.clock = 100.0
        self.running: list[tuple[checks.Command, Callable[[dict[str, Any]], None]]] = []
        self.files: dict[str, bytes] = {}
        self.written: list[checks.NewFile] = []
        self.evidence: list[str] = []
        self.num_resets = 0
        self._when: Callable[[], float] | None = None
        self.busy = False
        self.slow_resets: list[Callable[[list[str]], None]] | None = None
        self.fault: OSError | None = None

    def now(self) -> float:
        return self.clock

    def execute(self, command: checks.Command, done: Callable[[dict[str, Any]], None]) -> None:
        self.running.append((command, done))

    def read_file(self, path: str, max_bytes: int, offset: int | None) -> bytes:
        return self.files[path][offset or 0 :][:max_bytes]

    def write_file(self, file: checks.NewFile) -> None:
        if self.fault:
            raise self.fault
        self.written.append(file)
        self.files[file.path] = file.data

    def reset(self, done: Callable[[list[str]], None]) -> None:
        self.num_resets += 1
        if self.slow_resets is None:
            done(self.evidence)
        else:
            self.slow_resets.append(done)

    def end_claim_at(self, when: Callable[[], float] | None) -> None:
        self._when = when

    @property
    def ends_at(self) -> float | None:
        return self._when() if self._when else None

    def usage(self) -> dict[str, int]:
        return {"descriptors": 7}

    def is_busy(self) -> bool:
        return self.busy


class Box:
    """A guest and the calls of its pool and its owner."""

    def __init__(self, *, tainted: bool = False) -> None:
        self.backend = Backend()
        self.guest = Guest("box-1", KEY, self.backend, tainted=tainted)
        self.pool = {"x-rljob-pool": proof(KEY, "pool", self.guest.boot_nonce)}

    def owner(self, claim_id: str = "c1", token: str = "t1") -> dict[str, str]:
        return {
            "x-rljob-claim": claim_id,
            "authorization": f"Bearer {token}",
            "x-rljob-boot": self.guest.boot_nonce,
        }

    def call(
        self,
        method: str,
        route: str,
        body: object = None,
        headers: dict[str, str] | None = None,
        **query: str,
    ) -> list[Response]:
        raw = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        replies: list[Response] = []
        self.guest.handle(Request(method, route, query, headers or {}, raw), replies.append)
        return replies

    def status(self, *args: Any, **kwargs: Any) -> int:
        (reply,) = self.call(*args, **kwargs)
        return reply.status

    def claim(self, claim_id: str = "c1", token: str = "t1", **more: object) -> int:
        body = {"claim_id": claim_id, "token": token, "ttl_seconds": 60, **more}
        return self.status("POST", "/claim", body, self.pool)

    def state(self) -> str:
        (reply,) = self.call("GET", "/healthz")
        return json.loads(reply.body)["state"]


@pytest.fixture
def box() -> Box:
    return Box()


@pytest.fixture
def claimed(box: Box) -> Box:
    assert box.claim() == 200
    return box


def test_one_claim_at_a_time(box: Box) -> None:
    assert [box.claim("c1"), box.claim("c2"), box.claim("c1")] == [200, 409, 200]
    assert box.claim("c1", token="other") == 409
    assert box.state() == "claimed"


def test_only_the_pool_hands_out_claims(box: Box) -> None:
    for headers in (
        {},
        {"x-rljob-pool": "x"},
        {"x-rljob-pool": proof(KEY, "pool", "another boot")},
    ):
        assert box.status("POST", "/claim", {"claim_id": "c", "token": "t"}, headers) == 401
    assert box.state() == "warm"


def test_the_keyed_challenge_is_answered_for_this_challenge_boot_and_state(box: Box) -> None:
    (reply,) = box.call("GET", "/healthz", challenge="abc")
    health = json.loads(reply.body)
    assert health["proof"] == proof(KEY, "guest", "abc", box.guest.boot_nonce, "warm")
    assert health["proof"] != proof(
        sandbox_key("pool key", "box-2"), "guest", "abc", box.guest.boot_nonce, "warm"
    )


def test_a_second_boot_is_tainted_and_takes_no_claim() -> None:
    box = Box(tainted=True)
    assert (box.state(), box.claim()) == ("tainted", 409)
    assert box.status("POST", "/reset", {}, box.pool) == 409
    assert box.state() == "tainted"


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer ünïcode"}, 401),
        ({"x-rljob-claim": "c2"}, 401),
        ({"x-rljob-boot": "0"}, 409),
    ],
)
@pytest.mark.parametrize(
    "route", [("POST", "/exec"), ("GET", "/files"), ("PUT", "/files"), ("POST", "/reset")]
)
def test_an_owner_needs_claim_token_and_boot(
    claimed: Box, route: tuple[str, str], change: dict[str, str], status: int
) -> None:
    assert claimed.status(*route, {}, {**claimed.owner(), **change}) == status


def test_a_released_claim_opens_nothing_until_a_reset_and_a_new_claim(claimed: Box) -> None:
    assert claimed.status("POST", "/release", {}, claimed.owner()) == 200
    assert claimed.state() == "dirty"
    assert claimed.status("GET", "/files", {}, claimed.owner(), path="x") == 409
    assert claimed.claim("c2") == 409
    assert claimed.status("POST", "/reset", {}, claimed.pool) == 200
    assert claimed.claim("c2", "t2") == 200
    assert claimed.status("POST", "/reset", {}, claimed.owner()) == 401


def test_the_time_to_live_begins_with_the_claim_and_ends_with_it(claimed: Box) -> None:
    assert claimed.backend.ends_at == 160.0
    claimed.backend.clock = 130.0
    claimed.claim()
    assert claimed.backend.ends_at == 160.0
    claimed.status("POST", "/release", {}, claimed.pool)
    assert claimed.backend.ends_at is None


def test_a_reset_that_finds_evidence_quarantines_for_good(claimed: Box) -> None:
    claimed.backend.evidence = ["2 processes do not end"]
    (reply,) = claimed.call("POST", "/reset", {}, claimed.pool)
    assert reply.status == 409
    assert "2 processes do not end" in json.loads(reply.body)["message"]
    claimed.backend.evidence = []
    assert claimed.status("POST", "/reset", {}, claimed.pool) == 409
    assert (claimed.state(), claimed.claim("c2")) == ("quarantined", 409)


def test_a_command_has_the_claims_environment_under_its_own(box: Box) -> None:
    box.claim(env={"A": "claim", "B": "claim"})
    body = {"request_id": "r", "command": ["x"], "env": {"B": "call"}, "timeout": 5}
    assert box.call("POST", "/exec", body, box.owner()) == []
    ((command, _),) = box.backend.running
    assert command.env == {"A": "claim", "B": "call"}
    assert (command.command, command.timeout_seconds, command.max_output_bytes) == (
        ["x"],
        5,
        1_000_000,
    )


def test_a_repeated_request_joins_or_gets_the_kept_answer(claimed: Box) -> None:
    body = {"request_id": "r", "command": "x"}
    first = claimed.call("POST", "/exec", body, claimed.owner())
    second = claimed.call("POST", "/exec", body, claimed.owner())
    ((_, done),) = claimed.backend.running
    done(RESULT)
    third = claimed.call("POST", "/exec", body, claimed.owner())
    assert first == second == third != []
    assert len(claimed.backend.running) == 1


def test_a_failed_write_repeated_fails_alike(claimed: Box) -> None:
    claimed.backend.fault = PermissionError(13, "Permission denied", "/usr/x")
    head = b'{"request_id": "r", "files": [{"path": "/usr/x", "bytes": 1}]}\nx'
    first = claimed.call("PUT", "/files", head, claimed.owner())
    claimed.backend.fault = None
    assert claimed.call("PUT", "/files", head, claimed.owner()) == first
    assert (first[0].status, json.loads(first[0].body)["error"]) == (403, "permission")


def test_what_still_runs_when_the_claim_ends_is_told_so_and_its_answer_kept_from_the_next(
    claimed: Box,
) -> None:
    body = {"request_id": "r", "command": "x"}
    waiting = claimed.call("POST", "/exec", body, claimed.owner())
    claimed.status("POST", "/reset", {}, claimed.pool)
    assert [reply.status for reply in waiting] == [409]
    claimed.claim("c2", "t2")
    ((_, done),) = claimed.backend.running
    done({**RESULT, "stdout": "secret of c1"})
    assert claimed.call("POST", "/exec", body, claimed.owner("c2", "t2")) == []
    assert len(waiting) == 1


def test_unknown_routes_and_methods(box: Box) -> None:
    assert box.status("GET", "/nothing") == 404
    assert box.status("DELETE", "/files") == 405


BAD_BODIES = [
    b"not json",
    b"[]",
    b"[" * 100_000,
    {"command": "x"},
    {"request_id": 5, "command": "x"},
    {"request_id": "r" * 65, "command": "x"},
    {"request_id": "r"},
    {"request_id": "r", "command": 5},
    {"request_id": "r", "command": []},
    {"request_id": "r", "command": ["a", 5]},
    {"request_id": "r", "command": "nul\0"},
    {"request_id": "r", "command": "x", "timeout": "soon"},
    {"request_id": "r", "command": "x", "timeout": float("nan")},
    {"request_id": "r", "command": "x", "timeout": True},
    {"request_id": "r", "command": "x", "env": {"A=B": "c"}},
    {"request_id": "r", "command": "x", "env": {"A": 5}},
    {"request_id": "r", "command": "x", "env": {"A": "x" * 70_000}},
    {"request_id": "r", "command": "x", "stdin": "not base64!"},
    {"request_id": "r", "command": "x", "cwd": "x" * 5000},
    {"request_id": "r", "command": "\ud800"},
    {"request_id": "r", "command": "x", "cwd": "\ud800"},
    {"request_id": "r", "command": "x", "env": {"A": "\ud800"}},
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: str(body)[:40])
def test_a_malformed_command_is_400_and_runs_nothing(claimed: Box, body: object) -> None:
    assert claimed.status("POST", "/exec", body, claimed.owner()) == 400
    assert claimed.backend.running == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"request_id": "r", "files": [{"path": "a", "bytes": 3}]}\nxx',
        b'{"request_id": "r", "files": [{"path": "a", "bytes": 1}]}\nxx',
        b'{"request_id": "r", "files": [{"path": "a", "bytes": -1}]}\nxx',
        b'{"request_id": "r", "files": [{"path": "", "bytes": 2}]}\nxx',
        b'{"request_id": "r", "files": [{"path": "nul\\u0000", "bytes": 2}]}\nxx',
        b'{"request_id": "r", "files": ["a"]}\n',
        b'{"request_id": "r"}\n',
    ],
)
def test_files_whose_heads_do_not_fit_their_bytes_are_400_and_none_is_written(
    claimed: Box, body: bytes
) -> None:
    assert claimed.status("PUT", "/files", body, claimed.owner()) == 400
    assert claimed.backend.files == {}


def test_limits_are_brought_into_their_bounds(claimed: Box) -> None:
    body = {"request_id": "r", "command": "x", "timeout": 1e30, "max_output_bytes": 1e30}
    claimed.call("POST", "/exec", body, claimed.owner())
    ((command, _),) = claimed.backend.running
    assert command.timeout_seconds == checks.MAX_TTL_SECONDS
    assert command.max_output_bytes == checks.MAX_OUTPUT_BYTES


def test_metrics_count(claimed: Box) -> None:
    claimed.status("POST", "/reset", {}, claimed.owner())
    (reply,) = claimed.call("GET", "/metrics")
    assert b"rljob_guest_claims_total 1\n" in reply.body
    assert b"rljob_guest_resets_total 1\n" in reply.body
    assert b"rljob_guest_descriptors 7\n" in reply.body


def test_metrics_tell_how_long_commands_took(claimed: Box) -> None:
    claimed.call("POST", "/exec", {"request_id": "r", "command": "x"}, claimed.owner())
    ((_, done),) = claimed.backend.running
    done({**RESULT, "timed_out": True, "seconds": 1.5})
    (reply,) = claimed.call("GET", "/metrics")
    assert b"exec_seconds_count 1\nrljob_guest_exec_seconds_sum 1.500000\n" in reply.body
    assert b"rljob_guest_timeouts_total 1\n" in reply.body


def test_kept_answers_are_bounded_and_a_dropped_one_is_not_run_again() -> None:
    memory, replies = Memory(), []
    big = Response(200, b"x" * (MAX_BYTES // 2))
    for name in ("a", "b", "c"):
        assert memory.begin(name, replies.append)
        memory.finish(name, big)
    with pytest.raises(RefusedError, match="answer_dropped"):
        memory.begin("a", replies.append)
    assert not memory.begin("c", replies.append)
    assert len(replies) == 4


def test_a_claim_without_a_call_is_over_before_its_time(box: Box) -> None:
    assert box.claim(ttl_seconds=60, idle_seconds=10) == 200
    assert box.backend.ends_at == 110.0
    box.backend.clock = 105.0
    assert box.status("PUT", "/files", put(request_id="r1"), box.owner()) == 200
    assert box.backend.ends_at == 115.0
    box.backend.clock = 155.0
    assert box.status("PUT", "/files", put(request_id="r2"), box.owner()) == 200
    assert box.backend.ends_at == 160.0


def put(request_id: str) -> bytes:
    return json.dumps({"request_id": request_id, "files": []}).encode() + b"\n"


def test_a_call_that_is_refused_does_not_keep_a_claim(box: Box) -> None:
    box.claim(ttl_seconds=60, idle_seconds=10)
    box.backend.clock = 105.0
    assert box.status("POST", "/exec", {}, box.owner(token="other")) == 401
    assert box.backend.ends_at == 110.0


def test_what_runs_counts_as_a_call(box: Box) -> None:
    box.claim(ttl_seconds=600, idle_seconds=10)
    box.backend.busy, box.backend.clock = True, 200.0
    assert box.backend.ends_at == 210.0
    box.backend.busy, box.backend.clock = False, 205.0
    assert box.backend.ends_at == 210.0


def test_the_pool_is_told_how_long_a_claim_may_stay_idle(box: Box) -> None:
    box.claim(ttl_seconds=60, idle_seconds=10)
    box.backend.clock = 104.0
    (reply,) = box.call("GET", "/healthz", headers=box.pool)
    assert json.loads(reply.body)["idle_left"] == 6.0


def test_while_a_reset_is_under_way_nobody_claims_or_calls(claimed: Box) -> None:
    claimed.backend.slow_resets = []
    replies = claimed.call("POST", "/reset", {}, claimed.owner())
    assert claimed.status("POST", "/exec", {}, claimed.owner()) == 409
    assert claimed.status("POST", "/reset", {}, claimed.pool) == 409
    claimed.backend.slow_resets.pop()([])
    assert [reply.status for reply in replies] == [200]
    again = claimed.call("POST", "/reset", {}, claimed.pool)
    assert claimed.claim("c2") == 409
    claimed.backend.slow_resets.pop()([])
    assert [reply.status for reply in again] == [200]
    assert claimed.claim("c2") == 200


def test_a_quarantined_guest_tells_the_pool_why_and_answers_nothing_else(claimed: Box) -> None:
    claimed.backend.evidence = ["somebody listens: tcp port 80"] * 30
    assert claimed.status("POST", "/reset", {}, claimed.owner()) == 409
    (told,) = claimed.call("GET", "/healthz", headers=claimed.pool)
    assert json.loads(told.body)["evidence"] == claimed.backend.evidence[:20]
    (stranger,) = claimed.call("GET", "/healthz")
    assert "evidence" not in json.loads(stranger.body)
    assert claimed.state() == "quarantined"
    for call in (("POST", "/exec"), ("GET", "/files"), ("POST", "/reset")):
        assert claimed.status(*call, {}, claimed.owner()) == 409
    assert claimed.claim("c2") == 409
    assert claimed.backend.ends_at is None


def test_evidence_with_a_name_that_is_no_utf_8_can_be_read(claimed: Box) -> None:
    claimed.backend.evidence = ["/opt/x\udcff was touched"]
    (refused,) = claimed.call("POST", "/reset", {}, claimed.owner())
    assert msgspec.json.decode(refused.body)["error"] == "quarantined"
    (told,) = claimed.call("GET", "/healthz", headers=claimed.pool)
    assert msgspec.json.decode(told.body)["evidence"] == ["/opt/x\\udcff was touched"]


def test_a_part_of_a_file_is_read_by_its_offset(claimed: Box) -> None:
    claimed.backend.files["x"] = b"0123456789"
    query = {"path": "x", "offset": "4", "max_bytes": "3"}
    (reply,) = claimed.call("GET", "/files", headers=claimed.owner(), **query)
    assert reply.body == b"456"


def test_parts_of_a_file_are_told_apart_from_whole_ones(claimed: Box) -> None:
    head = {"path": "p", "bytes": 1, "append": True, "final": "f", "mtime_ns": 5}
    files = [head, {"path": "q", "bytes": 1, "mtime_ns": -1, "append": "yes"}]
    body = json.dumps({"request_id": "r", "files": files}).encode() + b"\nab"
    assert claimed.status("PUT", "/files", body, claimed.owner()) == 200
    assert claimed.backend.written == [
        checks.NewFile("p", 0o644, b"a", append=True, final="f", mtime_ns=5),
        checks.NewFile("q", 0o644, b"b"),
    ]


@pytest.mark.parametrize("call", [("GET", "/archive"), ("PUT", "/archive"), ("POST", "/tunnel")])
def test_what_a_kind_of_sandbox_has_not_is_said(claimed: Box, call: tuple[str, str]) -> None:
    (reply,) = claimed.call(*call, {}, claimed.owner(), path="x")
    assert (reply.status, json.loads(reply.body)["error"]) == (501, "not_here")
    assert claimed.status(*call, {}, path="x") == 409


@pytest.mark.parametrize("number", [10**400, -(10**400), 1e308, float("inf")])
def test_numbers_that_no_clock_has_are_brought_into_their_bounds(number: float) -> None:
    assert checks.number({"timeout": number}, "timeout", 60.0, 0.0, 9.0) in (0.0, 9.0)
