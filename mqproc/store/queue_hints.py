"""What the queue table of the last run says of each queue: enough to notice that units have gone since.

The table is not synced while a group runs, so after a power loss it may be older than the files. It is only asked for
what it surely knew: a queue that had a unit must still have it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mqproc.errors import CorruptStoreError
from mqproc.io import Kind, StoreIO
from mqproc.layout import queue_table as layout
from mqproc.paths import StorePaths
from mqproc.store.queue_table import QueueTable


@dataclass(frozen=True, slots=True)
class QueueHint:
    """A queue had units [min_offset, max_offset), the last one's record ended at `physical_end`."""

    min_offset: int
    max_offset: int
    physical_end: int
    store_timestamp_ms: int


Hints = dict[tuple[str, int], QueueHint]


def read_hints(io: StoreIO, paths: StorePaths) -> Hints | None:
    """By (topic, queue id), queues of deleted topics left out; None when there is no whole table."""
    entry = io.entry(paths.queues)
    if entry is None or entry.kind is not Kind.FILE:
        return None
    try:
        table = QueueTable(io, paths.queues)
        try:
            whole = table.bytes_view.size == layout.file_size(table.capacity) and 0 <= table.count <= table.capacity
            return _hints(table) if whole else None
        finally:
            table.close()
    except (FileNotFoundError, CorruptStoreError, ValueError, OverflowError):
        # Garbage behind a whole header: sizes that do not fit, names that are no text.
        return None


def _hints(table: QueueTable) -> Hints:
    columns = (layout.MIN_OFFSET, layout.MAX_OFFSET, layout.LAST_PHYSICAL_END, layout.LAST_STORE_TIMESTAMP_MS)
    words = [table.column(word).tolist() for word in columns]
    # What they hold up to here may be a deleted queue's that had the name.
    firsts = table.column(layout.FIRST_OFFSET).tolist()
    return {
        (topic, queue_id): QueueHint(max(words[0][number], firsts[number]), *(column[number] for column in words[1:]))
        for number, topic, queue_id in table.live()
        if words[1][number] > firsts[number]
    }
