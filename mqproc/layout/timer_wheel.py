"""RocketMQ's timer wheel: one file of 32-byte slots, big-endian.

    ┌──────────────────┬────────────────┬───────────────┬───────────┬───────────┐
    │ time / precision │ first position │ last position │ count i32 │ magic i32 │
    │ 0 i64            │ 8 i64          │ 16 i64        │ 24        │ 28        │
    └──────────────────┴────────────────┴───────────────┴───────────┴───────────┘

The slot of a time is (time / precision) modulo the number of slots. It holds the messages due within one precision
after that time, as a chain in the timer log that begins at the last position. A slot is empty if its first word is
another time.
"""

from __future__ import annotations

import struct

import numpy as np

from mqproc.layout.fields import Field

SLOT = struct.Struct(">qqqii")
SLOT_SIZE = SLOT.size
SLOT_DTYPE = np.dtype([("time", ">i8"), ("first", ">i8"), ("last", ">i8"), ("count", ">i4"), ("magic", ">i4")])
assert SLOT_SIZE == SLOT_DTYPE.itemsize == 32

SLOT_FIELDS = (
    Field("time", 0, 8, "in slot widths since 1970; a slot of another time is empty"),
    Field("first", 8, 8, "position in the timer log of the slot's first unit"),
    Field("last", 16, 8, "position of its last unit, the head of its chain"),
    Field("count", 24, 4, "messages, minus those that cancel others"),
    Field("magic", 28, 4, "0"),
)

SLOTS = 2 * 7 * 24 * 3600
FILE_SIZE = SLOTS * SLOT_SIZE
assert FILE_SIZE == 38_707_200
