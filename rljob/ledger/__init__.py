"""The ledger: every decision of a job that must survive a crash, in Redis or Valkey, one Lua script per call.

    worker ── lease, heartbeat, complete, fail, release ──► ledger ◄── take, archived, commit, resume ── trainer

`Ledger` is the client; `scripts/<call>.lua` is the call, `scripts/common.lua` what the calls share. All keys of a job
begin with `rljob:{job}:`, so they lie in one hash slot. Every call is safe to repeat. Time is the server's.

A training group moves so. The last two columns are what a move adds to `admitted` and to E, the number of unfinished
episodes of started groups, which `maxConcurrentEpisodes` bounds. G = episodes per group, B = groups per step.

| from | by | to | admitted | E |
| --- | --- | --- | --- | --- |
| – | `lease`, when admission lets it | running: G members leased or missing | +1 | +G |
| running | `complete` of a member that is not the last | running | 0 | −1 |
| running | `complete` of the last member | ready | 0 | −1 |
| running | the same, all rewards equal, `zero_variance: drop` | dropped; the next row takes its place | −1 | −1 |
| running | `fail`, attempts left; a lease that ended | running: the member waits or is missing | 0 | 0 |
| running | `fail` without attempts left; leases lost too often | dead letter; the next row … | −1 | −E |
| running, ready | past the bound (`take`, `heartbeat`, `lease` see it) | evicted; t`row`-`e+1` waits | −1 | −E |
| running, ready | the same, evicted `max_evictions` times before | dead letter `too_slow` | −1 | −E |
| ready | `take(s)`, among the B oldest | recorded for step s | 0 | 0 |
| recorded | `take(s)` again | recorded, the same answer | 0 | 0 |
| recorded | `reject` (a record that does not decode) | dead letter; `take(s)` fills the place | −1 | 0 |
| recorded | `archived(s)` | archived: it leaves the store and counts in A·B | 0 | 0 |
| archived | `commit(s)` | trained | 0 | 0 |
| archived s+1 … A | `resume(s)`, then `archived`, `commit` (replay) | trained | 0 | 0 |
| archived s+1 … A | `resume(s)`, then `take(s+1)`: no archive is found | lost, counted as rerun | −(A−s)·B | 0 |

A is the last archived step, T ≤ A the last trained one; they differ between `archived` and `commit`, and in a replay.
`admitted` is never stored: it is A·B + recorded + ready + running, so no crash can make it drift, and `resume(s)` of a
job without batches past s gives s·B + ready + running. A new group starts iff

    E + G ≤ maxConcurrentEpisodes  and  admitted < min((η + min(n, T) + 1)·B, steps·B)      n: the engine's version

and its members go only to engines of at least that version, of the newest line. The bound is hard under `evict` and
`wait`: `take(s)` gives no group with a token older than s − 1 − η. Order in a batch: oldest token, then oldest start.

Where nothing is trained, version 0 stays the policy. Mode `rollout`: η = steps, so that nothing gets stale; the whole
job takes `num_groups`, fewer by the dead ones in one pass over the rows, and its last batch holds what is left. Mode
`eval`: steps = 0, so that only validation is leased.

An episode: missing ─lease─► leased ─complete─► done, leased ─fail─► waiting ─due─► leased, and leased ─lease ended,
forfeit, release─► missing. The first completion wins, whichever attempt. Its entry in the stream names the payload,
which lies beside it; both stay until the batch is archived or the group ends. There is no consumer group: the record of
an episode holds its entry's id, which is all that one would know.

Leases end only inside calls of workers. After a restart of the server, or a time in which no worker called, every lease
first gets one more term. New groups stop at 80 % of `maxmemory`; members of started groups do not, because only whole
groups can be freed. Every call but `complete` works in a full store.
"""

from rljob.ledger.client import Ledger
from rljob.ledger.types import (
    CompletionInfo,
    DeadLetter,
    FailReply,
    Lease,
    LeaseReason,
    LeaseReply,
    LedgerConfig,
    LedgerFacts,
    LedgerSnapshot,
    OpenAttempt,
    Phase,
    Policy,
    Report,
    ReportView,
    TakenGroup,
    TakeReply,
    ValidationStatus,
    Verdict,
)

__all__ = [
    "CompletionInfo",
    "DeadLetter",
    "FailReply",
    "Lease",
    "LeaseReason",
    "LeaseReply",
    "Ledger",
    "LedgerConfig",
    "LedgerFacts",
    "LedgerSnapshot",
    "OpenAttempt",
    "Phase",
    "Policy",
    "Report",
    "ReportView",
    "TakeReply",
    "TakenGroup",
    "ValidationStatus",
    "Verdict",
]
