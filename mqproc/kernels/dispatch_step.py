"""Publish a dispatch step, and dispatch a single record with few Python calls.

    publish_step               commit the index position, update counters, advance `dispatched`, check for waiting pulls
    publish_queues             raise the maximum offsets in the queue table
    scan_single, put_single    scan and index one record that arrives alone

One call replaces two dozen stores from Python. The parameters of a step lie in the control file after the role's
histograms, so the kernel needs no argument but the file's words.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels import dispatch
from mqproc.kernels.dispatch import Runs, scan
from mqproc.kernels.index import published_count, put_entries
from mqproc.kernels.jit.compile import kernel
from mqproc.kernels.jit.intrinsics import fence, load_acquire, load_be32, load_be64, store_release
from mqproc.kernels.jit.lowering import Bytes, Int32s, Words
from mqproc.layout import control, histograms, index_file, queue_table
from mqproc.layout.consume_queue import UNIT_SIZE

# Parameters of a step: indices into the control file's words.
(
    STEP_END,
    STEP_RECORDS,
    STEP_ENTRIES,
    STEP_STORE_TIMESTAMP_MS,  # of its last record, 0 if it had none
    INDEX_MS,  # position of the index, as in `IndexCommit`
    INDEX_ITEMS,
    INDEX_SLOTS,
    INDEX_END_MS,
    INDEX_END,
) = range(histograms.DISPATCH_STATE, histograms.DISPATCH_STATE + 9)
assert INDEX_END < histograms.DISPATCH_STATE + histograms.DISPATCH_STATE_WORDS

# First slot of a commit; the second slot of each word lies in the next cache line.
_SLOT = control.WORDS_PER_LINE
_COMMIT = (
    control.COMMIT_DISPATCHED, control.COMMIT_MESSAGES, control.COMMIT_INDEX_MS, control.COMMIT_INDEX_ITEMS,
    control.COMMIT_INDEX_SLOTS, control.COMMIT_INDEX_END_MS, control.COMMIT_INDEX_END,
)  # fmt: skip
_DISPATCHED, _MESSAGES, _INDEX_MS, _INDEX_ITEMS, _INDEX_SLOTS, _INDEX_END_MS, _INDEX_END = (
    first for first, _second in _COMMIT
)
assert all(second == first + _SLOT for first, second in _COMMIT)


@kernel
def publish_step(cells: Words) -> int:
    """Publish the step in cells[STEP_END:INDEX_END + 1]; returns the number of waiting pulls.

    `cells` int64 is the control file. The commit, the index position that belongs to this step, is stored first: the
    slot, then the sequence number. `dispatched` follows, then its store time, so a reader that loads the time first
    never pairs it with an earlier position. A full fence separates the store of `dispatched` from the load of
    `waiting_pulls`; the query role stores and loads them in the opposite order.
    """
    sequence = cells[control.COMMIT_SEQUENCE] + 1
    slot = _SLOT * (sequence & 1)
    messages = cells[control.DISPATCHED_MESSAGES] + cells[STEP_RECORDS]
    cells[_DISPATCHED + slot] = cells[STEP_END]
    cells[_INDEX_MS + slot] = cells[INDEX_MS]
    cells[_INDEX_ITEMS + slot] = cells[INDEX_ITEMS]
    cells[_INDEX_SLOTS + slot] = cells[INDEX_SLOTS]
    cells[_INDEX_END_MS + slot] = cells[INDEX_END_MS]
    cells[_INDEX_END + slot] = cells[INDEX_END]
    cells[_MESSAGES + slot] = messages
    store_release(cells, control.COMMIT_SEQUENCE, sequence)
    cells[control.INDEX_FILE_MS] = cells[INDEX_MS]
    cells[control.INDEX_ITEMS] = cells[INDEX_ITEMS]
    cells[control.DISPATCHED_MESSAGES] = messages
    cells[control.DISPATCHED_ENTRIES] += cells[STEP_ENTRIES]
    cells[control.DISPATCH_ERRNO] = 0
    store_release(cells, control.DISPATCHED, cells[STEP_END])
    fence()
    waiting_pulls = load_acquire(cells, control.WAITING_PULLS)
    if cells[STEP_STORE_TIMESTAMP_MS] != 0:
        store_release(cells, control.DISPATCHED_STORE_TIMESTAMP_MS, cells[STEP_STORE_TIMESTAMP_MS])
    return waiting_pulls


# Queue table.


@kernel
def publish_queues(cells: Words, runs: Runs) -> None:
    """Raise the words of queues in the table to the ends of their runs, positions before times.

    `cells` int64 is the table, `runs` int64[n, RUN_COLUMNS] in record order. No word is lowered, since a repeated step
    may be shorter.
    """
    for run in range(len(runs)):
        entry = queue_table.HEADER_WORDS + runs[run, dispatch.RUN_QUEUE] * queue_table.ENTRY_WORDS
        _raise(
            cells, entry + queue_table.MAX_OFFSET, runs[run, dispatch.RUN_FIRST_OFFSET] + runs[run, dispatch.RUN_COUNT]
        )
        _raise(cells, entry + queue_table.LAST_PHYSICAL_END, runs[run, dispatch.RUN_PHYSICAL_END])
        _raise(cells, entry + queue_table.LAST_STORE_TIMESTAMP_MS, runs[run, dispatch.RUN_STORE_TIMESTAMP_MS])


@kernel
def _raise(cells: Words, index: int, value: int) -> None:
    if value > cells[index]:
        store_release(cells, index, value)


# A single record. After a wait each Python step takes several times as long as in a busy process, and a client may be
# waiting for the record.


@kernel
def scan_single(
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
    """Scan the single record in [start, stop) of a segment; the arrays are those of `scan`.

    False if [start, stop) is not exactly one record with a place in a queue.
    """
    state[dispatch.START] = start
    state[dispatch.LIMIT] = stop
    state[dispatch.STOP] = stop
    state[dispatch.SEGMENT_START] = segment_start
    state[dispatch.MAX_RECORDS] = 1
    state[dispatch.RECORDS : dispatch.STORE_TIMESTAMP_MS + 1] = 0
    scan(log, state, table, cells, slots, cache, units, run_of_unit, run_of_queue, runs, hashes, offsets, times)
    if state[dispatch.RUNS] == 0:
        return False
    run_of_queue[runs[dispatch.RUN_QUEUE]] = 0
    return bool(state[dispatch.STOPPED_AT] == stop)


@kernel
def put_single(
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
    """Index the record scanned by `scan_single`, and set the parameters of `publish_step`.

    `cells` int64 is the control file, `file_ms` the time in the index file's name; the others are those of
    `put_entries`. False, with nothing changed, if not all entries fit below `item_limit`.
    """
    count = int(state[dispatch.ENTRIES])
    if published_count(view) + count > item_limit:
        return False
    if count > 0:
        put_entries(view, slots, item_limit, hashes, offsets, times, 0, count)
    cells[STEP_END] = state[dispatch.SEGMENT_START] + state[dispatch.STOPPED_AT]
    cells[STEP_RECORDS] = 1
    cells[STEP_ENTRIES] = count
    cells[STEP_STORE_TIMESTAMP_MS] = state[dispatch.STORE_TIMESTAMP_MS]
    cells[INDEX_MS] = file_ms
    cells[INDEX_ITEMS] = published_count(view)
    cells[INDEX_SLOTS] = load_be32(view, index_file.SLOT_COUNT)
    cells[INDEX_END_MS] = load_be64(view, index_file.END_TIMESTAMP)
    cells[INDEX_END] = load_be64(view, index_file.END_PHYSICAL_OFFSET)
    return True


class SingleRecordBuffers:
    """Arrays of `scan_single`, which hold the result for one record."""

    def __init__(
        self,
        table: NDArray[np.uint8],
        cells: NDArray[np.int64],
        slots: NDArray[np.int32],
        delays_ms: Sequence[int],
        entries: dispatch.IndexEntries = dispatch.IndexEntries.KEYS,
    ) -> None:
        """Allocate arrays; `table`, `cells`, `slots` are the queue table's, `delays_ms` the levels'."""
        self.state = dispatch.state_with(delays_ms)
        self.state[dispatch.WITH_ENTRIES] = entries
        self.hashes = np.zeros(dispatch.RECORD_ENTRIES_MAX, np.int32)
        self.offsets = np.zeros(dispatch.RECORD_ENTRIES_MAX, np.int64)
        self.times = np.zeros(dispatch.RECORD_ENTRIES_MAX, np.int64)
        self.unit = np.zeros(UNIT_SIZE, np.uint8)
        self.runs = np.zeros((1, dispatch.RUN_COLUMNS), np.int64)
        self.run: memoryview = self.runs.data.cast("B").cast("q")
        """Columns of the record's run, see `dispatch`."""
        self.scan = functools.partial(
            scan_single,
            self.state,
            table,
            cells,
            slots,
            np.zeros(2 * dispatch.CACHE_SIZE, np.int64),
            self.unit,
            np.zeros(1, np.int32),
            np.zeros(int(cells[queue_table.HEADER_CAPACITY]), np.int32),
            self.runs.reshape(dispatch.RUN_COLUMNS),
            self.hashes,
            self.offsets,
            self.times,
        )
        """scan(log, start, stop, segment_start)"""


def warm() -> None:
    """Compile or load these kernels."""
    cells = np.zeros(control.FILE_SIZE // control.WORD_SIZE, np.int64)
    publish_step(cells)
    publish_queues(np.zeros(queue_table.HEADER_WORDS, np.int64), np.zeros((0, dispatch.RUN_COLUMNS), np.int64))
    table = np.zeros(queue_table.HEADER_SIZE, np.uint8)
    buffers = SingleRecordBuffers(table, table.view(np.int64), np.zeros(16, np.int32), ())
    buffers.scan(np.zeros(8, np.uint8), 0, 8, 0)
    view = np.zeros(index_file.file_size(1, 2), np.uint8)
    put_single(view, 1, 0, 0, buffers.state, buffers.hashes, buffers.offsets, buffers.times, cells)
