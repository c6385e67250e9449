"""Dispatch (RocketMQ: reput): convert a range of the log to queue units and index entries.

    log ──▶ records ──▶ units, in runs of one queue      ──▶ one pwrite a run
                   └──▶ (key hash, offset, store time)   ──▶ kernels/index.py

`scan` validates and parses complete records in one pass; `sort_units` then groups the 20-byte units by run, so that the
units of a queue are contiguous. Properties are parsed; bodies and CRCs are not read. No files are accessed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mqproc.kernels.crc import MASK_32
from mqproc.kernels.hashing import index_key_hash, java_hash_utf8, tag_seed
from mqproc.kernels.jit.compile import inlined, kernel
from mqproc.kernels.jit.intrinsics import (
    copy_bytes,
    load_be32,
    load_be64,
    load_le64,
    load_u8,
    store_be32,
    store_be64,
    trailing_zeros,
)
from mqproc.kernels.jit.lowering import Bytes, Int32s, Words
from mqproc.kernels.record_check import BAD_OFFSET, BLANK, prefetch_stride, record_size, store_timestamp_at, topic_of
from mqproc.kernels.record_fields import DELETED, ONES, UNKNOWN, find_byte, find_queue_of_record, same_bytes
from mqproc.layout import consume_queue, properties, queue_table, record
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.layout.index_file import KEY_TOPIC_SEPARATOR
from mqproc.topic_names import SCHEDULE_TOPIC
from mqproc.util.units import DELAY_LEVELS, DELAYS_MS

Runs = NDArray[np.int64]


class StopReason(enum.IntEnum):
    """Reason for the end of a scan."""

    LIMIT = 0
    """All records that begin below the limit are dispatched."""
    RECORDS = 1
    """The maximum number of records is reached."""
    BLANK = 2
    """A BLANK: the log continues at the start of the next segment."""
    UNKNOWN_QUEUE = 3
    """The record's queue is not in the table."""
    BAD_RECORD = 4
    """No valid record begins here."""
    ENTRIES_FULL = 5
    """The entries of the next record do not fit the buffer."""


class IndexEntries(enum.IntEnum):
    """Index entries that a scan collects."""

    NONE = 0
    KEYS = 1
    """Unique ids and keys."""
    KEYS_AND_TAGS = 2
    """Also tags, as RocketMQ since 5.4."""
    KEYS_AND_MARKED_TAGS = 3
    """The same, with TAG_MARK added to the hashes of tags."""


TAG_MARK: Final = -(1 << 31)

_TAGS, _MARKED_TAGS = int(IndexEntries.KEYS_AND_TAGS), int(IndexEntries.KEYS_AND_MARKED_TAGS)
_LIMIT, _RECORDS, _BLANK, _UNKNOWN_QUEUE, _BAD_RECORD, _ENTRIES_FULL = (int(reason) for reason in StopReason)

# Indices into the scan's state, int64[STATE_SIZE]. Positions are bytes of the segment.
(
    START,
    LIMIT,  # records that begin at or above it belong to the next scan
    STOP,  # nothing at or above it is read
    SEGMENT_START,  # CommitLog offset of the segment's byte 0
    MAX_RECORDS,
    WITH_ENTRIES,  # of IndexEntries
    # results
    STOPPED_AT,
    REASON,
    RECORDS,
    UNITS,
    RUNS,
    ENTRIES,
    STORE_TIMESTAMP_MS,  # of the last record, 0 without records
    # the current record
    TOPIC_AT,
    TOPIC_SIZE,
    PROPERTIES_AT,
    PROPERTIES_END,
    UNIQ_KEY_AT,
    UNIQ_KEY_END,
    KEYS_AT,
    KEYS_END,
    TAGS_AT,
    TAGS_END,
    DELAY_AT,
    DELAY_END,
    # set once by the caller
    LEVELS,  # number of delay levels
    DELAYS,  # first of the delays in ms, one for each level
) = range(27)
STATE_SIZE = DELAYS + DELAY_LEVELS

# Columns of a run, int64[RUN_COLUMNS]: units of one queue with consecutive queue offsets.
(
    RUN_QUEUE,  # number in the queue table
    RUN_FIRST_OFFSET,
    RUN_COUNT,
    RUN_BYTE_OFFSET,  # in the sorted units
    RUN_PHYSICAL_END,  # of the last record
    RUN_STORE_TIMESTAMP_MS,  # of the last record
) = range(6)
RUN_COLUMNS = 6

# The shortest key takes two bytes with its separator, which bounds the number of a record's entries.
RECORD_ENTRIES_MAX: Final = record.PROPERTIES_SIZE_MAX // 2 + 2

_SEPARATOR_CODE = ord(KEY_TOPIC_SEPARATOR)

_BELOW_3 = 3 * ONES
_SPACE = ord(" ")
_NAME_END = ord(properties.NAME_END)
_PAIR_END = ord(properties.PAIR_END)
assert max(_NAME_END, _PAIR_END) < 3


def _name_word(name: str, start: int, size: int) -> int:
    return int.from_bytes(name.encode()[start : start + size], "big")


_KEYS_WORD = _name_word(properties.KEYS, 0, 4)
_TAGS_WORD = _name_word(properties.TAGS, 0, 4)
_DELAY_WORD = _name_word(properties.DELAY, 0, 4)
_DELAY_LAST = _name_word(properties.DELAY, 4, 1)
_UNIQ_KEY_WORD = _name_word(properties.UNIQ_KEY, 0, 8)
assert [len(name) for name in (properties.KEYS, properties.TAGS, properties.DELAY, properties.UNIQ_KEY)] == [4, 4, 5, 8]

_SCHEDULE_SIZE = len(SCHEDULE_TOPIC)
_SCHEDULE_WORDS = tuple(_name_word(SCHEDULE_TOPIC, start, 8) for start in (0, 8, _SCHEDULE_SIZE - 8))

# Cache of the current topic's queue numbers by the low bits of the queue id: pairs of (generation and id, number).
CACHE_SIZE = 256


@inlined
def _parse_record(log: Bytes, at: int, stop: int, state: Words) -> int:
    """Size of the record at `at`, located in `state`; −reason if it is invalid."""
    total = record_size(log, at, stop)
    if total < 0:
        return total
    if load_be64(log, at + record.PHYSICAL_OFFSET) != state[SEGMENT_START] + at:
        return -BAD_OFFSET
    topic, topic_size = topic_of(log, at)
    state[TOPIC_AT] = topic
    state[TOPIC_SIZE] = topic_size
    state[PROPERTIES_AT] = topic + topic_size + 2
    state[PROPERTIES_END] = at + total
    return total


@inlined
def _match_property(log: Bytes, state: Words, at: int, name_end: int, end: int) -> None:
    """Record the value (name_end, end) if the name in [at, name_end) is one that dispatch needs."""
    if name_end <= at or end <= name_end + 1:
        return  # RocketMQ ignores pairs without a name or a value.
    size = name_end - at
    if size == 4:
        word = load_be32(log, at)
        if word == _TAGS_WORD:
            state[TAGS_AT] = name_end + 1
            state[TAGS_END] = end
        elif word == _KEYS_WORD:
            state[KEYS_AT] = name_end + 1
            state[KEYS_END] = end
    elif size == 8:
        if load_be64(log, at) == _UNIQ_KEY_WORD:
            state[UNIQ_KEY_AT] = name_end + 1
            state[UNIQ_KEY_END] = end
    elif size == 5 and load_be32(log, at) == _DELAY_WORD and load_u8(log, at + 4) == _DELAY_LAST:
        state[DELAY_AT] = name_end + 1
        state[DELAY_END] = end


@inlined
def _find_properties(log: Bytes, state: Words) -> None:
    """Locate the values of UNIQ_KEY, KEYS, TAGS and DELAY; end = 0 if a property is absent.

    The last pair of a name wins. Pairs end with 0x02 and are split at their first 0x01. Each step tests eight bytes for
    values below 3. The test may also flag other bytes above the lowest match, and bytes after the end, so each match is
    compared again.
    """
    state[UNIQ_KEY_END] = 0
    state[KEYS_END] = 0
    state[TAGS_END] = 0
    state[DELAY_END] = 0
    pair_at = int(state[PROPERTIES_AT])
    stop = int(state[PROPERTIES_END])
    name_end = -1
    at = pair_at
    while at < stop:
        word = load_le64(log, at) if at + 8 <= stop else load_le64(log, stop - 8) >> 8 * (8 - (stop - at))
        found = ((word - _BELOW_3) & ~word) >> 7 & ONES
        while found != 0:
            place = at + (trailing_zeros(found) >> 3)
            if place >= stop:
                break
            found &= found - 1
            byte = load_u8(log, place)
            if byte == _PAIR_END:
                _match_property(log, state, pair_at, name_end, place)
                pair_at = place + 1
                name_end = -1
            elif byte == _NAME_END and name_end < 0:
                name_end = place
        at += 8
    # The final separator may be missing.
    _match_property(log, state, pair_at, name_end, stop)


@inlined
def _is_schedule_topic(log: Bytes, at: int, size: int) -> bool:
    if size != _SCHEDULE_SIZE:
        return False
    first, second, last = _SCHEDULE_WORDS
    return load_be64(log, at) == first and load_be64(log, at + 8) == second and load_be64(log, at + size - 8) == last


@kernel
def _delay_level(log: Bytes, at: int, stop: int) -> int:
    """Parse the decimal number in [at, stop), which saturates; 0 if it is not a positive number."""
    if load_u8(log, at) == 43 and at + 1 < stop:  # '+'
        at += 1
    level = 0
    while at < stop:
        digit = load_u8(log, at) - 48
        if digit < 0 or digit > 9:
            return 0
        level = min(level * 10 + digit, 1_000_000)
        at += 1
    return level


@inlined
def _tags_code(log: Bytes, state: Words, is_schedule: bool, store_timestamp_ms: int) -> int:
    """Tags code of the unit: the hash of the tag, or in the schedule topic the delivery time."""
    if is_schedule and state[DELAY_END] != 0:
        level = _delay_level(log, state[DELAY_AT], state[DELAY_END])
        if level > 0:
            return store_timestamp_ms + int(state[DELAYS - 1 + min(level, int(state[LEVELS]))])
    if state[TAGS_END] == 0:
        return 0
    return java_hash_utf8(log, state[TAGS_AT], state[TAGS_END], 0)


@inlined
def _put_entries(
    log: Bytes, state: Words, prefix_hash: int, offset: int, time_ms: int, hashes: Int32s, offsets: Words, times: Words
) -> int:
    """Append the entries of the current record; returns their number, −1 if they do not fit."""
    first = int(state[ENTRIES])
    entry = first
    if state[UNIQ_KEY_END] != 0:
        if entry == hashes.size:
            return -1
        hashes[entry] = index_key_hash(java_hash_utf8(log, state[UNIQ_KEY_AT], state[UNIQ_KEY_END], prefix_hash))
        entry += 1
    if state[KEYS_END] != 0:
        at = int(state[KEYS_AT])
        stop = int(state[KEYS_END])
        while at < stop:
            end = find_byte(log, at, stop, _SPACE)
            if end > at:
                if entry == hashes.size:
                    return -1
                hashes[entry] = index_key_hash(java_hash_utf8(log, at, end, prefix_hash))
                entry += 1
            at = end + 1
    if state[WITH_ENTRIES] >= _TAGS and state[TAGS_END] != 0:
        if entry == hashes.size:
            return -1
        tag_hash = index_key_hash(java_hash_utf8(log, state[TAGS_AT], state[TAGS_END], tag_seed(prefix_hash)))
        hashes[entry] = tag_hash + TAG_MARK if state[WITH_ENTRIES] == _MARKED_TAGS else tag_hash
        entry += 1
    for added in range(first, entry):
        offsets[added] = offset
        times[added] = time_ms
    return entry - first


@inlined
def _put_unit(
    units: Bytes, run_of_unit: Int32s, run_of_queue: Int32s, runs: Words, state: Words, number: int, queue_offset: int
) -> int:
    """Add a unit to its queue's run, or to a new one; returns the run's column in `runs`."""
    run = int(run_of_queue[number]) - 1
    column = run * RUN_COLUMNS
    if run < 0 or runs[column + RUN_FIRST_OFFSET] + runs[column + RUN_COUNT] != queue_offset:
        run = int(state[RUNS])
        column = run * RUN_COLUMNS
        runs[column + RUN_QUEUE] = number
        runs[column + RUN_FIRST_OFFSET] = queue_offset
        runs[column + RUN_COUNT] = 0
        run_of_queue[number] = run + 1
        state[RUNS] = run + 1
    runs[column + RUN_COUNT] += 1
    run_of_unit[state[UNITS]] = run
    return column


@kernel
def sort_units(
    units: Bytes, sorted_units: Bytes, run_of_unit: Int32s, run_of_queue: Int32s, runs: Words, state: Words
) -> None:
    """Copy the units run by run to `sorted_units` uint8[20 × records]; clear `run_of_queue`.

    The other arrays are those of `scan`.
    """
    offset = 0
    for run in range(state[RUNS]):
        column = run * RUN_COLUMNS
        runs[column + RUN_BYTE_OFFSET] = offset
        offset += UNIT_SIZE * runs[column + RUN_COUNT]
        run_of_queue[runs[column + RUN_QUEUE]] = 0
    for unit in range(state[UNITS]):
        cursor = run_of_unit[unit] * RUN_COLUMNS + RUN_BYTE_OFFSET
        copy_bytes(sorted_units, runs[cursor], units, UNIT_SIZE * unit, UNIT_SIZE)
        runs[cursor] += UNIT_SIZE
    for run in range(state[RUNS]):
        column = run * RUN_COLUMNS
        runs[column + RUN_BYTE_OFFSET] -= UNIT_SIZE * runs[column + RUN_COUNT]


@kernel
def scan(
    log: Bytes,
    state: Words,
    table: Bytes,
    cells: Words,
    slots: Int32s,
    cache: Words,
    units: Bytes,
    run_of_unit: Int32s,
    run_of_queue: Int32s,
    runs: Words,
    hashes: Int32s,
    offsets: Words,
    times: Words,
) -> None:
    """Scan records of `log`, a segment, with the parameters state[START:WITH_ENTRIES + 1].

    `state` int64[STATE_SIZE]; `table`, `cells`, `slots` are the queue table's views; `cache` int64[2 × CACHE_SIZE];
    `units` uint8[20 × records]; `run_of_unit` int32[records]; `run_of_queue` int32[queues], initially 0; `runs`
    int64[RUN_COLUMNS × records]; `hashes` int32[n], `offsets` and `times` int64[n] receive the index entries. Results
    accumulate in state[RECORDS:STORE_TIMESTAMP_MS + 1], initially 0; STOPPED_AT and REASON describe the end. Only
    complete records are counted. Finish with `sort_units`.
    """
    at = int(state[START])
    limit = int(state[LIMIT])
    stop = int(state[STOP])
    records = int(state[RECORDS])
    state[REASON] = _RECORDS
    cache[:] = 0
    generation = 0
    last_total = 0
    last_topic_at = -1
    last_topic_size = -1
    topic_hash = 0
    prefix_hash = 0
    is_schedule = False
    while records < state[MAX_RECORDS]:
        if at >= limit:
            state[REASON] = _LIMIT
            break
        total = _parse_record(log, at, stop, state)
        if total < 0:
            state[REASON] = _BLANK if total == -BLANK else _BAD_RECORD
            break

        topic_at = int(state[TOPIC_AT])
        topic_size = int(state[TOPIC_SIZE])
        prefetch_stride(log, at, total, last_total)
        last_total = total
        if topic_size != last_topic_size or not same_bytes(log, topic_at, log, last_topic_at, topic_size):
            topic_hash = java_hash_utf8(log, topic_at, topic_at + topic_size, 0)
            prefix_hash = 31 * topic_hash + _SEPARATOR_CODE
            is_schedule = _is_schedule_topic(log, topic_at, topic_size)
            generation += 1
        last_topic_at = topic_at
        last_topic_size = topic_size

        physical_offset = int(state[SEGMENT_START]) + at
        sys_flag = load_be32(log, at + record.SYS_FLAG)
        transaction = sys_flag & record.SYS_FLAG_TRANSACTION_MASK
        number = DELETED
        queue_offset = 0
        if transaction == 0 or transaction == record.SYS_FLAG_COMMIT:
            queue_id = load_be32(log, at + record.QUEUE_ID)
            queue_offset = load_be64(log, at + record.QUEUE_OFFSET)
            if not 0 <= queue_offset < consume_queue.QUEUE_OFFSET_LIMIT:
                state[REASON] = _BAD_RECORD
                break
            cached = 2 * (queue_id & (CACHE_SIZE - 1))
            cache_key = (generation << 32) + (queue_id & MASK_32)
            if cache[cached] == cache_key:
                number = int(cache[cached + 1])
            else:
                number = find_queue_of_record(
                    table, cells, slots, log, topic_at, topic_size, topic_hash, queue_id, physical_offset, queue_offset
                )
                if number == UNKNOWN:
                    state[REASON] = _UNKNOWN_QUEUE
                    break
                # Not cached if deleted: records of the queue's next generation may follow.
                if number >= 0:
                    cache[cached] = cache_key
                    cache[cached + 1] = number

        _find_properties(log, state)
        store_timestamp_ms = load_be64(log, store_timestamp_at(log, at))
        if state[WITH_ENTRIES] != 0 and transaction != record.SYS_FLAG_ROLLBACK:
            added = _put_entries(log, state, prefix_hash, physical_offset, store_timestamp_ms, hashes, offsets, times)
            if added < 0:
                state[REASON] = _ENTRIES_FULL
                break
            state[ENTRIES] += added
        if number >= 0:
            run = _put_unit(units, run_of_unit, run_of_queue, runs, state, number, queue_offset)
            runs[run + RUN_PHYSICAL_END] = physical_offset + total
            runs[run + RUN_STORE_TIMESTAMP_MS] = store_timestamp_ms
            unit_at = UNIT_SIZE * int(state[UNITS])
            store_be64(units, unit_at + consume_queue.PHYSICAL_OFFSET, physical_offset)
            store_be32(units, unit_at + consume_queue.SIZE, total)
            tags_code = _tags_code(log, state, is_schedule, store_timestamp_ms)
            store_be64(units, unit_at + consume_queue.TAGS_CODE, tags_code)
            state[UNITS] += 1
        state[STORE_TIMESTAMP_MS] = store_timestamp_ms
        records += 1
        at += total
    state[STOPPED_AT] = at
    state[RECORDS] = records


# Buffers of a scan.


class ScanResult(msgspec.Struct, frozen=True, eq=False):
    """Result of a scan, whose arrays are valid until the next one. `stopped_at`: segment byte.

    `runs` int64[runs, RUN_COLUMNS] is ordered by first record: the
    last run of a queue holds its newest record. Index entries in log order: `hashes` int32[entries], `offsets` and
    `times` int64[entries].
    """

    stopped_at: int
    reason: StopReason
    records: int
    store_timestamp_ms: int
    runs: NDArray[np.int64]
    units: NDArray[np.uint8]
    hashes: NDArray[np.int32]
    offsets: NDArray[np.int64]
    times: NDArray[np.int64]

    @property
    def entries(self) -> int:
        return len(self.hashes)


class ScanProgress(NamedTuple):
    """Progress of a scan since `begin`: where and why it stopped, records and runs found."""

    stopped_at: int
    reason: StopReason
    records: int
    runs: int


# Indexing a tuple is ten times as fast as looking up an enum member by value.
_REASONS = tuple(StopReason)
assert [int(reason) for reason in _REASONS] == list(range(len(_REASONS)))
Zeros = Callable[[int, DTypeLike], NDArray[Any]]


def state_with(delays_ms: Sequence[int], zeros: Zeros = np.zeros) -> NDArray[np.int64]:
    """State of a scan with the delays of the levels, beginning with level 1."""
    state = zeros(STATE_SIZE, np.int64)
    state[LEVELS] = len(delays_ms)
    state[DELAYS : DELAYS + len(delays_ms)] = delays_ms
    return state


class DispatchBuffers:
    """Arrays filled by scans, allocated once."""

    def __init__(
        self,
        queues: int,
        records_max: int,
        entries_max: int,
        zeros: Zeros = np.zeros,
        delays_ms: Sequence[int] = DELAYS_MS,
    ) -> None:
        """Allocate buffers for tables of `queues` queues and scans of up to `records_max` records.

        `delays_ms` are the delays of the levels, beginning with level 1. `zeros` allocates the arrays; pass an
        allocator of shared memory if another process scans.
        """
        self.records_max = records_max
        entries_max = max(entries_max, RECORD_ENTRIES_MAX)
        self._state = state_with(delays_ms, zeros)
        self._hashes = zeros(entries_max, np.int32)
        self._offsets = zeros(entries_max, np.int64)
        self._times = zeros(entries_max, np.int64)
        self._cache = zeros(2 * CACHE_SIZE, np.int64)
        self._units = zeros(UNIT_SIZE * records_max, np.uint8)
        self._sorted_units = zeros(UNIT_SIZE * records_max, np.uint8)
        self._run_of_unit = zeros(records_max, np.int32)
        self._run_of_queue = zeros(queues, np.int32)
        self._runs = zeros(RUN_COLUMNS * records_max, np.int64)
        self._is_finished = True

    def scan(
        self,
        log: NDArray[np.uint8],
        table: NDArray[np.uint8],
        cells: NDArray[np.int64],
        slots: NDArray[np.int32],
        *,
        start: int,
        limit: int,
        stop: int,
        segment_start: int,
        entries: IndexEntries = IndexEntries.KEYS,
    ) -> ScanResult:
        """Scan the records that begin in [start, limit); nothing at or above `stop` is read."""
        self.begin()
        self.add(
            log, table, cells, slots,
            start=start, limit=limit, stop=stop, segment_start=segment_start,
            records_max=self.records_max, entries=entries,
        )  # fmt: skip
        return self.finish()

    def begin(self) -> None:
        """Discard the previous results, also those of an unfinished scan."""
        if not self._is_finished:
            self._run_of_queue[:] = 0
        self._is_finished = False
        self._state[RECORDS : STORE_TIMESTAMP_MS + 1] = 0

    def add(
        self,
        log: NDArray[np.uint8],
        table: NDArray[np.uint8],
        cells: NDArray[np.int64],
        slots: NDArray[np.int32],
        *,
        start: int,
        limit: int,
        stop: int,
        segment_start: int,
        records_max: int,
        entries: IndexEntries = IndexEntries.KEYS,
    ) -> int:
        """Continue a scan with up to `records_max` records; call `begin` before and `finish` after.

        Returns the position in the segment where it stopped.
        """
        state = self._state
        records_end = min(int(state[RECORDS]) + records_max, self.records_max)
        state[: WITH_ENTRIES + 1] = (start, min(limit, stop), stop, segment_start, records_end, entries)
        scan(
            log, state, table, cells, slots, self._cache, self._units, self._run_of_unit, self._run_of_queue,
            self._runs, self._hashes, self._offsets, self._times,
        )  # fmt: skip
        return int(state[STOPPED_AT])

    def progress(self) -> ScanProgress:
        """Progress since `begin`."""
        state = self._state.tolist()
        return ScanProgress(state[STOPPED_AT], _REASONS[state[REASON]], state[RECORDS], state[RUNS])

    def finish(self) -> ScanResult:
        """Sort the units and return the results since `begin`."""
        sort_units(self._units, self._sorted_units, self._run_of_unit, self._run_of_queue, self._runs, self._state)
        self._is_finished = True
        return self.result()

    def result(self) -> ScanResult:
        """The results of the last scan, also if another process made it."""
        state = self._state.tolist()
        run_count, entry_count = state[RUNS], state[ENTRIES]
        return ScanResult(
            stopped_at=state[STOPPED_AT],
            reason=_REASONS[state[REASON]],
            records=state[RECORDS],
            store_timestamp_ms=state[STORE_TIMESTAMP_MS],
            runs=self._runs[: RUN_COLUMNS * run_count].reshape(run_count, RUN_COLUMNS),
            units=self._sorted_units[: UNIT_SIZE * state[UNITS]],
            hashes=self._hashes[:entry_count],
            offsets=self._offsets[:entry_count],
            times=self._times[:entry_count],
        )


def warm() -> None:
    """Compile or load these kernels."""
    buffers = DispatchBuffers(1, 1, 1)
    blank = np.zeros(8, np.uint8)
    table = np.zeros(queue_table.HEADER_SIZE, np.uint8)
    buffers.scan(blank, table, table.view(np.int64), np.zeros(16, np.int32), start=0, limit=8, stop=8, segment_start=0)
