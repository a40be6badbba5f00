"""Three independent records of one job, reconciled: nothing that was accepted may be lost, nothing trained twice.

    workers' completion logs     completions/*.jsonl     what was sent, and what the ledger answered
    archived batches             batches/step-N/         what was trained (the surviving line)
    ledger and dead letters      facts()                 what is outstanding, evicted, dead, dropped

Every accepted completion of a training episode must be in exactly one place: trained, outstanding in the stream, or
explained by an eviction, a death, a dropped group or a later run of the same episode (`rerun`: a store that lost it).
Validation episodes are scored, not trained, and are left out; but where scoring was all (mode `eval`), every accepted
completion must have been scored, and each once.

The ledger's part is saved as `ledger-facts.json` beside the artifacts, for audits after the store ended.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from rljob.errors import CorruptError
from rljob.ids import EpisodeId
from rljob.ledger.types import LedgerFacts

if TYPE_CHECKING:
    from rljob.ledger.client import Ledger

T = TypeVar("T")

FACTS_FILE = "ledger-facts.json"
RESULT_FILE = "result.json"

Fate = Literal["trained", "outstanding", "rerun", "dead", "dropped", "evicted", "lost"]


class AuditReport(msgspec.Struct, kw_only=True):
    """What the audit found. completed = trained_completions + outstanding + evicted + dead + dropped + rerun + lost."""

    leased: int
    """Leases given, as the ledger counts them; 0 where the ledger is not known."""
    completed: int
    """Accepted completions in the workers' logs."""
    trained: int
    """Episodes in the archived batches."""
    outstanding: int
    evicted: int
    """Accepted completions of groups that were evicted."""
    dead: int
    dropped: int
    rerun: int
    """Accepted completions of episodes that were completed once more, and trained then."""
    lost: list[str]
    """Episodes with an accepted completion that is nowhere, and that no record explains."""
    trained_twice: list[str]
    """Rows that are in the surviving line more than once: `row 5: t5-0 in step 2, t5-0 in step 7`."""
    unlogged: list[str]
    """Trained episodes that no worker's log knows."""
    corrupt: list[str]
    """Archived records that do not match their hash."""

    @property
    def ok(self) -> bool:
        """Whether the three records agree."""
        return not (self.lost or self.trained_twice or self.unlogged or self.corrupt)


class _Result(msgspec.Struct):
    mode: str


class _Named(msgspec.Struct):
    episode: str


class _Line(msgspec.Struct):
    episode: str
    answer: str
    sha256: str


class _Episode(msgspec.Struct):
    episode: str
    sha256: str
    offset: int
    length: int


class _Group(msgspec.Struct):
    group: str
    episodes: list[_Episode]


class _Manifest(msgspec.Struct):
    step: int
    groups: list[_Group]


async def audit(artifacts: str | Path, ledger: Ledger | None) -> AuditReport:
    """Reconcile a job's records.

    Args:
        artifacts: The artifact store.
        ledger: The living ledger, whose facts are saved for later; None uses those that were saved.

    Raises:
        StoreError: the ledger cannot be reached.
        CorruptError: a manifest or the saved facts do not decode.
    """
    folder = Path(artifacts)
    if ledger is not None:
        facts = await ledger.facts()
        save_facts(folder, facts)
    else:
        facts = load_facts(folder)
    return reconcile(folder, facts)


def save_facts(artifacts: Path, facts: LedgerFacts) -> None:
    """Write the ledger's part beside the artifacts, whole or not at all."""
    temporary = artifacts / f".{FACTS_FILE}.new"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(facts)))
    temporary.replace(artifacts / FACTS_FILE)


def load_facts(artifacts: Path) -> LedgerFacts | None:
    """What was saved; None where nothing was."""
    path = artifacts / FACTS_FILE
    return _decode(path, LedgerFacts) if path.exists() else None


def reconcile(artifacts: Path, facts: LedgerFacts | None) -> AuditReport:
    """The audit proper. Without facts, whatever is not archived counts as lost."""
    if _only_scored(artifacts):
        return _reconcile_scores(artifacts, facts)
    batches = _batches(artifacts, facts)
    archive = _Archive(batches)
    sent, accepted = _logs(artifacts / "completions")
    fates: Counter[Fate] = Counter()
    lost: list[str] = []
    for episode, sha256 in sorted(accepted):
        fate = _fate(episode, sha256, archive, facts)
        fates[fate] += 1
        if fate == "lost":
            lost.append(episode)
    return AuditReport(
        leased=facts.counts.get("leased", 0) if facts else 0,
        completed=len(accepted),
        trained=sum(len(hashes) for hashes in archive.hashes.values()),
        outstanding=fates["outstanding"],
        evicted=fates["evicted"],
        dead=fates["dead"],
        dropped=fates["dropped"],
        rerun=fates["rerun"],
        lost=lost,
        trained_twice=archive.twice(),
        unlogged=sorted(
            {episode for episode, hashes in archive.hashes.items() if not hashes <= sent[episode]}
        ),
        corrupt=[name for path, manifest in batches for name in _corrupt(path, manifest)],
    )


def _only_scored(artifacts: Path) -> bool:
    """Whether this is what a finished job of mode `eval` left."""
    path = artifacts / RESULT_FILE
    return path.exists() and _decode(path, _Result).mode == "eval"


def _reconcile_scores(artifacts: Path, facts: LedgerFacts | None) -> AuditReport:
    sent, accepted = _logs(artifacts / "completions", scored=True)
    lines = (artifacts / "validation" / "step-000000.jsonl").read_bytes().splitlines()
    scored = Counter(msgspec.json.decode(line, type=_Named).episode for line in lines)
    completed = {episode for episode, _ in accepted}
    return AuditReport(
        leased=facts.counts.get("leased", 0) if facts else 0,
        completed=len(completed),
        trained=len(lines),
        outstanding=0,
        evicted=0,
        dead=0,
        dropped=0,
        rerun=len(accepted) - len(completed),
        lost=sorted(completed - scored.keys()),
        trained_twice=sorted(episode for episode, times in scored.items() if times > 1),
        unlogged=sorted(scored.keys() - sent.keys()),
        corrupt=[],
    )


class _Archive:
    """What the surviving line trained."""

    def __init__(self, batches: list[tuple[Path, _Manifest]]) -> None:
        self.hashes: dict[str, set[str]] = defaultdict(set)
        """Episode → hashes of its records."""
        self.places: dict[int, list[str]] = defaultdict(list)
        """Row index → where it was trained."""
        self.evictions: dict[int, int] = {}
        """Row index → evictions before it was trained."""
        for _, manifest in batches:
            for group in manifest.groups:
                self._add(manifest.step, group)

    def _add(self, step: int, group: _Group) -> None:
        for episode in group.episodes:
            self.hashes[episode.episode].add(episode.sha256)
        name = EpisodeId.parse(f"{group.group}.0").group
        self.places[name.row_index].append(f"{group.group} in step {step}")
        self.evictions[name.row_index] = max(name.minor, self.evictions.get(name.row_index, 0))

    def twice(self) -> list[str]:
        """Rows in more than one place."""
        return [
            f"row {row}: {', '.join(places)}"
            for row, places in sorted(self.places.items())
            if len(places) > 1
        ]


def _fate(name: str, sha256: str, archive: _Archive, facts: LedgerFacts | None) -> Fate:
    if name in archive.hashes:
        return "trained" if sha256 in archive.hashes[name] else "rerun"
    group = EpisodeId.parse(name).group
    row, evictions = group.row_index, group.minor
    if archive.evictions.get(row, 0) > evictions:
        return "evicted"
    if facts is None:
        return "lost"
    if name in facts.outstanding:
        return "outstanding"
    if row in facts.dead_rows:
        return "dead"
    if row in facts.dropped_rows:
        return "dropped"
    return "evicted" if facts.evictions.get(row, 0) > evictions else "lost"


def _batches(artifacts: Path, facts: LedgerFacts | None) -> list[tuple[Path, _Manifest]]:
    """Finished batches in step order; those past the ledger's last belong to a line that a resume left behind."""
    found = [
        (path.parent, _decode(path, _Manifest))
        for path in sorted(artifacts.glob("batches/step-*/manifest.json"))
    ]
    return [
        (path, manifest)
        for path, manifest in found
        if facts is None or manifest.step <= facts.archived_step
    ]


def _corrupt(folder: Path, manifest: _Manifest) -> Iterator[str]:
    data = (folder / "groups.bin").read_bytes()
    for group in manifest.groups:
        for episode in group.episodes:
            record = data[episode.offset : episode.offset + episode.length]
            if hashlib.sha256(record).hexdigest() != episode.sha256:
                yield f"{episode.episode} in step {manifest.step}"


def _logs(
    folder: Path, *, scored: bool = False
) -> tuple[dict[str, set[str]], set[tuple[str, str]]]:
    """Hashes of everything that was sent, per episode; and the (episode, hash) that were accepted.

    Of training, or of what was `scored`.
    """
    sent: dict[str, set[str]] = defaultdict(set)
    accepted: set[tuple[str, str]] = set()
    for path in sorted(folder.glob("*.jsonl")):
        for raw in path.read_bytes().splitlines():
            line = _line(raw)
            if line is None or line.episode.startswith("v") != scored:
                continue
            sent[line.episode].add(line.sha256)
            if line.answer == "accepted":
                accepted.add((line.episode, line.sha256))
    return sent, accepted


def _line(raw: bytes) -> _Line | None:
    try:
        return msgspec.json.decode(raw, type=_Line)
    except msgspec.DecodeError:
        return None  # torn by a crash; the completion was not answered yet


def _decode(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise CorruptError(f"{path}: {error}") from None
