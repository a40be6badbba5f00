"""How many sandboxes a job needs, of which images: from its rows, and from what may run at once. Pure.

    rows by (task, image) ─► by pool and image ─► weights ─────┐
    maxConcurrentEpisodes, groupSize, freshSandbox, recycle ───┴─► warm, max ─► pods, addresses, cpu, memory, disk

A group is `groupSize` episodes of one row, so sandboxes are wanted in lumps of one image: a lump is what is kept warm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from rljob.api.problem import Problem
from rljob.api.rljob_types import RLJob, SandboxPool
from rljob.api.sandbox_requirements import COPYING, requirements
from rljob_operator.policies.amounts import Amounts
from rljob_operator.render.quantities import resources

MAX_IMAGES = 32
MAX_WEIGHT = 1000
"""Bounds of `spec.sandboxPools[].images`."""
NAMED = 3
"""Images that one line names."""


class RowCount(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one task that name one image; None where they leave it to the task."""

    task: str
    image: str | None
    rows: int


class ImageNeed(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One image of a pool. The image None is the installation's own."""

    image: str | None
    rows: int
    weight: int
    """Proposed."""
    warm: int
    """Of the proposed `warm`."""
    at_most: int
    """Of the pool's `at_most`."""
    listed: bool
    """Whether the pool can give it."""


class PoolNeed(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One pool. `at_most` is what it comes to with the manifest's numbers; each `max` is an upper bound of that."""

    name: str
    rows: int
    at_once: int
    """Sandboxes that may be claimed at once."""
    warm: int
    max: int
    proposed_warm: int
    proposed_max: int
    at_most: int
    requests: Amounts
    limits: Amounts
    """Of one sandbox."""
    images: tuple[ImageNeed, ...]


class Needs(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """All pools of a job."""

    episodes: int
    """At once, at most."""
    group: int
    pools: tuple[PoolNeed, ...]
    problems: tuple[Problem, ...]

    @property
    def pods(self) -> int:
        """In all, each with an address of its own."""
        return sum(pool.at_most for pool in self.pools)

    @property
    def requests(self) -> Amounts:
        """In all."""
        return sum((pool.requests * pool.at_most for pool in self.pools), Amounts())

    @property
    def limits(self) -> Amounts:
        """In all, where every sandbox uses what it may."""
        return sum((pool.limits * pool.at_most for pool in self.pools), Amounts())


def needs(job: RLJob, counts: Sequence[RowCount] | None) -> Needs:
    """What the pools of a job need.

    Args:
        job: The job.
        counts: Of its rows; None where they cannot be read: then every pool may be wanted by all episodes.

    Raises:
        ManifestError: a pool's resources are none.
    """
    group, episodes = _group(job), _episodes(job, counts)
    rows = {pool.name: _rows_of(job, pool, counts or ()) for pool in job.spec.sandbox_pools}
    total = sum(sum(of.values()) for of in rows.values())
    pools = [
        _need(
            job,
            pool,
            rows[pool.name],
            num_at_once(
                episodes, group, sum(rows[pool.name].values()) / total if counts and total else 1.0
            ),
        )
        for pool in job.spec.sandbox_pools
    ]
    found = [
        problem
        for index, (pool, need) in enumerate(zip(job.spec.sandbox_pools, pools, strict=True))
        for problem in _problems(job, pool, need, index)
    ]
    return Needs(episodes=episodes, group=group, pools=tuple(pools), problems=tuple(found))


def _group(job: RLJob) -> int:
    validation = job.spec.data.validation
    samples = validation.samples_per_prompt if validation else 1
    own = 1 if job.spec.mode == "eval" else job.spec.rollout.group_size
    return min(max(own, samples), job.spec.rollout.max_concurrent_episodes)


def _episodes(job: RLJob, counts: Sequence[RowCount] | None) -> int:
    """`maxConcurrentEpisodes`, or all that there are: only training comes back to its rows."""
    rollout = job.spec.rollout
    if job.spec.mode == "train" or (counts is None and rollout.groups is None):
        return rollout.max_concurrent_episodes
    groups = rollout.groups or sum(count.rows for count in counts or ())
    return min(rollout.max_concurrent_episodes, groups * _group(job))


def _rows_of(job: RLJob, pool: SandboxPool, counts: Sequence[RowCount]) -> Counter[str | None]:
    """Image → rows. A task's own image is in it even where no row needs it."""
    default = pool.images[0].image if pool.images else None
    images = {
        task.name: task.sandbox.image or default
        for task in job.spec.tasks
        if task.sandbox.pool == pool.name
    }
    found: Counter[str | None] = Counter()
    for count in counts:
        if count.task in images:
            found[count.image or images[count.task]] += count.rows
    return found


def num_at_once(episodes: int, group: int, share: float) -> int:
    """Sandboxes of a pool that `episodes` may hold at once where it has this share of the rows.

    Whole groups, drawn at random: three standard deviations above the mean, and never more than there are episodes.
    """
    if share <= 0 or episodes <= 0:
        return 0
    groups = math.ceil(episodes / group)
    mean = groups * share
    wanted = math.ceil(round(mean + 3 * math.sqrt(mean * max(0.0, 1 - share)), 6))
    return min(episodes, group * min(groups, max(1, wanted)))


def _need(job: RLJob, pool: SandboxPool, rows: Mapping[str | None, int], at_once: int) -> PoolNeed:
    group = min(_group(job), at_once)
    fresh = any(
        task.reward.fresh_sandbox for task in job.spec.tasks if task.sandbox.pool == pool.name
    )
    # A sandbox that is replaced holds its place until its pod is gone; one that is reset is as good as warm.
    leaving = group if pool.recycle.strategy == "recreate" else 0
    warm = max(group * (2 if fresh else 1), min(len(rows), MAX_IMAGES)) if at_once else 0
    most = max(1, at_once + warm + leaving)
    at_most = min(pool.max, at_once + pool.warm + leaving)
    path = f"spec.sandboxPools[{job.spec.sandbox_pools.index(pool)}].resources"
    given = resources(requirements(pool), path)
    return PoolNeed(
        name=pool.name,
        rows=sum(rows.values()),
        at_once=at_once,
        warm=pool.warm,
        max=pool.max,
        proposed_warm=warm,
        proposed_max=most,
        at_most=at_most,
        # the scheduler takes the larger of the init container and the container
        requests=Amounts.requested(given).most(Amounts.requested(COPYING)),
        limits=Amounts.limited(given),
        images=tuple(_images(pool, rows, warm, at_most)),
    )


def _images(
    pool: SandboxPool, rows: Mapping[str | None, int], warm: int, at_most: int
) -> Iterator[ImageNeed]:
    listed: list[str | None] = [each.image for each in pool.images] or [None]
    shares = weights(rows)
    warm_of, most_of = apportion(warm, shares), apportion(at_most, shares)
    for image in dict.fromkeys([*listed, *sorted(rows, key=lambda image: -rows[image])]):
        yield ImageNeed(
            image=image,
            rows=rows.get(image, 0),
            weight=shares.get(image, 0),
            warm=warm_of.get(image, 0),
            at_most=most_of.get(image, 0),
            listed=image in listed,
        )


def weights(rows: Mapping[str | None, int]) -> dict[str | None, int]:
    """Rows per image as small whole numbers, 1 to 1000."""
    known = {image: num for image, num in rows.items() if num > 0}
    if not known:
        return {}
    divisor, most = math.gcd(*known.values()), max(known.values())
    if most // divisor <= MAX_WEIGHT:
        return {image: num // divisor for image, num in known.items()}
    return {image: max(1, round(num * MAX_WEIGHT / most)) for image, num in known.items()}


def apportion(total: int, shares: Mapping[str | None, int]) -> dict[str | None, int]:
    """`total` by weight, what is left over to the largest remainders: as the pool manager shares out warm ones."""
    if not (whole := sum(shares.values())):
        return {}
    given = {image: total * weight // whole for image, weight in shares.items()}
    by_rest = sorted(shares, key=lambda image: -(total * shares[image] % whole))
    for image in by_rest[: total - sum(given.values())]:
        given[image] += 1
    return given


# ── what does not fit ──


def _problems(job: RLJob, pool: SandboxPool, need: PoolNeed, index: int) -> Iterator[Problem]:
    path, cap = ("spec", "sandboxPools", index), job.spec.rollout.max_concurrent_episodes
    for key, given in (("max", pool.max), ("maxPerJob", pool.max_per_job or pool.max)):
        if given < need.at_once and (key == "max" or given < pool.max):
            waiting = need.at_once - given
            yield Problem(
                (*path, key),
                f"{given} is below the {need.at_once} sandboxes that maxConcurrentEpisodes {cap} can use at once: "
                f"{waiting} would wait",
                f"set {need.proposed_max}, or lower maxConcurrentEpisodes",
            )
    missing = [each for each in need.images if not each.listed]
    if missing:
        rows = sum(each.rows for each in missing)
        yield Problem(
            (*path, "images"),
            f"lacks {_named(missing)}, named by {rows} of its rows",
            "add the images proposed, or correct the rows",
        )
    if len(need.images) > MAX_IMAGES:
        yield Problem(
            (*path, "images"),
            f"would be {len(need.images)}, and a pool has at most {MAX_IMAGES}",
            f"spread the tasks over {math.ceil(len(need.images) / MAX_IMAGES)} pools",
        )
    idle = [each for each in need.images if each.listed and each.image and not each.rows]
    if idle and need.rows:
        yield Problem((*path, "images"), f"{_named(idle)}: no row names it", "remove it")


def _named(images: Sequence[ImageNeed]) -> str:
    names = ", ".join(str(each.image) for each in images[:NAMED])
    return f"{names} and {len(images) - NAMED} more" if len(images) > NAMED else names
