"""The one record that a queue has got: the short way for a pull that was held at the queue's end.

Behind a wait each step in Python costs ten times what it costs in a busy process, and `QueuePulls.pull` takes forty of
them for whatever a queue may hold. This takes a third, and knows one case: the queue is there, the offset is its last
one, and the record is small, intact, and passes. All else it leaves to the pull, and has then done nothing.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.gather import (
    BASE,
    BORN_BEGIN_MS,
    BORN_END_MS,
    COPY,
    COUNT,
    COUNT_LIMIT,
    LOG_STOP,
    OUT_AT,
    QUEUE,
    STORE_BEGIN_MS,
    STORE_END_MS,
    TIME_MAX,
    TIME_MIN,
    UNIT,
    UNIT_STOP,
    VERIFY,
    gather,
)
from mqproc.kernels.record_check import VERIFY_ALL
from mqproc.layout.consume_queue import UNIT_SIZE, place_of
from mqproc.message import PullStatus
from mqproc.store.consume_queue import ConsumeQueueFiles
from mqproc.store.queue_table import QueueTable
from mqproc.store.reads.log_records import LogRecords
from mqproc.store.reads.passing import Passing
from mqproc.store.reads.pull import Pulled
from mqproc.store.reads.unit_walk import Counts

RECORD_BYTES_MAX = 64 << 10
"""Larger ones take longer than the steps that are spared."""

_NOTHING = np.zeros(0, np.uint8)
_NO_WORDS = np.zeros(0, np.int64)


class LoneRecords:
    """Such records of one store. `counts` gets what is handed out."""

    def __init__(self, table: QueueTable, files: ConsumeQueueFiles, records: LogRecords, counts: Counts) -> None:
        self._table = table
        self._files = files
        self._visible = records.visible
        self._segments = records.segments
        self._counts = counts  # Kept: the state has addresses of its memory.
        self._unit = np.zeros(UNIT_SIZE, np.uint8)
        self._unit_bytes = self._unit.data
        state = self._state = counts.state.copy()
        state[UNIT_STOP] = state[COPY] = state[COUNT_LIMIT] = 1
        state[VERIFY] = VERIFY_ALL
        state[BORN_BEGIN_MS] = state[STORE_BEGIN_MS] = TIME_MIN
        state[BORN_END_MS] = state[STORE_END_MS] = TIME_MAX
        self._cells = state.data

    def pull(self, topic: str, queue_id: int, offset: int, chosen: Passing) -> Pulled | None:
        """What a pull from `offset` on would give, whatever its limits; None when that is not for this way to say.

        `chosen` goes by tags alone. Raises what a pull would raise.
        """
        bounds = self._table.bounds(topic, queue_id)
        if bounds is None:
            return None
        number, min_offset, max_offset = bounds
        if not min_offset <= offset == max_offset - 1:
            return None
        segments = self._segments
        try:
            unit = self._files.raw_units(topic, queue_id, offset, 1, number)
            if len(unit) != UNIT_SIZE:
                return None
            physical_offset, size = place_of(unit)
            begin, end = self._visible()
            if not (begin <= physical_offset < end and 0 < size <= RECORD_BYTES_MAX):
                return None
            start = physical_offset - physical_offset % segments.segment_size
            view = segments.view(start)
        except FileNotFoundError:
            return None
        segments.touched(physical_offset, size)
        out = np.empty(size, np.uint8)
        self._unit_bytes[:] = unit
        cells = self._cells
        cells[UNIT] = cells[OUT_AT] = cells[COUNT] = 0
        cells[BASE], cells[LOG_STOP], cells[QUEUE] = start, end, number
        tags = chosen.codes, chosen.tags, chosen.ends
        gather(self._unit, view, *tags, _NO_WORDS, _NOTHING, _NO_WORDS, out, self._state)
        if not cells[COUNT]:
            return None
        return Pulled(PullStatus.FOUND, max_offset, min_offset, max_offset, 1, out)
