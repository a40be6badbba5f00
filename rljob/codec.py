"""Trajectories as bytes, and back.

    Trajectory ─ envelope: everything but the token columns, msgpack, by field name ─┐
               └ per chain, three columns: low bits, high bits, logprobs ────────────┴─► header + envelope + columns

    header   magic "RLJT" · version · kind · reserved · envelope bytes · all bytes · crc32 of all of it
    low      the low 8 or 16 bits of each token id, one or two bytes each
    high     the remaining bits of each id, 1, 2, 4, 8 or 16 bits each; absent where the ids fit in `low`
    logprobs float32 of the action tokens, bit for bit, as four planes of bytes

The action mask has no column: the version spans are its run lengths, and `pack` refuses a chain in which the two
differ. A column is stored as it is, or by zstd where that saves at least a twentieth. Every length is checked against
the bytes at hand before anything is allocated for it, so `unpack` uses memory in proportion to its input.

Evolution: a reader reads every format version back to 1 (`tests/golden`); fields follow the rule of `rljob.trajectory`.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from rljob.errors import CorruptError
from rljob.trajectory import SCHEMA_VERSION, Chain, Trajectory

FORMAT_VERSION: Final = 1
_MAGIC: Final = b"RLJT"
_KIND_TRAJECTORY: Final = 1
_KIND_CHAINS: Final = 2
_HEADER: Final = struct.Struct("<4sBBHII")
_CRC: Final = struct.Struct("<I")
_BODY: Final = _HEADER.size + _CRC.size
_ZSTD_LEVEL: Final = 1  # level 3 gains 2 % on text and costs twice the time
_MAX_RATIO: Final = (
    64  # the most that a compressed column may grow: the bound on what a forged record can allocate
)
_COLUMNS: Final = 3  # per chain: low, high, logprobs
_MAX_ID_BITS: Final = 32


class _Columns(msgspec.Struct, array_like=True, frozen=True):
    """How the columns of one chain are stored. New fields are appended with a default."""

    num_tokens: int
    low_bits: int
    high_bits: int
    num_actions: int
    stored_bytes: tuple[int, int, int]
    """Bytes of low, high and logprobs; negative where the column is zstd."""


class _TrajectoryEnvelope(msgspec.Struct, array_like=True):
    record: Trajectory
    """With empty chains."""
    chains: list[Chain]
    """With empty columns."""
    columns: list[_Columns]


class _ChainsEnvelope(msgspec.Struct, array_like=True):
    chains: list[Chain]
    columns: list[_Columns]


_Envelope = TypeVar("_Envelope", _TrajectoryEnvelope, _ChainsEnvelope)


def pack(trajectory: Trajectory) -> bytes:
    """The bytes of a trajectory.

    Raises:
        ValueError: the record contradicts itself (mask, spans and logprobs differ) or holds what msgpack cannot.
    """
    bare, columns, blobs = _pack_columns(trajectory.chains)
    record = msgspec.structs.replace(trajectory, chains=[])
    return _frame(_KIND_TRAJECTORY, _TrajectoryEnvelope(record, bare, columns), blobs)


def unpack(data: bytes) -> Trajectory:
    """The trajectory that `pack` was given.

    Raises:
        CorruptError: the bytes are truncated, changed, of another kind, or of a later version.
    """
    envelope, blobs = _open_frame(data, _KIND_TRAJECTORY, _TrajectoryEnvelope)
    if not 1 <= envelope.record.schema_version <= SCHEMA_VERSION:
        raise CorruptError(
            f"trajectory schema {envelope.record.schema_version}, this reader knows 1 to {SCHEMA_VERSION}"
        )
    envelope.record.chains = _unpack_columns(envelope.chains, envelope.columns, blobs)
    return envelope.record


def pack_chains(chains: list[Chain]) -> bytes:
    """The bytes of bare chains (the gateway's answer to closing a session). Raises as `pack`."""
    bare, columns, blobs = _pack_columns(chains)
    return _frame(_KIND_CHAINS, _ChainsEnvelope(bare, columns), blobs)


def unpack_chains(data: bytes) -> list[Chain]:
    """The chains that `pack_chains` was given. Raises as `unpack`."""
    envelope, blobs = _open_frame(data, _KIND_CHAINS, _ChainsEnvelope)
    return _unpack_columns(envelope.chains, envelope.columns, blobs)


# ── frame ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _frame(kind: int, envelope: _TrajectoryEnvelope | _ChainsEnvelope, blobs: list[bytes]) -> bytes:
    try:
        head = msgspec.msgpack.encode(envelope)
        # what a reader would refuse must fail here, where its producer is known; without the columns this is cheap
        msgspec.msgpack.decode(head, type=type(envelope))
    except (TypeError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise ValueError(f"not a record: {error}") from error
    total = _BODY + len(head) + sum(map(len, blobs))
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION, kind, 0, len(head), total)
    body = b"".join([head, *blobs])
    return b"".join([header, _CRC.pack(zlib.crc32(body, zlib.crc32(header))), body])


def _open_frame(
    data: bytes, kind: int, envelope_type: type[_Envelope]
) -> tuple[_Envelope, memoryview]:
    """Verify everything that concerns the whole record; give its envelope and the bytes of its columns."""
    if len(data) < _BODY:
        raise CorruptError(f"{len(data)} bytes are too few for a record")
    magic, version, found_kind, reserved, head_bytes, total = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptError("not a record: wrong magic")
    if version != FORMAT_VERSION or reserved:
        raise CorruptError(
            f"record format {version}.{reserved}, this reader knows {FORMAT_VERSION}.0"
        )
    if total != len(data) or head_bytes > total - _BODY:
        raise CorruptError(f"record says {total} bytes, {len(data)} are here")
    body = memoryview(data)[_BODY:]
    if _CRC.unpack_from(data, _HEADER.size)[0] != zlib.crc32(
        body, zlib.crc32(memoryview(data)[: _HEADER.size])
    ):
        raise CorruptError("checksum differs")
    if found_kind != kind:
        raise CorruptError(f"record kind {found_kind}, expected {kind}")
    try:
        envelope = msgspec.msgpack.decode(body[:head_bytes], type=envelope_type)
    except (RecursionError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise CorruptError(f"envelope does not decode: {error}") from error
    return envelope, body[head_bytes:]


# ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _pack_columns(chains: list[Chain]) -> tuple[list[Chain], list[_Columns], list[bytes]]:
    bare: list[Chain] = []
    columns: list[_Columns] = []
    blobs: list[bytes] = []
    for index, chain in enumerate(chains):
        try:
            described, stored = _pack_chain(chain)
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"chain {index}: {error}") from error
        bare.append(msgspec.structs.replace(chain, tokens=[], action_mask=[], logprobs=[]))
        columns.append(described)
        blobs += stored
    return bare, columns, blobs


def _pack_chain(chain: Chain) -> tuple[_Columns, list[bytes]]:
    if chain.action_mask != _mask_of_spans(chain, len(chain.tokens)):
        raise ValueError("version spans do not cover exactly the tokens of the action mask")
    if len(chain.logprobs) != sum(span.length for span in chain.version_spans):
        raise ValueError(
            f"{len(chain.logprobs)} logprobs for {chain.action_mask.count(True)} action tokens"
        )
    # array() reads a list of ints three times as fast as NumPy does
    ids = np.frombuffer(array("I", chain.tokens), dtype=np.uint32)
    low_bits, high_bits = _widths(int(ids.max(initial=0)))
    low = ids.astype(np.uint8 if low_bits == 8 else np.dtype("<u2")).tobytes()
    high = _pack_high(ids >> np.uint32(low_bits), high_bits) if high_bits else b""
    logprobs = np.frombuffer(array("f", chain.logprobs), dtype=np.float32).astype("<f4", copy=False)
    stored = [
        _squeeze(raw) for raw in (low, high, logprobs.view(np.uint8).reshape(-1, 4).T.tobytes())
    ]
    sizes = (stored[0][0], stored[1][0], stored[2][0])
    return _Columns(len(chain.tokens), low_bits, high_bits, len(logprobs), sizes), [
        blob for _, blob in stored
    ]


def _unpack_columns(chains: list[Chain], columns: list[_Columns], blobs: memoryview) -> list[Chain]:
    if len(chains) != len(columns):
        raise CorruptError(f"{len(chains)} chains with {len(columns)} sets of columns")
    for index, (chain, described) in enumerate(zip(chains, columns, strict=True)):
        used = sum(map(abs, described.stored_bytes))
        if used > len(blobs):
            raise CorruptError(f"chain {index}: its columns end past the record")
        try:
            _unpack_chain(chain, described, blobs[:used])
        except (ValueError, zstandard.ZstdError) as error:
            raise CorruptError(f"chain {index}: {error}") from error
        blobs = blobs[used:]
    if blobs:
        raise CorruptError(f"{len(blobs)} bytes after the last column")
    return chains


def _unpack_chain(chain: Chain, columns: _Columns, blob: memoryview) -> None:
    """Fill the empty columns of `chain`. Raises ValueError on any contradiction."""
    num_tokens, low_bits, high_bits = columns.num_tokens, columns.low_bits, columns.high_bits
    if (
        low_bits not in (8, 16)
        or high_bits not in (0, 1, 2, 4, 8, 16)
        or num_tokens < 0
        or columns.num_actions < 0
    ):
        raise ValueError(f"columns described as {columns}")
    raw_bytes = (
        num_tokens * low_bits // 8,
        -(-num_tokens * high_bits // 8),
        4 * columns.num_actions,
    )
    raws: list[bytes] = []
    for stored, raw in zip(columns.stored_bytes, raw_bytes, strict=True):
        raws.append(_expand(blob[: abs(stored)], raw, compressed=stored < 0))
        blob = blob[abs(stored) :]
    ids = np.frombuffer(raws[0], dtype=np.uint8 if low_bits == 8 else np.dtype("<u2")).astype(
        np.uint32
    )
    if high_bits:
        ids |= _unpack_high(raws[1], high_bits, num_tokens) << np.uint32(low_bits)
    mask = _mask_of_spans(chain, num_tokens)
    if sum(span.length for span in chain.version_spans) != columns.num_actions:
        raise ValueError("version spans do not cover the action tokens")
    planes = np.frombuffer(raws[2], dtype=np.uint8).reshape(4, -1)
    chain.tokens = ids.tolist()
    chain.action_mask = mask
    chain.logprobs = np.ascontiguousarray(planes.T).view("<f4").reshape(-1).tolist()


def _mask_of_spans(chain: Chain, num_tokens: int) -> list[bool]:
    """The action mask that the version spans say. Raises ValueError where they overlap or leave the chain."""
    if not 0 <= chain.prompt_length <= num_tokens:
        raise ValueError(f"prompt_length {chain.prompt_length} of {num_tokens} tokens")
    mask = [False] * num_tokens
    end = chain.prompt_length
    for span in chain.version_spans:
        if span.length < 1 or span.start < end or span.start + span.length > num_tokens:
            raise ValueError(
                f"version span at {span.start}+{span.length} overlaps, is empty or leaves its chain"
            )
        end = span.start + span.length
        mask[span.start : end] = [True] * span.length
    return mask


def _widths(largest_id: int) -> tuple[int, int]:
    """(low bits, high bits) that hold every id up to `largest_id`; the high bits divide a byte or fill it."""
    bits = largest_id.bit_length()
    low = 8 if bits <= 12 else 16
    return low, next(high for high in (0, 1, 2, 4, 8, 16) if low + high >= bits)


def _pack_high(values: npt.NDArray[np.uint32], bits: int) -> bytes:
    """`bits` of each value; the first value in the lowest bits of its byte."""
    if bits >= 8:
        return values.astype(np.uint8 if bits == 8 else np.dtype("<u2")).tobytes()
    per_byte = 8 // bits
    padded = np.zeros(-(-len(values) // per_byte) * per_byte, dtype=np.uint8)
    padded[: len(values)] = values
    lanes = padded.reshape(-1, per_byte)
    packed = lanes[:, 0].copy()
    for lane in range(1, per_byte):
        packed |= lanes[:, lane] << np.uint8(lane * bits)
    return packed.tobytes()


def _unpack_high(raw: bytes, bits: int, count: int) -> npt.NDArray[np.uint32]:
    if bits >= 8:
        return np.frombuffer(raw, dtype=np.uint8 if bits == 8 else np.dtype("<u2")).astype(
            np.uint32
        )
    per_byte = 8 // bits
    packed = np.frombuffer(raw, dtype=np.uint8)
    values = np.empty(len(packed) * per_byte, dtype=np.uint32)
    for lane in range(per_byte):
        values[lane::per_byte] = (packed >> np.uint8(lane * bits)) & np.uint8((1 << bits) - 1)
    return values[:count]


def _squeeze(raw: bytes) -> tuple[int, bytes]:
    """(stored bytes, column): as it is, or zstd with a negative count where that pays and stays inside the bound."""
    if raw:
        small = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(raw)
        if len(small) * 20 <= len(raw) * 19 and len(raw) <= _MAX_RATIO * len(small):
            return -len(small), small
    return len(raw), raw


def _expand(stored: memoryview, raw_bytes: int, *, compressed: bool) -> bytes:
    if not compressed:
        if len(stored) != raw_bytes:
            raise ValueError(f"a column of {len(stored)} bytes should have {raw_bytes}")
        return bytes(stored)
    # zstandard allocates what the frame itself claims, so that claim is checked first
    if raw_bytes > _MAX_RATIO * len(stored) or zstandard.frame_content_size(stored) != raw_bytes:
        raise ValueError(f"a compressed column does not hold {raw_bytes} bytes")
    raw = zstandard.ZstdDecompressor().decompress(stored)
    if len(raw) != raw_bytes:
        raise ValueError(f"a compressed column held {len(raw)} bytes, expected {raw_bytes}")
    return raw


if array("I").itemsize != 4 or sys.byteorder != "little":  # pragma: no cover
    raise ImportError("rljob.codec needs 32-bit unsigned ints and a little-endian machine")
