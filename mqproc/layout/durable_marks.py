"""A durable mark: the log position up to which a row of files is durable.

Two slots, each in its own page, are written alternately.

    ┌──────────┬──────────────┬────────────┬───────────────────┬─────────────────┬─────────┐
    │ magic u64│ sequence u64 │ offset u64 │ store time ms u64 │ fingerprint u32 │ CRC u32 │  little-endian
    │ 0        │ 8            │ 16         │ 24                │ 32              │ 36      │
    └──────────┴──────────────┴────────────┴───────────────────┴─────────────────┴─────────┘

`offset` is a CommitLog position: everything the row needs for records below it is synced. The fingerprint is the CRC-32
of up to 4 KiB of log before the offset; if it differs, another program has written the log and the mark is void. The
slot with the highest sequence and a valid CRC is the mark.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from mqproc.layout import Field

MAGIC = 0x314B52414D51504D  # "MPQMARK1", little-endian
SLOT_SPACING = 4096
FILE_SIZE = 2 * SLOT_SPACING
FINGERPRINT_BYTES = 4096
_FIELDS = struct.Struct("<QQQQI")
_CRC = struct.Struct("<I")
SLOT_SIZE = _FIELDS.size + _CRC.size
assert SLOT_SIZE == 40

SLOT_FIELDS = (
    Field("magic", 0, 8),
    Field("sequence", 8, 8, "the slot with the higher one counts"),
    Field("offset", 16, 8, "log position up to which the row is durable"),
    Field("store_timestamp_ms", 24, 8, "of the last record before it"),
    Field("fingerprint", 32, 4, "CRC-32 of the log's 4 KiB before it"),
    Field("crc", _FIELDS.size, _CRC.size, "CRC-32 of the fields before it"),
)
assert sum(field.size for field in SLOT_FIELDS) == SLOT_SIZE


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark: CommitLog position and CRC-32 of the log's 4 KiB before it."""

    sequence: int
    offset: int
    store_timestamp_ms: int
    fingerprint: int


def slot_offset(sequence: int) -> int:
    """Byte offset of the slot for a sequence number."""
    return (sequence & 1) * SLOT_SPACING


def encode(mark: Mark) -> bytes:
    """Encode a slot, 40 bytes."""
    fields = _FIELDS.pack(MAGIC, mark.sequence, mark.offset, mark.store_timestamp_ms, mark.fingerprint)
    return fields + _CRC.pack(zlib.crc32(fields))


def decode(data: bytes) -> Mark | None:
    """Decode the newest valid mark of a file; None without one."""
    slots = [_decode_slot(data[start : start + SLOT_SIZE]) for start in (0, SLOT_SPACING)]
    return max((slot for slot in slots if slot), key=lambda mark: mark.sequence, default=None)


def _decode_slot(slot: bytes) -> Mark | None:
    if len(slot) < SLOT_SIZE or _CRC.unpack_from(slot, _FIELDS.size)[0] != zlib.crc32(slot[: _FIELDS.size]):
        return None
    magic, sequence, offset, store_timestamp_ms, fingerprint = _FIELDS.unpack_from(slot)
    return Mark(sequence, offset, store_timestamp_ms, fingerprint) if magic == MAGIC else None
