"""What a component tells about itself: metrics, health and log lines. Every metric name of rljob is in this file.

    METRIC.inc(…)/set/observe ─► registry ─► GET /metrics          log.info("event", key=value) ─► one line on stderr
                                 check()  ─► GET /healthz

Importing this module costs nothing: prometheus-client and structlog are loaded at the first value and by
`configure_logging`. A component serves only the metrics that it has touched.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rljob.errors import MachineError
from rljob.log_lines import configure_logging as configure_logging  # noqa: PLC0414  (handed on)
from rljob.log_lines import get_logger as get_logger  # noqa: PLC0414

if TYPE_CHECKING:
    from rljob.ledger.types import LedgerSnapshot
    from rljob.settings import Settings  # pydantic and the manifest's types: 0.2 s

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
"""Buckets for anything from a shell command to an episode of an hour."""
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, *SECONDS[:11])
"""Buckets for what mostly takes milliseconds."""
SMALL_COUNTS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0)
"""Buckets for turns and policy versions."""


class _Metric:
    """A name that becomes a prometheus-client object when it first gets a value."""

    _class = ""

    def __init__(
        self, name: str, doc: str, labels: Iterable[str] = (), buckets: Iterable[float] = ()
    ) -> None:
        self.name, self.doc, self.labels, self.buckets = name, doc, tuple(labels), tuple(buckets)
        self._made: Any = None
        self._lock = threading.Lock()
        METRICS.append(self)

    def _of(self, labels: dict[str, str]) -> Any:
        if self._made is None:
            with self._lock:
                if self._made is None:
                    self._made = self._make()
        return self._made.labels(**labels) if self.labels or labels else self._made

    def _make(self) -> Any:
        import prometheus_client

        extra: dict[str, Any] = {"buckets": self.buckets} if self.buckets else {}
        return getattr(prometheus_client, self._class)(self.name, self.doc, self.labels, **extra)


class Counter(_Metric):
    """Only goes up; its name ends in `_total`."""

    _class = "Counter"

    def inc(self, amount: float = 1.0, **labels: str) -> None:
        """Add `amount`."""
        self._of(labels).inc(amount)


class Gauge(_Metric):
    """Goes up and down."""

    _class = "Gauge"

    def set(self, value: float, **labels: str) -> None:
        """Make it `value`."""
        self._of(labels).set(value)

    def inc(self, amount: float = 1.0, **labels: str) -> None:
        """Add `amount`, which may be negative."""
        self._of(labels).inc(amount)


class Histogram(_Metric):
    """Values by size."""

    _class = "Histogram"

    def observe(self, value: float, **labels: str) -> None:
        """Count one value."""
        self._of(labels).observe(value)


METRICS: list[_Metric] = []
"""All of the names below, in order."""

# ── episodes (rollout worker) ──
EPISODES = Counter(
    "rljob_episodes_total",
    "Episodes that ended, by outcome: completed, max_turns, context_full, timeout, agent_error, and infra_error for "
    "attempts that get another try.",
    ["outcome", "task"],
)
ATTEMPTS = Counter(
    "rljob_attempts_total",
    "Attempts by what the ledger answered: leased, accepted, already_done, hopeless, retry, dead, released. "
    "The completion rate is accepted / (accepted + retry + dead).",
    ["answer"],
)
FAILURES = Counter(
    "rljob_failures_total",
    "Attempts that the infrastructure failed, by the stage they were in and the class of the error.",
    ["stage", "error"],
)
EPISODES_RUNNING = Gauge(
    "rljob_episodes_running", "Episodes in each stage of the pipeline now.", ["stage"]
)
EPISODE_TURNS = Histogram(
    "rljob_episode_turns", "Assistant turns per episode.", ["task"], SMALL_COUNTS
)
EPISODE_REWARD = Histogram(
    "rljob_episode_reward",
    "Reward per episode.",
    ["task"],
    (-1.0, -0.5, 0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0),
)
STAGE_SECONDS = Histogram(
    "rljob_stage_seconds",
    "Seconds per stage of an episode: acquire, setup, run, reward.",
    ["stage"],
    SECONDS,
)
TOKENS = Counter("rljob_tokens_total", "Tokens of finished episodes: prompt or action.", ["kind"])
TOOL_CALLS = Counter(
    "rljob_tool_calls_total", "Tool calls by result: ok, error, timeout.", ["tool", "result"]
)
ROLLOUT_WAITING_SECONDS = Counter(
    "rljob_rollout_waiting_seconds_total",
    "Seconds in which a worker with free slots ran nothing new, by the ledger's reason: no_policy, at_capacity, "
    "staleness_bound, all_steps_admitted, memory, engine_behind, draining.",
    ["reason"],
)

# ── gateway ──
GATEWAY_SESSIONS = Gauge("rljob_gateway_sessions", "Open sessions.")
GATEWAY_TURN_SECONDS = Histogram(
    "rljob_gateway_turn_seconds", "Seconds per assistant turn.", [], SECONDS
)
GATEWAY_RESUBMISSIONS = Counter(
    "rljob_gateway_resubmissions_total",
    "Turns continued after a switch of weights aborted their generation.",
)

# ── stream and ledger (trainer) ──
STREAM_ENTRIES = Gauge(
    "rljob_stream_entries", "Trajectories in the stream, acknowledged by no one yet."
)
STREAM_PENDING = Gauge(
    "rljob_stream_pending", "Trajectories taken by the trainer but not archived yet."
)
STREAM_BACKLOG = Gauge("rljob_stream_backlog_groups", "Complete groups that wait for the trainer.")
STORE_MEMORY_BYTES = Gauge("rljob_store_memory_bytes", "Memory that the store says it uses.")
STALENESS = Gauge(
    "rljob_staleness_versions",
    "Version being trained minus that of a group's oldest token, over the last batch: mean, max.",
    ["stat"],
)
GROUPS = Counter(
    "rljob_groups_total", "Groups that this trainer archived, by fate: trained.", ["fate"]
)
LEDGER_COUNT = Gauge(
    "rljob_ledger_count",
    "What the ledger counts, by its own name: evicted, dead, dropped and rerun groups, running episodes and others.",
    ["what"],
)

# ── sandboxes (pool manager) ──
SANDBOXES = Gauge(
    "rljob_sandboxes",
    "Sandboxes by state: starting, ready, claimed, resetting, quarantined, ending.",
    ["pool", "state"],
)
SANDBOX_STARTS = Counter(
    "rljob_sandbox_starts_total", "Starts by result: ready, adopted, failed.", ["pool", "result"]
)
SANDBOX_CLAIMS = Counter(
    "rljob_sandbox_claims_total",
    "Claims by result: granted, exhausted, at_quota, failed, expired, forfeited.",
    ["pool", "result"],
)
SANDBOX_CLAIM_SECONDS = Histogram(
    "rljob_sandbox_claim_seconds",
    "Seconds per granted claim: queue, until a sandbox was free (hit: one was ready), and accept, until its guest "
    "knew. The image only where the pool has several.",
    ["pool", "image", "phase", "result"],
    SHORT_SECONDS,
)
SANDBOX_IDLE_SECONDS = Histogram(
    "rljob_sandbox_idle_seconds",
    "Seconds that a sandbox was ready before its claim.",
    ["pool"],
    SECONDS,
)
SANDBOX_RESETS = Counter(
    "rljob_sandbox_resets_total",
    "Resets by result: verified, quarantined, failed.",
    ["pool", "result"],
)
SANDBOX_ORPHANS = Counter(
    "rljob_sandbox_orphans_total",
    "Sandbox pods whose SandboxPool is no more, by what was done: delete, dry-run.",
    ["mode"],
)

# ── sandboxes (whoever holds one: rollout workers) ──
SANDBOX_EXEC_SECONDS = Histogram(
    "rljob_sandbox_exec_seconds",
    "Seconds per command in a sandbox, from asking to its answer.",
    [],
    SHORT_SECONDS,
)

# ── weights (engine agent, trainer) ──
WEIGHT_SWITCHES = Counter(
    "rljob_weight_switches_total",
    "Switches by verdict: new, old, indistinguishable, failed.",
    ["verdict"],
)
WEIGHT_SWITCH_SECONDS = Histogram(
    "rljob_weight_switch_seconds", "Seconds from seeing a version to serving it.", [], SECONDS
)
WEIGHT_PAUSE_SECONDS = Histogram(
    "rljob_weight_pause_seconds", "Seconds in which the engine took no request.", [], SECONDS
)
POLICY_VERSION = Gauge("rljob_policy_version", "n of the policy version that this component holds.")

# ── trainer ──
TRAINER_STEP = Gauge("rljob_trainer_step", "Steps trained and committed.")
TRAINER_PHASE_SECONDS = Histogram(
    "rljob_trainer_phase_seconds",
    "Seconds per phase of a step: take, archive, batch, train, checkpoint, publish, commit, validate.",
    ["phase"],
    SECONDS,
)
TRAINER_WAITING_SECONDS = Counter(
    "rljob_trainer_waiting_seconds_total",
    "Seconds in which the trainer had nothing to train, by reason.",
    ["reason"],
)
TRAINER_VALUE = Gauge(
    "rljob_trainer_value", "What the last step's backend reported: loss, grad_norm, lr.", ["name"]
)
REWARD_MEAN = Gauge("rljob_reward_mean", "Mean reward of the last trained batch.")
VALIDATION_SCORE = Gauge("rljob_validation_score", "Mean score of the newest finished validation.")
VALIDATION_STEP = Gauge("rljob_validation_step", "Step of the newest finished validation.")


def show_ledger(snapshot: LedgerSnapshot) -> None:
    """Set everything that a snapshot of the ledger tells: backlog, pending, memory, counts."""
    STREAM_ENTRIES.set(snapshot.stream_entries)
    STREAM_PENDING.set(snapshot.stream_pending)
    STREAM_BACKLOG.set(snapshot.counts.get("ready_groups", 0))
    STORE_MEMORY_BYTES.set(snapshot.memory_bytes)
    for what, number in snapshot.counts.items():
        LEDGER_COUNT.set(number, what=what)


def show_step(record: Mapping[str, Any]) -> None:
    """Set everything that the record of a trained step tells: reward, staleness, loss and the like."""
    if "reward_mean" in record:
        REWARD_MEAN.set(record["reward_mean"])
    for stat in ("mean", "max"):
        if f"staleness_{stat}" in record:
            STALENESS.set(record[f"staleness_{stat}"], stat=stat)
    for name in ("loss", "grad_norm", "learning_rate", "entropy"):
        if isinstance(record.get(name), int | float):
            TRAINER_VALUE.set(record[name], name=name)


# ── serving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class TelemetryServer:
    """`/metrics` and `/healthz` of one process, served by a daemon thread until `close`. A context manager."""

    def __init__(self, server: ThreadingHTTPServer | None) -> None:
        self._server = server
        self.port = server.server_port if server else 0
        """The port it listens on; 0 where it serves nothing."""
        if server:
            threading.Thread(
                target=server.serve_forever, args=(0.1,), name="telemetry", daemon=True
            ).start()

    def close(self) -> None:
        """Stop serving. May be called again."""
        server, self._server = self._server, None
        if server:
            server.shutdown()
            server.server_close()

    def __enter__(self) -> TelemetryServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()


def serve(settings: Settings, check: Callable[[], str] | None = None) -> TelemetryServer:
    """Serve this process's metrics and health on `bind_host:metrics_port`; port 0 serves nothing.

    Args:
        settings: Where, and under which component name.
        check: Gives what is wrong now, empty where all is well; `/healthz` answers 503 with it.
            Called in another thread.

    Raises:
        MachineError: the port cannot be bound.
    """
    if not settings.metrics_port:
        return TelemetryServer(None)
    address = (settings.bind_host, settings.metrics_port)
    try:
        server = _Server(address, _Handler)
    except OSError as error:
        where = f"{address[0]}:{address[1]}"
        raise MachineError(
            where, f"cannot serve metrics: {error.strerror}", "free the port or choose another"
        ) from None
    server.component = settings.component
    server.check = check
    return TelemetryServer(server)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    component = ""
    check: Callable[[], str] | None = None


class _Handler(BaseHTTPRequestHandler):
    timeout = (
        10  # seconds for a client to send its request; a silent one must not hold a thread for ever
    )
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            from prometheus_client import REGISTRY
            from prometheus_client.exposition import choose_encoder

            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, content_type, encode(REGISTRY))
        elif path == "/healthz":
            problem = self.server.check() if self.server.check else ""
            body = {"component": self.server.component, "ok": not problem, "problem": problem}
            self._answer(503 if problem else 200, "application/json", json.dumps(body).encode())
        else:
            self._answer(404, "text/plain", b"only /metrics and /healthz are here\n")

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not events."""
