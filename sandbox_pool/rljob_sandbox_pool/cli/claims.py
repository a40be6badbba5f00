"""`rljob sandbox pools | ls | claim | release`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from rljob.errors import InfraError, MachineError, UserError
from rljob.sandbox import ClaimAnswer, ClaimStatus, PoolStatus
from rljob_sandbox_pool.cli.arguments import environment, in_range
from rljob_sandbox_pool.cli.state import State, StoredClaim, Where
from rljob_sandbox_pool.cli.where import Options, call, connect, silence

MAX_SECONDS = 7 * 86_400.0
"""The longest that a claim may live."""


def pools(options: Options) -> None:
    """Print what the broker holds."""
    where = options.where()

    async def work() -> list[PoolStatus]:
        async with connect(where) as client:
            return await client.pools()

    columns = "pool runtime ready claimed starting resetting quarantined waiting warm max".split()
    keys = ["name", *columns[1:]]
    table(columns, [[str(getattr(pool, key)) for key in keys] for pool in call(work)])


def ls(options: Options) -> None:
    """Print the claims that are held, by the names that they have here."""
    names = {stored.claim.claim_id: name for name, stored in options.state.claims().items()}
    where = options.where()

    async def work() -> list[ClaimStatus]:
        async with connect(where) as client:
            return await client.claims()

    rows = [
        [
            names.get(claim.claim_id, claim.claim_id),
            claim.pool,
            claim.sandbox_id,
            claim.image or "-",
            claim.owner or "-",
            f"{max(0.0, claim.seconds_left):.0f} s",
        ]
        for claim in sorted(call(work), key=lambda claim: (claim.pool, claim.sandbox_id))
    ]
    table("claim pool sandbox image owner left".split(), rows)


def claim(
    options: Options,
    pool: str,
    *,
    image: str | None,
    env: Sequence[str],
    ttl: float,
    idle: float | None,
    priority: int,
    timeout: float,
) -> None:
    """Claim a sandbox, write it down, print its name."""
    in_range("--ttl", ttl, 1.0, MAX_SECONDS)
    in_range("--idle", idle, 1.0, MAX_SECONDS)
    in_range("--priority", priority, -100, 100)
    in_range("--timeout", timeout, 0.1, MAX_SECONDS)
    variables = environment(env)
    where = options.where()
    silence()

    async def work() -> str:
        async with connect(where) as client:
            box = await client.acquire(
                pool,
                image=image,
                env=variables,
                ttl_seconds=ttl,
                idle_seconds=idle,
                priority=priority,
                timeout=timeout,
            )
            await box.aclose()
            try:
                return _keep(options.state, where, pool, image or "", box.claim, ttl)
            except BaseException:
                await box.release()
                raise

    sys.stdout.write(f"{call(work)}\n")


def _keep(state: State, where: Where, pool: str, image: str, claim: ClaimAnswer, ttl: float) -> str:
    stored = StoredClaim(
        pool=pool, image=image, where=where, claim=claim, expires=time.time() + ttl
    )
    return state.keep(stored)


def release(options: Options, names: Sequence[str], *, all_of_them: bool) -> None:
    """Give claims back: by the names that they have here, or by their ids."""
    if bool(names) == all_of_them:
        fault = "names and --all" if names else "says not which"
        raise UserError("claim", fault, "name the claims, or give --all")
    stored = options.state.claims()
    given = list(stored) if all_of_them else names
    here = {name: stored[name] for name in given if name in stored}
    ids = [name for name in given if name not in stored]
    elsewhere = options.where() if ids else None
    silence()

    async def work() -> list[str]:
        await _release_stored(options.state, here)
        if elsewhere is None:
            return []
        async with connect(elsewhere) as client:
            held = {claim.claim_id for claim in await client.claims()}
            for name in held & set(ids):
                await client.release_claim(name)
        return [name for name in ids if name not in held]

    if missing := call(work):
        raise UserError("claim", f"there is no claim {', '.join(missing)}", "see rljob sandbox ls")


async def _release_stored(state: State, claims: Mapping[str, StoredClaim]) -> None:
    """All that can be; then the first error of the others is raised."""
    problem: UserError | InfraError | None = None
    for name, stored in claims.items():
        try:
            await _release_one(name, stored)
        except (UserError, InfraError) as error:
            problem = problem or error
        else:
            state.forget(name)
    if problem is not None:
        raise problem


async def _release_one(name: str, stored: StoredClaim) -> None:
    if stored.expires < time.time():
        return
    async with connect(stored.where) as client:
        if not await client.release_claim(stored.claim.claim_id):
            raise MachineError(
                f"claim {name}", "the broker does not answer", "try again, or: rljob sandbox reap"
            )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns that are as wide as what is in them."""
    lines = [[column.upper() for column in columns], *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    for line in lines:
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write(text.rstrip() + "\n")
