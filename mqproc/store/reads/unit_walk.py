"""Walking a queue's units and gathering their records: what pulls, ranges and counts have in common.

    ConsumeQueue files ──units──▶ kernels.gather ◀──views── CommitLog segments
                                       └──▶ records, one after the other

The kernel does all that is done per message; this module feeds it chunks of units and the segment that they point into.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels import gather as kernel
from mqproc.kernels.record_check import BAD_OFFSET, REASON_NAMES, VERIFY_ALL
from mqproc.layout.consume_queue import FILLER_SIZE, physical_offset_of
from mqproc.layout.record_codec import decode_record
from mqproc.store.consume_queue import UNIT_SIZE, ConsumeQueueFiles, as_units
from mqproc.store.reads.log_records import LogRecords
from mqproc.store.reads.passing import Passing
from mqproc.store.segments import PAGES_AROUND_BYTES

FIRST_CHUNK_UNITS = 1024
# A chunk's records may lie far apart, and what is read of the log stays present until the chunk is done.
CHUNK_UNITS_MAX = 8192
# Damaged records that one answer steps over; fillers cost nothing and are passed over a chunk at a time.
DAMAGED_RUN_MAX = 1024
# What a look by Python counts as: it takes as long as the kernel's at so many bytes of records, about.
DECIDED_LOOK_BYTES = 64 << 10
_NOTHING = np.empty(0, np.uint8)
_NO_WORDS = np.zeros(0, np.int64)
# What a walk tells the kernel at its beginning: UNIT … QUEUE.
_STATE = struct.Struct(f"={kernel.QUEUE + 1}q")


class Halt(enum.Enum):
    """Why a walk ended."""

    DONE = "every unit was looked at"
    LIMIT = "a limit is reached"
    LOOKED = "records that do not match took as much work as one run may"
    DAMAGE = "the next unit has no intact record"
    NO_UNITS = "the file of the next unit is not there"


class Miss(enum.Enum):
    """Why the last unit that gave nothing gave nothing."""

    NONE = 0
    FILTERED = 1
    REMOVED = 2


@dataclass(slots=True)
class Limits:
    """Where a walk ends, and what passes beside the tags. Times in ms, the end not included."""

    messages: int = 1 << 62
    bytes: int = 1 << 62
    look_bytes: int = 1 << 62
    """What the records that do not match may cost a run: their bytes, and kernels.gather.LOOK_BYTES each; those that
    Python looks at, DECIDED_LOOK_BYTES more."""
    born_begin_ms: int = kernel.TIME_MIN
    born_end_ms: int = kernel.TIME_MAX
    store_begin_ms: int = kernel.TIME_MIN
    store_end_ms: int = kernel.TIME_MAX
    verify: int = VERIFY_ALL
    copy: bool = True
    segment_by_segment: bool = False
    """Removed segments are passed over one at a time, as RocketMQ does: the filter is asked about each one's units."""


class Counts:
    """Where walks count what they hand out. The kernel counts in memory that this keeps alive."""

    __slots__ = ("_kept", "state")

    def __init__(self, words: NDArray[np.int64] = _NO_WORDS, table: NDArray[np.int64] = _NO_WORDS) -> None:
        """`words` int64 is the control file, `table` int64 the queue table; both empty where nothing is counted."""
        self._kept = words, table
        self.state = np.zeros(kernel.STATE_SIZE, np.int64)
        """A walk's state before its beginning: a copy of it costs no more than an empty one."""
        if len(words):
            self.state[kernel.COUNTS], self.state[kernel.TABLE] = words.ctypes.data, table.ctypes.data


NOT_COUNTED = Counts()


@dataclass(slots=True)
class Damage:
    """Queue offsets [first, stop) without intact records; the log positions that they name; what is wrong."""

    first: int
    stop: int
    physical_begin: int
    physical_end: int
    reason: str

    def __str__(self) -> str:
        place = f"[{self.physical_begin}, {self.physical_end})"
        return f"queue offsets [{self.first}, {self.stop}) have no intact record: log {place}: {self.reason}"


class Walk:
    """One walk over units of one queue; `run` can be told to go on. `next_offset` is the first unit not consumed."""

    __slots__ = (
        "_counts",
        "_files",
        "_filter",
        "_limits",
        "_number",
        "_out",
        "_queue",
        "_records",
        "_scratch",
        "_state",
        "_units",
        "_view",
        "miss",
        "next_offset",
    )

    def __init__(
        self,
        records: LogRecords,
        files: ConsumeQueueFiles,
        queue: tuple[str, int],
        number: int,
        next_offset: int,
        passing: Passing,
        limits: Limits,
        counts: Counts = NOT_COUNTED,
    ) -> None:
        """`queue` is (topic, queue id), `number` its number in the queue table."""
        self._counts = counts  # Kept: the state has addresses of its memory.
        self._records = records
        self._files = files
        self._queue = queue
        self._number = number
        self.next_offset = next_offset
        self._filter = passing
        self._scratch = passing.scratch()
        self._limits = limits
        self.miss = Miss.NONE
        self._out = _NOTHING
        self._view = _NOTHING
        self._units = _NOTHING
        state = self._state = counts.state.copy()
        _STATE.pack_into(
            state.data,
            0,
            *(0, 0, 0, 0, 0),
            limits.verify,
            limits.copy,
            limits.messages,
            limits.bytes,
            limits.born_begin_ms,
            limits.born_end_ms,
            limits.store_begin_ms,
            limits.store_end_ms,
            number,
        )

    @property
    def count(self) -> int:
        """Records gathered."""
        return int(self._state[kernel.COUNT])

    @property
    def gathered(self) -> NDArray[np.uint8]:
        """The records, one after the other; its memory belongs to the caller."""
        return self._out[: int(self._state[kernel.OUT_AT])]

    def run(self, stop_offset: int) -> Halt:
        """Look at units up to `stop_offset`."""
        begin, end = self._records.visible()
        self._state[kernel.LOG_STOP] = end
        self._state[kernel.LOOK_BYTES_LEFT] = self._limits.look_bytes
        chunk = FIRST_CHUNK_UNITS
        while self.next_offset < stop_offset:
            wanted = min(chunk, stop_offset - self.next_offset)
            if not self._read_units(wanted):
                return Halt.NO_UNITS
            if self._limits.copy and not self.count:
                self._make_room(whole=self.next_offset + wanted >= stop_offset)
            self._enter_first_segment(begin, end)
            halt = self._chunk(begin, end)
            self._account()
            if halt is not Halt.DONE:
                return halt
            chunk = min(4 * chunk, CHUNK_UNITS_MAX)
        return Halt.DONE

    def uncount(self) -> None:
        """Take back what was counted: the records are not handed out."""
        kernel.uncount(self._state)

    def _account(self) -> None:
        """Tell what was read of the log: all between the first and the last record, or each one where few lie there."""
        looked_at = int(self._state[kernel.UNIT])
        if looked_at == 0:
            return
        first = physical_offset_of(self._units.data, 0)
        last = physical_offset_of(self._units.data, looked_at - 1)
        if 0 <= last - first < looked_at * PAGES_AROUND_BYTES:
            self._records.segments.touched(first, last - first + 1)
        else:
            self._records.segments.touched_at(as_units(self._units)["physical_offset"][:looked_at].astype(np.int64))

    def step_over_damage(self, stop_offset: int) -> Damage:
        """After Halt.DAMAGE: consume the units that have no intact record, up to the next one that has."""
        damage = self._consume_damaged(None)
        for _ in range(DAMAGED_RUN_MAX):
            if not self._next_is_damaged(stop_offset):
                break
            damage = self._consume_damaged(damage)
        return damage

    def pass_over_as_removed(self) -> None:
        """After Halt.DAMAGE: take it as RocketMQ takes a record that it cannot read, for one that retention removed."""
        physical_offset = max(0, int(as_units(self._units)[int(self._state[kernel.UNIT])]["physical_offset"]))
        self._pass_over_segment(self._records.segments.start_of(physical_offset))
        self._state[kernel.UNIT] += 1
        self.next_offset += 1

    def _next_is_damaged(self, stop_offset: int) -> bool:
        """Whether the walk would stop at once for damage. Only what the units say of it stays changed."""
        if self.next_offset >= stop_offset:
            return False
        at, miss, before = self.next_offset, self.miss, self._state.copy()
        self._state[kernel.COUNT_LIMIT], self._state[kernel.COPY] = 1 << 62, 0
        halt = self.run(min(stop_offset, at + FIRST_CHUNK_UNITS))
        damaged = halt is Halt.DAMAGE and self.next_offset == at
        before[kernel.UNIT], before[kernel.UNIT_STOP] = 0, self._state[kernel.UNIT_STOP]
        before[kernel.DAMAGE], before[kernel.BASE] = self._state[kernel.DAMAGE], self._state[kernel.BASE]
        self._state, self.next_offset, self.miss = before, at, miss
        return damaged

    def _consume_damaged(self, damage: Damage | None) -> Damage:
        """The unit at UNIT, and when it is a filler all fillers behind it in the chunk."""
        unit = int(self._state[kernel.UNIT])
        units = as_units(self._units)[unit:]
        first = units[0]
        physical, size = int(first["physical_offset"]), int(first["size"])
        if size == FILLER_SIZE:
            others = np.flatnonzero(units["size"] != FILLER_SIZE)
            run = int(others[0]) if len(others) else len(units)
            physical, physical_end, reason = self._hole(physical)
        else:
            run, physical_end = 1, physical + max(size, 0)
            reason = REASON_NAMES[int(self._state[kernel.DAMAGE])]
        if damage is None:
            damage = Damage(self.next_offset, self.next_offset, physical, physical_end, reason)
        self.next_offset += run
        damage.stop = self.next_offset
        damage.physical_begin = min(damage.physical_begin, physical)
        damage.physical_end = max(damage.physical_end, physical_end)
        return damage

    def _hole(self, position: int) -> tuple[int, int, str]:
        """(begin, end, what is wrong) of what the fillers here stand for, as far as it is known."""
        begin = self._files.last_end(*self._queue, self.next_offset, self._number)
        following = self._files.position_at(*self._queue, self.next_offset, self._number)
        end = following if following is not None and following >= begin else int(self._state[kernel.LOG_STOP])
        holes = self._records.holes_named(position, begin, end)
        if not holes:
            return position, position, "a hole"
        return holes[0].start, holes[-1].stop, f"a hole, {holes[0].kind}"

    def _read_units(self, count: int) -> bool:
        try:
            data = self._files.read_units(*self._queue, self.next_offset, count, self._number)
        except FileNotFoundError:
            return False
        # A copy: to have the kernel see bytes that may not be written costs more than a few units do.
        self._units = np.frombuffer(bytearray(data), np.uint8)
        self._state[kernel.UNIT] = self._state[kernel.DECIDED_UNIT] = 0
        self._state[kernel.UNIT_STOP] = len(self._units) // UNIT_SIZE
        return len(self._units) >= UNIT_SIZE

    def _make_room(self, *, whole: bool) -> None:
        """A buffer for the answer: as large as its units say, or as its limit when more units may follow."""
        limit = self._limits.bytes
        if whole:
            limit = min(limit, kernel.sum_of_sizes(self._units, 0, int(self._state[kernel.UNIT_STOP])))
        if len(self._out) < max(limit, 1):
            self._out = np.empty(max(limit, 1), np.uint8)

    def _chunk(self, begin: int, end: int) -> Halt:
        """Gather from the units that were read, segment by segment."""
        state = self._state
        while True:
            before = int(state[kernel.UNIT])
            state[kernel.LAST_FILTERED] = 0
            passing = self._filter
            reason = kernel.gather(
                self._units,
                self._view,
                passing.codes,
                passing.tags,
                passing.ends,
                passing.program,
                passing.texts,
                self._scratch,
                self._out,
                state,
            )
            self.next_offset += int(state[kernel.UNIT]) - before
            if state[kernel.LAST_FILTERED]:
                self.miss = Miss.FILTERED
            if reason == kernel.UNITS_DONE:
                return Halt.DONE
            if reason in (kernel.COUNT_REACHED, kernel.BYTES_REACHED):
                return Halt.LIMIT
            if reason == kernel.LOOKED_ENOUGH:
                return Halt.LOOKED
            if reason in (kernel.DAMAGED, kernel.FILLER):
                return Halt.DAMAGE
            unit = as_units(self._units)[int(state[kernel.UNIT])]
            if reason == kernel.OUT_FULL:
                if self.count:
                    return Halt.LIMIT
                self._out = np.empty(int(unit["size"]), np.uint8)
            elif reason == kernel.UNDECIDED:
                self._decide(int(unit["physical_offset"]), int(unit["size"]))
            elif not self._enter_segment(int(unit["physical_offset"]), begin, end):
                return Halt.DAMAGE

    def _decide(self, physical_offset: int, size: int) -> None:
        """Look at the properties of the next unit's record where the kernel left that to Python: at a copy of its
        `size` bytes alone, since a segment may have a gibibyte."""
        state, sql = self._state, self._filter.sql
        assert sql is not None
        at = physical_offset - int(state[kernel.BASE])
        message = decode_record(self._view[at : at + size].data, check_crc=False)
        state[kernel.DECIDED] = int(sql.matches(message.properties))
        state[kernel.DECIDED_UNIT] = state[kernel.UNIT] + 1
        state[kernel.LOOK_BYTES_LEFT] -= DECIDED_LOOK_BYTES

    def _enter_first_segment(self, begin: int, end: int) -> None:
        """Let the kernel see at once what it asks for unless a tag passes over it: the segment of the first unit."""
        physical_offset = physical_offset_of(self._units.data, 0)
        if self._view is _NOTHING and not len(self._filter.codes) and begin <= physical_offset < end:
            self._enter_segment(physical_offset, begin, end)

    def _enter_segment(self, physical_offset: int, begin: int, end: int) -> bool:
        """Let the kernel see the segment that the next unit points into; False when it points nowhere."""
        if physical_offset < 0 or physical_offset >= end:
            self._state[kernel.DAMAGE] = BAD_OFFSET
            return False
        start = self._records.segments.start_of(physical_offset)
        found = self._records.segment(physical_offset) if physical_offset >= begin else None
        if found is None:
            # Retention took the segment: what points below the next one is passed over.
            first_left = begin - self._records.segments.segment_size
            self._pass_over_segment(start if self._limits.segment_by_segment else max(start, first_left))
        else:
            self._state[kernel.BASE], self._view = found
        return True

    def _pass_over_segment(self, start: int) -> None:
        """What points below the end of the segment at `start` is gone."""
        self._state[kernel.SKIP_BELOW] = start + self._records.segments.segment_size
        self.miss = Miss.REMOVED
