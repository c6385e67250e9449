"""What a start reads: marks, half messages, and which of these something was made of already.

marks from progress on ──▶ half messages from progress on ──▶ open ──▶ a walk over the log ──▶ marks that lack
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from mqproc.names import HALF_TOPIC, OP_HALF_TOPIC
from mqproc.roles.transaction_table import OpenHalves
from mqproc.store.delays.made_from import MadeFrom, mark_of
from mqproc.store.reads.queue_messages import batches
from mqproc.store.slices import Slices
from mqproc.store.transactions.halves import QUEUE, Half, decode_marks, half_of

if TYPE_CHECKING:
    from mqproc.store.reads.reading import StoreReading

MARKS_BEHIND: Final = 3
"""What was made before the message of so many marks from the end is marked."""


class TransactionStart:
    """Reads what a start needs. `old` are half messages that a copy was found of, `made` those something else was."""

    def __init__(self, reading: StoreReading, table: OpenHalves, max_open: int) -> None:
        self._reading = reading
        self._table = table
        self._max_open = max_open
        self.old: list[Half] = []
        self.made: list[Half] = []
        self.made_marks: set[int] = set()
        """What the log has made messages of, as far as it was looked through."""
        self._marked: set[int] = set()

    def read(self, half_progress: int, mark_progress: int, written: int) -> Slices[None]:
        """Fill the table. The queues have what the log has below `written`."""
        newest_marks = yield from self._read_marks(half_progress, mark_progress)
        self._table.walked = half_progress
        yield from self._read_halves()
        places = {mark_of(half.physical_offset): half for half in self._table.all() if self._table.is_newest(half)}
        if not places:
            return
        begin = min(half.physical_offset for half in places.values())
        if len(newest_marks) == MARKS_BEHIND:
            begin = max(begin, newest_marks[0])
        self.made_marks = yield from MadeFrom(self._reading.segments).slices(begin, written)
        self.made = [half for mark, half in places.items() if mark in self.made_marks]

    def _read_marks(self, half_progress: int, mark_progress: int) -> Slices[deque[int]]:
        """The physical offsets of the newest ones."""
        newest: deque[int] = deque(maxlen=MARKS_BEHIND)
        bounds = self._reading.queues.bounds(OP_HALF_TOPIC, QUEUE)
        begin = min(mark_progress, bounds.max_offset - MARKS_BEHIND) if bounds is not None else 0
        for messages, _next in batches(self._reading, OP_HALF_TOPIC, QUEUE, begin):
            for message in messages:
                newest.append(message.physical_offset)
                offsets = decode_marks(message.body)
                self._table.marked(message.queue_offset, offsets)
                self._marked.update(offsets)
                for offset in offsets:
                    if offset >= half_progress:
                        self._table.done(offset)
            yield
        return newest

    def _read_halves(self) -> Slices[None]:
        for messages, following in batches(self._reading, HALF_TOPIC, QUEUE, self._table.walked):
            for message in messages:
                if len(self._table) >= self._max_open:
                    return
                half = half_of(message)
                if self._table.walk_past(half.offset) and half.is_whole:
                    old = self._table.add(half)
                    if old is not None:
                        self.old.append(old)
                    if half.requeued in self._marked:
                        self.old.append(half)  # RocketMQ's mark of the first one is meant for its copies too.
            self._table.walk_to(following)
            yield
