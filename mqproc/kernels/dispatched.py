"""Publishing a dispatch step: its commit, what it counted, `dispatched` itself, whether somebody waits for it.

One call instead of two dozen stores from Python. The step's own numbers lie in the control file, behind the role's
histograms, so the file's words are all that the kernel is given.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.intrinsics import fence, load_acquire, store_release
from mqproc.kernels.jit import kernel
from mqproc.kernels.primitive import Words
from mqproc.layout import control, figures

# Indices into the control file's words: what a step says of itself.
(
    POSITION,
    RECORDS,
    ENTRIES,
    STORE_TIMESTAMP_MS,  # of its last record, 0 when it had none
    INDEX_MS,  # where the index stands: as `IndexCommit`
    INDEX_ITEMS,
    INDEX_SLOTS,
    INDEX_END_MS,
    INDEX_END,
) = range(figures.DISPATCH_STATE, figures.DISPATCH_STATE + 9)
assert INDEX_END < figures.DISPATCH_STATE + figures.DISPATCH_STATE_WORDS

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
    cells[control.DISPATCHED_ENTRIES] += cells[ENTRIES]


@kernel
def publish_step(cells: Words) -> int:
    """Publish the step that cells[POSITION:INDEX_END + 1] tell of; returns how many pulls wait.

    `cells` int64 is the control file. The commit comes first: where the index stands at this position, the slot before
    its number. Then `dispatched`, and behind it its store time: who reads the time first never takes it for an earlier
    position's. Between `dispatched` and the look at `waiting_pulls` is a full fence, as query has it the other way.
    """
    sequence = cells[control.COMMIT_SEQUENCE] + 1
    slot = _SLOT * (sequence & 1)
    messages = cells[control.DISPATCHED_MESSAGES] + cells[RECORDS]
    cells[_DISPATCHED + slot] = cells[POSITION]
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
    store_release(cells, control.DISPATCHED, cells[POSITION])
    fence()
    waiting_pulls = load_acquire(cells, control.WAITING_PULLS)
    if cells[STORE_TIMESTAMP_MS] != 0:
        store_release(cells, control.DISPATCHED_STORE_TIMESTAMP_MS, cells[STORE_TIMESTAMP_MS])
    return waiting_pulls


def warm() -> None:
    """Compile or load this kernel."""
    publish_step(np.zeros(control.FILE_SIZE // control.WORD_SIZE, np.int64))
