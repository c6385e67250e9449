"""Messages by key or unique id: the index tells where to look, the records tell what is there.

The index knows hashes and whole seconds only. So candidates are asked for from a second before the begin up to the
newest (the first item of a rolled file reads too late by any time), cut to the time by the records' own store times,
which ascend with their offsets, and each record is compared by topic, key and time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import BadRequestError
from mqproc.kernels.gather import TIME_MAX, TIME_MIN
from mqproc.kernels.intrinsics import load_be32, load_be64
from mqproc.kernels.match import has_key
from mqproc.kernels.record_check import store_timestamp_at
from mqproc.kernels.views import as_kernel_array
from mqproc.layout import properties
from mqproc.layout.record import BORN_TIMESTAMP, FIXED_SIZE_V4, QUEUE_ID, QUEUE_OFFSET
from mqproc.store.reads.index_query import LOG_END_MAX, IndexAnswer, IndexReader
from mqproc.store.reads.log_records import LogRecords
from mqproc.store.reads.queue_bounds import Queues
from mqproc.store.slices import Batch, Slices

# The index keeps whole seconds.
INDEX_STEP_MS: Final = 1000
CANDIDATES_MAX: Final = 65_536
"""Index hits of one round; a key with more is searched in several."""
CANDIDATES_MIN: Final = 256
# Later rounds are so much larger: what a time leaves out may be all of many small ones.
_LARGER: Final = 4

SLICE_RECORDS: Final = 256
SLICE_BYTES: Final = 8 << 20
"""A slice ends after so many records, or so many bytes of them: a record may have mebibytes, whose CRC is checked."""

_ROUNDS_MAX: Final = 1 << 20


class KeySearch:
    """Searches in the index of one store. `newest_ms` tells the name of the newest index file as a time."""

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
        """The newest messages of a topic with a key (`unique`: a unique id) and begin_ms ≤ time ≤ end_ms.

        The time is the store time, or with `born_time` the born time, by which nothing is ordered. Sorted by
        physical offset, none twice. Not complete when there are more than `max_messages`, or `max_bytes` of them: the
        cursor (physical offset,) is then the `below` that goes on with the older ones. Messages of a deleted topic are
        none of the one that was made under its name later.
        """
        if not key or not topic:
            raise BadRequestError("a search needs a topic and a key")
        if end_ms < begin_ms:
            raise BadRequestError(f"the search ends ({end_ms}) before it begins ({begin_ms})")
        self._index.refresh(self._newest_ms())
        wanted = _Wanted(topic, key, begin_ms, end_ms, unique=unique, born_time=born_time)
        if born_time:
            begin_ms, end_ms = TIME_MIN, TIME_MAX
        found: list[NDArray[np.uint8]] = []
        # In bytes, to which each look adds its own.
        looked_at = 0
        size, oldest_found = 0, 0
        below = LOG_END_MAX if below < 0 else below
        begin = max(TIME_MIN, begin_ms - INDEX_STEP_MS)
        # A page of few messages looks at few, however many have the key: one after the other they read all of them.
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
            # More hits than a round holds: go on below the oldest one of this round.
            below = offsets[0]
            candidates *= _LARGER
            yield
        return Batch(len(found), found[::-1])

    def query_message(self, topic: str, key: str, max_messages: int, begin_ms: int, end_ms: int) -> Slices[IndexAnswer]:
        """RocketMQ's own `queryMessage`: hash hits and all, a message once for each of its words that hit."""
        self._index.refresh(self._newest_ms())
        return self._index.query_message(topic, key, max_messages, begin_ms, end_ms, self._is_there)

    def _is_there(self, offset: int) -> bool:
        return self._records.store_timestamp_ms(offset) >= 0

    def _is_deleted(self, topic: str, offset: int, record: NDArray[np.uint8]) -> bool:
        """Whether a record was its queue's before that was deleted."""
        log_end, next_offset = self._queues.deletion(topic, int(load_be32(record, QUEUE_ID)))
        return offset < log_end and int(load_be64(record, QUEUE_OFFSET)) < next_offset

    def _in_time(self, offsets: list[int], begin_ms: int, end_ms: int) -> list[int]:
        """The ascending offsets whose records may lie in the time.

        A damaged record has no time: whatever lies on either side of it is looked at.
        """
        time_of = self._records.store_timestamp_ms
        first = bisect_left(offsets, begin_ms, key=self._latest_time) if begin_ms > TIME_MIN else 0
        stop = bisect_left(offsets, end_ms + 1, key=time_of) if end_ms < TIME_MAX else len(offsets)
        return offsets[first:stop]

    def _latest_time(self, offset: int) -> int:
        """Store time of a record in ms; TIME_MAX of one that is damaged, −1 of one that retention has removed."""
        time_ms = self._records.store_timestamp_ms(offset)
        return TIME_MAX if time_ms < 0 and offset >= self._records.visible().begin else time_ms


class _Wanted:
    """What a record is compared with."""

    def __init__(self, topic: str, key: str, begin_ms: int, end_ms: int, *, unique: bool, born_time: bool) -> None:
        name = properties.UNIQ_KEY if unique else properties.KEYS
        # What is no UTF-8 is of no record.
        texts = (text.encode(errors="surrogatepass") for text in (topic, name, key))
        self._arguments = tuple(as_kernel_array(bytearray(text)) for text in texts)
        self._begin_ms = begin_ms
        self._end_ms = end_ms
        self._born_time = born_time

    def is_met_by(self, record: NDArray[np.uint8]) -> bool:
        """`record` uint8[n] is one whole record."""
        time_at = BORN_TIMESTAMP if self._born_time else store_timestamp_at(record, 0)
        time_ms = load_be64(record, int(time_at))
        # A bound that nobody gave holds for every time, and a born time may be any number.
        is_too_early = self._begin_ms > TIME_MIN and time_ms < self._begin_ms
        is_too_late = self._end_ms < TIME_MAX and time_ms > self._end_ms
        if is_too_early or is_too_late:
            return False
        return bool(has_key(record, 0, len(record), *self._arguments))
