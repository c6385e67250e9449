"""Messages of one queue, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from mqproc.layout.record_codec import decode_records
from mqproc.message import PullStatus, StoredMessage
from mqproc.store.reads.reading import StoreReading

BATCH_MESSAGES: Final = 1024


def batches(
    reading: StoreReading, topic: str, queue_id: int, offset: int, tags: Sequence[str] = ()
) -> Iterator[tuple[list[StoredMessage], int]]:
    """Messages from an offset to the queue's end, as many as one pull gives at a time, and the next offset.

    With `tags` those that have one of them.
    """
    bounds = reading.queues.bounds(topic, queue_id)
    at = max(offset, bounds.min_offset) if bounds is not None else 0
    while bounds is not None and at < bounds.max_offset:
        pulled = reading.pull(topic, queue_id, at, BATCH_MESSAGES, reading.options.max_pull_bytes, tags)
        if pulled.next_offset <= at:
            return
        at = pulled.next_offset
        yield decode_records(pulled.records.tobytes()) if pulled.status is PullStatus.FOUND else [], at
