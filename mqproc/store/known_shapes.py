"""Shapes of append frames that the kernel knows: frames that have one are appended a run at a time, without Python.

The table is `kernels.append_run`'s: rows with what was made of each shape once, found by the bytes of its frames'
options. A shape comes here when a frame of it was appended by itself, and all are forgotten when one might be another:
a topic was widened or deleted, an option changed, or there is no room for one more.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels import append_frame as frame
from mqproc.kernels import append_run as kernel
from mqproc.kernels.append_options import ITEMS, KEY_BYTES_MAX, NOT_READ, PREFIX_DIGITS, read_options
from mqproc.kernels.views import as_kernel_array
from mqproc.layout.frame import HEADER, HEADER_SIZE
from mqproc.store.frames import FrameShape, RenderedShape

TABLE_BYTES: Final = 1 << 20
QUEUES_MAX: Final = 1 << 16
ANSWERS_BYTES: Final = 1 << 20
"""Answers of frames that wait to be published and sent; a frame of more than 52,000 messages goes alone."""


class KnownShapes:
    """The table, the run in hand, and its answers. One object of one appender."""

    def __init__(self, max_queues: int, rounds: NDArray[np.int64], commit_bytes: int) -> None:
        """`rounds` int64[max_queues]; the kernel comes back when `commit_bytes` are staged."""
        self.run = np.zeros(kernel.RUN_WORDS, np.int64)
        self.words = self.run.data
        """The same: a memoryview gives and takes Python's own integers."""
        self.table = np.zeros(kernel.BYTES_AT + TABLE_BYTES, np.uint8)
        self.key = np.zeros(KEY_BYTES_MAX, np.uint8)
        self.queue_numbers = np.zeros(QUEUES_MAX, np.int64)
        self.rounds = rounds
        self.touched = np.zeros(2 * max_queues, np.int64)
        self.answers = np.zeros(ANSWERS_BYTES, np.uint8)
        self.views = self.answers.data
        self._found = np.zeros(ITEMS, np.int64)
        self._topics: dict[int, int] = {}
        self._options = self.table.data[kernel.OPTIONS_AT : kernel.BYTES_AT]
        self._rows = self._bytes = self._numbers = 0
        self.words[kernel.COMMIT_BYTES] = commit_bytes
        self.forget()
        self.untouch()

    # The run in hand

    def begin(self, at: int, end: int) -> None:
        """Take a run of whole frames in [at, end) of a buffer."""
        self.words[kernel.AT], self.words[kernel.END] = at, end

    @property
    def at(self) -> int:
        """Where the next frame begins, or the one in hand."""
        return self.words[kernel.AT]

    def go_on_at(self, at: int) -> None:
        """The frame before `at` is done with, or given up."""
        self.words[kernel.AT], self.words[kernel.ROW] = at, -1

    def answer_with(self, options: bytes, time_at: int) -> None:
        """All is answered with these options, the store time as a big-endian word at `time_at` of them."""
        self.words[kernel.ANSWER_OPTIONS_SIZE] = len(options)
        self.words[kernel.ANSWER_TIME_AT] = time_at
        self._options[: len(options)] = options

    def store_at(self, store_timestamp_ms: int) -> None:
        """What is appended next is stored now."""
        self.words[kernel.STORED_AT_MS] = store_timestamp_ms

    @property
    def stored_at_ms(self) -> int:
        """Store time of what is appended."""
        return self.words[kernel.STORED_AT_MS]

    @property
    def answers_end(self) -> int:
        """Where the answers end that are written."""
        return self.words[kernel.ANSWERS_AT]

    def answered(self, start: int, end: int) -> list[tuple[int, int]]:
        """(operation with ANSWER, request id) of the answers in [start, end)."""
        found = []
        while start < end:
            _, _, operation, request_id, options_size, _, payload_size = HEADER.unpack_from(self.views, start)
            found.append((operation, request_id))
            start += HEADER_SIZE + options_size + payload_size
        return found

    def forget_answers(self) -> None:
        """All are sent."""
        self.words[kernel.ANSWERS_AT] = 0

    # Queues whose next offsets are not published

    def touch(self, numbers: NDArray[np.int64]) -> None:
        """Note queues by number."""
        noted = self.words[kernel.TOUCHED]
        if noted > len(self.touched) // 2:
            distinct = np.unique(self.touched[:noted])
            noted = len(distinct)
            self.touched[:noted] = distinct
        self.touched[noted : noted + len(numbers)] = numbers
        self.words[kernel.TOUCHED] = noted + len(numbers)

    def untouch(self) -> None:
        """Nothing is left to publish, and no frame is in hand."""
        self.words[kernel.TOUCHED] = 0
        self.words[kernel.TOUCHED_TOPIC] = self.words[kernel.ROW] = -1

    # The table

    def forget(self) -> None:
        """Forget every shape. Rows are given out again, so queues are no longer noted by theirs."""
        self.words[kernel.TOUCHED_TOPIC] = -1
        self.run[kernel.SLOTS_AT : kernel.ROWS_AT] = 0
        self._topics.clear()
        self._rows = self._numbers = 0
        self._bytes = kernel.BYTES_AT

    def add(self, options: memoryview, shape: FrameShape, rendered: RenderedShape, *, answered: bool) -> None:
        """Know frames with such options by the shape that was made of them; a shape with too much text is left out."""
        size = read_options(as_kernel_array(options), 0, len(options), self._found, 0, self.key)
        if size == NOT_READ or kernel.find_row(self.run, self.table, self.key, size) >= 0:
            return
        texts = len(rendered.before_id) + len(rendered.behind_id)
        queues = len(shape.queue_numbers)
        new_numbers = 0 if int(shape.queue_numbers[0]) in self._topics else queues
        if texts + PREFIX_DIGITS > kernel.SCRATCH_BYTES or queues > QUEUES_MAX:
            return
        if (
            self._rows == kernel.ROWS_MAX
            or self._bytes + size + texts > len(self.table)
            or self._numbers + new_numbers > QUEUES_MAX
        ):
            self.forget()
        row = kernel.ROWS_AT + self._rows * kernel.ROW_WORDS
        self._fill(row, shape, rendered)
        run = self.words
        run[row + kernel.KEY_AT] = self._put(self.key[:size].tobytes())
        run[row + kernel.KEY_SIZE] = size
        run[row + kernel.KEY_HASH] = hashed = int(kernel.key_hash(self.key, size))
        run[row + kernel.ANSWERED] = answered
        slot = hashed % kernel.SLOTS
        while run[kernel.SLOTS_AT + slot]:
            slot = (slot + 1) % kernel.SLOTS
        self._rows += 1
        run[kernel.SLOTS_AT + slot] = self._rows

    def _fill(self, row: int, shape: FrameShape, rendered: RenderedShape) -> None:
        """What a row has of its shape. The constant properties are put together for each frame."""
        run = self.words
        state = np.frombuffer(rendered.constants, np.int64).copy()
        first = frame.FIXED_QUEUE
        parts = int(state[frame.PARTS_AT - first])
        at = self._put(rendered.before_id)
        run[row + kernel.COLUMNS] = shape.columns
        run[row + kernel.BEFORE_AT], run[row + kernel.BEFORE_SIZE] = at + parts, len(rendered.before_id) - parts
        run[row + kernel.BEHIND_AT], run[row + kernel.BEHIND_SIZE] = (
            self._put(rendered.behind_id),
            len(rendered.behind_id),
        )
        round_of = run[row + kernel.ROUND] = int(shape.queue_numbers[0])
        state[frame.HEAD_AT - first] += at
        state[frame.TOPIC_AT - first] += at
        state[frame.PARTS_AT - first] = kernel.SCRATCH_AT
        state[frame.NUMBERS_AT - first] = self._numbers_of(round_of, shape.queue_numbers)
        self.run[row + kernel.CONSTANTS : row + kernel.ROW_WORDS] = state

    def _numbers_of(self, round_of: int, numbers: NDArray[np.int64]) -> int:
        """Where a topic's queue numbers begin: once for all its shapes."""
        at = self._topics.get(round_of)
        if at is None:
            at = self._topics[round_of] = self._numbers
            self._numbers += len(numbers)
            self.queue_numbers[at : self._numbers] = numbers
        return at

    def _put(self, data: bytes) -> int:
        """Where bytes lie in the table now."""
        at = self._bytes
        self._bytes += len(data)
        self.table[at : self._bytes] = np.frombuffer(data, np.uint8)
        return at
