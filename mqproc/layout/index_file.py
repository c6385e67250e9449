"""The index file: header, hash slots, chained items; all numbers big-endian.

    ┌──────────────────────────────── header, 40 bytes ────────────────────────────────┐
    │ begin time i64 │ end time i64 │ begin offset i64 │ end offset i64 │ slots used i32 │ count i32 │
    │ 0              │ 8            │ 16               │ 24             │ 32             │ 36        │
    ├──────────────────────────────────────────────────────────────────────────────────┤
    │ slots: N × i32, number of the newest item of the chain, 0 = none                  │ 40
    │ items: M × 20 bytes; item 0 is never used                                         │ 40 + 4N
    └──────────────────────────────────────────────────────────────────────────────────┘
    item: │ key hash i32 │ physical offset i64 │ time difference i32, seconds │ previous item i32 │
          │ 0            │ 4                   │ 12                           │ 16                │

The count begins at 1, so a full file holds M − 1 items. Key = `topic#key`, hash = |String.hashCode|. A record has items
for its unique id, for each of its keys, and since RocketMQ 5.4 for its tag, with the key `T#tag`.
"""

from __future__ import annotations

from mqproc.layout import Field
from mqproc.layout.properties import java_hash

BEGIN_TIMESTAMP = 0
END_TIMESTAMP = BEGIN_TIMESTAMP + 8
BEGIN_PHYSICAL_OFFSET = END_TIMESTAMP + 8
END_PHYSICAL_OFFSET = BEGIN_PHYSICAL_OFFSET + 8
SLOT_COUNT = END_PHYSICAL_OFFSET + 8
ITEM_COUNT = SLOT_COUNT + 4
HEADER_SIZE = ITEM_COUNT + 4
assert HEADER_SIZE == 40

SLOT_SIZE = 4

ITEM_KEY_HASH = 0
ITEM_PHYSICAL_OFFSET = ITEM_KEY_HASH + 4
ITEM_TIME_DIFFERENCE = ITEM_PHYSICAL_OFFSET + 8
ITEM_PREVIOUS = ITEM_TIME_DIFFERENCE + 4
ITEM_SIZE = ITEM_PREVIOUS + 4
assert ITEM_SIZE == 20

HEADER_FIELDS = (
    Field("begin_timestamp_ms", BEGIN_TIMESTAMP, 8, "store time of the first entry's record"),
    Field("end_timestamp_ms", END_TIMESTAMP, 8, "store time of the last entry's record"),
    Field("begin_physical_offset", BEGIN_PHYSICAL_OFFSET, 8, "start of the first entry's record"),
    Field("end_physical_offset", END_PHYSICAL_OFFSET, 8, "start of the last entry's record"),
    Field("slots_used", SLOT_COUNT, 4, "slots that point to an item"),
    Field("count", ITEM_COUNT, 4, "number of the next item"),
)
ITEM_FIELDS = (
    Field("key_hash", ITEM_KEY_HASH, 4, "of topic#key, without its sign"),
    Field("physical_offset", ITEM_PHYSICAL_OFFSET, 8, "start of the record in the log"),
    Field("time_difference_s", ITEM_TIME_DIFFERENCE, 4, "seconds after the file's begin"),
    Field("previous", ITEM_PREVIOUS, 4, "previous item in the slot's chain, 0 = none"),
)

FIRST_ITEM = 1
KEY_TOPIC_SEPARATOR = "#"
TAG_TYPE = "T"
"""RocketMQ's INDEX_TAG_TYPE."""


def items_start(slots: int) -> int:
    """Byte offset of item 0."""
    return HEADER_SIZE + SLOT_SIZE * slots


def item_offset(slots: int, item: int) -> int:
    """Byte offset of an item."""
    return items_start(slots) + ITEM_SIZE * item


def file_size(slots: int, items: int) -> int:
    """Size of a whole file; 420,000,040 bytes with RocketMQ's defaults."""
    return item_offset(slots, items)


assert file_size(5_000_000, 20_000_000) == 420_000_040


def index_key_hash(hashed: int) -> int:
    """|hash|, and 0 for −2³¹, which has no absolute value as an i32: the hash of an index item."""
    return 0 if hashed == -0x80000000 else abs(hashed)


def tag_key(tag: str) -> str:
    """Index key of a tag."""
    return f"{TAG_TYPE}{KEY_TOPIC_SEPARATOR}{tag}"


def index_key_hash_of(topic: str, key: str) -> int:
    """Index key hash of `topic#key`; modulo the number of slots it selects the slot."""
    return index_key_hash(java_hash(f"{topic}{KEY_TOPIC_SEPARATOR}{key}"))
