"""Gathering a pull: limits, filters, damage, segments; output has all intact matches only."""

from __future__ import annotations

import json
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mqproc.filters.compiler import compiled
from mqproc.kernels import gather, gather_sql, record_check
from mqproc.kernels.jit.compile import plain
from mqproc.layout import consume_queue, control, queue_table, record
from mqproc.layout.consume_queue import EXTENSION_ADDRESS_MAX
from mqproc.layout.properties import java_hash
from mqproc.layout.record_codec import decode_records
from tests.support.records import BASE, SmallLog, decode_record, kernel_bytes, mutated, outcomes_uncompiled, small_log

UNIT = consume_queue.UNIT_SIZE
MUTATIONS = 60


@pytest.fixture(scope="module")
def log() -> SmallLog:
    return small_log()


def new_state(log: SmallLog, **changes: int) -> NDArray[np.int64]:
    state = np.zeros(gather.STATE_SIZE, np.int64)
    values = {
        "UNIT_STOP": len(log.units) // UNIT,
        "BASE": BASE,
        "LOG_STOP": BASE + len(log.segment),
        "VERIFY": record_check.VERIFY_CRCS,
        "COPY": 1,
        "COUNT_LIMIT": 1 << 40,
        "BYTES_LIMIT": 1 << 40,
        "BORN_BEGIN_MS": gather.TIME_MIN,
        "STORE_BEGIN_MS": gather.TIME_MIN,
        "BORN_END_MS": gather.TIME_MAX,
        "STORE_END_MS": gather.TIME_MAX,
        "SCAN_BUDGET": 1 << 40,
    } | changes
    for name, value in values.items():
        state[getattr(gather, name)] = value
    return state


def filtered(tags: tuple[str, ...]) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
    names = [tag.encode() for tag in tags]
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    return np.array([java_hash(tag) for tag in tags], np.int64), kernel_bytes(b"".join(names)), ends


def by_properties(expression: str) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
    """Arguments for a property filter; no filter when the expression is empty."""
    if not expression:
        return np.zeros(0, np.int64), np.zeros(0, np.uint8), np.zeros(0, np.int64)
    program = compiled(expression).program
    return program.words, program.texts, np.zeros(program.scratch_size, np.int64)


def gathered(
    log: SmallLog,
    tags: tuple[str, ...] = (),
    sql: str = "",
    room: int = 1 << 16,
    segment: bytes | None = None,
    **changes: int,
) -> tuple[int, bytes, NDArray[np.int64]]:
    """(reason, records, state); compiled and plain must agree and not write past the records."""
    found = []
    module = gather_sql if sql else gather
    for kernel in (module.gather, plain(module.gather)):
        state = new_state(log, **changes)
        out = np.full(room, 0x5A, np.uint8)
        view = kernel_bytes(log.segment if segment is None else segment)
        reason = kernel(kernel_bytes(log.units), view, *filtered(tags), *by_properties(sql), out, state)
        assert (out[state[gather.OUT_AT] :] == 0x5A).all()
        found.append((reason, out[: state[gather.OUT_AT]].tobytes(), state))
    assert found[0][:2] == found[1][:2]
    assert found[0][2].tolist() == found[1][2].tolist()
    return found[0]


def test_all_records_are_copied_unchanged(log: SmallLog) -> None:
    reason, records, state = gathered(log)
    assert reason == gather.UNITS_DONE
    assert records == log.records
    assert (state[gather.COUNT], state[gather.BYTES]) == (len(log.places), len(log.records))


def test_limits_exclude_unit_that_does_not_fit(log: SmallLog) -> None:
    reason, _records, state = gathered(log, COUNT_LIMIT=5)
    assert (reason, state[gather.UNIT], state[gather.COUNT]) == (gather.COUNT_REACHED, 5, 5)
    size = log.places[3][0]
    reason, records, state = gathered(log, BYTES_LIMIT=size + 1)
    assert (reason, len(records), state[gather.UNIT]) == (gather.BYTES_REACHED, size, 3)
    # The first record is returned whatever its size.
    reason, records, state = gathered(log, BYTES_LIMIT=1)
    assert (reason, len(records), state[gather.UNIT]) == (gather.BYTES_REACHED, log.places[0][1], 1)
    reason, records, state = gathered(log, room=log.places[2][0] + 3)
    assert (reason, len(records), state[gather.UNIT]) == (gather.OUT_FULL, log.places[2][0], 2)


@pytest.mark.parametrize("tags", [("Tag1",), ("Tag2", "Tag1"), ("schlußtag",), ("none",), ("Tag",)])
def test_tags_are_compared_as_text(log: SmallLog, tags: tuple[str, ...]) -> None:
    _reason, records, state = gathered(log, tags)
    messages = decode_records(log.records)
    assert [each.physical_offset for each in decode_records(records)] == [
        each.physical_offset for each in messages if each.tag in tags
    ]
    assert state[gather.UNIT] == len(messages)
    assert state[gather.LAST_FILTERED] == int(messages[-1].tag not in tags)


def test_delivered_records_are_counted(log: SmallLog) -> None:
    """Counted with the pull's first records, per queue; nothing is counted without copying."""
    number, generation = 3, 7 << 32
    place = queue_table.HEADER_WORDS + number * queue_table.ENTRY_WORDS + queue_table.DELIVERED
    for kernel, take_back in ((gather.gather, gather.uncount), (plain(gather.gather), plain(gather.uncount))):
        words = np.zeros(control.FILE_SIZE // 8, np.int64)
        table = np.zeros(queue_table.HEADER_WORDS + 8 * queue_table.ENTRY_WORDS, np.int64)

        def counted(words: NDArray[np.int64] = words) -> list[int]:
            places = (control.PULLED_MESSAGES, control.PULLED_BYTES, control.PULLS, control.QUERY_REQUESTS)
            return [int(words[place]) for place in places]

        arguments = (kernel_bytes(log.units), kernel_bytes(log.segment), *filtered(()), *by_properties(""))
        state = new_state(log, COUNT_LIMIT=2, QUEUE=generation + number)
        state[gather.COUNTS], state[gather.TABLE] = words.ctypes.data, table.ctypes.data
        out = np.zeros(1 << 16, np.uint8)
        assert kernel(*arguments, out, state) == gather.COUNT_REACHED
        assert counted() == [2, log.places[2][0], 1, 1]
        state[gather.COUNT_LIMIT] = 5
        kernel(*arguments, out, state)
        assert counted() == [5, log.places[5][0], 1, 1]
        assert (table[place], np.count_nonzero(table)) == (5, 1)
        take_back(state)
        assert counted() == [0, 0, 0, 0]
        assert not words.any()
        assert not table.any()

        state = new_state(log, COPY=0)
        state[gather.COUNTS], state[gather.TABLE] = words.ctypes.data, table.ctypes.data
        assert kernel(*arguments, out, state) == gather.UNITS_DONE
        assert not words.any()
        assert not table.any()


def test_colliding_hash_does_not_match(log: SmallLog) -> None:
    """Aa and BB have the same hash; the record with the other tag must not be returned."""
    assert java_hash("Aa") == java_hash("BB")
    units = b"".join(
        log.units[at : at + 12] + struct.pack(">q", java_hash("Aa")) for at in range(0, len(log.units), UNIT)
    )
    collided = SmallLog(log.segment, log.places, units)
    assert gathered(collided, ("BB",))[1] == b""


def test_time_bounds_filter_records(log: SmallLog) -> None:
    _reason, records, _state = gathered(log, BORN_BEGIN_MS=999_990, BORN_END_MS=999_995)
    assert [each.born_timestamp_ms for each in decode_records(records)] == [999_994, 999_993, 999_992, 999_991, 999_990]
    _reason, records, _state = gathered(log, STORE_BEGIN_MS=2_000_003, STORE_END_MS=2_000_005)
    assert [each.store_timestamp_ms for each in decode_records(records)] == [2_000_003, 2_000_004]


@pytest.mark.parametrize("born_ms", [-(1 << 63), gather.TIME_MIN - 1, gather.TIME_MAX, (1 << 63) - 1])
def test_any_born_time_passes_without_bounds(log: SmallLog, born_ms: int) -> None:
    at = log.places[3][0] + record.BORN_TIMESTAMP
    segment = log.segment[:at] + struct.pack(">q", born_ms) + log.segment[at + 8 :]
    of_any_time = gathered(log, segment=segment, VERIFY=0, STORE_BEGIN_MS=0)[2]
    assert of_any_time[gather.COUNT] == len(log.places)
    after = gathered(log, segment=segment, VERIFY=0, BORN_BEGIN_MS=0, STORE_BEGIN_MS=0)[2]
    assert after[gather.COUNT] == len(log.places) - (born_ms < 0)


def test_counting_copies_nothing(log: SmallLog) -> None:
    _reason, records, state = gathered(log, ("Tag1",), COPY=0)
    assert records == b""
    assert state[gather.COUNT] == sum(each.tag == "Tag1" for each in decode_records(log.records))


def test_gather_stops_at_damage_fillers_and_other_segments(log: SmallLog) -> None:
    start = log.places[4][0]
    broken = log.segment[: start + 12] + b"\xee" + log.segment[start + 13 :]
    reason, records, state = gathered(log, segment=broken)
    assert (reason, len(records), state[gather.UNIT]) == (gather.DAMAGED, start, 4)
    filler = struct.pack(">qiq", BASE, consume_queue.FILLER_SIZE, 0)
    holed = SmallLog(log.segment, log.places, log.units[: 2 * UNIT] + filler + log.units[3 * UNIT :])
    assert gathered(holed)[0] == gather.FILLER
    away = struct.pack(">qiq", BASE + (1 << 30), 100, 0)
    moved = SmallLog(log.segment, log.places, log.units[: 2 * UNIT] + away + log.units[3 * UNIT :])
    reason, _records, state = gathered(moved)
    assert (reason, state[gather.UNIT]) == (gather.OTHER_SEGMENT, 2)
    # Records above the visible end are not available yet.
    reason, _records, state = gathered(log, LOG_STOP=BASE + log.places[5][0] + 10)
    assert (reason, state[gather.UNIT]) == (gather.DAMAGED, 5)
    # Deleted records are skipped.
    _reason, records, _state = gathered(log, SKIP_BELOW=BASE + log.places[7][0])
    assert records == log.records[log.places[7][0] :]


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 1 << 30))
def test_only_intact_records_are_returned(seed: int) -> None:
    rng = random.Random(seed)
    log = small_log(count=8, seed=seed % 3)
    segment = mutated(log.segment, rng)
    units = mutated(log.units, rng) if rng.random() < 0.5 else log.units
    log = SmallLog(log.segment, log.places, units[: len(units) // UNIT * UNIT])
    _reason, records, state = gathered(log, segment=segment)
    at = 0
    for _ in range(int(state[gather.COUNT])):
        message = decode_record(records, at)
        position = message.physical_offset - BASE
        assert records[at : at + message.size] == segment[position : position + message.size]
        at += message.size
    assert at == len(records)


ADDRESS = "(address)"


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(("Aa", "BB", "C#", "other", "", ADDRESS)), max_size=60),
    st.sampled_from((("Aa",), ("Aa", "other"))),
)
def test_matching_units_by_hash(tags: list[str], wanted: tuple[str, ...]) -> None:
    """A unit with a ConsumeQueue extension address in place of its tags code may match."""
    hashes = [EXTENSION_ADDRESS_MAX if tag == ADDRESS else java_hash(tag) for tag in tags]
    units = b"".join(
        struct.pack(">qiq", 0, 0x7FFFFFFF if not tag else 1, code) for tag, code in zip(tags, hashes, strict=True)
    )
    codes = filtered(wanted)[0]
    expected = [i for i, tag in enumerate(tags) if tag == ADDRESS or (tag and java_hash(tag) in codes)]
    for kernel in (gather.match_units, plain(gather.match_units)):
        matches = np.zeros(len(tags), np.int64)
        count = kernel(kernel_bytes(units), 0, len(tags), codes, matches)
        assert matches[:count].tolist() == expected


def outcomes() -> list[list[int]]:
    """Results of gathers over damaged units and segments."""
    found = []
    for seed in range(MUTATIONS):
        rng = random.Random(seed)
        log = small_log(count=6, seed=seed % 3)
        units = mutated(log.units, rng)[: len(log.units) // UNIT * UNIT]
        state = new_state(log, UNIT_STOP=len(units) // UNIT)
        out = np.zeros(1 << 13, np.uint8)
        view = kernel_bytes(mutated(log.segment, rng))
        tags = filtered(("Tag1", "Tag2") if seed % 2 else ())
        sql = by_properties("TAGS IS NOT NULL" if seed % 5 == 0 else "")
        kernel = gather_sql.gather if seed % 5 == 0 else gather.gather
        reason = kernel(kernel_bytes(units), view, *tags, *sql, out, state)
        found.append([int(reason), int(out.sum()), *state.tolist()])
    return found


def test_uncompiled_gives_the_same_within_buffers() -> None:
    assert outcomes_uncompiled(__file__) == outcomes()


if __name__ == "__main__":
    print(json.dumps(outcomes()))
