"""Publishing a dispatch step: its commit, what it counted, `dispatched` itself, whether somebody waits for it.

One call instead of two dozen stores from Python. The step's own numbers lie in the control file, behind the role's
histograms, so the file's words are all that the kernel is given.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
    RUN_COUNT,
    RUN_FIRST_OFFSET,
    RUN_PHYSICAL_END,
    RUN_QUEUE,
    RUN_STORE_TIMESTAMP_MS,
    RUNS,
    SEGMENT_START,
    START,
    STATE_SIZE,
    STOP,
    STOPPED_AT,
    STORE_TIMESTAMP_MS,
    WITH_ENTRIES,
    Runs,
    scan,
)
from mqproc.kernels.index import published_count, put_entries
from mqproc.kernels.jit.compile import kernel
from mqproc.kernels.jit.intrinsics import fence, load_acquire, load_be32, load_be64, store_release
from mqproc.kernels.jit.lowering import Bytes, Int32s, Words
from mqproc.layout import control, histograms, index_file, queue_table
from mqproc.layout.consume_queue import UNIT_SIZE

# Indices into the control file's words: what a step says of itself.
(
    STEP_END,
    STEP_RECORDS,
    STEP_ENTRIES,
    STEP_STORE_TIMESTAMP_MS,  # of its last record, 0 when it had none
    INDEX_MS,  # where the index stands: as `IndexCommit`
    INDEX_ITEMS,
    INDEX_SLOTS,
    INDEX_END_MS,
    INDEX_END,
) = range(histograms.DISPATCH_STATE, histograms.DISPATCH_STATE + 9)
assert INDEX_END < histograms.DISPATCH_STATE + histograms.DISPATCH_STATE_WORDS

# Of a commit's two slots the first; each word's second one lies in the next line.
_SLOT = control.WORDS_PER_LINE
_DISPATCHED = control.COMMIT_DISPATCHED[0]
_MESSAGES = control.COMMIT_MESSAGES[0]
_INDEX_MS = control.COMMIT_INDEX_MS[0]
_INDEX_ITEMS = control.COMMIT_INDEX_ITEMS[0]
_INDEX_SLOTS = control.COMMIT_INDEX_SLOTS[0]
_INDEX_END_MS = control.COMMIT_INDEX_END_MS[0]
_INDEX_END = control.COMMIT_INDEX_END[0]
assert all(
    second == first + _SLOT
    for first, second in (
        control.COMMIT_DISPATCHED,
        control.COMMIT_MESSAGES,
        control.COMMIT_INDEX_MS,
        control.COMMIT_INDEX_ITEMS,
        control.COMMIT_INDEX_SLOTS,
        control.COMMIT_INDEX_END_MS,
        control.COMMIT_INDEX_END,
    )
)


@kernel
def _count_entries(cells: Words) -> None:
    cells[control.DISPATCHED_ENTRIES] += cells[STEP_ENTRIES]


@kernel
def publish_step(cells: Words) -> int:
    """Publish the step that cells[STEP_END:INDEX_END + 1] tell of; returns how many pulls wait.

    `cells` int64 is the control file. The commit comes first: where the index stands at this position, the slot before
    its number. Then `dispatched`, and behind it its store time: who reads the time first never takes it for an earlier
    position's. Between `dispatched` and the look at `waiting_pulls` is a full fence, as query has it the other way.
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
    _count_entries(cells)
    cells[control.DISPATCH_ERRNO] = 0
    store_release(cells, control.DISPATCHED, cells[STEP_END])
    fence()
    waiting_pulls = load_acquire(cells, control.WAITING_PULLS)
    if cells[STEP_STORE_TIMESTAMP_MS] != 0:
        store_release(cells, control.DISPATCHED_STORE_TIMESTAMP_MS, cells[STEP_STORE_TIMESTAMP_MS])
    return waiting_pulls


# --- publish ---
# Publishing in the queue table (layout/queue_table.py) what a dispatch step wrote.


@kernel
def publish_queues(cells: Words, runs: Runs) -> None:
    """Raise the queues' words in the queue table to what their runs say, position before time.

    `cells` int64 is the table, `runs` int64[n, RUN_COLUMNS] in the order of the records. A word is never lowered: a
    repeated step may be shorter than it was.
    """
    for run in range(len(runs)):
        entry = queue_table.HEADER_WORDS + runs[run, RUN_QUEUE] * queue_table.ENTRY_WORDS
        _raise(cells, entry + queue_table.MAX_OFFSET, runs[run, RUN_FIRST_OFFSET] + runs[run, RUN_COUNT])
        _raise(cells, entry + queue_table.LAST_PHYSICAL_END, runs[run, RUN_PHYSICAL_END])
        _raise(cells, entry + queue_table.LAST_STORE_TIMESTAMP_MS, runs[run, RUN_STORE_TIMESTAMP_MS])


@kernel
def _raise(cells: Words, index: int, value: int) -> None:
    if value > cells[index]:
        store_release(cells, index, value)


# --- dispatch_alone ---
# Dispatching a record that comes by itself: what `dispatch` and `index` do with many, in fewer calls and small arrays.
#
# Behind a wait each step of Python takes several times what it takes in a busy process, and somebody may be waiting.


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
    """Put the entries of a record that `scan_single` has found, and say in `cells` what `publish_step` is to publish.

    `cells` int64 is the control file; the others are those of `put_entries`, and the time that the file's name tells.
    False, and nothing is done, when the items that may be put have no room for all.
    """
    count = int(state[ENTRIES])
    if published_count(view) + count > item_limit:
        return False
    if count > 0:
        put_entries(view, slots, item_limit, hashes, offsets, times, 0, count)
    cells[STEP_END] = state[SEGMENT_START] + state[STOPPED_AT]
    cells[STEP_RECORDS] = 1
    cells[STEP_ENTRIES] = count
    cells[STEP_STORE_TIMESTAMP_MS] = state[STORE_TIMESTAMP_MS]
    cells[INDEX_MS] = file_ms
    cells[INDEX_ITEMS] = published_count(view)
    cells[INDEX_SLOTS] = load_be32(view, index_file.SLOT_COUNT)
    cells[INDEX_END_MS] = load_be64(view, index_file.END_TIMESTAMP)
    cells[INDEX_END] = load_be64(view, index_file.END_PHYSICAL_OFFSET)
    return True


class SingleRecordBuffers:
    """The arrays of `scan_single`: what it found of a record."""

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
            scan_single,
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
    publish_step(np.zeros(control.FILE_SIZE // control.WORD_SIZE, np.int64))
    publish_queues(np.zeros(queue_table.HEADER_WORDS, np.int64), np.zeros((0, RUN_COLUMNS), np.int64))
    table = np.zeros(queue_table.HEADER_SIZE, np.uint8)
    buffers = SingleRecordBuffers(table, table.view(np.int64), np.zeros(16, np.int32), ())
    buffers.scan(np.zeros(8, np.uint8), 0, 8, 0)
    cells = np.zeros(control.FILE_SIZE // control.WORD_SIZE, np.int64)
    view = np.zeros(index_file.file_size(1, 2), np.uint8)
    put_single(view, 1, 0, 0, buffers.state, buffers.hashes, buffers.offsets, buffers.times, cells)
