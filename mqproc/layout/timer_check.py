"""RocketMQ's `config/timercheck`.

One page with seven big-endian i64, and mqproc's additions.

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

from mqproc.layout.fields import Field, word

FILE_SIZE = 4096
NO_LOG_POSITION = -1
CLOCK_STEP_MAX_MS = 86_400_000
"""Maximum clock step back between a delivery and the write of the page that records it."""
_WORDS = struct.Struct(">7q")
_OWN = struct.Struct(">5q")
OWN_AT = 2048
_OWN_MAGIC = 0x6D717072_6F635443  # "mqprocTC"

FIELDS = (
    word("read_ms", 0, "slots below this time are delivered"),
    word("timer_log_flushed", 1, "the timer log is durable up to this position"),
    word("queue_offset", 2, "units of the timer's queue below this offset are in the timer log"),
    word("master_queue_offset", 3, "the same of the master, which counts if it is lower"),
    word("state_version", 4, "of a broker's role; 0"),
    word("timestamp_ms", 5, "time of the last write of this page"),
    word("counter", 6, "number of writes"),
)
OWN_FIELDS = (
    Field("magic", OWN_AT, 8, "mqproc's part, valid while the next two words equal those above"),
    Field("own_timestamp_ms", OWN_AT + 8, 8),
    Field("own_counter", OWN_AT + 16, 8),
    Field("log", OWN_AT + 24, 8, "no delivery of a slot from read_ms on is below this log position; -1 = unknown"),
    Field("precision_ms", OWN_AT + 32, 8, "width of the slots; 0 = unknown"),
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


def encode(check: TimerCheck) -> bytes:
    """Encode the whole page."""
    page = bytearray(FILE_SIZE)
    _WORDS.pack_into(
        page,
        0,
        check.read_ms,
        check.timer_log_flushed,
        check.queue_offset,
        check.queue_offset,
        0,
        check.timestamp_ms,
        check.counter,
    )
    own = _OWN_MAGIC, check.timestamp_ms, check.counter, check.log, check.precision_ms
    _OWN.pack_into(page, OWN_AT, *own)
    return bytes(page)


def decode(data: bytes) -> TimerCheck:
    """Decode a page; a short one reads as zeros."""
    data = data.ljust(FILE_SIZE, b"\0")
    read_ms, flushed, queue_offset, master_offset, _version, timestamp_ms, counter = _WORDS.unpack_from(data)
    magic, own_timestamp_ms, own_counter, log, precision_ms = _OWN.unpack_from(data, OWN_AT)
    if (magic, own_timestamp_ms, own_counter) != (_OWN_MAGIC, timestamp_ms, counter):
        log, precision_ms = NO_LOG_POSITION, 0
    # Use the lower offset, as RocketMQ does.
    enqueued = min(queue_offset, master_offset)
    return TimerCheck(read_ms, flushed, enqueued, timestamp_ms, counter, log, precision_ms)


def has_own(data: bytes) -> bool:
    """Whether a page has mqproc's part, valid or not."""
    return data[OWN_AT : OWN_AT + 8] == _OWN_MAGIC.to_bytes(8, "big")
