"""The record's bytes: round trips, refusals, damage, and the frozen bytes of every format version."""

import json
import math
import random
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob import codec
from rljob.codec import pack, pack_chains, unpack, unpack_chains
from rljob.errors import CorruptError
from rljob.trajectory import Chain, Trajectory, VersionSpan

GOLDEN = Path(__file__).parents[2] / "golden"


def make_chain(tokens: list[int], runs: list[tuple[int, int]], **changes: Any) -> Chain:
    """A chain whose tokens in `runs` [(start, length)] are actions."""
    mask = [any(start <= i < start + length for start, length in runs) for i in range(len(tokens))]
    first = runs[0][0] if runs else len(tokens)
    fields: dict[str, Any] = {
        "tokens": tokens,
        "prompt_length": first,
        "action_mask": mask,
        "logprobs": [-0.5 - i / 8 for i in range(sum(mask))],
        "version_spans": [
            VersionSpan(start, length, 1, i) for i, (start, length) in enumerate(runs)
        ],
        "finish_reason": "stop",
    }
    return Chain(**(fields | changes))


def make_trajectory(chains: list[Chain], **changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "job": "demo",
        "episode": "t3-0.1",
        "attempt": 2,
        "task": "files",
        "reward": 0.75,
        "reward_parts": {"answer": 1.0, "format": 0.5},
        "outcome": "completed",
        "chains": chains,
        "turns": 3,
        "tool_calls": 2,
        "stage_seconds": {"acquire": 0.25, "run": 4.5},
        "started_at": 1_700_000_000.5,
        "worker": "worker-0",
        "sandbox": "box-7",
        "model": "tiny",
        "sampling": {"temperature": 1.0},
        "row_index": 3,
        "row_hash": "ab12",
        "metadata": {"note": "ünïcode", "list": [1, None, True, 2.5], "deep": {"a": {"b": []}}},
    }
    return Trajectory(**(fields | changes))


def golden_trajectory() -> Trajectory:
    """What the frozen bytes hold: every id width, a zstd column, a raw column, no actions, odd floats."""
    rng = random.Random(1)
    text = [rng.choice([5, 17, 300, 1999, 70_000]) for _ in range(600)]
    return make_trajectory(
        [
            make_chain(text, [(100, 50), (200, 1), (201, 99), (599, 1)]),
            make_chain([], [], agent_id="empty"),
            make_chain([0], [(0, 1)], logprobs=[-0.0], finish_reason="length"),
            make_chain([255, 256, 4095], [], finish_reason="abort"),
            make_chain([2**32 - 1, 2**16, 7], [(1, 2)], logprobs=[-math.inf, 2.0**-149]),
            make_chain(list(range(40)), [(2, 38)], agent_id="sub", routed_experts="experts/1"),
        ]
    )


LOGPROB = st.floats(width=32, allow_nan=False)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    largest = draw(st.sampled_from([1, 255, 4095, 4096, 65_535, 151_935, 2**24, 2**32 - 1]))
    tokens = draw(st.lists(st.integers(0, largest), max_size=80))
    spans: list[VersionSpan] = []
    end = draw(st.integers(0, len(tokens)))
    prompt_length = end
    while end < len(tokens) and draw(st.booleans()):
        start = draw(st.integers(end, len(tokens) - 1))
        length = draw(st.integers(1, len(tokens) - start))
        spans.append(VersionSpan(start, length, draw(st.integers(1, 9)), draw(st.integers(0, 99))))
        end = start + length
    mask = [any(s.start <= i < s.start + s.length for s in spans) for i in range(len(tokens))]
    return Chain(
        tokens=tokens,
        prompt_length=prompt_length,
        action_mask=mask,
        logprobs=draw(st.lists(LOGPROB, min_size=sum(mask), max_size=sum(mask))),
        version_spans=spans,
        finish_reason=draw(st.sampled_from(["stop", "length", "tool_calls", "abort"])),
        agent_id=draw(st.text(max_size=5)),
    )


@given(st.lists(chains(), max_size=4), st.floats(allow_nan=False), st.text(max_size=20))
def test_a_trajectory_comes_back_as_it_was(several: list[Chain], reward: float, note: str) -> None:
    trajectory = make_trajectory(several, reward=reward, metadata={"note": note})
    assert unpack(pack(trajectory)) == trajectory


@given(st.lists(chains(), max_size=4))
def test_chains_come_back_as_they_were(several: list[Chain]) -> None:
    assert unpack_chains(pack_chains(several)) == several


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_logprobs_keep_every_bit(patterns: list[int]) -> None:
    floats = [f for (f,) in struct.iter_unpack("<f", struct.pack(f"<{len(patterns)}I", *patterns))]
    chain = make_chain([1] * len(floats), [(0, len(floats))], logprobs=floats)
    (back,) = unpack_chains(pack_chains([chain]))
    assert struct.pack(f"<{len(floats)}f", *back.logprobs) == struct.pack(
        f"<{len(floats)}f", *floats
    )


def test_packing_leaves_the_record_alone() -> None:
    trajectory = golden_trajectory()
    pack(trajectory)
    assert trajectory == golden_trajectory()


def test_the_same_record_gives_the_same_bytes() -> None:
    assert pack(golden_trajectory()) == pack(golden_trajectory())


def test_a_long_mixed_trajectory_stays_under_its_budget() -> None:
    rng = random.Random(7)
    tokens = [rng.randrange(151_936) for _ in range(32_768)]
    runs = [(1_000 + 780 * i, 180) for i in range(40)]
    logprobs = [
        struct.unpack("<f", struct.pack("<f", -rng.expovariate(1.4)))[0] for _ in range(7_200)
    ]
    trajectory = make_trajectory([make_chain(tokens, [(s, n) for s, n in runs], logprobs=logprobs)])
    assert len(pack(trajectory)) / 32_768 < 5.1


def test_the_frozen_bytes_of_version_1_read_as_ever() -> None:
    assert unpack((GOLDEN / "trajectory-v1.bin").read_bytes()) == golden_trajectory()
    assert unpack_chains((GOLDEN / "chains-v1.bin").read_bytes()) == golden_trajectory().chains


def test_the_golden_record_is_what_its_json_says() -> None:
    said = json.loads((GOLDEN / "trajectory-v1.json").read_text())
    assert (
        json.loads(msgspec.json.encode(unpack((GOLDEN / "trajectory-v1.bin").read_bytes()))) == said
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [-1.0]}, "1 logprobs for 2 action tokens"),
        ({"action_mask": [False, True, True]}, "do not cover"),
        ({"action_mask": [False, True, True, True]}, "do not cover"),
        ({"version_spans": []}, "do not cover"),
        ({"version_spans": [VersionSpan(1, 1, 1, 0), VersionSpan(1, 1, 1, 1)]}, "overlaps"),
        ({"version_spans": [VersionSpan(1, 0, 1, 0)]}, "overlaps, is empty"),
        ({"version_spans": [VersionSpan(3, 2, 1, 0)]}, "leaves its chain"),
        ({"prompt_length": 5}, "prompt_length 5 of 4"),
        ({"prompt_length": -1}, "prompt_length -1"),
        ({"prompt_length": 2}, "overlaps"),
        ({"tokens": [1, 2, 3, -1]}, "chain 0"),
        ({"tokens": [1, 2, 3, 2**32]}, "chain 0"),
        ({"tokens": [1, 2, 3, 0.5]}, "chain 0"),
        ({"finish_reason": "tired"}, "not a record"),
    ],
)
def test_a_chain_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    chain = msgspec.structs.replace(make_chain([1, 2, 3, 4], [(1, 2)]), **changes)
    with pytest.raises(ValueError, match=message):
        pack(make_trajectory([chain]))


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata": {"x": object()}},
        {"outcome": "infra_error"},
        {"turns": "3"},
        {"row_index": 2**80},
    ],
)
def test_a_field_that_no_reader_would_take_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a record"):
        pack(make_trajectory([], **changes))


def test_every_truncation_is_corrupt() -> None:
    data = pack(golden_trajectory())
    for length in range(len(data)):
        with pytest.raises(CorruptError):
            unpack(data[:length])


def test_every_flipped_bit_is_corrupt() -> None:
    data = bytearray(pack(golden_trajectory()))
    for position in range(len(data) * 8):
        data[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptError):
            unpack(bytes(data))
        data[position // 8] ^= 1 << position % 8


def test_appended_bytes_are_corrupt() -> None:
    with pytest.raises(CorruptError):
        unpack(pack(golden_trajectory()) + b"\0")


def test_one_kind_is_not_read_as_the_other() -> None:
    with pytest.raises(CorruptError, match="kind"):
        unpack(pack_chains([]))
    with pytest.raises(CorruptError, match="kind"):
        unpack_chains(pack(make_trajectory([])))


def test_a_later_schema_is_refused_by_name() -> None:
    with pytest.raises(CorruptError, match="schema 2"):
        unpack(pack(make_trajectory([], schema_version=2)))


@given(st.binary(max_size=200))
def test_noise_is_corrupt(noise: bytes) -> None:
    with pytest.raises(CorruptError):
        unpack(noise)


def forge(data: bytes, **changes: Any) -> bytes:
    """`data` with its first chain's columns described otherwise, and a checksum that holds."""
    header = struct.unpack_from("<4sBBHII", data)
    envelope = msgspec.msgpack.decode(data[20 : 20 + header[4]])
    for name, value in changes.items():
        envelope[2][0][codec._Columns.__struct_fields__.index(name)] = value
    head = msgspec.msgpack.encode(envelope)
    body = head + data[20 + header[4] :]
    new = struct.pack("<4sBBHII", *header[:4], len(head), 20 + len(body))
    return new + struct.pack("<I", zlib.crc32(new + body)) + body


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 2**40},
        {"num_tokens": 2**62},
        {"num_tokens": -8},
        {"num_actions": 2**40},
        {"num_actions": -1},
        {"num_actions": 0},
        {"low_bits": 2**30},
        {"low_bits": 0},
        {"high_bits": 3},
        {"stored_bytes": [2**40, 0, 0]},
        {"stored_bytes": [-(2**40), 0, 0]},
        {"stored_bytes": [1, 0, 0]},
        {"stored_bytes": [-1, 0, 0]},
    ],
)
def test_a_forged_length_is_corrupt_and_allocates_nothing(
    compressed: bool, changes: dict[str, Any]
) -> None:
    rng = random.Random(3)
    tokens = [rng.randrange(2 if compressed else 256) for _ in range(2_000)]
    data = pack(make_trajectory([make_chain(tokens, [(500, 100)])]))
    assert unpack(forge(data)) == unpack(data)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError):
            unpack(forge(data, **changes))
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_a_zstd_frame_that_claims_much_is_not_believed() -> None:
    rng = random.Random(3)
    data = pack(make_trajectory([make_chain([rng.randrange(2) for _ in range(2_000)], [])]))
    (frame_start,) = [i for i in range(len(data)) if data[i : i + 4] == b"\x28\xb5\x2f\xfd"]
    forged = bytearray(data)
    # the frame header's size field: single segment, 8 bytes of content size
    claim = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**40)
    forged[frame_start : frame_start + len(claim)] = claim
    body = bytes(forged[20:])
    header = bytes(forged[:16])
    with pytest.raises(CorruptError, match="does not hold 2000 bytes"):
        unpack(header + struct.pack("<I", zlib.crc32(header + body)) + body)
