"""The state folder of `rljob sandbox`: who serves here, and which claims its user holds. Everything in it is secret.

    DIR/serve.lock            locked while `serve` runs: the kernel unlocks it however the process ends
    DIR/serve.json            where it listens, and its token
    DIR/work/                 its scratch
    DIR/claims/NAME.json      a claim: where it was made, and what opens it

Names of claims are made here; nothing outside of the folder is read or written.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

import msgspec

from rljob.errors import MachineError, UserError
from rljob.sandbox import ClaimAnswer

_T = TypeVar("_T")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
STATE_ENV = "RLJOB_SANDBOX_STATE"


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """A broker, as claims remember it: an address and a token, or a place in the cluster of KUBECONFIG."""

    url: str = ""
    token: str = ""
    relay: bool = False
    """Sandboxes are reached by way of the broker."""
    namespace: str = ""
    secret: str = ""
    """Holds the token."""
    operator_namespace: str = ""
    """Of the broker's Service."""


class Served(msgspec.Struct, frozen=True):
    """Who serves here."""

    url: str
    token: str
    pid: int


class StoredClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A claim that a command made and others use."""

    pool: str
    image: str
    where: Where
    claim: ClaimAnswer
    expires: float
    """Unix time."""


class State:
    """See the picture above.

    Args:
        folder: Made when something is written into it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / "work"
        self._served, self._claims = folder / "serve.json", folder / "claims"

    # ── who serves here ──

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Be the one who serves here. Raises MachineError."""
        self._make(self.folder)
        with (self.folder / "serve.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise MachineError(
                    str(self.folder), "pools are served here already", "stop that, or use --state"
                ) from None
            try:
                self._forget_dead(_read(self._served, Served))
                yield
            finally:
                self._served.unlink(missing_ok=True)

    def _forget_dead(self, dead: Served | None) -> None:
        """Claims on one that was killed in this folder: its sandboxes are no more."""
        for name, stored in self.claims().items():
            if dead is not None and stored.where.token == dead.token:
                self.forget(name)

    def tell(self, served: Served) -> None:
        """Others may find it now. Raises MachineError."""
        self._write(self._served, msgspec.json.encode(served))

    def served(self) -> Served | None:
        """Who serves here; None: nobody. Raises MachineError."""
        return _read(self._served, Served) if self.is_served() else None

    def is_served(self) -> bool:
        """Whether the one that wrote `serve.json` lives."""
        try:
            with (self.folder / "serve.lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def was_served(self) -> Served | None:
        """What a `serve` that was killed left behind."""
        return None if self.is_served() else _read(self._served, Served)

    def forget_served(self) -> None:
        """It is no more."""
        self._served.unlink(missing_ok=True)

    # ── claims ──

    def keep(self, claim: StoredClaim) -> str:
        """Write a claim down; its name. Raises MachineError."""
        self._make(self._claims)
        name = f"{claim.pool}-{secrets.token_hex(3)}"
        self._write(self._claims / f"{name}.json", msgspec.json.encode(claim))
        return name

    def claims(self) -> dict[str, StoredClaim]:
        """Every claim by its name; those that cannot be read are none."""
        found: dict[str, StoredClaim] = {}
        with suppress(OSError):
            for path in sorted(self._claims.glob("*.json")):
                with suppress(MachineError):
                    if (claim := _read(path, StoredClaim)) is not None:
                        found[path.stem] = claim
        return found

    def claim(self, name: str) -> StoredClaim:
        """The claim of that name. Raises UserError."""
        claim = None
        if NAME.fullmatch(name):
            claim = _read(self._claims / f"{name}.json", StoredClaim)
        if claim is None:
            close = get_close_matches(name, known := list(self.claims()), n=1)
            fix = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
            raise UserError(
                "claim",
                f"there is no claim {name!r}",
                fix if known else "make one: rljob sandbox claim POOL",
            )
        if claim.expires < time.time():
            raise UserError(f"claim {name}", "its time to live is over", "make another one")
        return claim

    def forget(self, name: str) -> None:
        """It is given back."""
        (self._claims / f"{name}.json").unlink(missing_ok=True)

    # ── files ──

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise _unusable(folder, error) from None

    def _write(self, path: Path, data: bytes) -> None:
        new = path.with_suffix(f".{os.getpid()}")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            new.rename(path)
        except OSError as error:
            raise _unusable(path, error) from None


def default_folder() -> Path:
    """Where state lies that no option names."""
    if given := os.environ.get(STATE_ENV):
        return Path(given)
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "rljob" / "sandboxes"


def _read(path: Path, kind: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: Exception) -> MachineError:
    reason = (isinstance(error, OSError) and error.strerror) or error
    return MachineError(str(path), f"cannot be used ({reason})", "remove it, or use --state DIR")
