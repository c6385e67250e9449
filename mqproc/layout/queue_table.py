"""The queue table: (topic, queue id) → number and shared offsets. Recovery rebuilds it.

    header page │ magic, version, capacity, hash slots, count, live, deletions
    entries     │ capacity × 512 bytes
    hash        │ slots × i32, entry number + 1, 0 = empty; linear probing

    entry:  0  state, queue id, topic size, topic hash     writer, written before the entry is published
           32  generation, first offset, deleted at, deleted next   writer
           64  topic, up to 255 bytes of UTF-8             writer
          320  next offset                                 writer: the next message's queue offset
          384  max offset, last physical end, last store time   dispatcher
          448  min offset                                  keeper
          456  delivered                                   query: messages handed out since the group started

An entry is complete before its hash slot is stored, and the slot before the count. Entries are never moved, and a
number keeps its (topic, queue id) while a group runs. A deleted queue leaves a tombstone. If it is re-created it reuses
the entry: `generation` is incremented, and its offsets continue at `first offset`, the previous next offset. The words
of dispatcher and keeper are not reset; values below `first offset` count as `first offset`.

Records below the log position `deleted at` with a queue offset below `deleted next` belong to the deleted queue.
"""

from __future__ import annotations

from mqproc.layout import word

MAGIC = 0x3130485551514D  # "MQQUH01", little-endian
VERSION = 1
HEADER_SIZE = 4096
ENTRY_SIZE = 512
WORD_SIZE = 8

HEADER_MAGIC = 0
HEADER_VERSION = 1
HEADER_CAPACITY = 2
HEADER_HASH_SLOTS = 3
HEADER_COUNT = 8  # a cache line of its own
HEADER_LIVE = 16
HEADER_DELETIONS = 24  # deleted queues, in this run and earlier runs

# Word indices in an entry.
STATE = 0
QUEUE_ID = 1
TOPIC_SIZE = 2
TOPIC_HASH = 3
GENERATION = 4
FIRST_OFFSET = 5
DELETED_AT = 6
DELETED_NEXT = 7
TOPIC_OFFSET_BYTES = 64
TOPIC_BYTES_MAX = 255
NEXT_OFFSET = 320 // WORD_SIZE
MAX_OFFSET = 384 // WORD_SIZE
LAST_PHYSICAL_END = MAX_OFFSET + 1
LAST_STORE_TIMESTAMP_MS = MAX_OFFSET + 2
MIN_OFFSET = 448 // WORD_SIZE
DELIVERED = MIN_OFFSET + 1
assert (DELETED_NEXT + 1) * WORD_SIZE == TOPIC_OFFSET_BYTES
assert TOPIC_OFFSET_BYTES + TOPIC_BYTES_MAX < NEXT_OFFSET * WORD_SIZE

STATE_FREE, STATE_LIVE, STATE_TOMBSTONE = range(3)

HEADER_FIELDS = (
    word("magic", HEADER_MAGIC),
    word("version", HEADER_VERSION),
    word("capacity", HEADER_CAPACITY),
    word("hash_slots", HEADER_HASH_SLOTS),
    word("count", HEADER_COUNT),
    word("live", HEADER_LIVE),
    word("deletions", HEADER_DELETIONS),
)
# The topic, of TOPIC_SIZE bytes at TOPIC_OFFSET_BYTES, is between these words.
ENTRY_FIELDS = (
    word("state", STATE),
    word("queue_id", QUEUE_ID),
    word("topic_size", TOPIC_SIZE),
    word("topic_hash", TOPIC_HASH),
    word("generation", GENERATION),
    word("first_offset", FIRST_OFFSET),
    word("deleted_at", DELETED_AT),
    word("deleted_next", DELETED_NEXT),
    word("next_offset", NEXT_OFFSET),
    word("max_offset", MAX_OFFSET),
    word("last_physical_end", LAST_PHYSICAL_END),
    word("last_store_timestamp_ms", LAST_STORE_TIMESTAMP_MS),
    word("min_offset", MIN_OFFSET),
)

ENTRY_WORDS = ENTRY_SIZE // WORD_SIZE
HEADER_WORDS = HEADER_SIZE // WORD_SIZE

HASH_MULTIPLIER_TOPIC = 0x9E3779B1
HASH_MULTIPLIER_QUEUE = 0x85EBCA77


def hash_slots(capacity: int) -> int:
    """Number of hash slots: the power of two that is at least twice the capacity."""
    return 1 << max(4, (2 * capacity - 1).bit_length())


def entry_word(number: int, word: int) -> int:
    """Index of an entry's word in an int64 view of the file."""
    return HEADER_WORDS + number * ENTRY_WORDS + word


def entry_offset(number: int) -> int:
    """Byte offset of an entry."""
    return HEADER_SIZE + number * ENTRY_SIZE


def hash_offset(capacity: int) -> int:
    """Byte offset of the hash."""
    return HEADER_SIZE + capacity * ENTRY_SIZE


def file_size(capacity: int) -> int:
    """Bytes of the table."""
    return hash_offset(capacity) + 4 * hash_slots(capacity)


def first_slot(topic_hash: int, queue_id: int, slots: int) -> int:
    """First slot to probe. `topic_hash` is the topic's Java hash; arithmetic is modulo 2³²."""
    mixed = (topic_hash * HASH_MULTIPLIER_TOPIC + queue_id * HASH_MULTIPLIER_QUEUE) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 15)) & (slots - 1)
