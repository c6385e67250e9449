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

import functools
import heapq
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from mqproc.errors import CorruptStoreError
from mqproc.layout import control as words_of
from mqproc.layout import properties as names
from mqproc.layout import timer_log
from mqproc.layout.java_hash import java_hash
from mqproc.layout.timer_check import NO_LOG_POSITION
from mqproc.message import PullStatus
from mqproc.names import TIMER_TOPIC
from mqproc.process.appender import NewMessage
from mqproc.process.log import get_logger
from mqproc.process.loop import RoleContext
from mqproc.process.released import Parked, parked_records
from mqproc.process.releases import Releases
from mqproc.store.delays.made_from import MadeFrom
from mqproc.store.delays.timer_store import Filed, TimerSnapshot, TimerStore
from mqproc.store.final_syncs import FinalSyncs
from mqproc.store.reads.reading import StoreReading

FILE_MESSAGES: Final = 2048
BATCH_MESSAGES: Final = 1024
BATCH_BYTES: Final = 4 << 20
# What becomes due within this time of a release goes together with the next one.
GATHER_NS: Final = 4_000_000
SAVE_INTERVAL_NS: Final = 1_000_000_000
_NEVER_NS: Final = 1 << 62
_MS: Final = 1_000_000


class _Held(NamedTuple):
    """A message of a slot that is up. `rolls`: it is to be parked again, not delivered."""

    due_ms: int
    sequence: int
    physical_offset: int
    slot_ms: int
    rolls: bool


@dataclass(slots=True)
class _Slot:
    """A slot that is up: how many of its messages have no outcome, and the keys of those that are cancelled.

    `begin` is a position of the log below which none of its messages was delivered.
    """

    open: int = 0
    cancelled: set[str] = field(default_factory=set)
    begin: int = 1 << 62


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
        self._held: list[_Held] = []
        self._slots: dict[int, _Slot] = {}
        # Slots below the second had messages delivered by a predecessor, none of them below the first in the log.
        self._inherited: tuple[int, int] | None = None
        self._early: set[int] = set()  # held, though their slot is not up: all slots of their time were done
        self._sequence = 0
        self._busy = False
        self._release_ns = 0
        self.parked_to = 0
        """The log's end when messages were last parked again: once it is dispatched, they can be filed."""
        self._snapshot: TimerSnapshot | None = None
        self._dirty = False
        self._save_ns = 0
        if releases.settled and TimerStore.exists(context.io, context.paths):
            self._open_store()

    @property
    def pending(self) -> int:
        """Messages that wait for their time."""
        return self._store.pending if self._store is not None else 0

    @property
    def changed(self) -> bool:
        """Whether the check does not say yet what was done."""
        return self._dirty or self._snapshot is not None

    @property
    def due_ns(self) -> int:
        """When `step` has something to do, unless a message comes."""
        if self._store is None:
            return _NEVER_NS
        now_ns, now_ms = self._clock.monotonic_ns(), self._clock.time_ms()
        due_ns = self._save_ns if self.changed else _NEVER_NS
        if self._store.pending:
            due_ns = min(due_ns, now_ns + (self._up_ms - self._options.timer_precision_ms - now_ms) * _MS)
        if self._held and not self._busy:
            held_ns = now_ns + (self._held[0].due_ms - now_ms) * _MS
            due_ns = min(due_ns, max(held_ns, self._release_ns))
        return due_ns

    def step(self) -> int:
        """File what came, hold what comes up, release what is due; returns how much was done."""
        if self._store is None:
            if not self._releases.settled or not self._is_needed():
                return 0
            self._open_store()
        assert self._store is not None
        try:
            done = self._file(self._store)
        except OSError as error:
            self._fail("timed messages cannot be filed yet", error)
            done = 0
        self._bring_up(self._store)
        done += self._release_due()
        if self.changed and self._clock.monotonic_ns() >= self._save_ns:
            self.save()
        return done

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

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
                begin = written if store.queue_offset else self._words[words_of.MIN_PHYSICAL_OFFSET]
            if begin < written:
                self._releases.known |= self._made_from.marks(begin, written)
                self._inherited = begin, self._slots_up_to(store)
        self._up_ms = store.read_ms
        self._store = store

    def _queue_offset_of(self, physical_offset: int) -> int | None:
        found = self._parked_at(physical_offset)
        return None if found is None or found.topic != TIMER_TOPIC else found.queue_offset

    def _file(self, store: TimerStore) -> int:
        store.write_out()
        bounds = self._reading.queues.bounds(TIMER_TOPIC, 0)
        if bounds is None or store.queue_offset >= bounds.max_offset:
            return 0
        pulled = self._reading.pull(TIMER_TOPIC, 0, store.queue_offset, FILE_MESSAGES, BATCH_BYTES)
        if pulled.status is not PullStatus.FOUND:
            self._lose(max(0, pulled.next_offset - store.queue_offset), f"{pulled.status} {pulled.detail}".strip())
        for parked in parked_records(pulled.records.tobytes()):
            self._file_one(store, parked)
            store.queue_offset = parked.queue_offset + 1
        store.queue_offset = max(store.queue_offset, pulled.next_offset)
        self._dirty = True
        store.write_out()
        return max(1, pulled.count)

    def _file_one(self, store: TimerStore, parked: Parked) -> None:
        out_ms = parked.number(names.TIMER_OUT_MS)
        if out_ms is None or not parked.real_topic:
            self._lose(1, f"the record at {parked.physical_offset} names no time or no topic")
            return
        now_ms = self._clock.time_ms()
        slot_ms, magic = self._slot_for(store.slot_of(out_ms), store.slot_of(now_ms))
        if parked.text(names.TIMER_DEL_UNIQKEY):
            magic |= timer_log.MAGIC_DELETE
        is_up = slot_ms < self._up_ms
        # Slots below read_ms are never looked at again.
        slot_ms = max(slot_ms, store.read_ms)
        due_ms = parked.number(names.TIMER_DELIVER_MS) or 0
        topic_hash = _topic_hash(parked.real_topic)
        store.put(slot_ms, now_ms, parked.physical_offset, parked.size, topic_hash, magic, due_ms)
        if is_up:
            if slot_ms >= self._up_ms:
                self._early.add(parked.physical_offset)
            self._hold(Filed(slot_ms, magic, parked.physical_offset, parked.size, due_ms))

    def _slot_for(self, slot_ms: int, now_ms: int) -> tuple[int, int]:
        """The slot to file under, and the unit's magic: further off than the roll window it is an earlier one."""
        window_ms = self._options.timer_roll_window_slot * self._options.timer_precision_ms
        beyond_ms = slot_ms - now_ms - window_ms
        if beyond_ms < 0:
            return slot_ms, timer_log.MAGIC_DEFAULT
        # Time enough is left for the next roll too.
        wait_ms = window_ms // 2 if beyond_ms < window_ms // 3 else window_ms
        wait_ms -= wait_ms % self._options.timer_precision_ms
        return now_ms + wait_ms, timer_log.MAGIC_DEFAULT | timer_log.MAGIC_ROLL

    # Holding

    def _bring_up(self, store: TimerStore) -> None:
        """Hold the messages of slots that begin within a slot's width."""
        until_ms = self._slots_up_to(store)
        if until_ms <= self._up_ms:
            return
        for slot_ms in store.occupied(self._up_ms, until_ms) if store.pending else ():
            try:
                filed = store.filed(slot_ms)
            except CorruptStoreError as error:
                self._fail(f"slot {slot_ms} of the timer is lost", error)
                continue
            for one in dict.fromkeys(filed):
                if one.physical_offset in self._early:
                    self._early.discard(one.physical_offset)
                else:
                    self._hold(one)
        self._up_ms = until_ms
        self._move_read(store)

    def _slots_up_to(self, store: TimerStore) -> int:
        """The first slot that is not to be up now."""
        return store.slot_of(self._clock.time_ms()) + 2 * self._options.timer_precision_ms

    def _hold(self, filed: Filed) -> None:
        """Keep a message of a slot that is up until it is due."""
        slot = self._slots.setdefault(filed.slot_ms, _Slot())
        rolls = bool(filed.magic & timer_log.MAGIC_ROLL)
        due_ms = filed.slot_ms + self._options.timer_precision_ms
        if filed.magic & timer_log.MAGIC_DELETE:
            parked = self._parked_at(filed.physical_offset)
            slot.cancelled.add(parked.text(names.TIMER_DEL_UNIQKEY) if parked is not None else "")
            self._take_off(1)
            return
        if not rolls:
            due_ms = filed.due_ms or self._due_of(filed.physical_offset) or due_ms
        self._sequence += 1
        slot.open += 1
        heapq.heappush(self._held, _Held(due_ms, self._sequence, filed.physical_offset, filed.slot_ms, rolls))

    def _due_of(self, physical_offset: int) -> int | None:
        """The exact time, from a record that RocketMQ filed."""
        parked = self._parked_at(physical_offset)
        return parked.number(names.TIMER_DELIVER_MS) if parked is not None else None

    # Releasing

    def _release_due(self) -> int:
        now_ms = self._clock.time_ms()
        now_ns = self._clock.monotonic_ns()
        if self._busy or not self._held or self._held[0].due_ms > now_ms or now_ns < self._release_ns:
            return 0
        self._release_ns = now_ns + GATHER_NS
        self._words[words_of.DELIVERY_LATE_MS] = now_ms - self._held[0].due_ms
        batch = self._take_due(now_ms)
        records = self._reading.records.copies(held.physical_offset for held in batch)
        messages: list[NewMessage] = []
        written = self._words[words_of.WRITTEN]
        for held, record in zip(batch, records, strict=True):
            slot = self._slots[held.slot_ms]
            slot.begin = min(slot.begin, written)
            parked = Parked(record, 0) if record is not None else None
            if parked is None or parked.topic != TIMER_TOPIC or not parked.real_topic:
                self._lose(1, f"the log has no message for later at {held.physical_offset} any more")
            elif not (slot.cancelled and _is_cancelled(parked, slot.cancelled)):
                messages.append(parked.rolled() if held.rolls else parked.released(keeps_real=False))
        self._busy = True
        self._releases.start(messages, lambda: self._done_with(batch))
        return len(batch)

    def _take_due(self, now_ms: int) -> list[_Held]:
        """The next messages that are due, by their times."""
        batch: list[_Held] = []
        held = self._held
        while held and held[0].due_ms <= now_ms and len(batch) < BATCH_MESSAGES:
            batch.append(heapq.heappop(held))
        return batch

    def _done_with(self, batch: list[_Held]) -> None:
        self._busy = False
        for held in batch:
            self._slots[held.slot_ms].open -= 1
        if any(held.rolls for held in batch):
            self.parked_to = self._words[words_of.WRITTEN]
        if self._store is not None:
            self._take_off(len(batch))
            self._move_read(self._store)
        self._dirty = True

    def _take_off(self, count: int) -> None:
        if self._store is not None:
            self._store.pending -= count

    def _move_read(self, store: TimerStore) -> None:
        read_ms = min((slot_ms for slot_ms, slot in self._slots.items() if slot.open), default=self._up_ms)
        if read_ms > store.read_ms:
            store.read_ms = read_ms
            for slot_ms in [slot_ms for slot_ms in self._slots if slot_ms < read_ms]:
                del self._slots[slot_ms]

    def _parked_at(self, physical_offset: int) -> Parked | None:
        try:
            record = self._reading.records.record(physical_offset)
        except CorruptStoreError:
            return None
        return next(parked_records(record.tobytes())) if record is not None else None

    # The check

    def save(self, durable: int = 0) -> None:
        """Write the check as of now, or of the last call, once the log is durable behind what it counts.

        `durable` is a position that the caller has made the log durable up to; else it is what the flushers say.
        """
        self._save_ns = self._clock.monotonic_ns() + SAVE_INTERVAL_NS
        if self._store is None or self._syncs.ended():
            return  # Once a sync has failed the log tells a next run what was delivered.
        try:
            if self._snapshot is None or durable:
                end = self._words[words_of.WRITTEN]
                self._snapshot = self._store.snapshot(self._begin(self._store), end, self._clock.time_ms())
                self._dirty = False
            if max(durable, self._context.control.flushed) >= self._snapshot.log_end:
                self._store.write(self._snapshot)
                self._snapshot = None
        except OSError as error:
            self._fail("timercheck could not be saved yet", error)

    def _begin(self, store: TimerStore) -> int:
        """No message of the slots from read_ms on that has been delivered lies below this position of the log."""
        begins = [self._releases.begin, *(slot.begin for slot in self._slots.values())]
        if self._inherited is not None:
            begin, until_ms = self._inherited
            if store.read_ms < until_ms:
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


_topic_hash = functools.lru_cache(4096)(java_hash)


def _is_cancelled(parked: Parked, cancelled: set[str]) -> bool:
    """RocketMQ 5.3.0 names the message by its unique id alone, later releases by topic and unique id."""
    unique, topic = parked.text(names.UNIQ_KEY), parked.real_topic
    return not cancelled.isdisjoint({unique, topic + unique, f"{topic}+{unique}"})
