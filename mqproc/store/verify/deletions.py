"""Deleted topics: their records stay in the log until they expire, and belong to no queue any more."""

from __future__ import annotations

import msgspec

from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store import deleted_topics
from mqproc.store.queue_table import QueueTable
from mqproc.store.topics import Topics
from mqproc.store.verify.inventory import Queue

Deleted = dict[Queue, tuple[int, int]]
"""By queue: where log and queue offsets ended when it was deleted the last time."""


def read_deleted(io: StoreIO, paths: StorePaths, *, running: bool) -> Deleted:
    """What the store's files say, or the queue table of a running group, which is ahead of them."""
    return _of_table(io, paths) if running else _of_files(io, paths)


def _of_files(io: StoreIO, paths: StorePaths) -> Deleted:
    try:
        deletions = deleted_topics.load(io, paths)
    except (CorruptStoreError, IsADirectoryError):
        # That the file cannot be read is told with the other settings.
        return {}
    return {
        (topic, queue_id): (deletion.physical_offset, next_offset)
        for topic, deletion in deletions.items()
        for queue_id, next_offset in enumerate(deletion.next_offsets)
    }


def _of_table(io: StoreIO, paths: StorePaths) -> Deleted:
    try:
        table = QueueTable(io, paths.queues)
    except (FileNotFoundError, CorruptStoreError):
        return {}
    try:
        found = {table.name(number): table.deletion(number) for number in range(table.count)}
    finally:
        table.close()
    return {queue: deletion for queue, deletion in found.items() if deletion != (0, 0)}


def known_topics(io: StoreIO, paths: StorePaths) -> set[str] | None:
    """Topics of the settings; None without any that can be read."""
    topics = Topics(io, paths)
    try:
        topics.load()
    except (CorruptStoreError, IsADirectoryError, msgspec.MsgspecError):
        return None
    return set(topics.names()) or None
