"""Delivery at any time: the queue of rmq_sys_wheel_timer is filed by seconds, and each second's messages are held.

    queue ──filed──▶ timer log, wheel ──slot comes up──▶ held, by their times ──due──▶ release
                                                            ▲
            a message for a slot that is up already ────────┘ (it is filed too, for a successor)

RocketMQ's files know whole seconds. A slot is read a second before it begins; its messages then wait in memory for the
very millisecond that they name. `read_ms` stands at the first slot that has a message not delivered yet.

A message due later than the roll window is filed under an earlier slot and parked anew when that comes, so that it
stays young enough for the log. One with TIMER_DEL_UNIQKEY cancels the message of its slot that has this unique id.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.layout import control as words_of
from mqproc.layout import properties as names
from mqproc.layout import timer_log
from mqproc.layout.timer_check import NO_LOG_POSITION
from mqproc.message import PullStatus
from mqproc.names import TIMER_TOPIC
from mqproc.roles.held_messages import Held, HeldMessages
from mqproc.roles.log import get_logger
from mqproc.roles.loop import RoleContext
from mqproc.roles.message_columns import MessageColumns
from mqproc.roles.parked_again import timed_again
from mqproc.roles.parted_save import PartedSave
from mqproc.roles.released import ParkedRecords
from mqproc.roles.releases import Releases
from mqproc.roles.timer_backlog import Backlog
from mqproc.roles.timer_rolls import TimerRolls
from mqproc.roles.timer_slots import Rising, Slot, are_cancelled, counts_of, leaving_ms, topic_hash, with_rolls
from mqproc.store.delays.filed import Filed
from mqproc.store.delays.made_from import MadeFrom
from mqproc.store.delays.timer_store import TimerSnapshot, TimerStore
from mqproc.store.final_syncs import FinalSyncs
from mqproc.store.reads.reading import StoreReading

# A step's parts are a few ms long each: what becomes due meanwhile is late by that much.
FILE_MESSAGES: Final = 512
HOLD_MESSAGES: Final = 4096
BATCH_MESSAGES: Final = 1024
BATCH_BYTES: Final = 4 << 20
# What becomes due is gathered for some times as long as the last release took, so that releases leave time for others.
GATHER_TIMES: Final = 3
GATHER_LEAST_NS: Final = 5_000_000
GATHER_MOST_NS: Final = 15_000_000
# What comes is filed together; not for long while some of it is due within this time.
FILE_GATHER_NS: Final = 25_000_000
FILE_SOON_GATHER_NS: Final = 5_000_000
SOON_MS: Final = 500
FILE_AGAIN_NS: Final = 500_000_000
_NEVER: Final = 1 << 62
_MS: Final = 1_000_000


class TimerDeliveries:
    """The keeper's timer. Its files are made with the first message that names a time."""

    def __init__(
        self,
        context: RoleContext,
        reading: StoreReading,
        releases: Releases,
        made_from: MadeFrom,
        syncs: FinalSyncs,
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        self._options = context.options
        self._log = get_logger()
        self._reading = reading
        self._releases = releases
        self._made_from = made_from
        self._syncs = syncs
        self._store: TimerStore | None = None
        self._up_ms = 0  # slots below it are up
        self._first_ms = 0  # the first slot of this keeper; what was past already when it was filed lies in it too
        self._rising: deque[Rising] = deque()
        self._held = HeldMessages()
        self.rolls = TimerRolls(context.options.timer_precision_ms)
        self._slots: dict[int, Slot] = {}
        # Slots below the second had messages delivered by a predecessor, none of them below the first in the log.
        self._inherited: tuple[int, int] | None = None
        self._backlog = Backlog(self._words)
        self._early: set[int] = set()  # held, though their slot is not up: all slots of their time were done
        self._busy = False
        self._release_ns = 0
        self._file_ns = 0  # after a failure nothing is filed before; 0 otherwise
        self._gather_ns = 0  # few messages are not filed before
        self._is_gathering = False
        self._snapshot: TimerSnapshot | None = None
        self._dirty = False
        self._save = PartedSave(self._clock, self._save_steps, self._save_failed)
        if releases.settled and TimerStore.exists(context.io, context.paths):
            self._open_store()

    @property
    def pending(self) -> int:
        """Messages that wait for their time."""
        return self._store.pending if self._store is not None else 0

    @property
    def changed(self) -> bool:
        """Whether the check does not say yet what was done."""
        return self._dirty or self._snapshot is not None or self._save.under_way

    @property
    def due_ns(self) -> int:
        """When `step` has something to do, unless a message comes."""
        if self._store is None:
            return _NEVER
        now_ns, now_ms = self._clock.monotonic_ns(), self._clock.time_ms()
        if self._rising or self._save.under_way:
            return now_ns
        due_ns = self._save.due_ns if self.changed else _NEVER
        if not self._backlog.is_dispatched:
            due_ns = min(due_ns, self._backlog.look_ns(now_ns, now_ms))
        if self._is_gathering:
            due_ns = min(due_ns, max(self._gather_ns, self._file_ns))
        if self._store.pending and self._backlog.is_dispatched:
            up_ns = now_ns + (self._up_ms - self._options.timer_precision_ms - now_ms) * _MS
            due_ns = min(due_ns, max(up_ns, self._file_ns))
        if not self._busy and self._has_filed:
            is_looked_at = not self._is_gathering and self._words[words_of.DISPATCHED] >= self.rolls.parked_to
            first_ms = self.rolls.first_to_go_ms(self._held.first_due_ms, none_waits=is_looked_at)
            held_ns = now_ns + (first_ms - now_ms) * _MS
            due_ns = min(due_ns, max(held_ns, self._release_ns))
        return due_ns

    def step(self) -> int:
        """File what came, hold what comes up, release what is due; returns how much was done."""
        if self._store is None:
            if not self._releases.settled or not self._is_needed():
                return 0
            self._open_store()
        assert self._store is not None
        done = self._file_and_bring_up(self._store) + self._hold_some(self._store) + self._release_due()
        if self._save.under_way or (self.changed and self._clock.monotonic_ns() >= self._save.due_ns):
            self._save.go_on()
        return done

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    @property
    def _has_filed(self) -> bool:
        """Whether all is filed that waited when filing began: what comes last may cancel what was due first."""
        return self._store is not None and not self._file_ns and self._store.queue_offset >= self._backlog.end

    # Filing

    def _is_needed(self) -> bool:
        bounds = self._reading.queues.bounds(TIMER_TOPIC, 0)
        came = bounds is not None and bounds.max_offset > 0
        return came or TimerStore.exists(self._context.io, self._context.paths)

    def _open_store(self) -> None:
        options, context = self._options, self._context
        store = TimerStore(
            context.io, self._syncs, context.paths, options.timer_precision_ms, options.mapped_file_size_timer_log
        )
        with context.heart.busy(words_of.STATE_RECOVERING):
            store.open(self._clock.time_ms(), self._queue_offset_of)
            if store.remark:
                self._log.warning("the timer's files are made anew", reason=store.remark)
            bounds = self._reading.queues.bounds(TIMER_TOPIC, 0)
            if context.incarnation == 1:
                store.queue_offset = min(store.queue_offset, bounds.max_offset if bounds is not None else 0)
            written = self._words[words_of.WRITTEN]
            begin = store.log_position
            if begin == NO_LOG_POSITION:
                begin = self._take_over(store) if store.queue_offset else self._words[words_of.MIN_PHYSICAL_OFFSET]
            if begin < written:
                self._releases.known |= self._made_from.marks(begin, written)
                self._inherited = begin, self._slots_up_to(store)
            self._backlog.begin(self._clock.time_ms())
        self._up_ms = self._first_ms = store.read_ms
        self._store = store

    def _take_over(self, store: TimerStore) -> int:
        """From here on deliveries bear marks. The next keeper may follow a kill before the first of them is counted."""
        begin = min(self._words[words_of.WRITTEN], self._context.control.flushed)
        try:
            if not self._syncs.ended():
                store.write(store.snapshot(begin, begin, self._clock.time_ms()))
        except OSError as error:
            self._save_failed(error)
        return begin

    def _queue_offset_of(self, physical_offset: int) -> int | None:
        parked, _found = self._parked_at(np.array([physical_offset], np.int64))
        return int(parked.column("queue_offset")[0]) if parked.is_of(TIMER_TOPIC).any() else None

    def _file_and_bring_up(self, store: TimerStore) -> int:
        """What cannot be written yet is in no slot where it would be found, so none comes up before it is."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._file_ns:
            return 0
        try:
            done = self._file(store)
        except OSError as error:
            self._file_ns = now_ns + FILE_AGAIN_NS
            self._fail("timed messages cannot be filed yet", error)
            return 0
        if self._has_filed:
            self._bring_up(store)
        return done

    def _file(self, store: TimerStore) -> int:
        store.write_out()
        now_ns, now_ms = self._clock.monotonic_ns(), self._clock.time_ms()
        dispatched = self._backlog.dispatched(now_ms)
        bounds = self._reading.queues.bounds(TIMER_TOPIC, 0)
        end = bounds.max_offset if bounds is not None else 0
        if self._file_ns or self._words[words_of.DISPATCH_ERRNO]:
            self._file_ns = 0
            self._backlog.begin(now_ms)
        self._backlog.look(dispatched, end, store.queue_offset, now_ms)
        self.rolls.look(dispatched, end, store.queue_offset)
        came = end - store.queue_offset
        self._is_gathering = 0 < came < FILE_MESSAGES and now_ns < self._gather_ns
        if came <= 0 or self._is_gathering:
            return 0
        pulled = self._reading.pull(TIMER_TOPIC, 0, store.queue_offset, FILE_MESSAGES, BATCH_BYTES)
        if pulled.status is not PullStatus.FOUND:
            self._lose(max(0, pulled.next_offset - store.queue_offset), f"{pulled.status} {pulled.detail}".strip())
        self._gather_ns = now_ns + FILE_GATHER_NS
        if pulled.count:
            self._file_all(store, ParkedRecords(pulled.records, pulled.count))
        store.queue_offset = max(store.queue_offset, pulled.next_offset)
        self._dirty = True
        store.write_out()
        self._context.io.crash_point("timer.filed")
        return max(1, pulled.count)

    def _file_all(self, store: TimerStore, parked: ParkedRecords) -> None:
        """File what a pull gave, in parts; after an error `queue_offset` is behind those that are filed."""
        now_ms = self._clock.time_ms()
        out_ms = parked.properties.numbers(names.TIMER_OUT_MS)
        usable = (out_ms >= 0) & parked.names_topic
        rows = np.flatnonzero(usable)
        filed, is_up = self._to_file(store, parked, out_ms, rows, now_ms)
        if len(filed) and filed.due_ms.min() <= now_ms + SOON_MS:
            self._gather_ns = self._clock.monotonic_ns() + FILE_SOON_GATHER_NS
        topics = parked.real_topics
        hashes = np.fromiter((topic_hash(topics[row]) for row in rows.tolist()), np.int32, len(rows))
        queue_offsets = parked.column("queue_offset")
        first = 0
        try:
            while first < len(filed):
                stop = first + store.put(filed.chosen(slice(first, None)), now_ms, hashes[first:])
                self._hold_those_up(filed.chosen(slice(first, stop)), is_up[first:stop])
                store.queue_offset = int(queue_offsets[rows[stop - 1]]) + 1
                first = stop
            store.queue_offset = int(queue_offsets[-1]) + 1
        finally:
            passed = int((queue_offsets[~usable] < store.queue_offset).sum())
            self._lose(passed, "parked records name no time or no topic")

    def _to_file(
        self,
        store: TimerStore,
        parked: ParkedRecords,
        out_ms: NDArray[np.int64],
        rows: NDArray[np.intp],
        now_ms: int,
    ) -> tuple[Filed, NDArray[np.bool_]]:
        """What is filed of these rows, and which of it belongs to slots that are up."""
        precision_ms = self._options.timer_precision_ms
        wanted_ms = out_ms[rows] // precision_ms * precision_ms
        slots_ms, magics = with_rolls(wanted_ms, store.slot_of(now_ms), self._options)
        deletes = parked.properties.pairs(names.TIMER_DEL_UNIQKEY).last_of_each()
        named = deletes.messages[deletes.ends > deletes.values]
        magics[np.isin(rows, named)] |= timer_log.MAGIC_DELETE
        is_up = slots_ms < self._up_ms
        filed = Filed(
            np.maximum(slots_ms, store.read_ms),  # Slots below read_ms are never looked at again.
            magics,
            parked.column("physical_offset")[rows],
            parked.column("size")[rows].astype(np.int64),
            np.maximum(parked.properties.numbers(names.TIMER_DELIVER_MS)[rows], 0),
        )
        return filed, is_up

    def _hold_those_up(self, filed: Filed, is_up: NDArray[np.bool_]) -> None:
        """Hold what was filed in slots that are up, or past."""
        if not is_up.any():
            return
        filed = filed.chosen(is_up)
        if self._inherited is not None:
            # It may be delivered already, and its own slot is passed.
            begin, until_ms = self._inherited
            last_ms = int(filed.slots_ms.max())
            self._inherited = begin, max(until_ms, last_ms + self._options.timer_precision_ms)
        self._early.update(filed.physical_offsets[filed.slots_ms >= self._up_ms].tolist())
        self._hold(filed)

    # Holding

    def _bring_up(self, store: TimerStore) -> None:
        """Slots that begin within a slot's width are up: what is filed in them by now is to be held."""
        until_ms = self._slots_up_to(store)
        if until_ms <= self._up_ms:
            return
        for slot_ms in store.occupied(self._up_ms, until_ms) if store.pending else ():
            self._rising.append(Rising(slot_ms, store.filed(slot_ms, HOLD_MESSAGES)))
            self._slots.setdefault(slot_ms, Slot()).open += 1
        self._up_ms = until_ms
        self._move_read(store)

    def _hold_some(self, store: TimerStore) -> int:
        """Hold the next messages of slots that are up; returns how many were looked at."""
        looked, waiting = 0, len(self._rising)
        while self._rising and looked < HOLD_MESSAGES:
            rising = self._rising[0]
            filed = self._next_filed(rising)
            if filed is None:
                self._rising.popleft()
                self._slots[rising.slot_ms].open -= 1
            else:
                looked += len(filed)
                self._hold(rising.not_held(filed, self._early))
        if len(self._rising) < waiting:
            # Once: it looks at every slot that is up, many thousands behind a long stop.
            self._move_read(store)
        return looked

    def _next_filed(self, rising: Rising) -> Filed | None:
        try:
            return next(rising.filed, None)
        except CorruptStoreError as error:
            self._fail(f"what is left of slot {rising.slot_ms} of the timer is lost", error)
            return None

    def _slots_up_to(self, store: TimerStore) -> int:
        """The first slot that is not to be up now."""
        return store.slot_of(self._clock.time_ms()) + 2 * self._options.timer_precision_ms

    def _hold(self, filed: Filed) -> None:
        """Keep messages of slots that are up until they are due."""
        # One that is to be parked again on its way goes there, as its message does.
        deletes = (filed.magics & (timer_log.MAGIC_DELETE | timer_log.MAGIC_ROLL)) == timer_log.MAGIC_DELETE
        if deletes.any():
            self._cancel(filed.chosen(deletes))
            filed = filed.chosen(~deletes)
        if not len(filed):
            return
        rolls = (filed.magics & timer_log.MAGIC_ROLL) != 0
        due_ms = leaving_ms(filed, rolls, self._options.timer_precision_ms)
        unknown = np.flatnonzero(~rolls & (filed.due_ms <= 0))
        if len(unknown):
            # RocketMQ filed them: the exact time is in the records.
            parked, found = self._parked_at(filed.physical_offsets[unknown])
            known_ms = parked.properties.numbers(names.TIMER_DELIVER_MS)
            due_ms[unknown[found]] = np.where(known_ms > 0, known_ms, due_ms[unknown[found]])
        for slot_ms, count in counts_of(filed.slots_ms):
            self._slots.setdefault(slot_ms, Slot()).open += count
        held = Held(due_ms, filed.physical_offsets, filed.slots_ms, filed.sizes)
        self._held.add(held.chosen(~rolls))
        self.rolls.held.add(held.chosen(rolls))

    def _cancel(self, deletes: Filed) -> None:
        """Note the keys of messages of these slots that are not to be delivered."""
        parked, found = self._parked_at(deletes.physical_offsets)
        keys = parked.properties.texts(names.TIMER_DEL_UNIQKEY)
        for slot_ms, key in zip(deletes.slots_ms[found].tolist(), keys, strict=True):
            self._slots.setdefault(slot_ms, Slot()).cancelled.add(key.decode("utf-8", "replace"))
        if self._store is not None:
            self._store.pending -= len(deletes)

    # Releasing

    def _release_due(self) -> int:
        now_ms = self._clock.time_ms()
        now_ns = self._clock.monotonic_ns()
        if self._busy or now_ns < self._release_ns:
            return 0
        until_ms = self._due_until_ms(now_ms)
        messages_until_ms = min(until_ms, self.rolls.delivered_until_ms)
        if self._held.first_due_ms <= min(messages_until_ms, self.rolls.first_due_ms):
            batch, are_rolls = self._held.take(messages_until_ms, BATCH_MESSAGES, BATCH_BYTES), False
        elif self.rolls.first_due_ms <= until_ms:
            batch, are_rolls = self.rolls.take(until_ms, now_ms, BATCH_MESSAGES, BATCH_BYTES), True
        else:
            return 0
        self._words[words_of.DELIVERY_LATE_MS] = now_ms - int(batch.due_ms[0])
        self._busy = True
        messages = self._made_of(batch, are_rolls=are_rolls)
        self._releases.start(messages, lambda: self._done_with(batch, are_rolls=are_rolls), self._parked_again)
        ended_ns = self._clock.monotonic_ns()
        gather_ns = max(GATHER_LEAST_NS, GATHER_TIMES * (ended_ns - now_ns))
        self._release_ns = ended_ns + min(gather_ns, GATHER_MOST_NS)
        return len(batch)

    def _made_of(self, batch: Held, *, are_rolls: bool) -> list[MessageColumns]:
        """The messages of those that the log has and nobody has cancelled."""
        parked, found = self._parked_at(batch.physical_offsets)
        wanted = parked.is_of(TIMER_TOPIC) & parked.names_topic
        if (lost := len(batch) - int(wanted.sum())) > 0:
            self._lose(lost, "the log has no such messages for later any more")
        written = self._words[words_of.WRITTEN]
        slots_ms = batch.slots_ms[found]
        for slot_ms, _count in counts_of(batch.slots_ms):
            slot = self._slots[slot_ms]
            slot.begin = min(slot.begin, written)
            if slot.cancelled:
                wanted[slots_ms == slot_ms] &= ~are_cancelled(parked, slot.cancelled)[slots_ms == slot_ms]
        return parked.rolled(wanted) if are_rolls else parked.released(wanted, keeps_real=False)

    def _parked_again(self, refused: MessageColumns) -> MessageColumns:
        return timed_again(refused, self._clock.time_ms(), self._options.timer_precision_ms)

    def _due_until_ms(self, now_ms: int) -> int:
        """What is due by then may go: nothing overtakes a message, or its cancellation, that is not held yet."""
        if self._backlog.is_late or not self._has_filed:
            now_ms = min(now_ms, self._backlog.until_ms)
        if not self._rising:
            return now_ms
        slot_ms = self._rising[0].slot_ms
        # What lies in the first slot may be due before it begins.
        return min(now_ms, slot_ms) if slot_ms > self._first_ms else 0

    def _done_with(self, batch: Held, *, are_rolls: bool) -> None:
        self._context.io.crash_point("timer.delivered")
        self._busy = False
        for slot_ms, count in counts_of(batch.slots_ms):
            self._slots[slot_ms].open -= count
        if are_rolls:
            self.rolls.are_parked(self._words[words_of.WRITTEN])
        if self._store is not None:
            self._store.pending -= len(batch)
            self._move_read(self._store)
        self._dirty = True

    def _move_read(self, store: TimerStore) -> None:
        read_ms = min((slot_ms for slot_ms, slot in self._slots.items() if slot.open), default=self._up_ms)
        # What cancels one that is not filed again yet may lie in its slot alone.
        read_ms = min(read_ms, store.slot_of(self.rolls.back_from_ms))
        if read_ms > store.read_ms:
            store.read_ms = read_ms
            self._slots = {slot_ms: slot for slot_ms, slot in self._slots.items() if slot_ms >= read_ms}

    def _parked_at(self, physical_offsets: NDArray[np.int64]) -> tuple[ParkedRecords, NDArray[np.bool_]]:
        """The records at these places that the log has, and which these are, bool[n]."""
        records, found = self._reading.records.gathered(physical_offsets)
        return ParkedRecords(records, int(found.sum())), found

    # The check

    def save(self, durable: int) -> None:
        """Write the check as of now; `durable` is a position that the caller has made the log durable up to."""
        self._snapshot = None
        self._save.whole(durable)

    def _save_failed(self, error: OSError) -> None:
        self._dirty = True
        self._fail("timercheck could not be saved yet", error)

    def _save_steps(self, durable: int) -> Iterator[None]:
        """Write the check as of when it was last synced for, once the log is durable behind what it counts.

        With `durable` 0 the flushers say up to where it is. Otherwise what the caller found written has all that is
        counted: what a writer has appended since must not keep a stopping keeper from saving.
        """
        if self._store is None or self._syncs.ended():
            return  # Once a sync has failed the log tells a next run what was delivered.
        if self._snapshot is None:
            end = durable or self._words[words_of.WRITTEN]
            picture = self._store.picture(min(self._begin(self._store), end), end, self._clock.time_ms())
            self._dirty = False
            for _ in self._store.sync_steps():
                yield
            self._snapshot = picture
            yield
        if max(durable, self._context.control.flushed) >= self._snapshot.log_end:
            self._store.write(self._snapshot)
            self._snapshot = None

    def _begin(self, store: TimerStore) -> int:
        """No message of the slots from read_ms on that has been delivered lies below this position of the log."""
        begins = [self._releases.begin, *(slot.begin for slot in self._slots.values())]
        if self._inherited is not None:
            begin, until_ms = self._inherited
            if store.read_ms < until_ms or store.queue_offset < self._backlog.end:
                begins.append(begin)
            else:
                self._inherited = None
        return min(begins)

    def _lose(self, count: int, why: str) -> None:
        if count:
            self._words.add(words_of.DELIVERIES_LOST, count)
            self._context.heart.failed()
            self._log.error("timed messages are lost", messages=count, why=why)

    def _fail(self, what: str, error: Exception) -> None:
        self._context.heart.failed()
        self._log.error(what, error=str(error))
