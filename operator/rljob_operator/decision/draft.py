"""The status under construction: what the last one said, what this pass adds, and the events that follow.

A condition keeps its lastTransitionTime while its status stays the same. Everything that a later pass must know is
here: the operator may be killed at any moment and remembers nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rljob.api import conditions
from rljob_operator.decision.times import to_seconds, to_text
from rljob_operator.observed import Event, Object
from rljob_operator.policies.attempts import Attempts

MESSAGE_CHARS = 1024
"""Of a condition, an event and the status; longer ones are cut."""

_ORDER = (
    conditions.ACCEPTED,
    conditions.STORE_READY,
    conditions.PREPARED,
    conditions.SANDBOXES_READY,
    conditions.ROLLOUTS_READY,
    conditions.TRAINER_READY,
    conditions.PROGRESSING,
    conditions.SUSPENDED,
    conditions.COMPLETE,
    conditions.FAILED,
)


class Draft:
    """See the module. `fields` are the plain ones; what is None there is left out."""

    def __init__(self, resource: Object, now_seconds: float) -> None:
        self.old: dict[str, Any] = resource.get("status") or {}
        self.now = now_seconds
        self.generation = int(resource["metadata"].get("generation", 1))
        self.fields: dict[str, Any] = {
            key: value
            for key, value in self.old.items()
            if key not in {"conditions", "observedGeneration", "message"}
        }
        self.events: list[Event] = []
        self._old = {c["type"]: c for c in self.old.get("conditions") or []}
        self._new = dict(self._old)

    # ── conditions ──

    def set(self, kind: str, status: bool | None, reason: str, message: str = "") -> None:
        """State a condition; None is Unknown."""
        text = {True: "True", False: "False", None: "Unknown"}[status]
        old = self._old.get(kind, {})
        same = old.get("status") == text
        self._new[kind] = {
            "type": kind,
            "status": text,
            "reason": reason,
            "message": _cut(message),
            "lastTransitionTime": old["lastTransitionTime"] if same else to_text(self.now),
            "observedGeneration": self.generation,
        }

    def drop(self, kind: str) -> None:
        """A condition no longer means anything."""
        self._new.pop(kind, None)

    def was(self, kind: str) -> dict[str, Any]:
        """The condition before this pass; empty if there was none."""
        return self._old.get(kind, {})

    def now_is(self, kind: str) -> dict[str, Any]:
        """The condition after this pass; empty if there is none."""
        return self._new.get(kind, {})

    def holds(self, kind: str) -> bool:
        """The condition is True after this pass."""
        return self.now_is(kind).get("status") == "True"

    def since(self, kind: str) -> float:
        """When the condition got its present status; now if it has none."""
        found = to_seconds(self.now_is(kind).get("lastTransitionTime"))
        return self.now if found is None else found

    # ── what is remembered ──

    @property
    def phase(self) -> str:
        """Before this pass; empty: none yet."""
        return str(self.old.get("phase", ""))

    def attempts(self, component: str) -> Attempts:
        """Of `prepare` or `trainer`, as this pass sees them now."""
        return msgspec.convert(self.fields.get(component) or {}, Attempts)

    def attempts_before(self, component: str) -> Attempts:
        """As the status that was read has them: only that survives a crash."""
        return msgspec.convert(self.old.get(component) or {}, Attempts)

    def retry_at(self, component: str) -> float | None:
        """When the next attempt is due."""
        return to_seconds((self.fields.get(component) or {}).get("retryTime"))

    def remember(self, component: str, attempts: Attempts, retry_at: float | None) -> None:
        """Keep the attempts of a component."""
        kept = self.fields.get(component) or {}
        numbers = {**kept, **msgspec.to_builtins(attempts), "retryTime": None}
        if attempts.failed_step < 0:
            numbers["failedStep"] = None
        if retry_at is not None:
            # whole seconds, so never earlier than asked for
            numbers["retryTime"] = to_text(retry_at + 0.999)
        started = attempts.attempt or attempts.ended
        self.fields[component] = _without_none(numbers) if started else None

    def progress_counter(self) -> int:
        """The ledger's counter that was seen last."""
        return int((self.fields.get("progress") or {}).get("counter", -1))

    def progress_since(self) -> float | None:
        """When it last changed."""
        return to_seconds((self.fields.get("progress") or {}).get("since"))

    def remember_progress(self, counter: int, since_seconds: float) -> None:
        """Keep the counter, once there is one."""
        if counter >= 0:
            self.fields["progress"] = {"counter": counter, "since": to_text(since_seconds)}

    def moment(self, key: str) -> float | None:
        """A moment of the status (startTime, readyTime …)."""
        return to_seconds(self.fields.get(key))

    # ── the end ──

    def announce(self, kind: str, reason: str, message: str) -> None:
        """Post an event."""
        self.events.append(Event(kind, reason, _cut(message)))

    def finish(self, phase: str, message: str) -> dict[str, Any]:
        """The whole status."""
        fields = {**self.fields, "phase": phase, "message": _cut(message) or None}
        fields["observedGeneration"] = self.generation
        known = [self._new[kind] for kind in _ORDER if kind in self._new]
        # each is about this generation, also those that this pass had no reason to touch
        fields["conditions"] = [{**c, "observedGeneration": self.generation} for c in known]
        return _without_none(fields)


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _cut(text: str) -> str:
    return text if len(text) <= MESSAGE_CHARS else text[: MESSAGE_CHARS - 1] + "…"
