"""RocketMQ's checkpoint: one page with six big-endian i64, the rest zero.

Times are store times in ms. The sixth word exists since RocketMQ 5.5.

│ physic time │ logics time │ index time │ master flushed offset │ confirmed physical offset │ logics physical offset │
│ 0           │ 8           │ 16         │ 24                    │ 32                        │ 40                     │
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass

from mqproc.layout import word

PHYSIC_TIMESTAMP = 0
LOGICS_TIMESTAMP = PHYSIC_TIMESTAMP + 8
INDEX_TIMESTAMP = LOGICS_TIMESTAMP + 8
MASTER_FLUSHED_OFFSET = INDEX_TIMESTAMP + 8
CONFIRM_PHYSICAL_OFFSET = MASTER_FLUSHED_OFFSET + 8
LOGICS_PHYSICAL_OFFSET = CONFIRM_PHYSICAL_OFFSET + 8
FILE_SIZE = 4096
_WORDS = struct.Struct(">6q")
assert _WORDS.size == LOGICS_PHYSICAL_OFFSET + 8

FIELDS = (
    word("physic_timestamp_ms", 0, "the log is durable up to this store time"),
    word("logics_timestamp_ms", 1, "the ConsumeQueues are durable up to this store time"),
    word("index_timestamp_ms", 2, "the index is durable up to this store time"),
    word("master_flushed_offset", 3, "used by replicas only"),
    word("confirm_physical_offset", 4, "the log is confirmed below this offset"),
    word("logics_physical_offset", 5, "RocketMQ 5.5: the ConsumeQueues are durable up to the record that begins here"),
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The six words of the file."""

    physic_timestamp_ms: int = 0
    logics_timestamp_ms: int = 0
    index_timestamp_ms: int = 0
    master_flushed_offset: int = 0
    confirm_physical_offset: int = 0
    logics_physical_offset: int = 0


def encode(checkpoint: Checkpoint) -> bytes:
    """Encode the whole file."""
    return _WORDS.pack(*astuple(checkpoint)).ljust(FILE_SIZE, b"\0")


def decode(data: bytes) -> Checkpoint:
    """Decode a file; a short or missing one reads as zeros, like RocketMQ's older files."""
    return Checkpoint(*_WORDS.unpack(data[: _WORDS.size].ljust(_WORDS.size, b"\0")))
