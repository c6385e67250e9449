"""Dispatching a record that comes by itself: what `dispatch` and `index` do with many, in fewer calls and small arrays.

Behind a wait each step of Python takes several times what it takes in a busy process, and somebody may be waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels import dispatched
from mqproc.kernels.dispatch import (
    CACHE_SIZE,
    DELAYS,
    ENTRIES,
    LEVELS,
    LIMIT,
    MAX_RECORDS,
    RECORD_ENTRIES_MAX,
    RECORDS,
    RUN_COLUMNS,
    RUN_QUEUE,
    RUNS,
    SEGMENT_START,
    START,
    STATE_SIZE,
    STOP,
    STOPPED_AT,
    STORE_TIMESTAMP_MS,
    WITH_ENTRIES,
    Int32s,
    scan,
)
from mqproc.kernels.index import published_count, put_entries
from mqproc.kernels.intrinsics import load_be32, load_be64
from mqproc.kernels.jit import kernel
from mqproc.kernels.primitive import Bytes, Words
from mqproc.layout import control, index_file, queue_table
from mqproc.layout.consume_queue import UNIT_SIZE


@kernel
def scan_alone(
    state: Words,
    table: Bytes,
    cells: Words,
    slots: Int32s,
    cache: Words,
    units: Bytes,
    run_of_unit: Int32s,
    run_of_queue: Int32s,
    runs: Words,
    hashes: Int32s,
    offsets: Words,
    times: Words,
    log: Bytes,
    start: int,
    stop: int,
    segment_start: int,
) -> bool:
    """Scan the record in [start, stop) of a segment as `scan` does, whose arrays these are.

    False when there is no record, more than one, or one that belongs into no queue.
    """
    state[START] = start
    state[LIMIT] = stop
    state[STOP] = stop
    state[SEGMENT_START] = segment_start
    state[MAX_RECORDS] = 1
    state[RECORDS : STORE_TIMESTAMP_MS + 1] = 0
    scan(log, state, table, cells, slots, cache, units, run_of_unit, run_of_queue, runs, hashes, offsets, times)
    if state[RUNS] == 0:
        return False
    run_of_queue[runs[RUN_QUEUE]] = 0
    return bool(state[STOPPED_AT] == stop)


@kernel
def put_alone(
    view: Bytes,
    slots: int,
    item_limit: int,
    file_ms: int,
    state: Words,
    hashes: Int32s,
    offsets: Words,
    times: Words,
    cells: Words,
) -> bool:
    """Put the entries of a record that `scan_alone` has found, and say in `cells` what `publish_step` is to publish.

    `cells` int64 is the control file; the others are those of `put_entries`, and the time that the file's name tells.
    False, and nothing is done, when the items that may be put have no room for all.
    """
    count = int(state[ENTRIES])
    if published_count(view) + count > item_limit:
        return False
    if count > 0:
        put_entries(view, slots, item_limit, hashes, offsets, times, 0, count)
    cells[dispatched.POSITION] = state[SEGMENT_START] + state[STOPPED_AT]
    cells[dispatched.RECORDS] = 1
    cells[dispatched.ENTRIES] = count
    cells[dispatched.STORE_TIMESTAMP_MS] = state[STORE_TIMESTAMP_MS]
    cells[dispatched.INDEX_MS] = file_ms
    cells[dispatched.INDEX_ITEMS] = published_count(view)
    cells[dispatched.INDEX_SLOTS] = load_be32(view, index_file.SLOT_COUNT)
    cells[dispatched.INDEX_END_MS] = load_be64(view, index_file.END_TIMESTAMP)
    cells[dispatched.INDEX_END] = load_be64(view, index_file.END_PHYSICAL_OFFSET)
    return True


class AloneBuffers:
    """The arrays of `scan_alone`: what it found of a record."""

    def __init__(
        self,
        table: NDArray[np.uint8],
        cells: NDArray[np.int64],
        slots: NDArray[np.int32],
        delays_ms: Sequence[int],
    ) -> None:
        """`table`, `cells` and `slots` are the queue table's views, `delays_ms` those of the delay levels."""
        self.state = np.zeros(STATE_SIZE, np.int64)
        self.state[WITH_ENTRIES] = 1
        self.state[LEVELS] = len(delays_ms)
        self.state[DELAYS : DELAYS + len(delays_ms)] = delays_ms
        self.hashes = np.zeros(RECORD_ENTRIES_MAX, np.int32)
        self.offsets = np.zeros(RECORD_ENTRIES_MAX, np.int64)
        self.times = np.zeros(RECORD_ENTRIES_MAX, np.int64)
        self.unit = np.zeros(UNIT_SIZE, np.uint8)
        self.runs = np.zeros((1, RUN_COLUMNS), np.int64)
        self.run: memoryview = self.runs.data.cast("B").cast("q")
        """The columns of the record's run, as `dispatch` names them."""
        self.scan = functools.partial(
            scan_alone,
            self.state,
            table,
            cells,
            slots,
            np.zeros(2 * CACHE_SIZE, np.int64),
            self.unit,
            np.zeros(1, np.int32),
            np.zeros(int(cells[queue_table.HEADER_CAPACITY]), np.int32),
            self.runs.reshape(RUN_COLUMNS),
            self.hashes,
            self.offsets,
            self.times,
        )
        """scan(log, start, stop, segment_start)"""


def warm() -> None:
    """Compile or load these kernels."""
    table = np.zeros(queue_table.HEADER_SIZE, np.uint8)
    buffers = AloneBuffers(table, table.view(np.int64), np.zeros(16, np.int32), ())
    buffers.scan(np.zeros(8, np.uint8), 0, 8, 0)
    cells = np.zeros(control.FILE_SIZE // control.WORD_SIZE, np.int64)
    view = np.zeros(index_file.file_size(1, 2), np.uint8)
    put_alone(view, 1, 0, 0, buffers.state, buffers.hashes, buffers.offsets, buffers.times, cells)
