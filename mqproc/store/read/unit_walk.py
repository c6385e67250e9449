"""Walk over a queue's units that gathers their records, shared by pulls, ranges and counts.

    ConsumeQueue files ──units──▶ kernels.gather ◀──views── CommitLog segments
                                       └──▶ consecutive records

The kernel does all work per message; this module passes it chunks of units and the segments that they point into.
"""

from __future__ import annotations

import enum
import functools
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import BadRequestError
from mqproc.filters.compiler import CompiledFilter, compiled
from mqproc.kernels import gather as kernel
from mqproc.kernels import gather_sql
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.kernels.record_check import BAD_OFFSET, REASON_NAMES, VERIFY_ALL
from mqproc.kernels.sql import INSTRUCTION_SIZE
from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE, physical_offset_of
from mqproc.layout.properties import java_hash
from mqproc.layout.record_codec import decode_record
from mqproc.store.commitlog.segments import PAGES_AROUND_BYTES
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.read.records import LogRecords
from mqproc.topic_names import SCHEDULE_TOPIC

# Filters compiled for the kernel
#
# tags     hash in the unit ──▶ the tag itself in the record
# SQL92    hash in the unit, if the filter names the tags ──▶ properties of the record

_NOTHING = np.empty(0, np.uint8)
_NO_WORDS = np.zeros(0, np.int64)
# Characters that Java's String.trim removes.
_JAVA_BLANKS = "".join(map(chr, range(0x21)))
# Hashes have 32 bits: no unit has this one.
_NO_HASH = 1 << 32


@dataclass(frozen=True, slots=True)
class FilterProgram:
    """Filter by `codes` int64[k] (hashes), exact `tags` uint8 with `ends` int64[k], then `sql`.

    Empty codes and ends without `sql` accept everything.
    """

    codes: NDArray[np.int64]
    tags: NDArray[np.uint8]
    ends: NDArray[np.int64]
    sql: CompiledFilter | None = None

    @property
    def program(self) -> NDArray[np.int64]:
        """The program of the SQL92 filter; empty without one."""
        return _NO_WORDS if self.sql is None else self.sql.program.words

    @property
    def texts(self) -> NDArray[np.uint8]:
        return _NOTHING if self.sql is None else self.sql.program.texts

    @property
    def cost(self) -> int:
        """Upper bound of the steps of the SQL92 filter for a byte of a record."""
        return 1 + self.program.size // INSTRUCTION_SIZE + self.texts.size // WORD_BYTES

    def scratch(self) -> NDArray[np.int64]:
        """Working memory of an evaluation."""
        return _NO_WORDS if self.sql is None else np.zeros(self.sql.program.scratch_size, np.int64)


@functools.lru_cache(1024)
def compile_filter(topic: str, tags: tuple[str, ...] = (), sql: str = "") -> FilterProgram:
    """Compile a filter by tags or SQL92. Raises FilterSyntaxError, BadRequestError."""
    if tags and sql:
        raise BadRequestError("a filter is either by tags or by properties, not by both")
    if sql:
        compiled_sql = compiled(sql)
        codes = _NO_WORDS if compiled_sql.tags is None else _codes(topic, compiled_sql.tags)
        return FilterProgram(codes, _NOTHING, _NO_WORDS, compiled_sql)
    names = [tag.encode() for tag in tags]
    return FilterProgram(
        codes=_codes(topic, tags) if tags else _NO_WORDS,
        tags=as_kernel_array(bytearray(b"".join(names))),
        ends=np.cumsum([len(name) for name in names], dtype=np.int64),
    )


def _codes(topic: str, tags: Iterable[str]) -> NDArray[np.int64]:
    """Hashes of tags; for no tags one that no unit has.

    Empty for the schedule topic, whose units have the delivery time in place of the hash.
    """
    if topic == SCHEDULE_TOPIC:
        return _NO_WORDS
    return np.array(sorted({java_hash(tag) for tag in tags} or {_NO_HASH}), np.int64)


@functools.lru_cache(1024)
def compile_subscription(expression: str) -> FilterProgram:
    """Compile RocketMQ's subscription expression like `a || b`, by hash alone.

    The empty expression and `*` accept everything; one without tags accepts nothing.
    """
    if expression in ("", "*"):
        return FilterProgram(_NO_WORDS, _NOTHING, _NO_WORDS)
    tags = [tag for part in expression.split("||") if (tag := part.strip(_JAVA_BLANKS))]
    return FilterProgram(_codes("", tags), _NOTHING, _NO_WORDS)


# The walk

FIRST_CHUNK_UNITS = 1024
# The slowest filters take ten milliseconds for the largest properties.
FIRST_SQL_CHUNK_UNITS = 1
SQL_STEPS_MAX = 16 << 20
"""Limit of the steps of an SQL92 filter in a chunk of more than one record."""
# Bytes that a filter compares in one step.
WORD_BYTES = 8
RUN_NS = 5_000_000
NEVER_NS = 1 << 62
# Records of a chunk may be scattered, and their pages stay resident until the chunk is done.
CHUNK_UNITS_MAX = 8192
# Damaged records that one answer skips. Fillers cost nothing and are skipped a chunk at a time.
DAMAGED_RUN_MAX = 1024
# Cost of a check in Python, in bytes of records that the kernel checks in the same time.
DECIDED_LOOK_BYTES = 64 << 10
# State words that a walk sets initially: UNIT … QUEUE.
_STATE = struct.Struct(f"={kernel.QUEUE + 1}q")


class WalkEnd(enum.Enum):
    """Why a walk ended."""

    DONE = "all units are consumed"
    LIMIT = "a limit is reached"
    LOOKED = "non-matching records reached their cost limit"
    DAMAGE = "the next unit has no intact record"
    NO_UNITS = "the file of the next unit is missing"


class Miss(enum.Enum):
    """Why the last unit without a record gave none."""

    NONE = 0
    FILTERED = 1
    REMOVED = 2


@dataclass(slots=True)
class WalkLimits:
    """Limits of a walk, and conditions other than the filter. Times in ms, the end is excluded."""

    messages: int = 1 << 62
    bytes: int = 1 << 62
    look_bytes: int = 1 << 62
    """Cost limit of non-matching records per run: their bytes, plus kernels.gather.RECORD_SCAN_COST each, plus
    DECIDED_LOOK_BYTES for each one that Python checks."""
    born_begin_ms: int = kernel.TIME_MIN
    born_end_ms: int = kernel.TIME_MAX
    store_begin_ms: int = kernel.TIME_MIN
    store_end_ms: int = kernel.TIME_MAX
    verify: int = VERIFY_ALL
    copy: bool = True
    segment_by_segment: bool = False
    """Skip removed segments one at a time, as RocketMQ does: the filter is applied to the units of each."""


class PullCounters:
    """Counters for gathered records, in memory that this object keeps alive for the kernel."""

    __slots__ = ("_kept", "state")

    def __init__(self, words: NDArray[np.int64] = _NO_WORDS, table: NDArray[np.int64] = _NO_WORDS) -> None:
        """Count in `words` int64, the control file, and `table` int64; both empty to count nothing."""
        self._kept = words, table
        self.state = np.zeros(kernel.STATE_SIZE, np.int64)
        """Initial state of a walk: copying it costs no more than an empty one."""
        if len(words):
            self.state[kernel.COUNTS], self.state[kernel.TABLE] = words.ctypes.data, table.ctypes.data


NOT_COUNTED = PullCounters()


@dataclass(slots=True)
class DamagedUnits:
    """Queue offsets [first, stop) without intact records, their log positions, and the reason."""

    first: int
    stop: int
    physical_begin: int
    physical_end: int
    reason: str

    def __str__(self) -> str:
        place = f"[{self.physical_begin}, {self.physical_end})"
        return f"queue offsets [{self.first}, {self.stop}) have no intact record: log {place}: {self.reason}"


class QueueWalk:
    """A walk over units of one queue; `run` may be called repeatedly.

    `next_offset` is the first unit not consumed.
    """

    def __init__(
        self,
        records: LogRecords,
        files: ConsumeQueueFiles,
        queue: tuple[str, int],
        number: int,
        next_offset: int,
        filter_program: FilterProgram,
        limits: WalkLimits,
        counts: PullCounters = NOT_COUNTED,
    ) -> None:
        """`queue` is (topic, queue id), `number` its number in the queue table."""
        self._counts = counts  # Keeps the memory alive whose addresses the state has.
        self._records = records
        self._files = files
        self._queue = queue
        self._number = number
        self.next_offset = next_offset
        self._filter = filter_program
        self._scratch = filter_program.scratch()
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
        return int(self._state[kernel.COUNT])

    @property
    def gathered(self) -> NDArray[np.uint8]:
        """The gathered records; the memory belongs to the caller."""
        return self._out[: int(self._state[kernel.OUT_AT])]

    @property
    def next_file_offset(self) -> int:
        """First offset of the file after that of the next unit."""
        return self._files.next_file_offset(self.next_offset)

    def run(self, stop_offset: int) -> WalkEnd:
        """Consume units up to `stop_offset`.

        With an SQL92 filter, or without copying, a run ends after RUN_NS, as if its cost limit was reached: such a
        filter may take milliseconds for one record, and records that are only counted do not count for the limit.
        """
        begin, end = self._records.visible()
        self._state[kernel.LOG_STOP] = end
        self._state[kernel.SCAN_BUDGET] = self._limits.look_bytes
        is_sql = self._filter.sql is not None
        chunk = FIRST_SQL_CHUNK_UNITS if is_sql else FIRST_CHUNK_UNITS
        end_ns = time.monotonic_ns() + RUN_NS if is_sql or not self._limits.copy else NEVER_NS
        first_offset = self.next_offset
        while self.next_offset < stop_offset:
            count = min(chunk, stop_offset - self.next_offset)
            if not self._read_units(count):
                return WalkEnd.NO_UNITS
            if is_sql:
                self._limit_filter_steps()
            if self._limits.copy and not self.count:
                self._make_room(whole=self.next_offset + int(self._state[kernel.UNIT_STOP]) >= stop_offset)
            self._enter_first_segment(begin, end)
            halt = self._chunk(begin, end, first_offset, end_ns)
            self._account()
            if halt is not WalkEnd.DONE:
                return halt
            if self.next_offset < stop_offset and time.monotonic_ns() >= end_ns:
                return WalkEnd.LOOKED
            chunk = min(4 * chunk, CHUNK_UNITS_MAX)
        return WalkEnd.DONE

    def uncount(self) -> None:
        """Undo the counts: the records are not returned."""
        kernel.uncount(self._state)

    def _account(self) -> None:
        """Report the reads of the log: the records' whole range, or each record if scattered."""
        looked_at = int(self._state[kernel.UNIT])
        if looked_at == 0:
            return
        first = physical_offset_of(self._units.data, 0)
        last = physical_offset_of(self._units.data, looked_at - 1)
        if 0 <= last - first < looked_at * PAGES_AROUND_BYTES:
            self._records.segments.note_read(first, last - first + 1)
        else:
            self._records.segments.note_reads(as_units(self._units)["physical_offset"][:looked_at].astype(np.int64))

    def step_over_damage(self, stop_offset: int) -> DamagedUnits:
        """After WalkEnd.DAMAGE: consume units up to the next one with an intact record."""
        damage = self._consume_damaged(None)
        for _ in range(DAMAGED_RUN_MAX):
            if not self._next_is_damaged(stop_offset):
                break
            damage = self._consume_damaged(damage)
        return damage

    def skip_as_removed(self) -> None:
        """After WalkEnd.DAMAGE: treat the record as removed by retention, as RocketMQ does."""
        physical_offset = max(0, int(as_units(self._units)[int(self._state[kernel.UNIT])]["physical_offset"]))
        self._skip_segment(self._records.segments.start_of(physical_offset))
        self._state[kernel.UNIT] += 1
        self.next_offset += 1

    def _next_is_damaged(self, stop_offset: int) -> bool:
        """Whether the walk would stop at once for damage. Changes only the damage in the state."""
        if self.next_offset >= stop_offset:
            return False
        at, miss, before = self.next_offset, self.miss, self._state.copy()
        self._state[kernel.COUNT_LIMIT], self._state[kernel.COPY] = 1 << 62, 0
        halt = self.run(min(stop_offset, at + FIRST_CHUNK_UNITS))
        damaged = halt is WalkEnd.DAMAGE and self.next_offset == at
        before[kernel.UNIT], before[kernel.UNIT_STOP] = 0, self._state[kernel.UNIT_STOP]
        before[kernel.DAMAGE], before[kernel.BASE] = self._state[kernel.DAMAGE], self._state[kernel.BASE]
        self._state, self.next_offset, self.miss = before, at, miss
        return damaged

    def _consume_damaged(self, damage: DamagedUnits | None) -> DamagedUnits:
        """Consume the unit at UNIT, and if it is a filler all fillers that follow it in the chunk."""
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
            damage = DamagedUnits(self.next_offset, self.next_offset, physical, physical_end, reason)
        self.next_offset += run
        damage.stop = self.next_offset
        damage.physical_begin = min(damage.physical_begin, physical)
        damage.physical_end = max(damage.physical_end, physical_end)
        return damage

    def _hole(self, position: int) -> tuple[int, int, str]:
        """(begin, end, reason) of the hole that the fillers here represent, as far as it is known."""
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
        # A copy: converting read-only bytes for the kernel costs more for a few units.
        self._units = np.frombuffer(bytearray(data), np.uint8)
        self._state[kernel.UNIT] = self._state[kernel.DECIDED_UNIT] = 0
        self._state[kernel.UNIT_STOP] = len(self._units) // UNIT_SIZE
        return len(self._units) >= UNIT_SIZE

    def _limit_filter_steps(self) -> None:
        """Shorten the chunk so that the SQL92 filter takes SQL_STEPS_MAX at most, or one record."""
        count, limit = int(self._state[kernel.UNIT_STOP]), SQL_STEPS_MAX // self._filter.cost
        if count == 1 or kernel.sum_of_sizes(self._units, 0, count) <= limit:
            return
        candidates = np.arange(count)
        if len(self._filter.codes):
            found = kernel.match_units(self._units, 0, count, self._filter.codes, candidates)
            candidates = candidates[:found]
        sizes = as_units(self._units)["size"][candidates].astype(np.int64)
        fitting = int(np.searchsorted(sizes.clip(0).cumsum(), limit, "right"))
        if max(fitting, 1) < len(candidates):
            self._state[kernel.UNIT_STOP] = candidates[max(fitting, 1)]

    def _make_room(self, *, whole: bool) -> None:
        """Allocate the answer for the units' records, or up to the limit if more units may follow."""
        limit = self._limits.bytes
        if whole:
            limit = min(limit, kernel.sum_of_sizes(self._units, 0, int(self._state[kernel.UNIT_STOP])))
        if len(self._out) < max(limit, 1):
            self._out = np.empty(max(limit, 1), np.uint8)

    def _chunk(self, begin: int, end: int, first_offset: int, end_ns: int) -> WalkEnd:
        """Gather from the units read, segment by segment.

        A run that began at `first_offset` leaves no further decision to Python after `end_ns`.
        """
        state = self._state
        while True:
            before = int(state[kernel.UNIT])
            state[kernel.LAST_FILTERED] = 0
            filter_program = self._filter
            gather = kernel.gather if filter_program.sql is None else gather_sql.gather
            reason = gather(
                self._units,
                self._view,
                filter_program.codes,
                filter_program.tags,
                filter_program.ends,
                filter_program.program,
                filter_program.texts,
                self._scratch,
                self._out,
                state,
            )
            self.next_offset += int(state[kernel.UNIT]) - before
            if state[kernel.LAST_FILTERED]:
                self.miss = Miss.FILTERED
            if reason == kernel.UNITS_DONE:
                return WalkEnd.DONE
            if reason in (kernel.COUNT_REACHED, kernel.BYTES_REACHED):
                return WalkEnd.LIMIT
            if reason == kernel.BUDGET_SPENT:
                return WalkEnd.LOOKED
            if reason in (kernel.DAMAGED, kernel.FILLER):
                return WalkEnd.DAMAGE
            unit = as_units(self._units)[int(state[kernel.UNIT])]
            if reason == kernel.OUT_FULL:
                if self.count:
                    return WalkEnd.LIMIT
                self._out = np.empty(int(unit["size"]), np.uint8)
            elif reason == kernel.UNDECIDED:
                if self.next_offset > first_offset and time.monotonic_ns() >= end_ns:
                    return WalkEnd.LOOKED
                self._decide(int(unit["physical_offset"]), int(unit["size"]))
            elif not self._enter_segment(int(unit["physical_offset"]), begin, end):
                return WalkEnd.DAMAGE

    def _decide(self, physical_offset: int, size: int) -> None:
        """Apply the SQL92 filter in Python to the next record, where the kernel cannot decide.

        Only the record is copied: its segment may have a gibibyte.
        """
        state, sql = self._state, self._filter.sql
        assert sql is not None
        at = physical_offset - int(state[kernel.BASE])
        message = decode_record(self._view[at : at + size].data)
        state[kernel.DECIDED] = int(sql.matches(message.properties))
        state[kernel.DECIDED_UNIT] = state[kernel.UNIT] + 1
        state[kernel.SCAN_BUDGET] -= DECIDED_LOOK_BYTES

    def _enter_first_segment(self, begin: int, end: int) -> None:
        """Enter the first unit's segment in advance, unless a tag may skip it."""
        physical_offset = physical_offset_of(self._units.data, 0)
        if self._view is _NOTHING and not len(self._filter.codes) and begin <= physical_offset < end:
            self._enter_segment(physical_offset, begin, end)

    def _enter_segment(self, physical_offset: int, begin: int, end: int) -> bool:
        """Set the segment that the next unit points into; False if it points nowhere."""
        if physical_offset < 0 or physical_offset >= end:
            self._state[kernel.DAMAGE] = BAD_OFFSET
            return False
        start = self._records.segments.start_of(physical_offset)
        found = self._records.segment(physical_offset) if physical_offset >= begin else None
        if found is None:
            # Retention deleted the segment: skip units that point below the next one.
            first_left = begin - self._records.segments.segment_size
            self._skip_segment(start if self._limits.segment_by_segment else max(start, first_left))
        else:
            self._state[kernel.BASE], self._view = found
        return True

    def _skip_segment(self, start: int) -> None:
        """Skip units that point below the end of the segment at `start`."""
        self._state[kernel.SKIP_BELOW] = start + self._records.segments.segment_size
        self.miss = Miss.REMOVED
