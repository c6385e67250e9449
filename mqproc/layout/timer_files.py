"""RocketMQ's timer files: log, wheel and `config/timercheck`; all numbers big-endian.

The timer log has 52-byte units in files named by their first position:

    ┌──────┬──────────┬───────┬──────────────┬──────────┬─────────────────┬──────┬────────────┬──────────┐
    │ size │ previous │ magic │ enqueued ms  │ delay ms │ physical offset │ size │ topic hash │ due ms   │
    │ i32  │ i64      │ i32   │ i64          │ i32      │ i64             │ i32  │ i32        │ i64      │
    │ 0    │ 4        │ 12    │ 16           │ 24       │ 28              │ 36   │ 40         │ 44       │
    └──────┴──────────┴───────┴──────────────┴──────────┴─────────────────┴──────┴────────────┴──────────┘

RocketMQ reserves the last field, writes it as 0 and does not read it; mqproc stores the exact time there. The slot of a
unit is enqueued + delay; `previous` is the position of the previous unit in the same slot, −1 = none. The magic is 1,
plus 2 for a message that is only enqueued again, plus 4 for one that cancels another. A file whose rest has no room for
a unit and 16 bytes ends with (rest i32, 0 i64, magic i32).

The timer wheel is one file of 32-byte slots:

    ┌──────────────────┬────────────────┬───────────────┬───────────┬───────────┐
    │ time / precision │ first position │ last position │ count i32 │ magic i32 │
    │ 0 i64            │ 8 i64          │ 16 i64        │ 24        │ 28        │
    └──────────────────┴────────────────┴───────────────┴───────────┴───────────┘

The slot of a time is (time / precision) modulo the number of slots. It holds the messages due within one precision
after that time, as a chain in the timer log that begins at the last position. A slot is empty if its first word is
another time.

`timercheck` is one page with seven i64, and mqproc's additions:

    │ last read ms │ timer log flushed │ queue offset │ master queue offset │ state version │ timestamp │ counter │
    │ 0            │ 8                 │ 16           │ 24                  │ 32            │ 40        │ 48      │

    │ magic │ timestamp │ counter │ log position │ precision │        ours, at 2048
    │ 2048  │ 2056      │ 2064    │ 2072         │ 2080      │

RocketMQ writes the first seven words and preserves the rest. mqproc's words are valid while their timestamp and counter
equal those of the page; otherwise RocketMQ has run since.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from mqproc.layout import Field, word

# Timer log

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
UNIT = struct.Struct(">iqiqiqiiq")
UNIT_SIZE = UNIT.size
UNIT_DTYPE = np.dtype([(field.name, f">i{field.size}") for field in UNIT_FIELDS])
assert UNIT_SIZE == UNIT_DTYPE.itemsize == 52

END_FIELDS = (
    Field("remaining", 0, 4, "bytes from here to the file's end"),
    Field("zero", 4, 8),
    Field("magic", 12, 4, "the file ends here"),
)
END = struct.Struct(">iqi")
END_SIZE = END.size
END_MAGIC = 0xCBD43194 - (1 << 32)
assert END_SIZE == 16

NO_POSITION = -1
MAGIC_DEFAULT, MAGIC_ROLL, MAGIC_DELETE = 1, 2, 4
LOG_FILE_SIZE = 100 << 20
LOG_FILE_SIZE_MIN = 1024


def units_per_file(file_size: int) -> int:
    """Number of units in a file of this size."""
    return max(0, (file_size - END_SIZE) // UNIT_SIZE)


# Timer wheel

SLOT_FIELDS = (
    Field("time", 0, 8, "in slot widths since 1970; a slot of another time is empty"),
    Field("first", 8, 8, "position in the timer log of the slot's first unit"),
    Field("last", 16, 8, "position of its last unit, the head of its chain"),
    Field("count", 24, 4, "messages, minus those that cancel others"),
    Field("magic", 28, 4, "0"),
)
SLOT = struct.Struct(">qqqii")
SLOT_SIZE = SLOT.size
SLOT_DTYPE = np.dtype([(field.name, f">i{field.size}") for field in SLOT_FIELDS])
assert SLOT_SIZE == SLOT_DTYPE.itemsize == 32

SLOTS = 2 * 7 * 24 * 3600
WHEEL_FILE_SIZE = SLOTS * SLOT_SIZE
assert WHEEL_FILE_SIZE == 38_707_200

# `timercheck`

CHECK_FILE_SIZE = 4096
NO_LOG_POSITION = -1
CLOCK_STEP_MAX_MS = 86_400_000
"""Maximum clock step back between a delivery and the write of the page that records it."""
_CHECK_WORDS = struct.Struct(">7q")
_OWN_WORDS = struct.Struct(">5q")
_OWN_AT = 2048
_OWN_MAGIC = 0x6D717072_6F635443  # "mqprocTC"

CHECK_FIELDS = (
    word("read_ms", 0, "slots below this time are delivered"),
    word("timer_log_flushed", 1, "the timer log is durable up to this position"),
    word("queue_offset", 2, "units of the timer's queue below this offset are in the timer log"),
    word("master_queue_offset", 3, "the same of the master, which counts if it is lower"),
    word("state_version", 4, "of a broker's role; 0"),
    word("timestamp_ms", 5, "time of the last write of this page"),
    word("counter", 6, "number of writes"),
)
OWN_CHECK_FIELDS = (
    Field("magic", _OWN_AT, 8, "mqproc's part, valid while the next two words equal those above"),
    Field("own_timestamp_ms", _OWN_AT + 8, 8),
    Field("own_counter", _OWN_AT + 16, 8),
    Field("log", _OWN_AT + 24, 8, "no delivery of a slot from read_ms on is below this log position; -1 = unknown"),
    Field("precision_ms", _OWN_AT + 32, 8, "width of the slots; 0 = unknown"),
)


@dataclass(frozen=True, slots=True)
class TimerCheck:
    """Contents of the page.

    `log` is the log position from which to look for deliveries that the page does not record; `precision_ms` is the
    width of a slot when it was written, 0 = unknown.
    """

    read_ms: int = 0
    timer_log_flushed: int = 0
    queue_offset: int = 0
    timestamp_ms: int = 0
    counter: int = 0
    log: int = NO_LOG_POSITION
    precision_ms: int = 0

    def is_ahead(self, now_ms: int) -> bool:
        """Whether `read_ms` is later than the page or the present: nothing can be delivered yet."""
        written_ms = self.timestamp_ms or self.read_ms
        return self.read_ms > min(written_ms, now_ms) + CLOCK_STEP_MAX_MS


def encode_check(check: TimerCheck) -> bytes:
    """Encode the whole page."""
    page = bytearray(CHECK_FILE_SIZE)
    offset, write = check.queue_offset, (check.timestamp_ms, check.counter)
    _CHECK_WORDS.pack_into(page, 0, check.read_ms, check.timer_log_flushed, offset, offset, 0, *write)
    _OWN_WORDS.pack_into(page, _OWN_AT, _OWN_MAGIC, *write, check.log, check.precision_ms)
    return bytes(page)


def decode_check(data: bytes) -> TimerCheck:
    """Decode a page; a short one reads as zeros."""
    data = data.ljust(CHECK_FILE_SIZE, b"\0")
    read_ms, flushed, queue_offset, master_offset, _version, timestamp_ms, counter = _CHECK_WORDS.unpack_from(data)
    *identity, log, precision_ms = _OWN_WORDS.unpack_from(data, _OWN_AT)
    if identity != [_OWN_MAGIC, timestamp_ms, counter]:
        log, precision_ms = NO_LOG_POSITION, 0
    # Use the lower offset, as RocketMQ does.
    return TimerCheck(read_ms, flushed, min(queue_offset, master_offset), timestamp_ms, counter, log, precision_ms)


def has_own_check(data: bytes) -> bool:
    """Whether a page has mqproc's part, valid or not."""
    return data[_OWN_AT : _OWN_AT + 8] == _OWN_MAGIC.to_bytes(8, "big")
