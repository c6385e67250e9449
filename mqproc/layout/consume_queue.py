"""The ConsumeQueue unit: 20 bytes, big-endian.

Unit `q` is at byte `20 q` of its queue's files.

    ┌─────────────────────┬────────────┬───────────────┐
    │ physical offset i64 │ size i32   │ tags code i64 │
    │ 0                   │ 8          │ 12            │
    └─────────────────────┴────────────┴───────────────┘

A unit is valid if its physical offset is ≥ 0 and its size > 0. The filler for an offset without a record is (anything,
0x7FFFFFFF, 0); RocketMQ writes it before a queue's first unit. Fillers that recovery writes over a hole in the log have
the size END_FILLER_SIZE, smaller than any record (`store/consumequeue/bounds`).
"""

from __future__ import annotations

import struct

from mqproc.layout import Field

PHYSICAL_OFFSET = 0
SIZE = PHYSICAL_OFFSET + 8
TAGS_CODE = SIZE + 4
UNIT_SIZE = TAGS_CODE + 8
assert UNIT_SIZE == 20

UNIT_FIELDS = (
    Field("physical_offset", PHYSICAL_OFFSET, 8, "start of the record in the log"),
    Field("size", SIZE, 4, "of the record; 7fffffff in a filler"),
    Field("tags_code", TAGS_CODE, 8, "hash of the tag, or time of delivery"),
)

FILLER_SIZE = 0x7FFFFFFF
END_FILLER_SIZE = 16
FILLER_SIZES = (FILLER_SIZE, END_FILLER_SIZE)
# Limit of queue offsets in records; offsets outside [0, limit) are invalid: no queue grows that large.
QUEUE_OFFSET_LIMIT = 1 << 44
# With RocketMQ's ConsumeQueue extension a tags code may be an address, which is below any hash: the position in the
# queue's extension files, counted from EXTENSION_ADDRESS_MIN.
EXTENSION_ADDRESS_MIN = -(1 << 63)
EXTENSION_ADDRESS_MAX = -(1 << 31) - 1
EXTENSION_FOLDER = "consumequeue_ext"

_physical_offset_from = struct.Struct(">q").unpack_from

unit_of = struct.Struct(">qiq").pack
"""(physical offset, size, tags code) → bytes of a unit."""

place_of = struct.Struct(">qi").unpack_from
"""Bytes → physical offset and size in their first unit."""


def physical_offset_of(units: memoryview, index: int) -> int:
    """Physical offset in one of several units; faster than numpy for a single value."""
    found: int = _physical_offset_from(units, index * UNIT_SIZE + PHYSICAL_OFFSET)[0]
    return found
