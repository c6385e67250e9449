"""RocketMQ's timer log: 52-byte units, big-endian, in files named by their first position.

    ┌──────┬──────────┬───────┬──────────────┬──────────┬─────────────────┬──────┬────────────┬──────────┐
    │ size │ previous │ magic │ enqueued ms  │ delay ms │ physical offset │ size │ topic hash │ due ms   │
    │ i32  │ i64      │ i32   │ i64          │ i32      │ i64             │ i32  │ i32        │ i64      │
    │ 0    │ 4        │ 12    │ 16           │ 24       │ 28              │ 36   │ 40         │ 44       │
    └──────┴──────────┴───────┴──────────────┴──────────┴─────────────────┴──────┴────────────┴──────────┘

RocketMQ reserves the last field, writes it as 0 and does not read it; mqproc stores the exact time there. The slot of a
unit is enqueued + delay; `previous` is the position of the previous unit in the same slot, −1 = none. The magic is 1,
plus 2 for a message that is only enqueued again, plus 4 for one that cancels another. A file whose rest has no room for
a unit and 16 bytes ends with (rest i32, 0 i64, magic i32).
"""

from __future__ import annotations

import struct

import numpy as np

from mqproc.layout.fields import Field

UNIT = struct.Struct(">iqiqiqiiq")
UNIT_SIZE = UNIT.size
assert UNIT_SIZE == 52

END = struct.Struct(">iqi")
END_SIZE = END.size
assert END_SIZE == 16
END_MAGIC = 0xCBD43194 - (1 << 32)

UNIT_DTYPE = np.dtype(
    [
        ("size", ">i4"),
        ("previous", ">i8"),
        ("magic", ">i4"),
        ("enqueued_ms", ">i8"),
        ("delay_ms", ">i4"),
        ("physical_offset", ">i8"),
        ("message_size", ">i4"),
        ("topic_hash", ">i4"),
        ("due_ms", ">i8"),
    ]
)
assert UNIT_DTYPE.itemsize == UNIT_SIZE

UNIT_FIELDS = (
    Field("size", 0, 4, "of the unit, 52"),
    Field("previous", 4, 8, "position of the previous unit in the same slot, -1 = none"),
    Field("magic", 12, 4, "1 a message, +2 to be enqueued again only, +4 cancels another"),
    Field("enqueued_ms", 16, 8, "time of enqueueing, in whole slots"),
    Field("delay_ms", 24, 4, "distance of its slot from that time"),
    Field("physical_offset", 28, 8, "of the waiting record in the log"),
    Field("message_size", 36, 4, "of that record"),
    Field("topic_hash", 40, 4, "String.hashCode of the target topic"),
    Field("due_ms", 44, 8, "mqproc's: the exact time; RocketMQ writes 0"),
)
END_FIELDS = (
    Field("remaining", 0, 4, "bytes from here to the file's end"),
    Field("zero", 4, 8),
    Field("magic", 12, 4, "the file ends here"),
)

NO_POSITION = -1
MAGIC_DEFAULT, MAGIC_ROLL, MAGIC_DELETE = 1, 2, 4
FILE_SIZE = 100 << 20
FILE_SIZE_MIN = 1024
"""Minimum size of a file."""


def units_per_file(file_size: int) -> int:
    """Number of units in a file of this size."""
    return max(0, (file_size - END_SIZE) // UNIT_SIZE)
