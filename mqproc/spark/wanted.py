"""What is wanted of each queue, as the kernel asks for it: learnt queue by queue while the log is read."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels import log_range
from mqproc.kernels.intrinsics import load_be32
from mqproc.kernels.record_check import signed_topic_length, topic_length_at, topic_length_size
from mqproc.kernels.views import as_kernel_array
from mqproc.layout import record
from mqproc.spark.options import LATEST, OFFSET_MAX, Queue, Selection
from mqproc.store.queue_table import QueueTable

_QUEUES_AT_FIRST = 256


class Wanted:
    """The kernel's view of a selection, for the records of one store."""

    def __init__(self, selection: Selection, deleted: Mapping[Queue, tuple[int, int]]) -> None:
        self.selection = selection
        self._deleted = deleted
        self.table = QueueTable.in_memory(_QUEUES_AT_FIRST)
        self.verdicts = np.zeros(log_range.VERDICT_COLUMNS * _QUEUES_AT_FIRST, np.int64)
        self.tags, self.tag_ends = _texts(selection.tags)
        self.keys, self.key_ends = _texts(selection.keys)

    def learn(self, view: NDArray[np.uint8], at: int) -> bool:
        """Take up the queue of the record at `at`, whose sizes hold; False when its topic is no text."""
        width = int(topic_length_size(view, at))
        length_at = int(topic_length_at(view, at))
        first = length_at + width
        size = int(signed_topic_length(view, length_at, width))
        try:
            topic = view[first : first + size].tobytes().decode()
        except UnicodeDecodeError:
            return False
        self._add((topic, load_be32(view, at + record.QUEUE_ID)))
        return True

    def number_of(self, queue: Queue) -> int:
        """The queue's number in the table, which takes it up."""
        if self.table.find(*queue) < 0:
            self._add(queue)
        return self.table.find(*queue)

    def _add(self, queue: Queue) -> None:
        if self.table.count == self.table.capacity:
            self._grow()
        number = self.table.create_queue(*queue)
        row = self.verdicts[log_range.VERDICT_COLUMNS * number :]
        row[log_range.FIRST_OFFSET], row[log_range.STOP_OFFSET] = self._offsets(queue)
        row[log_range.DELETED_AT], row[log_range.DELETED_NEXT] = self._deleted.get(queue, (0, 0))

    def _offsets(self, queue: Queue) -> tuple[int, int]:
        if not self.selection.takes(*queue):
            return 0, 0
        stop = self.selection.ending.of(*queue)
        return max(0, self.selection.starting.of(*queue)), OFFSET_MAX if stop == LATEST else stop

    def _grow(self) -> None:
        queues = [self.table.name(number) for number in range(self.table.count)]
        self.table = QueueTable.in_memory(2 * len(queues))
        self.verdicts = np.concatenate([self.verdicts, np.zeros_like(self.verdicts)])
        for queue in queues:
            self.table.create_queue(*queue)


def _texts(texts: tuple[str, ...]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([len(each) for each in encoded], dtype=np.int64)
    return as_kernel_array(bytearray(b"".join(encoded))), ends
