"""Names of things that cross a wire: policy versions, groups, episodes, boot ids."""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

_GROUP = re.compile(r"(t)(\d+)-(\d+)|(v)(\d+)-(\d+)")


class PolicyVersion(NamedTuple):
    """`(incarnation, n)`: n optimizer steps trained in the line that trainer start `incarnation` continues.

    Versions follow the *pair*: after a resume n may go back while the incarnation goes up.
    Staleness compares n only.
    """

    incarnation: int
    n: int

    def __str__(self) -> str:
        return f"{self.incarnation}-{self.n}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Read the form that `str` writes. Raises ValueError on anything else."""
        incarnation, n = text.split("-")
        return cls(int(incarnation), int(n))


class GroupId(NamedTuple):
    """One group of episodes.

    Training: row index and how often it was evicted. Validation: the step scored and the row.
    `kind` is "t" or "v"; `major` the row index (t) or the step (v); `minor` the eviction count (t)
    or the row index (v).
    """

    kind: str
    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.kind}{self.major}-{self.minor}"

    @property
    def row_index(self) -> int:
        """Index of the group's row in its dataset order."""
        return self.major if self.kind == "t" else self.minor

    @property
    def is_validation(self) -> bool:
        """Whether the group belongs to a validation run."""
        return self.kind == "v"

    @classmethod
    def parse(cls, text: str) -> GroupId:
        """Read the form that `str` writes. Raises ValueError on anything else."""
        if not (match := _GROUP.fullmatch(text)):
            raise ValueError(f"not a group id: {text!r}")
        kind, major, minor = (part for part in match.groups() if part is not None)
        return cls(kind, int(major), int(minor))


class EpisodeId(NamedTuple):
    """Member `member` (0-based) of a group; `str` gives `t12-0.3` or `v5-17.0`."""

    group: GroupId
    member: int

    def __str__(self) -> str:
        return f"{self.group}.{self.member}"

    @classmethod
    def parse(cls, text: str) -> EpisodeId:
        """Read the form that `str` writes. Raises ValueError on anything else."""
        group, _, member = text.rpartition(".")
        return cls(GroupId.parse(group), int(member))


def new_boot_id() -> str:
    """A random name for one start of one process (64 bits, hex)."""
    return secrets.token_hex(8)


def new_token() -> str:
    """A bearer token (256 bits, URL-safe)."""
    return secrets.token_urlsafe(32)
