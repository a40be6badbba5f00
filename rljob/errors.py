"""The one exception tree of rljob.

    RLJobError
    ├── UserError            bad input: one line with path and fix, exit code 2; never retried
    │   ├── ManifestError    a key of the manifest
    │   ├── DataError        a row or file of a dataset
    │   └── MachineError     this machine lacks something (bubblewrap, memory, a free port)
    ├── InfraError           retry: another attempt may well succeed; never becomes reward 0
    │   ├── SandboxError     the sandbox died, answered nonsense or missed a deadline
    │   ├── EngineError      the engine died, restarted or missed a deadline
    │   │   └── EngineNotReadyError   no version is being served now: wait and submit again
    │   ├── GatewayError     the gateway restarted or lost the session
    │   ├── DeadlineError    a stage's deadline passed (acquire, setup, turn, reward)
    │   └── StoreError       Redis or the artifact store cannot be reached
    ├── FencedError          a newer incarnation or boot id took over: exit, do not retry
    ├── StateError           the ledger's state does not allow this call: exit, restart and resume
    ├── CorruptError         bytes that do not verify: quarantine, never retry the same bytes
    └── TaskError            the task, agent, tool or reward code of the user failed: reward 0 or refused

To add a class: derive from the branch whose retry rule it shares, give it a docstring, and keep `__init__`
compatible with `Exception.args` so that it pickles.
"""

from __future__ import annotations


class RLJobError(Exception):
    """Root of everything rljob raises on purpose."""


class UserError(RLJobError):
    """Bad input. `str(error)` is one line: path, what is wrong, what to do.

    Args:
        path: Where the fault is: a manifest path (`spec.rollout.groupSize`), a file and line, or a machine part.
        problem: What is wrong.
        fix: What to do about it.
    """

    exit_code = 2

    def __init__(self, path: str, problem: str, fix: str = "") -> None:
        super().__init__(path, problem, fix)
        self.path, self.problem, self.fix = path, problem, fix

    def __str__(self) -> str:
        line = f"{self.path}: {self.problem}"
        return f"{line}; {self.fix}" if self.fix else line


class ManifestError(UserError):
    """A key of the manifest is unknown, malformed, out of range or without effect."""


class DataError(UserError):
    """A dataset is missing or a row of it is malformed."""


class MachineError(UserError):
    """The machine lacks what the manifest needs."""


class InfraError(RLJobError):
    """An infrastructure failure: the episode gets another attempt."""


class SandboxError(InfraError):
    """A sandbox died, was lost, or answered what its protocol does not allow."""


class EngineError(InfraError):
    """An engine died, restarted, refused, or answered what its protocol does not allow."""


class EngineNotReadyError(EngineError):
    """The engine serves no version now (`state`: starting, empty, switching): wait, then submit the same request again.

    Args:
        state: The engine's state.
        retry_after_seconds: When to ask again.
    """

    def __init__(self, state: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(state, retry_after_seconds)
        self.state, self.retry_after_seconds = state, retry_after_seconds

    def __str__(self) -> str:
        return f"engine is {self.state}"


class GatewayError(InfraError):
    """A gateway restarted, lost a session, or answered what its protocol does not allow."""


class DeadlineError(InfraError):
    """A stage did not end by its deadline. The message names the stage and the seconds."""


class StoreError(InfraError):
    """Redis or the artifact store could not be reached within its deadline."""


class FencedError(RLJobError):
    """A newer incarnation (trainer) or boot id (worker) has taken over; the caller must exit."""


class StateError(RLJobError):
    """The ledger's state does not allow this call (a lost store, a bug): the caller exits.

    Its restart resumes cleanly.
    """


class CorruptError(RLJobError):
    """Bytes failed their checksum or do not decode."""


class TaskError(RLJobError):
    """Code of the task, agent, tool or reward failed in a way that belongs to the episode."""
