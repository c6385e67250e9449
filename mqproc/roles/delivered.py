"""What pulls and receives have handed out: in all in the control file, by topic in the queue table."""

from __future__ import annotations

from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.layout import queue_table as layout
from mqproc.store.queue_table import QueueTable


class Delivered:
    """Counts answers with messages, once for each answer."""

    def __init__(self, words: Words, table: QueueTable) -> None:
        self._words = words
        self._table = table

    def count(self, topic: str, queue_id: int, messages: int, size: int) -> None:
        """So many messages of a queue go out, in `size` bytes."""
        self._words.add(words_of.PULLED_MESSAGES, messages)
        self._words.add(words_of.PULLED_BYTES, size)
        number = self._table.entry(topic, queue_id)
        if number >= 0:
            self._table.words.add(layout.entry_word(number, layout.DELIVERED), messages)
