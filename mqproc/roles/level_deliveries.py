"""Delivery of messages with a delay level: 18 queues of SCHEDULE_TOPIC_XXXX, each in the order it was stored.

    queue level − 1   │ delivered … │ release under way │ due by now │ not due ……│
                       offset        one batch at a time              ▲ held by the monotonic clock until due

A unit's tags code is its time to deliver at. A level's head is held until that time; one that lies further ahead than
the level's delay, because the clock was set back, is due at once, as in RocketMQ. A record that is gone, by retention
or by damage, is passed over and counted. Otherwise nothing is: a batch that cannot be stored is tried until it can, and
messages that are refused for their own sake wait in a longer level (`parked_again.py`).

`save` writes `delayOffset.json` once the log is durable up to every delivery that it counts, so a loss of power
makes deliveries again and loses none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from mqproc.delay_levels import DELAY_LEVELS, delays_ms_of
from mqproc.errors import CorruptStoreError
from mqproc.layout import control as words_of
from mqproc.message import PullStatus
from mqproc.names import SCHEDULE_TOPIC
from mqproc.roles.log import get_logger
from mqproc.roles.loop import RoleContext
from mqproc.roles.parked_again import delayed_again
from mqproc.roles.parted_save import PartedSave
from mqproc.roles.released import ParkedRecords
from mqproc.roles.releases import Releases
from mqproc.store.consume_queue import as_units
from mqproc.store.delays.delay_offsets import NO_LOG_POSITION, DelayOffsets
from mqproc.store.delays.made_from import MadeFrom
from mqproc.store.final_syncs import FinalSyncs
from mqproc.store.reads.queue_bounds import QueueBounds
from mqproc.store.reads.reading import StoreReading

# So many are on their way to the writer some ms after they are due.
BATCH_MESSAGES: Final = 512
BATCH_BYTES: Final = 4 << 20
_NEVER_NS: Final = 1 << 62
_MS: Final = 1_000_000


@dataclass(slots=True)
class _Level:
    """One level: `offset` is its first unit that is not delivered, `due_ns` the monotonic time at which that is due."""

    level: int
    delay_ms: int
    offset: int = 0
    busy: bool = False
    due_ns: int = 0
    head: int = -1
    caught_up: bool = False  # nothing is left that was due when this keeper began

    @property
    def queue_id(self) -> int:
        return self.level - 1


class LevelDeliveries:
    """The keeper's delivery by levels. A restarted one goes on from the file, and from what the log has since."""

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
        self._io = context.io
        self._paths = context.paths
        self._words = context.control.words
        self._log = get_logger()
        self._reading = reading
        self._releases = releases
        self._syncs = syncs
        self._saved_offsets: dict[int, int] = {}
        self._inherited = 0  # no delivery of a predecessor's that the file does not count lies below this position
        self._snapshot: tuple[dict[int, int], int, int] | None = None
        self._save = PartedSave(self._clock, self._save_steps, self._save_failed)
        self._file = DelayOffsets()
        # RocketMQ may have had more levels than this store has: what waits there is delivered too.
        delays_ms = delays_ms_of(context.options.message_delay_level)
        more_ms = [max(delays_ms)] * (DELAY_LEVELS - len(delays_ms))
        self._delays_ms = delays_ms
        self._levels = [_Level(level, delay_ms) for level, delay_ms in enumerate([*delays_ms, *more_ms], 1)]
        self._made_from = made_from
        self._loaded = False
        if releases.settled:
            self._load()

    @property
    def due_ns(self) -> int:
        """When `step` has something to do at the latest, unless a message comes, or the releases settle."""
        if not self._loaded:
            return _NEVER_NS
        due_ns = min((level.due_ns for level in self._levels if not level.busy), default=_NEVER_NS)
        if self._save.under_way:
            return self._clock.monotonic_ns()
        return min(due_ns, self._save.due_ns) if self.changed else due_ns

    def look_again(self) -> None:
        """Look at every level in the next step: something may have come."""
        for level in self._levels:
            if level.head < 0:
                level.due_ns = 0

    def step(self) -> int:
        """Release what is due; returns how many messages."""
        if not self._loaded:
            if not self._releases.settled:
                return 0
            self._load()
        now_ns = self._clock.monotonic_ns()
        done = 0
        for level in self._levels:
            if not level.busy and level.due_ns <= now_ns:
                done += self._deliver_due(level)
        if self._save.under_way or (self.changed and now_ns >= self._save.due_ns):
            self._save.go_on()
        return done

    def count_pending(self) -> int:
        """Messages that wait for their time; none as long as nobody knows how many of them were delivered."""
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
            self._lose(level, bounds.min_offset, "the log does not have them any more")
        if bounds is None or level.offset >= bounds.max_offset:
            level.head, level.due_ns, level.caught_up = -1, _NEVER_NS, True
            return 0
        held = level.head == level.offset
        due_count = self._due_units(level, bounds)
        if due_count == 0 and held:
            # Held by the monotonic clock until now: the other one may say what it likes.
            due_count = 1
        if due_count == 0:
            level.head = level.offset
            return 0
        level.head = -1
        return self._release(level, due_count)

    def _due_units(self, level: _Level, bounds: QueueBounds) -> int:
        """How many units from the head on are due; when none is, `due_ns` is when the head will be."""
        wanted = min(bounds.max_offset - level.offset, BATCH_MESSAGES)
        try:
            data = self._reading.files.read_units(SCHEDULE_TOPIC, level.queue_id, level.offset, wanted, bounds.number)
        except FileNotFoundError:
            return wanted  # The pull says what has become of them.
        units = as_units(data)
        due_ms = units["tags_code"].astype(np.int64)
        now_ms = self._clock.time_ms()
        ahead = (due_ms > now_ms) & (due_ms <= now_ms + level.delay_ms)
        count = int(np.argmax(ahead)) if ahead.any() else len(due_ms)
        if count:
            late_ms = np.maximum(now_ms - due_ms[:count], 0)
            self._words[words_of.DELIVERY_LATE_MS] = int(late_ms.max())
            return count
        # With a clock that was set back it is no sign that a predecessor has not delivered it.
        level.caught_up = level.caught_up or not self._releases.has_made(units["physical_offset"].astype(np.int64))
        # This clock after the other one: what passes between the two makes it late, never early.
        level.due_ns = self._clock.monotonic_ns() + (int(due_ms[0]) - now_ms) * _MS
        return 0

    def _release(self, level: _Level, count: int) -> int:
        pulled = self._reading.pull(SCHEDULE_TOPIC, level.queue_id, level.offset, count, BATCH_BYTES)
        if pulled.status is not PullStatus.FOUND:
            self._lose(level, max(pulled.next_offset, level.offset), f"{pulled.status} {pulled.detail}".strip())
            level.due_ns = 0
            return 1
        found = ParkedRecords(pulled.records, pulled.count)
        named = found.names_topic
        if not named.all():
            self._count_lost(level, int((~named).sum()), "they name no topic to go to")
        if (gone := pulled.next_offset - level.offset - pulled.count) > 0:
            self._count_lost(level, gone, "the log does not have them any more")
        level.busy = True
        messages = found.released(named, keeps_real=True)
        self._releases.start(
            messages,
            lambda: self._delivered(level, pulled.next_offset),
            lambda refused: delayed_again(refused, level.level, self._delays_ms),
        )
        return len(found)

    def _delivered(self, level: _Level, offset: int) -> None:
        self._io.crash_point("delay.delivered")
        level.offset = offset
        level.busy = False
        level.due_ns = 0

    def _lose(self, level: _Level, offset: int, why: str) -> None:
        if offset > level.offset:
            self._count_lost(level, offset - level.offset, why)
            level.offset = offset

    def _count_lost(self, level: _Level, count: int, why: str) -> None:
        self._words.add(words_of.DELIVERIES_LOST, count)
        self._context.heart.failed()
        self._log.error(
            "delayed messages are lost", level=level.level, queue_offset=level.offset, messages=count, why=why
        )

    # The file

    def _load(self) -> None:
        """Offsets from the file, and from the log the marks of deliveries that the file does not count."""
        self._loaded = True
        try:
            self._file = DelayOffsets.load(self._io, self._paths)
            known = bool(self._file.offsets)
        except CorruptStoreError as error:
            self._context.heart.failed()
            self._log.error("delayOffset.json cannot be read: the log tells what was delivered", error=str(error))
            known = False
        written = self._words[words_of.WRITTEN]
        begin = self._file.log
        if begin == NO_LOG_POSITION:
            # RocketMQ's deliveries bear no marks; without a file any delivery in the log may be ours.
            begin = self._take_over() if known else self._words[words_of.MIN_PHYSICAL_OFFSET]
        for level in self._levels:
            level.offset = self._file.offsets.get(level.level, 0)
            bounds = self._bounds(level)
            if self._context.incarnation == 1:
                # All is dispatched, so the queue's end is its end. As RocketMQ does at its start.
                level.offset = min(level.offset, bounds.max_offset if bounds is not None else 0)
        self._inherited = written
        if begin < written and self.count_pending():
            self._inherited = begin
            with self._context.heart.busy(words_of.STATE_RECOVERING):
                self._releases.known |= self._made_from.marks(begin, written)
        self._saved_offsets = dict(self._file.offsets)

    def _take_over(self) -> int:
        """From here on deliveries bear marks. The next keeper may follow a kill before the first of them is counted."""
        self._file.log = min(self._words[words_of.WRITTEN], self._context.control.flushed)
        try:
            if not self._syncs.ended():
                self._file.save(self._io, self._syncs, self._paths, self._clock.time_ms())
        except OSError as error:
            self._save_failed(error)
        return self._file.log

    def _offsets(self) -> dict[int, int]:
        """Delivered offsets of the levels that ever had a message."""
        return {level.level: level.offset for level in self._levels if level.offset}

    @property
    def changed(self) -> bool:
        """Whether the file does not say yet what was delivered."""
        return self._save.under_way or self._snapshot is not None or self._offsets() != self._saved_offsets

    def _begin(self) -> int:
        """No delivery that the offsets do not count lies below this position of the log."""
        begin = self._releases.begin
        return begin if all(level.caught_up for level in self._levels) else min(begin, self._inherited)

    def save(self, durable: int) -> None:
        """Write the offsets as of now; `durable` is a position that the caller has made the log durable up to.

        What was not loaded stays as it is: the file alone says what is delivered.
        """
        if self._loaded:
            self._snapshot = None
            self._save.whole(durable)

    def _save_failed(self, error: OSError) -> None:
        self._context.heart.failed()
        self._log.error("delayOffset.json could not be saved yet", error=str(error))

    def _save_steps(self, durable: int) -> Iterator[None]:
        """Write the offsets as they were when the log had the part of it that is durable now.

        With `durable` 0 the flushers say up to where it is. Otherwise what the caller found written has all that is
        counted: what a writer has appended since must not keep a stopping keeper from saving.
        """
        if self._syncs.ended():
            return  # Once a sync has failed the log tells a next run what was delivered.
        if self._snapshot is None:
            end = durable or self._words[words_of.WRITTEN]
            self._snapshot = (self._offsets(), min(self._begin(), end), end)
        offsets, log, end = self._snapshot
        if max(durable, self._context.control.flushed) < end:
            return
        self._file.offsets = self._file.offsets | offsets
        self._file.log = log
        yield from self._file.save_steps(self._io, self._syncs, self._paths, self._clock.time_ms())
        self._snapshot = None
        self._saved_offsets = dict(offsets)
