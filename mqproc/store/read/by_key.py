"""Search by key or unique id: the index gives candidates, the records decide.

The index has hashes and whole seconds only. So candidates are looked up from a second before the begin to the newest
(in a rolled file the first item's time is too late by an unknown amount), then limited by the records' own store
times, which ascend with their offsets. Each remaining record is compared by topic, key and time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import BadRequestError
from mqproc.kernels.gather import TIME_MAX, TIME_MIN
from mqproc.kernels.jit.intrinsics import load_be32, load_be64
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.kernels.log_match import has_key
from mqproc.kernels.record_check import store_timestamp_at
from mqproc.layout import properties
from mqproc.layout.record import BORN_TIMESTAMP, FIXED_SIZE_V4, QUEUE_ID, QUEUE_OFFSET
from mqproc.store.cooperative import Batch, Slices
from mqproc.store.index.lookup import LOG_END_MAX, IndexAnswer, IndexReader
from mqproc.store.read.records import LogRecords
from mqproc.store.read.views import Queues

# Time resolution of the index.
INDEX_STEP_MS: Final = 1000
CANDIDATES_MAX: Final = 65_536
"""Index hits per round; keys with more hits take several rounds."""
CANDIDATES_MIN: Final = 256
# Growth of later rounds: all hits of many small ones may lie outside the time range.
_LARGER: Final = 4

SLICE_RECORDS: Final = 256
SLICE_BYTES: Final = 8 << 20
"""A slice ends after this many records or bytes: the CRC of a record of mebibytes takes long."""

_ROUNDS_MAX: Final = 1 << 20


class KeySearch:
    """Searches in one store's index; `newest_ms` returns the newest file's name as a time."""

    def __init__(self, index: IndexReader, records: LogRecords, queues: Queues, newest_ms: Callable[[], int]) -> None:
        """`index` must give up to CANDIDATES_MAX results."""
        self._index = index
        self._records = records
        self._queues = queues
        self._newest_ms = newest_ms

    def by_key(
        self,
        topic: str,
        key: str,
        begin_ms: int = TIME_MIN,
        end_ms: int = TIME_MAX,
        *,
        unique: bool = False,
        born_time: bool = False,
        below: int = -1,
        max_messages: int,
        max_bytes: int,
    ) -> Slices[Batch]:
        """The newest messages with a key (`unique`: a unique id) and begin_ms ≤ time ≤ end_ms.

        The time is the store time, or with `born_time` the unordered born time. The answer is sorted by physical offset
        without duplicates. With more than `max_messages` or `max_bytes` it is incomplete: its cursor (physical offset,)
        is the `below` for the older ones. Messages of a deleted topic are not found in a new one of that name.
        """
        _check_search(topic, key, begin_ms, end_ms)
        self._index.refresh(self._newest_ms())
        wanted = _Wanted(topic, key, begin_ms, end_ms, unique=unique, born_time=born_time)
        if born_time:
            begin_ms, end_ms = TIME_MIN, TIME_MAX
        found: list[NDArray[np.uint8]] = []
        # In bytes; each record also counts a fixed cost.
        looked_at = 0
        size, oldest_found = 0, 0
        below = LOG_END_MAX if below < 0 else below
        begin = max(TIME_MIN, begin_ms - INDEX_STEP_MS)
        # A small page looks up few candidates, so that paging through a key with many hits stays linear.
        candidates = max(CANDIDATES_MIN, 2 * min(max_messages, max_bytes // FIXED_SIZE_V4))
        for _ in range(_ROUNDS_MAX):
            candidates = min(candidates, CANDIDATES_MAX)
            looked_up = yield from self._index.look_up(topic, key, candidates, begin, TIME_MAX, below)
            hits = looked_up.offsets
            offsets = sorted(set(hits))
            for offset in reversed(self._in_time(offsets, begin_ms, end_ms)):
                record = self._records.intact(offset)
                looked_at += SLICE_BYTES // SLICE_RECORDS + (len(record) if record is not None else 0)
                if looked_at >= SLICE_BYTES:
                    looked_at = 0
                    yield
                if record is None or not wanted.is_met_by(record) or self._is_deleted(topic, offset, record):
                    continue
                if found and (len(found) >= max_messages or size + len(record) > max_bytes):
                    return Batch(len(found), found[::-1], (oldest_found,), complete=False)
                found.append(record)
                size += len(record)
                oldest_found = offset
            if len(hits) < candidates:
                break
            # There are more hits than a round has: continue below its oldest one.
            below = offsets[0]
            candidates *= _LARGER
            yield
        return Batch(len(found), found[::-1])

    def query_message(self, topic: str, key: str, max_messages: int, begin_ms: int, end_ms: int) -> Slices[IndexAnswer]:
        """RocketMQ's `queryMessage`: all hash hits, a message once per matching key."""
        self._index.refresh(self._newest_ms())
        return self._index.query_message(topic, key, max_messages, begin_ms, end_ms, self._is_there)

    def _is_there(self, offset: int) -> bool:
        return self._records.store_timestamp_ms(offset) >= 0

    def _is_deleted(self, topic: str, offset: int, record: NDArray[np.uint8]) -> bool:
        """Whether a record belongs to a deleted queue of this name."""
        log_end, next_offset = self._queues.deletion(topic, int(load_be32(record, QUEUE_ID)))
        return offset < log_end and int(load_be64(record, QUEUE_OFFSET)) < next_offset

    def _in_time(self, offsets: list[int], begin_ms: int, end_ms: int) -> list[int]:
        """The ascending offsets whose records may lie in the time range.

        Damaged records have no time, so those at either border are included.
        """
        time_of = self._records.store_timestamp_ms
        first = bisect_left(offsets, begin_ms, key=self._latest_time) if begin_ms > TIME_MIN else 0
        stop = bisect_left(offsets, end_ms + 1, key=time_of) if end_ms < TIME_MAX else len(offsets)
        return offsets[first:stop]

    def _latest_time(self, offset: int) -> int:
        """Store time of a record in ms; TIME_MAX if it is damaged, −1 if retention has deleted it."""
        time_ms = self._records.store_timestamp_ms(offset)
        return TIME_MAX if time_ms < 0 and offset >= self._records.visible().begin else time_ms


def _check_search(topic: str, key: str, begin_ms: int, end_ms: int) -> None:
    if not key or not topic:
        raise BadRequestError("a search needs a topic and a key")
    if end_ms < begin_ms:
        raise BadRequestError(f"the search ends ({end_ms}) before it begins ({begin_ms})")


class _Wanted:
    """Conditions for a record."""

    def __init__(self, topic: str, key: str, begin_ms: int, end_ms: int, *, unique: bool, born_time: bool) -> None:
        name = properties.UNIQ_KEY if unique else properties.KEYS
        # Texts that are not valid UTF-8 match no record.
        texts = (text.encode(errors="surrogatepass") for text in (topic, name, key))
        self._arguments = tuple(as_kernel_array(bytearray(text)) for text in texts)
        self._begin_ms = begin_ms
        self._end_ms = end_ms
        self._born_time = born_time

    def is_met_by(self, record: NDArray[np.uint8]) -> bool:
        """Whether a whole record, uint8[n], meets the conditions."""
        time_at = BORN_TIMESTAMP if self._born_time else store_timestamp_at(record, 0)
        time_ms = load_be64(record, int(time_at))
        # A missing bound accepts any time, and a born time may be any number.
        is_too_early = self._begin_ms > TIME_MIN and time_ms < self._begin_ms
        is_too_late = self._end_ms < TIME_MAX and time_ms > self._end_ms
        if is_too_early or is_too_late:
            return False
        return bool(has_key(record, 0, len(record), *self._arguments))
