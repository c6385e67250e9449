"""The queue table's part of recovery: every queue with its offsets, then it takes the place of the last run's."""

from __future__ import annotations

from collections.abc import Collection

from mqproc.errors import TooManyQueuesError
from mqproc.io import StoreIO
from mqproc.layout import queue_table as table_layout
from mqproc.paths import StorePaths
from mqproc.quantities import counted
from mqproc.store.consume_queue import UNIT_SIZE, ConsumeQueueFiles
from mqproc.store.damage import DamageLedger
from mqproc.store.queue_table import QueueTable
from mqproc.store.recovery.log_step import LogState
from mqproc.store.recovery.queue_recovery import QueueRecovery
from mqproc.store.topics import Topics


class TableStep:
    """The last words of the table that recovery fills."""

    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        table: QueueTable,
        topics: Topics,
        queues: ConsumeQueueFiles,
        ledger: DamageLedger,
    ) -> None:
        self._io = io
        self._paths = paths
        self._table = table
        self._topics = topics
        self._queues = queues
        self._ledger = ledger

    def run(
        self, log: LogState, mender: QueueRecovery, on_disk: Collection[tuple[str, int]], rebuilt: Collection[int]
    ) -> None:
        """Queues of topics without messages, next offsets, minimum offsets; then the table takes its place.

        `on_disk` are the queues that had files, `rebuilt` the numbers of those that were built again.
        """
        for name in self._topics.names():
            config = self._topics.get(name)
            assert config is not None
            try:
                for queue_id in range(config.queues):
                    self._table.create_queue(name, queue_id)
            except TooManyQueuesError as error:
                text = f"{self._paths.topics}: topic {name!r} has {counted(config.queues, 'queue')}: {error}"
                raise TooManyQueuesError(text) from None
        compared = mender.limit == log.begin
        for number, topic, queue_id in self._table.live():
            max_offset = self._table.max_offset(number)
            self._table.store(number, table_layout.NEXT_OFFSET, max_offset)
            is_new = (topic, queue_id) not in on_disk
            if log.begin > 0 or compared or is_new or number in rebuilt:
                minimum = self._first_readable(topic, queue_id, max_offset, log.begin)
                self._table.store(number, table_layout.MIN_OFFSET, minimum)
        self._put_in_place()

    def _first_readable(self, topic: str, queue_id: int, max_offset: int, log_begin: int) -> int:
        """The first queue offset whose record has not been deleted with the log's beginning; `max_offset` for none."""
        starts = self._queues.starts(topic, queue_id)
        if not starts:
            return max_offset
        if log_begin > 0:
            low = min(self._queues.first_offset(topic, queue_id, starts[0]), max_offset)
            return self._queues.first_at_or_above(topic, queue_id, low, max_offset, log_begin)
        if self._ledger.holes:
            # Nothing has expired, so fillers that the queue begins with stand for what is damaged.
            return min(starts[0] // UNIT_SIZE, max_offset)
        return min(self._queues.first_offset(topic, queue_id, starts[0]), max_offset)

    def _put_in_place(self) -> None:
        """The table takes its place when it is whole: what the last run knew is needed until then, and by the next."""
        fd = self._io.open(self._paths.next_queues, write=True)
        try:
            self._io.sync(fd)
        finally:
            self._io.close(fd)
        self._io.rename(self._paths.next_queues, self._paths.queues)
