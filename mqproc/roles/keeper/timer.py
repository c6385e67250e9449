"""Timed delivery with RocketMQ's timer wheel: messages of rmq_sys_wheel_timer.

    queue ──enqueue──▶ timer log, wheel ──slot becomes active──▶ heap by due time ──due──▶ delivery
                                                                  ▲
            a message for a slot that is active already ──────────┘ (enqueued too, for a successor)

RocketMQ's files have a resolution of one slot, by default a second. A slot becomes active one slot width before it
begins; its messages then wait in memory until the exact millisecond. `read_ms` is the first slot with an undelivered
message.

A message due beyond the roll window is enqueued in an earlier slot and sent to the timer's queue again from there (a
roll), so that its record does not expire from the log. A message with TIMER_DEL_UNIQKEY cancels the message of its slot
that has this unique id and topic.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.layout import control, timer_files
from mqproc.layout import properties as names
from mqproc.layout.timer_files import NO_LOG_POSITION
from mqproc.roles.delivery_queue import DeliveryQueue, IncrementalSave, reschedule_timed
from mqproc.roles.internal_producer import AppendColumns
from mqproc.roles.keeper.slots import (
    ActiveSlot,
    HeapEntries,
    LoadingSlot,
    TimerBacklog,
    TimerHeap,
    TimerRolls,
    cancel_key,
    cancelled_mask,
    release_times,
    slot_counts,
    topic_hash,
    wheel_slots,
)
from mqproc.roles.role import RoleContext
from mqproc.roles.role_log import get_logger
from mqproc.roles.scheduled_records import ScheduledRecords
from mqproc.store.read.queries import StoreQueries
from mqproc.store.schedule.timer_store import TimerSnapshot, TimerStore, TimerUnits
from mqproc.store.sync_guard import SyncGuard
from mqproc.topic_names import TIMER_TOPIC
from mqproc.types import PullStatus

# Sizes of the parts of a step, each of which takes a few ms: messages that become due meanwhile are late by that.
ENQUEUE_MESSAGES: Final = 512
LOAD_MESSAGES: Final = 4096
BATCH_MESSAGES: Final = 1024
BATCH_BYTES: Final = 4 << 20
# Due messages are gathered for a multiple of the last delivery's duration, which leaves time for other work.
GATHER_TIMES: Final = 3
GATHER_MIN_NS: Final = 5_000_000
GATHER_MAX_NS: Final = 15_000_000
# New messages are gathered before they are enqueued, for less time while one of them is due soon.
ENQUEUE_GATHER_NS: Final = 25_000_000
ENQUEUE_SOON_GATHER_NS: Final = 5_000_000
SOON_MS: Final = 500
ENQUEUE_RETRY_NS: Final = 500_000_000
_NEVER: Final = 1 << 62
_MS: Final = 1_000_000


class TimerDelivery:
    """Delivers timed messages. Its files are created with the first one."""

    def __init__(
        self, context: RoleContext, reading: StoreQueries, deliveries: DeliveryQueue, syncs: SyncGuard
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        self._options = context.options
        self._reading = reading
        self._deliveries = deliveries
        self._syncs = syncs
        self._store: TimerStore | None = None
        self._active_until_ms = 0  # Slots below it are active.
        self._first_ms = 0  # First slot of this keeper; it also has messages that were overdue when enqueued.
        self._loading: deque[LoadingSlot] = deque()
        self._heap = TimerHeap()
        self.rolls = TimerRolls(context.options.timer_precision_ms)
        self._slots: dict[int, ActiveSlot] = {}
        # (begin, until_ms): a predecessor delivered messages of slots below `until_ms`, at or above `begin` in the log.
        self._inherited: tuple[int, int] | None = None
        self._backlog = TimerBacklog(self._words)
        self._early: set[int] = set()  # In the heap though their slot is not active.
        self._busy = False
        self._deliver_ns = 0
        self._enqueue_ns = 0  # Time of the next attempt after a failure, else 0.
        self._gather_ns = 0  # End of gathering.
        self._is_gathering = False
        self._snapshot: TimerSnapshot | None = None
        self._dirty = False
        self._save = IncrementalSave(self._clock, self._save_steps, self._save_failed)
        if deliveries.ready and TimerStore.exists(context.io, context.paths):
            self._open_store()

    @property
    def pending(self) -> int:
        return self._store.pending if self._store is not None else 0

    @property
    def changed(self) -> bool:
        """Whether timercheck lacks progress."""
        return self._dirty or self._snapshot is not None or self._save.under_way

    @property
    def due_ns(self) -> int:
        """Time of the next work unless a message arrives."""
        if self._store is None:
            return _NEVER
        now_ns, now_ms = self._clock.monotonic_ns(), self._clock.time_ms()
        if self._loading or self._save.under_way:
            return now_ns
        due_ns = self._save.due_ns if self.changed else _NEVER
        if not self._backlog.is_dispatched:
            due_ns = min(due_ns, self._backlog.poll_ns(now_ns, now_ms))
        if self._is_gathering:
            due_ns = min(due_ns, max(self._gather_ns, self._enqueue_ns))
        if self._store.pending and self._backlog.is_dispatched:
            up_ns = now_ns + (self._active_until_ms - self._options.timer_precision_ms - now_ms) * _MS
            due_ns = min(due_ns, max(up_ns, self._enqueue_ns))
        if not self._busy and self._is_caught_up:
            readable = not self._is_gathering and self._words[control.DISPATCHED] >= self.rolls.dispatch_target
            first_ms = self.rolls.next_due_ms(self._heap.first_due_ms, queue_readable=readable)
            first_ns = now_ns + (first_ms - now_ms) * _MS
            due_ns = min(due_ns, max(first_ns, self._deliver_ns))
        return due_ns

    def step(self) -> int:
        """Enqueue new messages, load active slots, deliver due messages; returns work done."""
        if self._store is None:
            if not self._deliveries.ready or not self._is_needed():
                return 0
            self._open_store()
        assert self._store is not None
        done = self._enqueue_and_activate(self._store) + self._load_slots(self._store) + self._deliver_due()
        if self._save.under_way or (self.changed and self._clock.monotonic_ns() >= self._save.due_ns):
            self._save.step()
        return done

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    @property
    def _is_caught_up(self) -> bool:
        """Whether the backlog is enqueued, the last of which may cancel the first."""
        return self._store is not None and not self._enqueue_ns and self._store.queue_offset >= self._backlog.end

    # Enqueueing

    def _is_needed(self) -> bool:
        bounds = self._reading.queues.bounds(TIMER_TOPIC, 0)
        used = bounds is not None and bounds.max_offset > 0
        return used or TimerStore.exists(self._context.io, self._context.paths)

    def _open_store(self) -> None:
        options, context = self._options, self._context
        store = TimerStore(
            context.io, self._syncs, context.paths, options.timer_precision_ms, options.mapped_file_size_timer_log
        )
        with context.heartbeat.busy(control.STATE_RECOVERING):
            store.open(self._clock.time_ms(), self._queue_offset_of, clean=bool(self._words[control.CLEAN_START]))
            if store.remark:
                get_logger().warning("timer files are rebuilt", reason=store.remark)
            bounds = self._reading.queues.bounds(TIMER_TOPIC, 0)
            if context.incarnation == 1:
                store.queue_offset = min(store.queue_offset, bounds.max_offset if bounds is not None else 0)
            written = self._words[control.WRITTEN]
            begin = store.log_position
            if begin == NO_LOG_POSITION:
                begin = self._take_over(store) if store.queue_offset else self._words[control.MIN_PHYSICAL_OFFSET]
            if begin < written:
                self._deliveries.delivered_marks |= self._deliveries.delivery_marks.marks(begin, written)
                self._inherited = begin, self._activation_end_ms(store)
            self._backlog.begin(self._clock.time_ms())
        self._active_until_ms = self._first_ms = store.read_ms
        self._store = store

    def _take_over(self, store: TimerStore) -> int:
        """Record the log position from which deliveries have marks, before the first one."""
        begin = min(self._words[control.WRITTEN], self._context.control.flushed)
        try:
            if not self._syncs.has_failed():
                store.write(store.synced_snapshot(begin, begin, self._clock.time_ms()))
        except OSError as error:
            self._save_failed(error)
        return begin

    def _queue_offset_of(self, physical_offset: int) -> int | None:
        records, _found = self._records_at(np.array([physical_offset], np.int64))
        return int(records.column("queue_offset")[0]) if records.in_topic(TIMER_TOPIC).any() else None

    def _enqueue_and_activate(self, store: TimerStore) -> int:
        """Enqueue, then activate slots: none is activated while messages for it cannot be written."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._enqueue_ns:
            return 0
        try:
            done = self._enqueue(store)
        except OSError as error:
            self._enqueue_ns = now_ns + ENQUEUE_RETRY_NS
            self._deliveries.note_errno("timer", error.errno or errno.EIO)
            self._context.heartbeat.log_error("timed messages cannot be enqueued, retrying", error=str(error))
            return 0
        self._deliveries.note_errno("timer", 0)
        if self._is_caught_up:
            self._activate_slots(store)
        return done

    def _enqueue(self, store: TimerStore) -> int:
        store.write_out()
        now_ns, now_ms = self._clock.monotonic_ns(), self._clock.time_ms()
        dispatched = self._backlog.check_dispatch(now_ms)
        bounds = self._reading.queues.bounds(TIMER_TOPIC, 0)
        end = bounds.max_offset if bounds is not None else 0
        if self._enqueue_ns or self._words[control.DISPATCH_ERRNO]:
            self._enqueue_ns = 0
            self._backlog.begin(now_ms)
        self._backlog.update(dispatched, end, store.queue_offset, now_ms)
        self.rolls.update(dispatched, end, store.queue_offset)
        new = end - store.queue_offset
        self._is_gathering = 0 < new < ENQUEUE_MESSAGES and now_ns < self._gather_ns
        if new <= 0 or self._is_gathering:
            return 0
        pulled = self._reading.pull(TIMER_TOPIC, 0, store.queue_offset, ENQUEUE_MESSAGES, BATCH_BYTES)
        if pulled.status is not PullStatus.FOUND:
            self._lose(max(0, pulled.next_offset - store.queue_offset), f"{pulled.status} {pulled.detail}".strip())
        self._gather_ns = now_ns + ENQUEUE_GATHER_NS
        if pulled.count:
            self._enqueue_all(store, ScheduledRecords(pulled.records, pulled.count))
        store.queue_offset = max(store.queue_offset, pulled.next_offset)
        self._dirty = True
        store.write_out()
        self._context.io.crash_point("timer.filed")
        return max(1, pulled.count)

    def _enqueue_all(self, store: TimerStore, records: ScheduledRecords) -> None:
        """Enqueue pulled messages in parts; on an error `queue_offset` is after those done."""
        now_ms = self._clock.time_ms()
        out_ms = records.properties.numbers(names.TIMER_OUT_MS)
        usable = (out_ms >= 0) & records.has_topic
        rows = np.flatnonzero(usable)
        units, is_active = self._units_of(store, records, out_ms, rows, now_ms)
        if len(units) and units.due_ms.min() <= now_ms + SOON_MS:
            self._gather_ns = self._clock.monotonic_ns() + ENQUEUE_SOON_GATHER_NS
        topics = records.real_topics
        hashes = np.fromiter((topic_hash(topics[row]) for row in rows.tolist()), np.int32, len(rows))
        queue_offsets = records.column("queue_offset")
        first = 0
        try:
            while first < len(units):
                stop = first + store.put(units.chosen(slice(first, None)), now_ms, hashes[first:])
                self._hold_active(units.chosen(slice(first, stop)), is_active[first:stop])
                store.queue_offset = int(queue_offsets[rows[stop - 1]]) + 1
                first = stop
            store.queue_offset = int(queue_offsets[-1]) + 1
        finally:
            passed = int((queue_offsets[~usable] < store.queue_offset).sum())
            self._lose(passed, "no delivery time or no target topic")

    def _units_of(
        self,
        store: TimerStore,
        records: ScheduledRecords,
        out_ms: NDArray[np.int64],
        rows: NDArray[np.intp],
        now_ms: int,
    ) -> tuple[TimerUnits, NDArray[np.bool_]]:
        """Timer units of these rows, and a mask of those in active slots."""
        precision_ms = self._options.timer_precision_ms
        own_slots_ms = out_ms[rows] // precision_ms * precision_ms
        slots_ms, magics = wheel_slots(own_slots_ms, store.slot_of(now_ms), self._options)
        deletes = records.properties.pairs(names.TIMER_DEL_UNIQKEY).last_of_each()
        named = deletes.messages[deletes.ends > deletes.values]
        magics[np.isin(rows, named)] |= timer_files.MAGIC_DELETE
        is_active = slots_ms < self._active_until_ms
        units = TimerUnits(
            np.maximum(slots_ms, store.read_ms),  # Slots below read_ms are never read again.
            magics,
            records.column("physical_offset")[rows],
            records.column("size")[rows].astype(np.int64),
            np.maximum(records.properties.numbers(names.TIMER_DELIVER_MS)[rows], 0),
        )
        return units, is_active

    def _hold_active(self, units: TimerUnits, is_active: NDArray[np.bool_]) -> None:
        """Add units in active or past slots to the heap."""
        if not is_active.any():
            return
        units = units.chosen(is_active)
        if self._inherited is not None:
            # A predecessor may have delivered them, and their own slots have passed.
            begin, until_ms = self._inherited
            last_ms = int(units.slots_ms.max())
            self._inherited = begin, max(until_ms, last_ms + self._options.timer_precision_ms)
        self._early.update(units.physical_offsets[units.slots_ms >= self._active_until_ms].tolist())
        self._hold(units)

    # Active slots

    def _activate_slots(self, store: TimerStore) -> None:
        """Activate slots that begin within a slot width; their messages are loaded into the heap."""
        until_ms = self._activation_end_ms(store)
        if until_ms <= self._active_until_ms:
            return
        for slot_ms in store.occupied(self._active_until_ms, until_ms) if store.pending else ():
            self._loading.append(LoadingSlot(slot_ms, store.units_of(slot_ms, LOAD_MESSAGES)))
            self._slots.setdefault(slot_ms, ActiveSlot()).open += 1
        self._active_until_ms = until_ms
        self.advance_read_time(store)

    def _load_slots(self, store: TimerStore) -> int:
        """Load the next messages of active slots; returns how many were read."""
        read, waiting = 0, len(self._loading)
        while self._loading and read < LOAD_MESSAGES:
            loading = self._loading[0]
            units = self._next_units(loading)
            if units is None:
                self._loading.popleft()
                self._slots[loading.slot_ms].open -= 1
            else:
                read += len(units)
                self._hold(loading.new_units(units, self._early))
        if len(self._loading) < waiting:
            # Once, since it inspects every active slot: many thousands after a long stop.
            self.advance_read_time(store)
        return read

    def _next_units(self, loading: LoadingSlot) -> TimerUnits | None:
        try:
            return next(loading.units, None)
        except CorruptStoreError as error:
            self._context.heartbeat.log_error(f"the rest of timer slot {loading.slot_ms} is lost", error=str(error))
            return None

    def _activation_end_ms(self, store: TimerStore) -> int:
        """First slot that must not be active now."""
        return store.slot_of(self._clock.time_ms()) + 2 * self._options.timer_precision_ms

    def _hold(self, units: TimerUnits) -> None:
        """Add messages of active slots to the heap, and record cancellations."""
        # A cancellation that is a roll is rescheduled like its message.
        deletes = (units.magics & (timer_files.MAGIC_DELETE | timer_files.MAGIC_ROLL)) == timer_files.MAGIC_DELETE
        if deletes.any():
            self._cancel(units.chosen(deletes))
            units = units.chosen(~deletes)
        if not len(units):
            return
        rolls = (units.magics & timer_files.MAGIC_ROLL) != 0
        due_ms = release_times(units, rolls, self._options.timer_precision_ms)
        unknown = np.flatnonzero(~rolls & (units.due_ms <= 0))
        if len(unknown):
            # Enqueued by RocketMQ: the exact time is in the records.
            records, found = self._records_at(units.physical_offsets[unknown])
            known_ms = records.properties.numbers(names.TIMER_DELIVER_MS)
            due_ms[unknown[found]] = np.where(known_ms > 0, known_ms, due_ms[unknown[found]])
        for slot_ms, count in slot_counts(units.slots_ms):
            self._slots.setdefault(slot_ms, ActiveSlot()).open += count
        entries = HeapEntries(due_ms, units.physical_offsets, units.slots_ms, units.sizes)
        self._heap.add(entries.chosen(~rolls))
        self.rolls.heap.add(entries.chosen(rolls))

    def _cancel(self, deletes: TimerUnits) -> None:
        """Record the keys of cancelled messages of these slots."""
        records, found = self._records_at(deletes.physical_offsets)
        keys = records.properties.texts(names.TIMER_DEL_UNIQKEY)
        for slot_ms, data, topic in zip(deletes.slots_ms[found].tolist(), keys, records.real_topics, strict=True):
            key = data.decode("utf-8", "replace")
            self._slots.setdefault(slot_ms, ActiveSlot()).cancelled |= {key, cancel_key(topic, key)}
        if self._store is not None:
            self._store.pending -= len(deletes)

    # Delivery

    def _deliver_due(self) -> int:
        now_ms = self._clock.time_ms()
        now_ns = self._clock.monotonic_ns()
        if self._busy or now_ns < self._deliver_ns:
            return 0
        until_ms = self._due_until_ms(now_ms)
        messages_until_ms = min(until_ms, self.rolls.safe_until_ms)
        if self._heap.first_due_ms <= min(messages_until_ms, self.rolls.first_due_ms):
            batch, are_rolls = self._heap.pop_due(messages_until_ms, BATCH_MESSAGES, BATCH_BYTES), False
        elif self.rolls.first_due_ms <= until_ms:
            batch, are_rolls = self.rolls.pop_due(until_ms, now_ms, BATCH_MESSAGES, BATCH_BYTES), True
        else:
            return 0
        self._words[control.DELIVERY_LATE_MS] = now_ms - int(batch.due_ms[0])
        self._busy = True
        messages = self._messages_of(batch, are_rolls=are_rolls)
        self._deliveries.start(messages, lambda: self._record_delivery(batch, are_rolls=are_rolls), self._reschedule)
        ended_ns = self._clock.monotonic_ns()
        gather_ns = max(GATHER_MIN_NS, GATHER_TIMES * (ended_ns - now_ns))
        self._deliver_ns = ended_ns + min(gather_ns, GATHER_MAX_NS)
        return len(batch)

    def _messages_of(self, batch: HeapEntries, *, are_rolls: bool) -> list[AppendColumns]:
        """Messages of entries that are in the log and not cancelled."""
        records, found = self._records_at(batch.physical_offsets)
        selected = records.in_topic(TIMER_TOPIC) & records.has_topic
        if (lost := len(batch) - int(selected.sum())) > 0:
            self._lose(lost, "no longer in the log")
        written = self._words[control.WRITTEN]
        slots_ms = batch.slots_ms[found]
        for slot_ms, _count in slot_counts(batch.slots_ms):
            slot = self._slots[slot_ms]
            slot.begin = min(slot.begin, written)
            if slot.cancelled:
                selected[slots_ms == slot_ms] &= ~cancelled_mask(records, slot.cancelled)[slots_ms == slot_ms]
        return records.to_roll(selected) if are_rolls else records.to_deliver(selected, keeps_real=False)

    def _reschedule(self, refused: AppendColumns) -> AppendColumns:
        return reschedule_timed(refused, self._clock.time_ms(), self._options.timer_precision_ms)

    def _due_until_ms(self, now_ms: int) -> int:
        """Time up to which messages may be delivered without overtaking one not loaded yet."""
        if self._backlog.is_late or not self._is_caught_up:
            now_ms = min(now_ms, self._backlog.until_ms)
        if not self._loading:
            return now_ms
        slot_ms = self._loading[0].slot_ms
        # Messages in the first slot may be due before it begins.
        return min(now_ms, slot_ms) if slot_ms > self._first_ms else 0

    def _record_delivery(self, batch: HeapEntries, *, are_rolls: bool) -> None:
        self._context.io.crash_point("timer.delivered")
        self._busy = False
        for slot_ms, count in slot_counts(batch.slots_ms):
            self._slots[slot_ms].open -= count
        if are_rolls:
            self.rolls.rescheduled(self._words[control.WRITTEN])
        if self._store is not None:
            self._store.pending -= len(batch)
            self.advance_read_time(self._store)
        self._dirty = True

    def advance_read_time(self, store: TimerStore) -> None:
        read_ms = min((slot_ms for slot_ms, slot in self._slots.items() if slot.open), default=self._active_until_ms)
        # A cancellation of a roll that is not enqueued again yet may be in its slot only.
        read_ms = min(read_ms, store.slot_of(self.rolls.returning_from_ms))
        if read_ms > store.read_ms:
            store.read_ms = read_ms
            self._slots = {slot_ms: slot for slot_ms, slot in self._slots.items() if slot_ms >= read_ms}

    def _records_at(self, physical_offsets: NDArray[np.int64]) -> tuple[ScheduledRecords, NDArray[np.bool_]]:
        """Records at these log positions, and a mask of the positions that have one."""
        records, found = self._reading.records.gathered(physical_offsets)
        return ScheduledRecords(records, int(found.sum())), found

    # timercheck

    def save(self, durable: int) -> None:
        """Write timercheck with the current progress; the log is durable up to `durable`."""
        self._snapshot = None
        self._save.save_all(durable)

    def _save_failed(self, error: OSError) -> None:
        self._dirty = True
        self._deliveries.note_errno("timercheck", error.errno or errno.EIO)
        self._context.heartbeat.log_error("timercheck could not be saved, retrying", error=str(error))

    def _save_steps(self, durable: int) -> Iterator[None]:
        """Sync the timer's files and write a snapshot once the counted deliveries are durable.

        With `durable` 0 the flushers determine that. Otherwise the snapshot ends at `durable`, so that later appends do
        not keep a stopping keeper from saving.
        """
        if self._store is None or self._syncs.has_failed():
            return  # After a failed sync the next run reads deliveries from the log.
        if self._snapshot is None:
            end = durable or self._words[control.WRITTEN]
            snapshot = self._store.prepare_snapshot(min(self._begin(self._store), end), end, self._clock.time_ms())
            self._dirty = False
            for _ in self._store.sync_steps():
                yield
            self._snapshot = snapshot
            yield
        if max(durable, self._context.control.flushed) >= self._snapshot.log_end:
            self._store.write(self._snapshot)
            self._snapshot = None
            self._deliveries.note_errno("timercheck", 0)

    def _begin(self, store: TimerStore) -> int:
        """Log position at or above which every delivery of slots from `read_ms` on lies."""
        begins = [self._deliveries.begin, *(slot.begin for slot in self._slots.values())]
        if self._inherited is not None:
            begin, until_ms = self._inherited
            if store.read_ms < until_ms or store.queue_offset < self._backlog.end:
                begins.append(begin)
            else:
                self._inherited = None
        return min(begins)

    def _lose(self, count: int, why: str) -> None:
        if count:
            self._words.add(control.DELIVERIES_LOST, count)
            self._context.heartbeat.log_error("timed messages are lost", messages=count, why=why)
