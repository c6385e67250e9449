"""Last steps of recovery: queue table, group offsets, sync, marks, checkpoint, words."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Collection, Mapping
from typing import Any

from mqproc.errors import CorruptStoreError, TooManyQueuesError
from mqproc.ipc.control_words import Words
from mqproc.layout import checkpoint as checkpoint_layout
from mqproc.layout import control
from mqproc.layout import queue_table as table_layout
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.store import compat
from mqproc.store.durable_marks import DurableMark, read_checkpoint, store_checkpoint
from mqproc.store.logics_offset import keeps_logics_offset, last_queued_record
from mqproc.store.offsets.offset_store import OffsetStore, committed_offsets
from mqproc.store.recovery.log import OpenStore
from mqproc.store.recovery.queues import QueueRecovery
from mqproc.store.topics import Topics
from mqproc.util.units import counted

# Queue table


def complete_table(
    store: OpenStore,
    topics: Topics,
    queue_recovery: QueueRecovery,
    on_disk: Collection[tuple[str, int]],
    rebuilt: Collection[int],
) -> None:
    """Add queues without messages, set next and minimum offsets, then install the table.

    `on_disk` are the queues that had files, `rebuilt` the numbers of rebuilt queues. Raises TooManyQueuesError.
    """
    log, table = store.log, store.table
    for name in topics.names():
        config = topics.get(name)
        assert config is not None
        try:
            for queue_id in range(config.queues):
                table.create_queue(name, queue_id)
        except TooManyQueuesError as error:
            text = f"{store.paths.topics}: topic {name!r} has {counted(config.queues, 'queue')}: {error}"
            raise TooManyQueuesError(text) from None
    compared = queue_recovery.limit == log.begin
    for number, topic, queue_id in table.live():
        max_offset = table.max_offset(number)
        table.store(number, table_layout.NEXT_OFFSET, max_offset)
        is_new = (topic, queue_id) not in on_disk
        if log.begin > 0 or compared or is_new or number in rebuilt:
            table.store(number, table_layout.MIN_OFFSET, _first_readable(store, topic, queue_id, max_offset))
    # The last run's table is needed until the new one is complete.
    with store.io.opened(store.paths.next_queues, write=True) as fd:
        store.io.sync(fd)
    store.io.rename(store.paths.next_queues, store.paths.queues)


def _first_readable(store: OpenStore, topic: str, queue_id: int, max_offset: int) -> int:
    """First queue offset whose record is still in the log; `max_offset` without one."""
    queues, log_begin = store.queues, store.log.begin
    starts = queues.starts(topic, queue_id)
    if not starts:
        return max_offset
    if log_begin == 0 and store.ledger.holes:
        # Nothing has expired, so fillers at the start of the queue represent damaged records.
        return min(starts[0] // UNIT_SIZE, max_offset)
    low = min(queues.first_offset(topic, queue_id, starts[0]), max_offset)
    return queues.first_at_or_above(topic, queue_id, low, max_offset, log_begin) if log_begin > 0 else low


# Group offsets


def lower_group_offsets(store: OpenStore) -> None:
    """Lower group offsets beyond a queue's end durably, and report each.

    Those groups would miss the next messages. Raises OSError, FailedSyncError.
    """
    if store.io.exists(store.paths.read_only):
        # After a failed sync another one would not detect lost data: wait for the repair.
        return

    def end_of(topic: str, queue_id: int) -> int | None:
        """Next offset of a queue, including records not dispatched yet; None for an unknown queue."""
        number = store.table.entry(topic, queue_id)
        return store.table.next_offset(number) if number >= 0 else None

    def log_event(event: str, **figures: Any) -> None:
        store.report(f"recovery: groups: {event}: {', '.join(f'{name} {value}' for name, value in figures.items())}")

    try:
        progress = list(committed_offsets(store.io, store.paths))
    except CorruptStoreError as error:
        store.report(f"recovery: groups: {error}; they start without offsets")
        return
    ends = [(at, end_of(at.topic, at.queue_id)) for at in progress]
    beyond = [(at, end) for at, end in ends if end is not None and at.offset > end]
    if not beyond:
        return
    with contextlib.closing(OffsetStore(store.io, store.paths, store.io, log_event)) as offsets:
        offsets.lower_to_maxima(end_of)
        offsets.save(store.now_ms())
    for at, end in beyond:
        queue = f"{at.topic} queue {at.queue_id}"
        store.report(f"recovery: group {at.group}: {queue}: set back from {at.offset:,} to its end {end:,}")


# Durability


def make_durable(
    store: OpenStore, marks: Mapping[str, DurableMark], dispatched: int, *, marks_valid: bool, changed: bool
) -> None:
    """Sync, then move the marks, then the checkpoint; skip if up to date and not `changed`.

    Queues and index have all records below `dispatched`. `marks_valid`: valid marks cover all of queues and index that
    was not compared. Raises FailedSyncError, OSError.
    """
    io, paths, log = store.io, store.paths, store.log
    if io.exists(paths.read_only):
        # After a failed sync nothing is known to be durable, and another sync would not detect that.
        return
    ends = {"commitlog": log.end, "consumequeue": dispatched}
    if store.options.message_index_enable:
        ends["index"] = dispatched
    outdated = [name for name, end in ends.items() if not marks[name].is_at(end)]
    if (outdated or changed) and marks_valid:
        store.queues.sync()
        store.index.sync()
    elif outdated or changed:
        with io.opened(paths.root) as fd:
            io.sync_file_system(fd)
    store.ledger.mark_filled()
    compat.remember(io, paths)
    # Before the marks vouch for these records.
    compat.note_time_order(io, paths, log.found.ordered_from)
    for name in outdated:
        marks[name].move(ends[name], log.found.last_store_timestamp_ms)
    # Only now: until the mark moved, records of the previous run lay above it.
    written = store.options.enabled_append_prop_crc and marks["commitlog"].is_at(log.end)
    compat.remember_record_crcs(io, paths, written=written)
    io.crash_point("recover.marked")
    _store_checkpoint(store, dispatched)
    io.crash_point("recover.ckpt")


def _store_checkpoint(store: OpenStore, dispatched: int) -> None:
    """Store RocketMQ's checkpoint, never ahead of the log."""
    before = read_checkpoint(store.io, store.paths.checkpoint)
    last_ms = store.log.found.last_store_timestamp_ms
    index_ms = before.index_timestamp_ms if 0 <= before.index_timestamp_ms <= last_ms else 0
    after = dataclasses.replace(
        before,
        physic_timestamp_ms=last_ms,
        logics_timestamp_ms=last_ms,
        index_timestamp_ms=index_ms,
        confirm_physical_offset=store.log.end,
        logics_physical_offset=_logics_offset(store, dispatched),
    )
    if after != before:
        words = {
            checkpoint_layout.PHYSIC_TIMESTAMP: last_ms,
            checkpoint_layout.LOGICS_TIMESTAMP: last_ms,
            checkpoint_layout.INDEX_TIMESTAMP: index_ms,
            checkpoint_layout.CONFIRM_PHYSICAL_OFFSET: store.log.end,
            checkpoint_layout.LOGICS_PHYSICAL_OFFSET: after.logics_physical_offset,
        }
        store_checkpoint(store.io, store.paths.checkpoint, words, store.io)


def _logics_offset(store: OpenStore, dispatched: int) -> int:
    """The checkpoint's word for RocketMQ 5.5; 0 in a store without it."""
    io, paths, options = store.io, store.paths, store.options
    if not keeps_logics_offset(io, paths, options):
        return 0
    return max(0, last_queued_record(io, paths, options, store.table, dispatched))


def store_words(store: OpenStore, words: Words, dispatched: int) -> None:
    """Set the control words from which the roles continue."""
    log = store.log
    last_ms = log.found.last_store_timestamp_ms
    words[control.MIN_PHYSICAL_OFFSET] = log.begin
    words[control.TIME_ORDERED_FROM] = log.found.ordered_from
    words[control.WRITTEN_STORE_TIMESTAMP_MS] = last_ms
    words[control.WRITER_SYNCED_STORE_TIMESTAMP_MS] = last_ms
    words[control.DISPATCHED_STORE_TIMESTAMP_MS] = last_ms
    words[control.RESERVED_END] = words[control.WRITTEN] = words[control.TABLE_AT] = log.end
    words[control.WRITER_SYNCED] = words[control.FLUSHER_SYNCED] = log.end
    words[control.DISPATCHED] = dispatched
    words[control.SEGMENTS_READY_END] = store.segments.starts()[-1] + store.segments.segment_size
    commit = store.index.commit()
    words[control.INDEX_FILE_MS] = commit.file_ms
    words[control.INDEX_ITEMS] = commit.count
    for slot in (0, 1):
        words[control.COMMIT_DISPATCHED[slot]] = dispatched
        words[control.COMMIT_INDEX_MS[slot]] = commit.file_ms
        words[control.COMMIT_INDEX_ITEMS[slot]] = commit.count
        words[control.COMMIT_INDEX_SLOTS[slot]] = commit.slots_used
        words[control.COMMIT_INDEX_END_MS[slot]] = commit.end_timestamp_ms
        words[control.COMMIT_INDEX_END[slot]] = commit.end_physical_offset
    words[control.DAMAGE_HOLES] = len(store.ledger.holes)
    words[control.DAMAGE_READ_ONLY] = int(store.ledger.read_only)
    if store.io.exists(store.paths.read_only):
        words[control.SUPERVISOR_SYNC_ERRNO] = errno.EIO
