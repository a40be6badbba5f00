"""(2)-(4) One attempt at one episode; errors become data here.

    acquire ──► setup ──► run ──► (export, release, acquire afresh) ──► reward ──► trajectory
       │          │        │                                              │
       └──────────┴────────┴──────────────────────────────────────────────┴──► close: nothing stays held

The pipeline decides when each method runs; this class knows what it means. Which error becomes
what:

| where      | error                                     | becomes                                        |
| ---------- | ----------------------------------------- | ---------------------------------------------- |
| anywhere   | InfraError (sandbox, engine, deadline …)  | raised: the ledger gives another attempt       |
| setup      | anything that the task raises             | TaskError: nothing was sampled, nothing trains |
| run        | the run deadline                          | `timeout`, scored, trained                     |
| run        | anything else that agent or tools raise   | `agent_error`, reward 0, trained               |
| run        | the sandbox dies under it, second time    | `agent_error`, reward 0, trained               |
| run        | it ends and no token was sampled          | TaskError: nothing trains                      |
| rewarding  | TaskError                                 | reward 0, trained                              |
| rewarding  | anything else that the task raises        | `agent_error`, reward 0, trained, error kept   |
"""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import structlog

from rljob.api.rljob_types import Deadlines
from rljob.clock import Clock
from rljob.errors import FencedError, GatewayError, InfraError, SandboxError, TaskError, UserError
from rljob.gateway import ClosedSession, Session, SessionSampling, SessionSpec
from rljob.ids import EpisodeId
from rljob.task_config import AgentContext, AgentResult, Chat, Message, Reward, Row
from rljob.trajectory import Trajectory
from rljob_rollout_worker.claims import Box, Claims
from rljob_rollout_worker.engine_clock import EngineClock, OutOfTimeError
from rljob_rollout_worker.plugins import Bench
from rljob_rollout_worker.watch import WatchedChat, WatchedSandbox

DEATHS_ARE_THE_AGENTS = 2
"""So many sandboxes that die under the same episode's own commands are its fault, or it would learn to kill them."""
REMEMBERED_DEATHS = 10_000
EVIDENCE_CHARS = 4000
TTL_SLACK_SECONDS = 600.0
"""What a claim lives beyond all deadlines of its episode: waits between stages, engine pauses."""
REWARD_PRIORITY = 10
"""Of a claim for the reward: what was begun is finished before anything else begins."""

_log = structlog.get_logger("rljob.episode")


class Gateway(Protocol):
    """What of `rljob.gateway.GatewayClient` the worker uses."""

    async def open_session(self, spec: SessionSpec) -> Session:
        """Open a session."""
        ...

    async def close_session(self, session_id: str) -> ClosedSession:
        """End it and fetch its chains."""
        ...

    async def abort_session(self, session_id: str) -> None:
        """Drop it."""
        ...


class World(msgspec.Struct, kw_only=True):
    """What all episodes of a worker share."""

    job: str
    worker: str
    model: str
    max_context_tokens: int
    deadlines: Deadlines
    clock: Clock
    engine_clock: EngineClock
    claims: Claims
    gateway: Gateway
    chat: Callable[[Session], Chat]
    """The model behind a session."""
    deaths: dict[str, int] = {}
    """Sandboxes that died under an episode's own commands, while the episode is unfinished."""
    reward_errors: int = 0
    """Episodes that got reward 0 since their verifier broke or gave no finite number."""


class Ticket(msgspec.Struct, kw_only=True):
    """What one attempt is to run."""

    episode: EpisodeId
    attempt: int
    row: Row
    row_index: int
    row_hash: str
    bench: Bench
    sampling: SessionSampling


class Episode:
    """One attempt. Its methods are called in the order of the picture, and `close` always at the end."""

    def __init__(self, world: World, ticket: Ticket) -> None:
        self._world, self._ticket = world, ticket
        self._plan = ticket.bench.plan(ticket.row)
        self._started_at = world.clock.now()
        self._messages: list[Message] = []
        self._box: Box | None = None
        self._box_id = ""
        self._session: Session | None = None
        self._closed: ClosedSession | None = None
        self._chat: WatchedChat | None = None
        self._result: AgentResult | None = None
        self._exported: bytes | None = None
        self._reward: Reward | None = None
        self._error = ""
        self.stage_seconds: dict[str, float] = {}
        """Filled in by the pipeline."""

    @property
    def task_name(self) -> str:
        """Name of the Task Config."""
        return self._ticket.bench.name

    @property
    def wants_fresh_sandbox(self) -> bool:
        """Whether the result has been exported and waits for a new sandbox."""
        return self._exported is not None and self._reward is None

    @property
    def evidence(self) -> str:
        """The end of the conversation and the error, for the dead-letter stream."""
        said = self._chat.cut_off("completed").messages[-2:] if self._chat is not None else []
        return f"{self._error}\n{msgspec.json.encode(said).decode()}"[-EVIDENCE_CHARS:]

    async def acquire(self) -> None:
        """Claim a sandbox. Raises InfraError, UserError."""
        deadlines, plan = self._world.deadlines, self._plan
        ttl = (
            deadlines.setup_seconds
            + deadlines.run_seconds
            + deadlines.reward_seconds
            + TTL_SLACK_SECONDS
        )
        self._box = await self._world.claims.acquire(
            plan.pool,
            image=plan.image,
            env=plan.env,
            ttl_seconds=ttl,
            timeout=deadlines.acquire_seconds,
            priority=REWARD_PRIORITY if self.wants_fresh_sandbox else 0,
        )
        self._box_id = self._box_id or self._box.id

    async def setup(self) -> None:
        """Make the sandbox ready and get the opening messages. Raises InfraError, TaskError."""
        bench, row = self._ticket.bench, self._ticket.row
        try:
            messages = await bench.task.setup(self._held(), row)
        except (InfraError, UserError):
            raise
        except Exception as error:  # boundary: the task's own code
            self._error = _trace(error)
            raise TaskError(f"{bench.name}: {_one_line(error)}") from error
        self._messages = bench.opening(messages)

    async def run(self) -> None:
        """Run the agent to its end and fetch what it sampled. Raises InfraError, TaskError."""
        watched = WatchedSandbox(self._held())
        self._session = await self._world.gateway.open_session(self._session_spec())
        self._chat = chat = WatchedChat(self._world.chat(self._session))
        self._result = await self._run_agent(chat, watched)
        died = watched.lost if self._result.outcome != "agent_error" else None
        if died is not None and not self._is_agents_fault():
            raise died
        self._closed = await self._world.gateway.close_session(self._session.id)
        if self._closed.boot_id != self._session.boot_id:
            raise GatewayError("the gateway restarted: the session is gone")
        self._session = None
        if died is not None:
            self._error = str(died)
            self._result = chat.cut_off("agent_error")
        self._require_tokens()

    async def export(self) -> None:
        """Carry the result out and give the sandbox back, where rewards want a fresh one. Raises InfraError."""
        task, result = self._ticket.bench.exporting, self._finished()
        if result.outcome == "agent_error":
            self._reward = Reward(value=0.0)
        elif task is not None:
            try:
                self._exported = await task.export(self._held(), self._ticket.row)
            except InfraError:
                raise
            except Exception as error:  # boundary: the task's own code  # noqa: BLE001
                self._score_failed(error)
        if self._reward is not None or self._exported is not None:
            await self._give_back()

    async def reward(self) -> None:
        """Score the episode. Raises InfraError."""
        if self._reward is not None:
            return
        bench, row, result = self._ticket.bench, self._ticket.row, self._finished()
        try:
            if bench.exporting is not None and self._exported is not None:
                await bench.task.setup(self._held(), row)
                await bench.exporting.load(self._held(), row, self._exported)
            self._reward = await bench.score(self._held(), row, result)
        except InfraError:
            raise
        except Exception as error:  # boundary: the task's own code  # noqa: BLE001
            self._score_failed(error)

    def trajectory(self) -> Trajectory:
        """The record of the finished episode."""
        world, ticket, result, closed = self._world, self._ticket, self._finished(), self._closed
        assert closed is not None and self._reward is not None  # noqa: PT018 - run and reward came before
        world.deaths.pop(str(ticket.episode), None)
        return Trajectory(
            job=world.job,
            episode=str(ticket.episode),
            attempt=ticket.attempt,
            task=ticket.bench.name,
            reward=self._reward.value,
            reward_parts=self._reward.parts,
            outcome=result.outcome,
            chains=closed.chains,
            turns=closed.turns,
            tool_calls=result.tool_calls,
            stage_seconds={**self.stage_seconds, "engine_wait": closed.engine_wait_seconds},
            started_at=self._started_at,
            worker=world.worker,
            sandbox=self._box_id,
            model=world.model,
            sampling=msgspec.structs.asdict(ticket.sampling),
            row_index=ticket.row_index,
            row_hash=ticket.row_hash,
            metadata=self._metadata(),
        )

    async def close(self) -> None:
        """Give back whatever is held. Never raises what it cannot mend."""
        if self._session is not None:
            session, self._session = self._session, None
            try:
                await self._world.gateway.abort_session(session.id)
            except InfraError as error:  # the gateway ends it by itself, at its time to live
                _log.warning("session_not_aborted", session=session.id, reason=str(error))
        await self._give_back()

    async def _run_agent(self, chat: WatchedChat, box: WatchedSandbox) -> AgentResult:
        bench = self._ticket.bench
        context = AgentContext(
            chat=chat, box=box, tools=bench.tools(), max_turns=self._plan.max_turns
        )
        try:
            run = bench.agent().run(context, self._messages)
            return await self._world.engine_clock.within(self._world.deadlines.run_seconds, run)
        except OutOfTimeError:
            return chat.cut_off("timeout")
        except SandboxError as error:
            box.lost = error
            return chat.cut_off(
                "completed"
            )  # `run` decides what the death of the sandbox makes of it
        except (InfraError, FencedError, UserError):
            raise
        except Exception as error:  # boundary: the agent's and the tools' own code  # noqa: BLE001
            self._error = _trace(error)
            _log.warning("agent_error", episode=str(self._ticket.episode), error=_one_line(error))
            return chat.cut_off("agent_error")

    def _is_agents_fault(self) -> bool:
        deaths, episode = self._world.deaths, str(self._ticket.episode)
        deaths[episode] = deaths.pop(episode, 0) + 1
        if len(deaths) > REMEMBERED_DEATHS:  # of episodes that were given up elsewhere
            del deaths[next(iter(deaths))]
        return deaths[episode] >= DEATHS_ARE_THE_AGENTS

    def _require_tokens(self) -> None:
        result, closed = self._finished(), self._closed
        if closed is not None and any(chain.logprobs for chain in closed.chains):
            return
        why = self._error.strip().rpartition("\n")[2] or f"the agent ended as {result.outcome}"
        raise TaskError(f"nothing was sampled: {why}")

    def _score_failed(self, error: Exception) -> None:
        result = self._finished()
        self._error = _trace(error)
        self._reward = Reward(value=0.0)
        if not isinstance(error, TaskError):
            # the verifier may have stumbled over what the model left behind, so it costs the episode its reward; a bug
            # shows as many of these with the same error
            result.outcome = "agent_error"
            self._world.reward_errors += 1
            _log.error(
                "reward_error",
                episode=str(self._ticket.episode),
                task=self._ticket.bench.name,
                error=_one_line(error),
                so_far=self._world.reward_errors,
            )

    def _session_spec(self) -> SessionSpec:
        ticket, world = self._ticket, self._world
        return SessionSpec(
            # random, since the same attempt may come again: to a restarted worker, or in a validation run
            # that a restarted trainer opens anew
            session_id=f"{ticket.episode}.{ticket.attempt}.{secrets.token_hex(4)}",
            model=world.model,
            sampling=ticket.sampling,
            max_context_tokens=world.max_context_tokens,
            turn_seconds=world.deadlines.turn_seconds,
        )

    def _metadata(self) -> dict[str, Any]:
        kept = {key: value for key, value in self._ticket.row.metadata.items() if _is_small(value)}
        answer = self._finished().answer
        if answer is not None:
            kept["submitted"] = answer[:EVIDENCE_CHARS]
        if self._error:
            kept["error"] = self._error[-EVIDENCE_CHARS:]
        return kept

    async def _give_back(self) -> None:
        if self._box is not None:
            box, self._box = self._box, None
            await self._world.claims.release(box)

    def _held(self) -> Box:
        if self._box is None:
            raise RuntimeError("the pipeline called a stage without a sandbox")
        return self._box

    def _finished(self) -> AgentResult:
        if self._result is None:
            raise RuntimeError("the pipeline called a stage before the agent ran")
        return self._result


def _is_small(value: object) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= 64)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-EVIDENCE_CHARS:]
