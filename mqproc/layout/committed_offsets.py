"""`mqproc/progress`: committed offset of each group in each queue, one word each.

Words are native-endian; the query role is the only writer.

    header page │ magic, version, end, boot id, saved fingerprints, next epoch, reset, changes
    blocks      │ one after the other up to `end`, each at a multiple of 64 bytes

    block:   0  CRC-32 of the bytes from 4 to the names' end │ u32 size of the block, a multiple of 64
             8  u32 first queue id │ u32 number of queues
            16  u16 bytes of the group's name │ u16 bytes of the topic's │ u32 zero
            24  group, topic, zeros up to a multiple of 8
                i64 state: bit 0 = deleted; above it the oldest epoch that members may present
                i64 for each queue: the committed queue offset plus one; 0 = unknown

A block is complete before `end` moves past it, and never moves; a topic that gets more queues gets another block. The
blocks of a deleted group change their state and are dropped by the next start.

An epoch issued before the creation of its block, or before a reset of a queue of the block, is void: a member that
presents it after a restart gets a new epoch and continues at the committed offset.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

from mqproc.layout import Field, word

MAGIC: Final = 0x3130524750514D  # "MQPGR01", little-endian
VERSION: Final = 1
HEADER_SIZE: Final = 4096
WORD_SIZE: Final = 8
BLOCK_ALIGNMENT: Final = 64

# Word indices of the header.
HEADER_MAGIC = 0
HEADER_VERSION = 1
HEADER_END = 8  # bytes of the file in use
HEADER_BOOT = (16, 17)  # boot id of the machine when the words were stored
HEADER_SAVED = 24  # fingerprint of the last consumerOffset.json
HEADER_SAVING = 25  # fingerprint of the one being written
HEADER_EPOCH = 32  # next epoch to be issued when a queue is assigned to a member
HEADER_RESET_AT = 33  # end of the log at the last reset or deletion of a group
HEADER_CHANGES = 40  # words stored since the file was created
HEADER_SAVED_CHANGES = 41  # words stored before the last consumerOffset.json

STATE_DELETED: Final = 1

QUEUES_MIN: Final = 7
"""Minimum number of queues of a block: with its state they fill a cache line."""

NAME_BYTES_MAX: Final = 255
QUEUES_MAX: Final = 1 << 20
OFFSET_MAX: Final = (1 << 63) - 2
"""A word holds the offset plus one."""
_FIELDS: Final = struct.Struct("<IIIIHHI")
_CRC: Final = struct.Struct("<I")
assert _FIELDS.size == 24

HEADER_FIELDS: Final = (
    word("magic", HEADER_MAGIC, "MQPGR01"),
    word("version", HEADER_VERSION),
    word("end", HEADER_END, "bytes of the file in use"),
    word("boot", HEADER_BOOT[0], "boot id of the machine when the words were stored"),
    word("boot", HEADER_BOOT[1], "its second half"),
    word("saved", HEADER_SAVED, "fingerprint of the consumerOffset.json that was written last"),
    word("saving", HEADER_SAVING, "fingerprint of the consumerOffset.json that is being written"),
    word("epoch", HEADER_EPOCH, "number of the next assignment of a queue to a member"),
    word("reset_at", HEADER_RESET_AT, "end of the log when a group was reset or deleted last"),
    word("changes", HEADER_CHANGES, "words stored since the file was created"),
    word("saved_changes", HEADER_SAVED_CHANGES, "words stored before the last consumerOffset.json"),
)
BLOCK_FIELDS: Final = (
    Field("crc", 0, 4, "of the bytes after it, up to the end of the names"),
    Field("size", 4, 4, "of the block, a multiple of 64"),
    Field("first_queue", 8, 4, "queue id of the first word"),
    Field("queues", 12, 4, "number of words"),
    Field("group_size", 16, 2, "bytes of the group's name"),
    Field("topic_size", 18, 2, "bytes of the topic's name"),
)
NAMES_AT: Final = _FIELDS.size


@dataclass(frozen=True, slots=True)
class OffsetBlock:
    """Position of a block: `state` and `first_offset` are word indices, `end` is in bytes."""

    group: str
    topic: str
    first_queue: int
    queues: int
    state: int
    end: int

    @property
    def first_offset(self) -> int:
        """Index of the word of queue `first_queue`."""
        return self.state + 1


def state_of(oldest_epoch: int) -> int:
    """State word of a live block."""
    return oldest_epoch << 1


def oldest_epoch_of(state: int) -> int:
    """Oldest epoch that members may present."""
    return state >> 1


def encode_block(group: str, topic: str, first_queue: int, queues: int) -> bytes:
    """Encode a block without committed offsets."""
    names = group.encode(), topic.encode()
    names_end = _FIELDS.size + sum(map(len, names))
    words_at = -(-names_end // WORD_SIZE) * WORD_SIZE
    size = -(-(words_at + WORD_SIZE * (1 + queues)) // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
    block = bytearray(size)
    _FIELDS.pack_into(block, 0, 0, size, first_queue, queues, len(names[0]), len(names[1]), 0)
    block[_FIELDS.size : names_end] = names[0] + names[1]
    _CRC.pack_into(block, 0, zlib.crc32(block[_CRC.size : names_end]))
    return bytes(block)


def decode_block(data: bytes | memoryview, at: int, end: int) -> OffsetBlock | None:
    """Decode the block at byte `at` of a file in use up to `end`; None if there is no block."""
    if at + _FIELDS.size > end:
        return None
    crc, size, first_queue, queues, group_size, topic_size, _ = _FIELDS.unpack_from(data, at)
    names_end = _FIELDS.size + group_size + topic_size
    words_at = -(-names_end // WORD_SIZE) * WORD_SIZE
    if size % BLOCK_ALIGNMENT or words_at + WORD_SIZE * (1 + queues) > size or at + size > end:
        return None
    if zlib.crc32(data[at + _CRC.size : at + names_end]) != crc:
        return None
    names = bytes(data[at + _FIELDS.size : at + names_end])
    try:
        group, topic = names[:group_size].decode(), names[group_size:].decode()
    except UnicodeDecodeError:
        return None
    return OffsetBlock(group, topic, first_queue, queues, (at + words_at) // WORD_SIZE, at + size)
