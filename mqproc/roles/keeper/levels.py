"""Delivery by delay level: 18 queues of SCHEDULE_TOPIC_XXXX, each in order.

    queue level − 1   │ delivered … │ batch under way │ due │ not due ……│
                       offset        one at a time            ▲ timed by the monotonic clock

The tags code of a unit is its delivery time. A level waits for the time of its head. A head further ahead than the
level's delay, because the clock was set back, is due at once, as in RocketMQ. Records that retention or damage has
removed are skipped and counted as lost. Nothing else is skipped: a batch that cannot be stored is retried, and messages
that are refused for their own sake move to a longer level (`delivery_queue`).

`delayOffset.json` is saved once the log is durable up to every delivery that it counts, so a power loss may repeat
deliveries but loses none.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from mqproc.errors import CorruptStoreError
from mqproc.layout import control
from mqproc.roles.delivery_queue import DeliveryQueue, IncrementalSave, reschedule_delayed
from mqproc.roles.role import RoleContext
from mqproc.roles.scheduled_records import ScheduledRecords
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.views import QueueBounds
from mqproc.store.schedule.levels import NO_LOG_POSITION, DelayOffsets
from mqproc.store.sync_guard import SyncGuard
from mqproc.topic_names import SCHEDULE_TOPIC
from mqproc.types import PullStatus
from mqproc.util.units import DELAY_LEVELS, delays_ms_of

BATCH_MESSAGES: Final = 512
BATCH_BYTES: Final = 4 << 20
_NEVER_NS: Final = 1 << 62
_MS: Final = 1_000_000


@dataclass(slots=True)
class _Level:
    """A level: `offset` of its first undelivered unit, monotonic `due_ns` of that unit."""

    level: int
    delay_ms: int
    offset: int = 0
    busy: bool = False
    due_ns: int = 0
    head: int = -1
    caught_up: bool = False  # No unit is left that was due when this keeper started.

    @property
    def queue_id(self) -> int:
        return self.level - 1


class LevelDelivery:
    """Delivers by levels. A restarted keeper continues from the file and the log."""

    def __init__(
        self, context: RoleContext, reading: StoreQueries, deliveries: DeliveryQueue, syncs: SyncGuard
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._io = context.io
        self._paths = context.paths
        self._words = context.control.words
        self._reading = reading
        self._deliveries = deliveries
        self._syncs = syncs
        self._saved_offsets: dict[int, int] = {}
        self._inherited = 0  # Log position; deliveries of a predecessor that the file lacks lie at or above it.
        self._snapshot: tuple[dict[int, int], int, int] | None = None
        self._save = IncrementalSave(self._clock, self._save_steps, self._save_failed)
        self._file = DelayOffsets()
        # RocketMQ may have used more levels than this store has; their messages are delivered too.
        delays_ms = delays_ms_of(context.options.message_delay_level)
        more_ms = [max(delays_ms)] * (DELAY_LEVELS - len(delays_ms))
        self._delays_ms = delays_ms
        self._levels = [_Level(level, delay_ms) for level, delay_ms in enumerate([*delays_ms, *more_ms], 1)]
        self._loaded = False
        if deliveries.ready:
            self._load()

    @property
    def due_ns(self) -> int:
        """Time of the next work unless a message arrives or the delivery queue becomes ready."""
        if not self._loaded:
            return _NEVER_NS
        due_ns = min((level.due_ns for level in self._levels if not level.busy), default=_NEVER_NS)
        if self._save.under_way:
            return self._clock.monotonic_ns()
        return min(due_ns, self._save.due_ns) if self.changed else due_ns

    def recheck(self) -> None:
        """Check every idle level in the next step for new messages."""
        for level in self._levels:
            if level.head < 0:
                level.due_ns = 0

    def step(self) -> int:
        """Deliver due messages; returns the number of messages."""
        if not self._loaded:
            if not self._deliveries.ready:
                return 0
            self._load()
        now_ns = self._clock.monotonic_ns()
        done = 0
        for level in self._levels:
            if not level.busy and level.due_ns <= now_ns:
                done += self._deliver_due(level)
        if self._save.under_way or (self.changed and now_ns >= self._save.due_ns):
            self._save.step()
        return done

    def count_pending(self) -> int:
        """Number of waiting messages; 0 until delivery progress is loaded."""
        if not self._loaded:
            return 0
        found = [self._bounds(level) for level in self._levels]
        pairs = zip(self._levels, found, strict=True)
        return sum(max(0, bounds.max_offset - level.offset) for level, bounds in pairs if bounds is not None)

    # One level

    def _bounds(self, level: _Level) -> QueueBounds | None:
        return self._reading.queues.bounds(SCHEDULE_TOPIC, level.queue_id)

    def _deliver_due(self, level: _Level) -> int:
        bounds = self._bounds(level)
        if bounds is not None and level.offset < bounds.min_offset:
            self._lose(level, bounds.min_offset, "no longer in the log")
        if bounds is None or level.offset >= bounds.max_offset:
            level.head, level.due_ns, level.caught_up = -1, _NEVER_NS, True
            return 0
        held = level.head == level.offset
        due_count = self._due_units(level, bounds)
        if due_count == 0 and held:
            # Due by the monotonic clock, whatever the wall clock says.
            due_count = 1
        if due_count == 0:
            level.head = level.offset
            return 0
        level.head = -1
        return self._deliver(level, due_count)

    def _due_units(self, level: _Level, bounds: QueueBounds) -> int:
        """Number of due units from the head on; if none, `due_ns` is set to the time of the head."""
        count_max = min(bounds.max_offset - level.offset, BATCH_MESSAGES)
        place = SCHEDULE_TOPIC, level.queue_id, level.offset
        try:
            data = self._reading.files.read_units(*place, count_max, bounds.number)
        except FileNotFoundError:
            return count_max  # The pull reports the reason.
        units = as_units(data)
        due_ms = units["tags_code"].astype(np.int64)
        now_ms = self._clock.time_ms()
        ahead = (due_ms > now_ms) & (due_ms <= now_ms + level.delay_ms)
        count = int(np.argmax(ahead)) if ahead.any() else len(due_ms)
        if count:
            late_ms = np.maximum(now_ms - due_ms[:count], 0)
            self._words[control.DELIVERY_LATE_MS] = int(late_ms.max())
            return count
        # An undue head does not prove it undelivered: the clock may have been set back.
        level.caught_up = level.caught_up or not self._deliveries.was_delivered(
            units["physical_offset"].astype(np.int64)
        )
        # The monotonic clock is read last, so the time between the readings makes delivery late, never early.
        level.due_ns = self._clock.monotonic_ns() + (int(due_ms[0]) - now_ms) * _MS
        return 0

    def _deliver(self, level: _Level, count: int) -> int:
        pulled = self._reading.pull(SCHEDULE_TOPIC, level.queue_id, level.offset, count, BATCH_BYTES)
        if pulled.status is not PullStatus.FOUND:
            self._lose(level, max(pulled.next_offset, level.offset), f"{pulled.status} {pulled.detail}".strip())
            level.due_ns = 0
            return 1
        found = ScheduledRecords(pulled.records, pulled.count)
        named = found.has_topic
        if not named.all():
            self._count_lost(level, int((~named).sum()), "no target topic")
        if (gone := pulled.next_offset - level.offset - pulled.count) > 0:
            self._count_lost(level, gone, "no longer in the log")
        level.busy = True
        messages = found.to_deliver(named, keeps_real=True)
        self._deliveries.start(
            messages,
            lambda: self._record_delivery(level, pulled.next_offset),
            lambda refused: reschedule_delayed(refused, level.level, self._delays_ms),
        )
        return len(found)

    def _record_delivery(self, level: _Level, offset: int) -> None:
        self._io.crash_point("delay.delivered")
        self._move(level, offset)
        level.busy = False
        level.due_ns = 0

    def _lose(self, level: _Level, offset: int, why: str) -> None:
        if offset > level.offset:
            self._count_lost(level, offset - level.offset, why)
            self._move(level, offset)

    def _move(self, level: _Level, offset: int) -> None:
        level.offset = offset
        self._words[control.LEVEL_OFFSETS[level.queue_id]] = offset

    def _count_lost(self, level: _Level, count: int, why: str) -> None:
        self._words.add(control.DELIVERIES_LOST, count)
        self._context.heartbeat.log_error(
            "delayed messages are lost", level=level.level, queue_offset=level.offset, messages=count, why=why
        )

    # The file

    def _load(self) -> None:
        """Load offsets from the file, and from the log the marks of deliveries that the file lacks."""
        self._loaded = True
        try:
            self._file = DelayOffsets.load(self._io, self._paths)
            loaded = bool(self._file.offsets)
        except CorruptStoreError as error:
            event = "delayOffset.json cannot be read, deliveries are read from the log"
            self._context.heartbeat.log_error(event, error=str(error))
            loaded = False
        written = self._words[control.WRITTEN]
        begin = self._file.log
        if begin == NO_LOG_POSITION:
            # Deliveries of RocketMQ have no marks. Without a file any delivery in the log may be ours.
            begin = self._take_over() if loaded else self._words[control.MIN_PHYSICAL_OFFSET]
        for level in self._levels:
            level.offset = self._file.offsets.get(level.level, 0)
            bounds = self._bounds(level)
            if self._context.incarnation == 1:
                # The log is fully dispatched. RocketMQ also clamps at its start.
                level.offset = min(level.offset, bounds.max_offset if bounds is not None else 0)
            self._move(level, level.offset)
        self._inherited = written
        if begin < written and self.count_pending():
            self._inherited = begin
            with self._context.heartbeat.busy(control.STATE_RECOVERING):
                self._deliveries.delivered_marks |= self._deliveries.delivery_marks.marks(begin, written)
        self._saved_offsets = dict(self._file.offsets)

    def _take_over(self) -> int:
        """Record the log position from which deliveries have marks, before the first one."""
        self._file.log = min(self._words[control.WRITTEN], self._context.control.flushed)
        try:
            if not self._syncs.has_failed():
                self._file.save(self._io, self._syncs, self._paths, self._clock.time_ms())
        except OSError as error:
            self._save_failed(error)
        return self._file.log

    def _offsets(self) -> dict[int, int]:
        """Delivered offsets of levels that ever had a message."""
        return {level.level: level.offset for level in self._levels if level.offset}

    @property
    def changed(self) -> bool:
        """Whether the file lacks deliveries."""
        return self._save.under_way or self._snapshot is not None or self._offsets() != self._saved_offsets

    def _begin(self) -> int:
        """Log position at or above which every delivery lies that the offsets do not count."""
        begin = self._deliveries.begin
        return begin if all(level.caught_up for level in self._levels) else min(begin, self._inherited)

    def save(self, durable: int) -> None:
        """Write the current offsets; the caller has made the log durable up to `durable`.

        Does nothing before the file was loaded.
        """
        if self._loaded:
            self._snapshot = None
            self._save.save_all(durable)

    def _save_failed(self, error: OSError) -> None:
        self._deliveries.note_errno("delayOffset.json", error.errno or errno.EIO)
        self._context.heartbeat.log_error("delayOffset.json could not be saved, retrying", error=str(error))

    def _save_steps(self, durable: int) -> Iterator[None]:
        """Write a snapshot of the offsets once the deliveries that it counts are durable.

        With `durable` 0 the flushers determine that. Otherwise the snapshot ends at `durable`, so that later appends do
        not keep a stopping keeper from saving.
        """
        if self._syncs.has_failed():
            return  # After a failed sync the next run reads deliveries from the log.
        if self._snapshot is None:
            end = durable or self._words[control.WRITTEN]
            self._snapshot = (self._offsets(), min(self._begin(), end), end)
        offsets, log, end = self._snapshot
        if max(durable, self._context.control.flushed) < end:
            return
        self._file.offsets = self._file.offsets | offsets
        self._file.log = log
        yield from self._file.save_steps(self._io, self._syncs, self._paths, self._clock.time_ms())
        self._snapshot = None
        self._saved_offsets = dict(offsets)
        self._deliveries.note_errno("delayOffset.json", 0)
