"""Publishing a dispatch step raises the words of queues to the offsets of its runs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.kernels.dispatch import RUN_COLUMNS
from mqproc.kernels.dispatch_step import publish_queues
from mqproc.kernels.jit.compile import plain
from mqproc.layout import queue_table

QUEUES = 3
RUN = st.tuples(
    st.integers(0, QUEUES - 1),
    st.integers(0, 50),
    st.integers(1, 9),
    st.just(0),
    st.integers(0, 99),
    st.integers(0, 99),
)
WORDS = (queue_table.MAX_OFFSET, queue_table.LAST_PHYSICAL_END, queue_table.LAST_STORE_TIMESTAMP_MS)


@settings(max_examples=50, deadline=None)
@given(st.lists(RUN, max_size=12), st.lists(st.integers(0, 60), min_size=9, max_size=9))
def test_words_are_raised_to_highest_offset(runs: list[tuple[int, ...]], before: list[int]) -> None:
    wanted = [before[3 * number : 3 * number + 3] for number in range(QUEUES)]
    for number, first, count, _at, end, time_ms in runs:
        wanted[number] = [max(pair) for pair in zip(wanted[number], (first + count, end, time_ms), strict=True)]
    for kernel in (publish_queues, plain(publish_queues)):
        cells = np.zeros(queue_table.HEADER_WORDS + QUEUES * queue_table.ENTRY_WORDS, np.int64)
        places = [queue_table.entry_word(number, word) for number in range(QUEUES) for word in WORDS]
        cells[places] = before
        kernel(cells, np.array(runs, np.int64).reshape(len(runs), RUN_COLUMNS))
        assert cells[places].reshape(QUEUES, 3).tolist() == wanted
        cells[places] = 0
        assert not cells.any()
