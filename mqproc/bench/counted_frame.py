"""A frame that is encoded and a pull that is gathered again and again, with what they count and without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels import append, append_frame, gather
from mqproc.layout import control as layout
from mqproc.layout import record
from mqproc.store.consume_queue import UNIT_DTYPE

BODY_BYTES: Final = 160
_TOPIC = b"\x06orders"
_NO_BYTES, _NO_WORDS = np.zeros(0, np.uint8), np.zeros(0, np.int64)


class CountedFrame:
    """A frame of so many messages with a body, the log that it gives, and the queue of these messages."""

    def __init__(self, cells: NDArray[np.int64], messages: int) -> None:
        """`cells` is a control file."""
        self._cells = cells
        self._messages = messages
        lengths = np.full(messages, BODY_BYTES, "<u4").view(np.uint8)
        self._payload = np.concatenate([lengths, np.ones(BODY_BYTES * messages, np.uint8)])
        self._log = np.zeros((BODY_BYTES + record.RECORD_OVERHEAD_MAX) * messages, np.uint8)
        self._answer = np.zeros(append.ANSWER_BYTES_PER_MESSAGE * messages, np.uint8)
        head = record.HEAD.pack(0, record.MAGIC_V1, 0, 0, 0, 0, 0, 0, 0)
        self._shape = np.frombuffer(bytearray(head.ljust(record.BODY, b"\0") + _TOPIC), np.uint8)
        self._numbers, self._next_offsets = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._frame = np.full(append_frame.SEGMENT_END + 1 - append_frame.COUNT, -1, np.int64)
        for at, value in self._frame_state().items():
            self._frame[at - append_frame.COUNT] = value
        self._state, self._fresh = np.zeros(gather.STATE_SIZE, np.int64), np.zeros(gather.STATE_SIZE, np.int64)

    def _frame_state(self) -> dict[int, int]:
        """What differs from −1, no such column."""
        zeros = (
            *(
                append_frame.BODY_LENGTHS,
                append_frame.FIXED_QUEUE,
                append_frame.ROTATION,
                append_frame.PROPERTY_CRC,
                append_frame.PART_0_END,
            ),
            *(append_frame.HEAD_AT, append_frame.PARTS_AT, append_frame.NUMBERS_AT),
            *(
                append_frame.PART_1_END,
                append_frame.PART_2_END,
                append_frame.PART_3_END,
                append_frame.NEXT_MESSAGE,
                append_frame.STAGING_AT,
            ),
            append_frame.PHYSICAL_AT,
        )
        return dict.fromkeys(zeros, 0) | {
            append_frame.COUNT: self._messages,
            append_frame.BODIES: 4 * self._messages,
            append_frame.PAYLOAD_SIZE: len(self._payload),
            append_frame.QUEUE_COUNT: 1,
            append_frame.TAKES_QUEUE_OFFSET: 1,
            append_frame.HEAD_SIZE: record.BODY,
            append_frame.TOPIC_AT: record.BODY,
            append_frame.TOPIC_SIZE: len(_TOPIC),
            append_frame.STORE_TIMESTAMP_AT: record.STORE_TIMESTAMP,
            append_frame.STORE_TIMESTAMP_MS: 1,
            append_frame.BORN_TIMESTAMP_MS: 1,
            append_frame.SEGMENT_END: 1 << 40,
        }

    def encode(self, encode_frame: Callable[..., int], steps: int) -> None:
        """Encode the frame so many times, each time as if the one before were published."""
        cells = self._cells
        frame = (self._payload, cells, self._shape, self._numbers, self._next_offsets)
        for step in range(steps):
            cells[append_frame.COUNT : append_frame.SEGMENT_END + 1] = self._frame
            cells[layout.WRITTEN] = step
            encode_frame(*frame, self._log, self._answer)
        size = int(cells[append_frame.STAGING_AT]) // self._messages
        units = np.zeros(self._messages, UNIT_DTYPE)
        units["physical_offset"], units["size"] = np.arange(self._messages) * size, size
        out = np.zeros(size * self._messages, np.uint8)
        self._pull = (
            *(units.view(np.uint8), self._log, _NO_WORDS, _NO_BYTES, _NO_WORDS, _NO_WORDS, _NO_BYTES, _NO_WORDS),
            *(out, self._state),
        )
        fresh = self._fresh
        fresh[gather.UNIT_STOP] = fresh[gather.COUNT_LIMIT] = self._messages
        fresh[gather.LOG_STOP] = fresh[gather.BYTES_LIMIT] = fresh[gather.LOOK_BYTES_LEFT] = len(self._log)
        fresh[gather.BORN_BEGIN_MS] = fresh[gather.STORE_BEGIN_MS] = gather.TIME_MIN
        fresh[gather.BORN_END_MS] = fresh[gather.STORE_END_MS] = gather.TIME_MAX
        fresh[gather.VERIFY], fresh[gather.COPY] = gather.VERIFY_CRCS, 1

    def gather(self, gather_records: Callable[..., int], table: NDArray[np.int64], steps: int) -> None:
        """Gather the queue's messages so many times, and count them where the kernel does."""
        fresh = self._fresh.copy()
        fresh[gather.COUNTS], fresh[gather.TABLE] = self._cells.ctypes.data, table.ctypes.data
        for _ in range(steps):
            self._state[:] = fresh
            gather_records(*self._pull)
