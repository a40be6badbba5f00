"""The sandboxes of a plan: as text, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from rljob_operator.policies.amounts import Amounts
from rljob_operator.policies.sandbox_needs import MAX_IMAGES, Needs, PoolNeed
from rljob_operator.show.plan_nodes import Nodes
from rljob_operator.show.plan_rows import Rows

_OWN_IMAGE = "(the installation's own)"
_SHOWN_IMAGES = 12
_LARGE_MIB = 10_240


def sandbox_lines(rows: Rows, needs: Needs, nodes: Nodes | None) -> list[str]:
    """For people."""
    groups = f"{needs.episodes} episodes at once, in groups of {needs.group}"
    lines = [f"sandboxes              for at most {groups}; {_rows(rows)}"]
    for pool in needs.pools:
        lines += _pool(pool, rows_known=rows.counts is not None)
    lines.append(
        f"in all                 {needs.pods} pods, as many addresses; {_amounts(needs.requests)} requested, "
        f"at most {_amounts(needs.limits)}"
    )
    if rows.counts is not None:
        lines += ["proposed               sandboxPools:", *_proposed(needs)]
    if nodes is not None:
        lines += _nodes(nodes)
    faults = [*map(str, needs.problems), *(nodes.problems if nodes else ())]
    lines += [f"does not fit           {fault}" for fault in faults]
    return lines


def sandbox_json(rows: Rows, needs: Needs, nodes: Nodes | None) -> dict[str, Any]:
    """For programs."""
    return {
        "rows": {
            name: {"unread": split.unread}
            if split.unread
            else {"rows": sum(count.rows for count in split.counts)}
            for name, split in rows.splits.items()
        },
        "episodesAtOnce": needs.episodes,
        "group": needs.group,
        "pools": [_pool_json(pool) for pool in needs.pools],
        "needs": {
            "pods": needs.pods,
            "addresses": needs.pods,
            "requests": msgspec.to_builtins(needs.requests),
            "limits": msgspec.to_builtins(needs.limits),
        },
        "nodes": msgspec.to_builtins(nodes) if nodes else None,
        "doesNotFit": [*map(str, needs.problems), *(nodes.problems if nodes else ())],
    }


def _pool_json(pool: PoolNeed) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(pool)
    for image, each in zip(found["images"], pool.images, strict=True):
        image["requests"] = msgspec.to_builtins(pool.requests * each.at_most)
    found["needs"] = {
        "pods": pool.at_most,
        "addresses": pool.at_most,
        "requests": msgspec.to_builtins(pool.requests * pool.at_most),
        "limits": msgspec.to_builtins(pool.limits * pool.at_most),
    }
    return found


def _rows(rows: Rows) -> str:
    told = (
        f"{name}: {split.unread}; rows unread"
        if split.unread
        else f"{sum(count.rows for count in split.counts)} rows of {name}"
        for name, split in rows.splits.items()
    )
    return ", ".join(told)


def _pool(pool: PoolNeed, *, rows_known: bool) -> Iterator[str]:
    yield f"  {pool.name:20} {pool.at_once} claimed at once; warm {pool.warm}, max {pool.max}"
    yield f"    each               {_amounts(pool.requests)} requested, at most {_amounts(pool.limits)}"
    images = pool.images[:_SHOWN_IMAGES] if rows_known else ()
    table = [["image", "rows", "keep warm", "pods", "cpu", "memory", "disk"]]
    for image in images:
        name = image.image or _OWN_IMAGE
        table.append(_line(name, image.rows, image.warm, image.at_most, pool))
    if (more := len(pool.images) - len(images)) > 0 and rows_known:
        table.append([f"{more} more (-o json)", *[""] * 6])
    table.append(_line("all", pool.rows, pool.proposed_warm, pool.at_most, pool))
    yield from _table(table, "    ")


def _line(name: str, rows: int, warm: int, pods: int, pool: PoolNeed) -> list[str]:
    total = pool.requests * pods
    numbers = (str(number) for number in (rows, warm, pods))
    return [name, *numbers, _cpu(total), _mib(total.memory_mib), _mib(total.disk_mib)]


def _proposed(needs: Needs) -> Iterator[str]:
    """As they may be written into the manifest."""
    for pool in needs.pools:
        head = f"  - {{name: {pool.name}, warm: {pool.proposed_warm}, max: {pool.proposed_max}"
        images = [image for image in pool.images if image.image and image.rows][:MAX_IMAGES]
        if not images:
            yield f"{head}}}"
            continue
        yield f"{head}, images: ["
        for image in images:
            yield f"      {{image: {image.image}, weight: {image.weight}}},"
        yield "    ]}"


def _nodes(nodes: Nodes) -> Iterator[str]:
    yield f"nodes                  what is left beside what runs, and how many of pool {nodes.largest} it is room for"
    table = [["node", "cpu", "memory", "disk", "pods", "addresses", nodes.largest, "then short"]]
    for room, fit in zip(nodes.rooms, nodes.fits, strict=True):
        free = room.free
        known = "–" if room.addresses is None else str(room.addresses)
        table.append(
            [
                *(room.name, _cpu(free), _mib(free.memory_mib), _mib(free.disk_mib)),
                *(str(room.pods), known, str(fit.number), fit.short),
            ]
        )
    yield from _table(table, "    ")
    placed = ", ".join(f"{name} {number}" for name, number in nodes.placed.items())
    yield f"placed                 {placed}"


def _table(rows: Sequence[Sequence[str]], indent: str) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        yield f"{indent}{first:{widths[0]}}  {'  '.join(cells)}".rstrip()


def _amounts(amounts: Amounts) -> str:
    return f"{_cpu(amounts)} cpu, {_mib(amounts.memory_mib)} memory, {_mib(amounts.disk_mib)} disk"


def _cpu(amounts: Amounts) -> str:
    return f"{amounts.cpu_millis / 1000:g}"


def _mib(number: int) -> str:
    return f"{number / 1024:.1f} GiB" if number >= _LARGE_MIB else f"{number} MiB"
