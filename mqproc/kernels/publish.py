"""Publishing in the queue table (layout/queue_table.py) what a dispatch step wrote."""

from __future__ import annotations

import numpy as np

from mqproc.kernels.dispatch import (
    RUN_COLUMNS,
    RUN_COUNT,
    RUN_FIRST_OFFSET,
    RUN_PHYSICAL_END,
    RUN_QUEUE,
    RUN_STORE_TIMESTAMP_MS,
    Runs,
)
from mqproc.kernels.intrinsics import store_release
from mqproc.kernels.jit import kernel
from mqproc.kernels.primitive import Words
from mqproc.layout import queue_table


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


def warm() -> None:
    """Compile or load this kernel."""
    publish_queues(np.zeros(queue_table.HEADER_WORDS, np.int64), np.zeros((0, RUN_COLUMNS), np.int64))
