"""Bytes and milliseconds of a packed trajectory beside msgpack, orjson and pickle on plain lists.

The comparators get the record as dicts and lists, and give dicts and lists back: building our structs and verifying a
checksum is on our side only. msgpack writes single floats, as we do.
"""

from __future__ import annotations

import pickle
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import msgspec
import orjson

from benchmarks.figure import Figure
from benchmarks.workload import NUM_TOKENS, SEED, mixed_trajectory
from rljob.codec import pack, unpack

MAX_BYTES_PER_TOKEN = 5.1
ROUNDS, CALLS = 15, 10


@dataclass(frozen=True)
class _Measured:
    bytes_per_token: float
    encode_ms: float
    decode_ms: float

    @property
    def both_ms(self) -> float:
        return self.encode_ms + self.decode_ms


def figures() -> Iterator[Figure]:
    """Ours beside each of theirs: size, both ways, each way."""
    trajectory = mixed_trajectory()
    plain = msgspec.to_builtins(trajectory)
    ways: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "rljob": (lambda: pack(trajectory), unpack),
        "msgpack lists": (lambda: msgpack.packb(plain, use_single_float=True), msgpack.unpackb),
        "orjson": (lambda: orjson.dumps(plain), orjson.loads),
        "pickle": (lambda: pickle.dumps(plain, protocol=5), pickle.loads),
    }
    measured = _measure(ways)
    ours = measured.pop("rljob")
    for name, theirs in measured.items():
        yield from _beside(name, ours, theirs)


def _measure(
    ways: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]],
) -> dict[str, _Measured]:
    """The best of many rounds; the ways take turns, so that a busy moment of the machine meets all of them."""
    data = {name: encode() for name, (encode, _) in ways.items()}
    best: dict[str, list[float]] = {name: [float("inf")] * 2 for name in ways}
    for _ in range(ROUNDS):
        for name, (encode, decode) in ways.items():
            record = data[name]
            times = (
                timeit.timeit(encode, number=CALLS),
                timeit.timeit(lambda d=decode, r=record: d(r), number=CALLS),
            )
            best[name] = [
                min(old, new / CALLS * 1e3) for old, new in zip(best[name], times, strict=True)
            ]
    return {name: _Measured(len(data[name]) / NUM_TOKENS, *best[name]) for name in ways}


def _beside(name: str, ours: _Measured, theirs: _Measured) -> Iterator[Figure]:
    yield Figure(
        name="codec_bytes_per_token",
        value=ours.bytes_per_token,
        unit="bytes/token",
        comparator=name,
        comparator_value=theirs.bytes_per_token,
        goal=f"at most {MAX_BYTES_PER_TOKEN}",
        holds=ours.bytes_per_token <= MAX_BYTES_PER_TOKEN,
        seed=SEED,
    )
    yield Figure(
        name="codec_encode_and_decode",
        value=ours.both_ms,
        unit="ms",
        comparator=name,
        comparator_value=theirs.both_ms,
        goal="less than the comparator",
        holds=ours.both_ms < theirs.both_ms,
        seed=SEED,
    )
    for way in ("encode", "decode"):
        value, other = getattr(ours, f"{way}_ms"), getattr(theirs, f"{way}_ms")
        yield Figure(
            name=f"codec_{way}",
            value=value,
            unit="ms",
            comparator=name,
            comparator_value=other,
            seed=SEED,
        )
