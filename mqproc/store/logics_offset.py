"""The checkpoint's word `logicsPhysicalOffset` of RocketMQ 5.5.

It is the start of a record up to which the ConsumeQueues are durable; from there RocketMQ dispatches after a kill, and
its accelerated recovery requires it. A store keeps it that has it, or that has entries for tags in its index.
"""

from __future__ import annotations

import contextlib
from typing import Final

import numpy as np

from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.layout import consume_queue as unit_layout
from mqproc.layout import queue_table as table_layout
from mqproc.paths import StorePaths
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.durable_marks import read_checkpoint

NOT_FOUND: Final = -1


def keeps_logics_offset(io: StoreIO, paths: StorePaths, options: Options) -> bool:
    """Whether the store's checkpoint has the word; `options`: options of the store's index."""
    return options.message_index_tags or read_checkpoint(io, paths.checkpoint).logics_physical_offset > 0


def last_queued_record(io: StoreIO, paths: StorePaths, options: Options, table: QueueTable, position: int) -> int:
    """Start of the newest queued record that ends at or below a log position, or NOT_FOUND.

    It may not be found while records are dispatched.
    """
    ends = table.column(table_layout.LAST_PHYSICAL_END)
    ends[(ends > position) | (table.column(table_layout.STATE) != table_layout.STATE_LIVE)] = 0
    if not ends.any():
        return NOT_FOUND
    number = int(np.argmax(ends))
    topic, queue_id = table.name(number)
    last = table.max_offset(number) - 1
    files = ConsumeQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes)
    unit = b""
    with contextlib.closing(files), contextlib.suppress(FileNotFoundError):
        unit = files.raw_units(topic, queue_id, last, 1, table.generation(number))
    if last < 0 or len(unit) < unit_layout.UNIT_SIZE:
        return NOT_FOUND
    start, size = unit_layout.place_of(unit)
    # A unit added meanwhile is another record's.
    return start if start + size == int(ends[number]) else NOT_FOUND
