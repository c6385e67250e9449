"""The ConsumeQueue unit, 20 bytes, big-endian; unit `q` lies at byte `q * 20` of the row of files.

    ┌─────────────────────┬────────────┬───────────────┐
    │ physical offset i64 │ size i32   │ tags code i64 │
    │ 0                   │ 8          │ 12            │
    └─────────────────────┴────────────┴───────────────┘

A unit is valid when its physical offset is ≥ 0 and its size > 0. The filler for a place that no record has is
(anything, 0x7FFFFFFF, 0): RocketMQ writes it before a queue's first unit. Recovery's, over a hole in the log, have
END_FILLER_SIZE instead, which no record is as small as (`store/end_fillers`).
"""

from __future__ import annotations

import struct

from mqproc.layout.fields import Field

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
# No queue comes as far: such a queue offset in a record is nonsense, as one below 0.
QUEUE_OFFSET_LIMIT = 1 << 44
# With RocketMQ's ConsumeQueue extension a tags code may be an address instead: no hash is as low. It is the place among
# the bytes of the queue's extension files, counted from the lowest number that there is.
EXTENSION_ADDRESS_MIN = -(1 << 63)
EXTENSION_ADDRESS_MAX = -(1 << 31) - 1
EXTENSION_FOLDER = "consumequeue_ext"

_physical_offset_from = struct.Struct(">q").unpack_from

unit_of = struct.Struct(">qiq").pack
"""A unit's bytes, of physical offset, size and tags code."""

place_of = struct.Struct(">qi").unpack_from
"""Physical offset and size of the record that some bytes' first unit points to."""


def physical_offset_of(units: memoryview, index: int) -> int:
    """Where the record of one of some units begins: for a single one quicker than numpy."""
    found: int = _physical_offset_from(units, index * UNIT_SIZE + PHYSICAL_OFFSET)[0]
    return found
