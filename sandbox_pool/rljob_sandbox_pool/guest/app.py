"""Routes of the guest: who may call what, and the same answer for the same request id.

    POST /claim     pool    {claim_id, token, env, ttl_seconds, idle_seconds, owner, boot_id, job}
    POST /release   pool or claim: ends the claim
    POST /reset     pool (ends the claim too) or claim (keeps it)
    …               claim   what `commands` and `transfers` list
    GET  /healthz   anyone; ?challenge= asks for the keyed answer, a claim's headers whether it holds; the pool is told
                    the claim and the evidence of a quarantine
    GET  /metrics   anyone

The pool proves itself with HMAC(sandbox key, boot nonce), an owner with its claim's token. Knows no socket and
no process: those are the `Backend`, of which the simulated runtime has its own.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rljob_sandbox_pool.guest import checks, commands, transfers
from rljob_sandbox_pool.guest.claims import Claim, Lock, State, proof
from rljob_sandbox_pool.guest.commands import CommandsBackend
from rljob_sandbox_pool.guest.memory import Memory
from rljob_sandbox_pool.guest.os_errors import refusal_of
from rljob_sandbox_pool.guest.routes import Reply, Routes, find
from rljob_sandbox_pool.guest.transfers import FilesBackend
from rljob_sandbox_pool.guest.wire import RefusedError, Request, Response, answer

MAX_EVIDENCE = 20
MAX_WORDS = 500
"""What the pool is told of a quarantine: so many sentences, each so long."""


class Backend(CommandsBackend, FilesBackend, Protocol):
    """What a sandbox does."""

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def reset(self, done: Callable[[list[str]], None]) -> None:
        """Back to pristine; `done` gets what is not."""
        ...

    def end_claim_at(self, when: Callable[[], float] | None) -> None:
        """When the sandbox is to end itself (`now()`), asked again when that time has come; None: the claim is over."""
        ...

    def usage(self) -> dict[str, int]:
        """What the guest holds, as numbers that must not grow with what it has done."""
        ...

    def is_busy(self) -> bool:
        """Whether anything runs that a call of the claim started."""
        ...


class Guest:
    """The API of one sandbox."""

    def __init__(
        self, sandbox_id: str, key: bytes, backend: Backend, *, tainted: bool = False
    ) -> None:
        self.id = sandbox_id
        self.boot_nonce = secrets.token_hex(8)
        self.lock = Lock(tainted=tainted)
        counted = ("claims", "execs", "shells", "shell_commands", "timeouts", "resets")
        self.counts: dict[str, int] = dict.fromkeys(counted, 0)
        self._ran, self._ran_seconds = 0, 0.0
        self._key = key
        self._backend = backend
        self._memory = Memory()
        self._last_call = 0.0
        self._pool_proof = proof(key, "pool", self.boot_nonce)
        self._routes: Routes = {
            ("POST", "/claim"): self._claim,
            ("POST", "/release"): self._release,
            ("POST", "/reset"): self._reset,
            ("GET", "/healthz"): self._health,
            ("GET", "/metrics"): self._metrics,
            **commands.routes(self, backend),
            **transfers.routes(self, backend),
        }

    def handle(self, request: Request, reply: Reply) -> None:
        """Answer one request: `reply` is called once, now or later."""
        try:
            handler, given, known = find(self._routes, request.method, request.path)
            if handler is None:
                words = f"{request.method} {request.path}"[:200]
                raise RefusedError(405 if known else 404, "no_route", words)
            handler(request._replace(id=given), reply)
        except RefusedError as refusal:
            reply(refusal.response())
        except OSError as error:
            reply(refusal_of(error).response())

    def _is_pool(self, request: Request) -> bool:
        given = request.headers.get("x-rljob-pool", "")
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._pool_proof.encode())

    def owner(self, request: Request) -> Claim:
        """The claim that the request holds. Raises RefusedError."""
        headers = request.headers
        if headers.get("x-rljob-boot", "") != self.boot_nonce:
            raise RefusedError(409, "other_boot", "the sandbox has another boot nonce")
        token = headers.get("authorization", "").removeprefix("Bearer ")
        claim = self.lock.check(headers.get("x-rljob-claim", ""), token)
        self.touch()
        return claim

    def touch(self) -> None:
        """The claim is used."""
        self._last_call = self._backend.now()

    def _claim(self, request: Request, reply: Reply) -> None:
        if not self._is_pool(request):
            raise RefusedError(401, "not_the_pool", "only the pool hands out claims")
        body = checks.json_object(request.body)
        seconds = checks.number(body, "ttl_seconds", 3600.0, 0.01, checks.MAX_TTL_SECONDS)
        claim = Claim(
            id=checks.text(body, "claim_id", limit=128),
            token=checks.text(body, "token", limit=256),
            env=checks.environment(body.get("env", {})),
            expires=self._backend.now() + seconds,
            idle_seconds=checks.number(body, "idle_seconds", 0.0, 0.0, checks.MAX_TTL_SECONDS),
            owner=checks.text(body, "owner", "", limit=128),
            boot_id=checks.text(body, "boot_id", "", limit=128),
            job=checks.text(body, "job", "", limit=512),
        )
        self.lock.take(claim)
        if self.lock.claim is claim:
            self.counts["claims"] += 1
            self.touch()
            self._backend.end_claim_at(lambda: self._end_of(claim))
        reply(answer({"boot_nonce": self.boot_nonce}))

    def _end_of(self, claim: Claim) -> float:
        """When the claim is over, as things are now."""
        if not claim.idle_seconds:
            return claim.expires
        if self._backend.is_busy():
            self.touch()
        return min(claim.expires, self._last_call + claim.idle_seconds)

    def _release(self, request: Request, reply: Reply) -> None:
        if not self._is_pool(request):
            self.owner(request)
        self._end_claim()
        reply(answer({"state": self.lock.state.value}))

    def _end_claim(self) -> None:
        self.lock.release()
        self._backend.end_claim_at(None)
        self._memory.clear()

    def _reset(self, request: Request, reply: Reply) -> None:
        keep_claim = not self._is_pool(request)
        if keep_claim:
            self.owner(request)
        elif self.lock.state in (State.QUARANTINED, State.TAINTED):
            raise RefusedError(409, self.lock.state.value, "; ".join(self.lock.evidence))
        self.lock.begin_reset()
        if not keep_claim:
            self._end_claim()
        self.counts["resets"] += 1
        self._backend.reset(lambda evidence: self._cleaned(evidence, reply, keep_claim=keep_claim))

    def _cleaned(self, evidence: list[str], reply: Reply, *, keep_claim: bool) -> None:
        # Names of files may be no UTF-8, and nobody would read the answer.
        evidence = [each.encode("utf-8", "backslashreplace").decode() for each in evidence]
        self.lock.cleaned(evidence, keep_claim=keep_claim)
        if self.lock.state is State.QUARANTINED:
            self._end_claim()
            words = "; ".join(evidence)[:2000]
            reply(RefusedError(409, "quarantined", words).response())
        else:
            reply(answer({"state": self.lock.state.value}))

    def holds(self, claim: Claim) -> bool:
        """Whether that claim still holds the sandbox."""
        return self.lock.claim is claim

    def ran(self, result: Mapping[str, Any]) -> None:
        """A command has ended: counted."""
        self.counts["timeouts"] += bool(result["timed_out"])
        if (seconds := result.get("seconds")) is not None:
            self._ran, self._ran_seconds = self._ran + 1, self._ran_seconds + seconds

    def once(self, body: dict[str, Any], reply: Reply, run: Callable[[Reply], None]) -> None:
        """Run unless this request id ran before; then its answer is given again, errors included."""
        request_id = checks.text(body, "request_id", limit=64)
        if not self._memory.begin(request_id, reply):
            return
        try:
            run(lambda response: self._memory.finish(request_id, response))
        except RefusedError as refusal:
            self._memory.finish(request_id, refusal.response())
        except OSError as error:
            self._memory.finish(request_id, refusal_of(error).response())

    def _health(self, request: Request, reply: Reply) -> None:
        if "x-rljob-claim" in request.headers:
            self.owner(request)
        health = {"id": self.id, "state": self.lock.state.value, "boot_nonce": self.boot_nonce}
        if challenge := request.query.get("challenge", "")[:128]:
            health["proof"] = proof(
                self._key, "guest", challenge, self.boot_nonce, self.lock.state.value
            )
        reply(answer(health | (self._held() if self._is_pool(request) else {})))

    def _held(self) -> dict[str, Any]:
        """What a pool manager that takes over has to know."""
        held: dict[str, Any] = {"uses": self.counts["claims"], "job": self.lock.job}
        held["evidence"] = [words[:MAX_WORDS] for words in self.lock.evidence[:MAX_EVIDENCE]]
        if claim := self.lock.claim:
            now = self._backend.now()
            owner = {"owner": claim.owner, "boot_id": claim.boot_id}
            held["claim"] = {"id": claim.id, "seconds_left": claim.expires - now, **owner}
            if claim.idle_seconds:
                held["idle_left"] = self._end_of(claim) - now
        return held

    def _metrics(self, request: Request, reply: Reply) -> None:
        lines = [f"rljob_guest_{name}_total {count}\n" for name, count in self.counts.items()]
        lines.append(f"rljob_guest_exec_seconds_count {self._ran}\n")
        lines.append(f"rljob_guest_exec_seconds_sum {self._ran_seconds:.6f}\n")
        lines += [f"rljob_guest_{name} {value}\n" for name, value in self._backend.usage().items()]
        reply(Response(200, "".join(lines).encode(), "text/plain; version=0.0.4"))
