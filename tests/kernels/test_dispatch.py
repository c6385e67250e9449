"""The dispatch scan against a model of RocketMQ's rules, and its plain twin against both.

Logs consist of random records (V1 and V2, IPv4 and IPv6, all transaction types, any properties); the model parses
them with `struct` and dictionaries.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mqproc.kernels import dispatch
from mqproc.kernels.dispatch import (
    RUN_COLUMNS,
    SCHEDULE_TOPIC,
    TAG_MARK,
    DispatchBuffers,
    IndexEntries,
    ScanProgress,
    ScanResult,
    StopReason,
)
from mqproc.kernels.jit.compile import COMPILED
from mqproc.layout import queue_table as table_layout
from mqproc.layout import record
from mqproc.layout.index_file import index_key_hash_of, tag_key
from mqproc.layout.properties import java_hash
from mqproc.util.units import DELAYS_MS

SEGMENT_START = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Record:
    """Fields of a record; `queue_offset` and similar fields are encoded as given."""

    topic: str = "TopicTest"
    queue_id: int = 0
    queue_offset: int = 0
    properties: bytes = b""
    body: bytes = b"body"
    sys_flag: int = 0
    store_timestamp_ms: int = 1_700_000_000_000
    v2: bool = False

    def encode(self, physical_offset: int) -> bytes:
        topic = self.topic.encode()
        born = bytes(20 if self.sys_flag & record.SYS_FLAG_BORN_HOST_V6 else 8)
        store = bytes(20 if self.sys_flag & record.SYS_FLAG_STORE_HOST_V6 else 8)
        head = struct.pack(
            ">iiiqqiq",
            0,
            self.queue_id,
            0,
            self.queue_offset,
            physical_offset,
            self.sys_flag,
            self.store_timestamp_ms - 1,
        )
        rest = b"".join(
            (
                head,
                born,
                struct.pack(">q", self.store_timestamp_ms),
                store,
                struct.pack(">iqi", 0, 0, len(self.body)),
                self.body,
                struct.pack(">h" if self.v2 else ">b", len(topic)),
                topic,
                struct.pack(">h", len(self.properties)),
                self.properties,
            )
        )
        magic = record.MAGIC_V2 if self.v2 else record.MAGIC_V1
        return struct.pack(">ii", len(rest) + 8, magic) + rest


def as_pairs(text: str) -> dict[str, str]:
    """RocketMQ's `string2messageProperties`."""
    pairs = {}
    for part in text.split("\x02"):
        name, separator, value = part.partition("\x01")
        if separator and name and value:
            pairs[name] = value
    return pairs


def tags_code(message: Record, pairs: dict[str, str]) -> int:
    if message.topic == SCHEDULE_TOPIC and "DELAY" in pairs:
        try:
            level = min(int(pairs["DELAY"]), 18)
        except ValueError:
            level = 0
        if level > 0:
            return message.store_timestamp_ms + DELAYS_MS[level - 1]
    return java_hash(pairs["TAGS"]) if "TAGS" in pairs else 0


@dataclass
class Model:
    """The expected units and index entries of a log; `marked` has those of tags, too, with marked hashes."""

    units: dict[tuple[str, int], list[tuple[int, int, int, int]]] = field(default_factory=dict)
    entries: list[tuple[int, int, int]] = field(default_factory=list)
    marked: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, message: Record, physical_offset: int, size: int) -> None:
        pairs = as_pairs(message.properties.decode())
        kind = message.sys_flag & 0xC
        if kind in (0, 8):
            unit = (message.queue_offset, physical_offset, size, tags_code(message, pairs))
            self.units.setdefault((message.topic, message.queue_id), []).append(unit)
        if kind == 0xC:
            return
        keys = [pairs["UNIQ_KEY"]] if "UNIQ_KEY" in pairs else []
        keys += [key for key in pairs.get("KEYS", "").split(" ") if key]
        for key in keys:
            entry = (index_key_hash_of(message.topic, key), physical_offset, message.store_timestamp_ms)
            self.entries.append(entry)
            self.marked.append(entry)
        if "TAGS" in pairs:
            marked = index_key_hash_of(message.topic, tag_key(pairs["TAGS"])) + TAG_MARK
            self.marked.append((marked, physical_offset, message.store_timestamp_ms))


class Table:
    """A queue table in memory."""

    def __init__(self, names: list[tuple[str, int]], capacity: int = 64) -> None:
        self.view = np.zeros(table_layout.file_size(capacity), np.uint8)
        self.cells = self.view.view(np.int64)
        start = table_layout.hash_offset(capacity)
        self.slots: NDArray[np.int32] = self.view[start:].view(np.int32)
        self.names: list[tuple[str, int]] = []
        for topic, queue_id in names:
            self.add(topic, queue_id)

    def add(self, topic: str, queue_id: int) -> int:
        number = len(self.names)
        self.names.append((topic, queue_id))
        name = topic.encode()
        start = table_layout.entry_offset(number) + table_layout.TOPIC_OFFSET_BYTES
        self.view[start : start + len(name)] = np.frombuffer(name, np.uint8)
        self.set(number, table_layout.QUEUE_ID, queue_id)
        self.set(number, table_layout.TOPIC_SIZE, len(name))
        self.set(number, table_layout.TOPIC_HASH, java_hash(topic))
        self.set(number, table_layout.STATE, table_layout.STATE_LIVE)
        slot = table_layout.first_slot(java_hash(topic), queue_id, len(self.slots))
        while self.slots[slot]:
            slot = (slot + 1) % len(self.slots)
        self.slots[slot] = number + 1
        return number

    def set(self, number: int, word: int, value: int) -> None:
        self.cells[table_layout.entry_word(number, word)] = value


class Log:
    """Consecutive records in a segment that ends directly after the last one."""

    def __init__(self, messages: list[Record], tail: bytes = b"") -> None:
        self.messages = messages
        self.model = Model()
        self.starts: list[int] = []
        data = b""
        for message in messages:
            encoded = message.encode(SEGMENT_START + len(data))
            self.starts.append(len(data))
            self.model.add(message, SEGMENT_START + len(data), len(encoded))
            data += encoded
        self.end = len(data)
        self.view = np.frombuffer(bytearray(data + tail or b"\0"), np.uint8)

    def table(self) -> Table:
        return Table(sorted({(message.topic, message.queue_id) for message in self.messages}))


def scan(
    log: Log,
    table: Table,
    buffers: DispatchBuffers,
    start: int = 0,
    *,
    limit: int | None = None,
    stop: int | None = None,
    segment_start: int = SEGMENT_START,
    entries: IndexEntries = IndexEntries.KEYS,
) -> ScanResult:
    return buffers.scan(
        log.view,
        table.view,
        table.cells,
        table.slots,
        start=start,
        limit=log.end if limit is None else limit,
        stop=log.end if stop is None else stop,
        segment_start=segment_start,
        entries=entries,
    )


def units_of(result: ScanResult, table: Table) -> dict[tuple[str, int], list[tuple[int, int, int, int]]]:
    """(queue offset, physical offset, size, tags code) of each queue, from the runs."""
    found: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {}
    for number, first, count, offset, _end, _time in result.runs.tolist():
        for index in range(count):
            at = offset + 20 * index
            unit = struct.unpack(">qiq", result.units[at : at + 20].tobytes())
            found.setdefault(table.names[number], []).append((first + index, *unit))
    return found


def entries_of(result: ScanResult) -> list[tuple[int, int, int]]:
    columns = (result.hashes, result.offsets, result.times)
    return list(zip(*(column.tolist() for column in columns), strict=True))


TOPICS = st.sampled_from(["TopicTest", "a", "Zwölf", "%RETRY%group", "T" * 127, SCHEDULE_TOPIC, "eight_by", "n" * 24])
NAMES = st.sampled_from(["KEYS", "TAGS", "UNIQ_KEY", "DELAY", "WAIT", "KEY", "UNIQ_KEYS", "", "ключ", "TAGSX", "kEYS"])
VALUES = st.one_of(
    st.sampled_from(["", "a", "TagA", "a b", " a  b ", "3", "18", "99", "-2", "0", "+4", "x\x01y", "\x01", "\0 \0"]),
    st.text(st.characters(exclude_characters="\x02", exclude_categories=["Cs"]), max_size=40),
)
PAIRS = st.lists(st.tuples(NAMES, st.sampled_from(["\x01", "\x01", "\x01", ""]), VALUES), max_size=6)


@st.composite
def records(draw: st.DrawFn) -> Record:
    text = "\x02".join(name + end + value for name, end, value in draw(PAIRS))
    text += draw(st.sampled_from(["", "\x02", "\x02__CRC32#\x011234567890\x02"]))
    return Record(
        topic=draw(TOPICS),
        queue_id=draw(st.sampled_from([0, 1, 2, 300, 2**31 - 1])),
        properties=text.encode(),
        body=bytes(draw(st.integers(0, 40))),
        sys_flag=draw(st.sampled_from([0, 0, 0, 4, 8, 12])) | draw(st.sampled_from([0, 0x10, 0x20, 0x30, 0x1])),
        store_timestamp_ms=draw(st.integers(0, 2**41)),
        v2=draw(st.booleans()),
    )


def numbered(messages: list[Record], gaps: list[bool]) -> list[Record]:
    """Assign queue offsets as a writer does, with a jump wherever `gaps` is true."""
    following: dict[tuple[str, int], int] = {}
    for index, message in enumerate(messages):
        if message.sys_flag & 4:
            continue
        key = (message.topic, message.queue_id)
        message.queue_offset = following.get(key, 5) + (3 if gaps and gaps[index % len(gaps)] else 0)
        following[key] = message.queue_offset + 1
    return messages


@settings(max_examples=300 if COMPILED else 60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(records(), max_size=12), st.lists(st.booleans(), max_size=3))
def test_scan_matches_model(messages: list[Record], gaps: list[bool]) -> None:
    log = Log(numbered(messages, gaps))
    table = log.table()
    buffers = DispatchBuffers(64, 100, 1)
    result = scan(log, table, buffers)
    assert (result.stopped_at, result.records, result.reason) == (log.end, len(messages), StopReason.LIMIT)
    assert units_of(result, table) == log.model.units
    assert entries_of(result) == log.model.entries
    assert result.store_timestamp_ms == (messages[-1].store_timestamp_ms if messages else 0)
    marked = scan(log, table, DispatchBuffers(64, 100, 1), entries=IndexEntries.KEYS_AND_MARKED_TAGS)
    assert entries_of(marked) == log.model.marked
    tagged = scan(log, table, DispatchBuffers(64, 100, 1), entries=IndexEntries.KEYS_AND_TAGS)
    assert entries_of(tagged) == [(hashed & 0x7FFFFFFF, *place) for hashed, *place in log.model.marked]


@settings(max_examples=100 if COMPILED else 20, deadline=None)
@given(st.lists(records(), min_size=1, max_size=12), st.integers(1, 5), st.data())
def test_scan_in_parts_matches_one_scan(messages: list[Record], records_max: int, data: st.DataObject) -> None:
    log = Log(numbered(messages, []))
    table = log.table()
    buffers = DispatchBuffers(64, records_max, 1)
    units: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {}
    entries = []
    position = 0
    while position < log.end:
        limit = data.draw(st.integers(position + 1, log.end))
        result = scan(log, table, buffers, position, limit=limit)
        assert result.reason in (StopReason.LIMIT, StopReason.RECORDS)
        assert result.records <= records_max
        for key, found in units_of(result, table).items():
            units.setdefault(key, []).extend(found)
        entries += entries_of(result)
        position = result.stopped_at
    assert units == log.model.units
    assert entries == log.model.entries


def add(log: Log, table: Table, buffers: DispatchBuffers, start: int, limit: int) -> ScanProgress:
    buffers.add(
        log.view,
        table.view,
        table.cells,
        table.slots,
        start=start,
        limit=limit,
        stop=log.end,
        segment_start=SEGMENT_START,
        records_max=3,
    )
    return buffers.progress()


@settings(max_examples=100 if COMPILED else 20, deadline=None)
@given(st.lists(records(), min_size=1, max_size=12), st.booleans(), st.data())
def test_scan_of_added_pieces_matches_one_scan(messages: list[Record], begun_before: bool, data: st.DataObject) -> None:
    """The previous scan may have ended between its pieces, as after the loss of its segment."""
    log = Log(numbered(messages, []))
    table = log.table()
    buffers = DispatchBuffers(64, 100, 1)
    start = 0
    if begun_before:
        buffers.begin()
        start = add(log, table, buffers, 0, log.end).stopped_at
    buffers.begin()
    position = start
    while position < log.end:
        progress = add(log, table, buffers, position, data.draw(st.integers(position + 1, log.end)))
        position = progress.stopped_at
    result = buffers.finish()
    if start == log.end:
        return
    whole = scan(log, table, DispatchBuffers(64, 100, 1), start)
    assert (result.stopped_at, result.records, result.store_timestamp_ms) == (
        whole.stopped_at,
        whole.records,
        whole.store_timestamp_ms,
    )
    assert result.runs.tolist() == whole.runs.tolist()
    assert result.units.tobytes() == whole.units.tobytes()
    assert entries_of(result) == entries_of(whole)


@settings(max_examples=300 if COMPILED else 40, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_scan_survives_any_bytes(noise: bytes, with_record: bool) -> None:
    log = Log([Record(properties=b"KEYS\x01a\x02")] if with_record else [], tail=noise)
    result = scan(log, log.table(), DispatchBuffers(64, 100, 1), limit=len(log.view), stop=len(log.view))
    assert result.stopped_at >= log.end
    assert result.records >= with_record


@settings(max_examples=300 if COMPILED else 60, deadline=None)
@given(st.data())
def test_scan_changed_length_is_bad_or_same_record(data: st.DataObject) -> None:
    """For any wrong length field the scan stops before the record and reads nothing past `stop`."""
    message = data.draw(records())
    log = Log([message])
    view = log.view.copy()
    at = data.draw(st.integers(0, len(view) - 1))
    view[at] ^= data.draw(st.integers(1, 255))
    log.view = view
    result = scan(log, log.table(), DispatchBuffers(64, 100, 1))
    assert result.stopped_at in (0, log.end)


@pytest.mark.parametrize("delays_ms", [DELAYS_MS, (5_000, 8_000), (7,), tuple(range(1, 19))])
def test_schedule_topic_tags_code_is_delivery_time(delays_ms: tuple[int, ...]) -> None:
    """A level above the maximum counts as the maximum; an invalid level gives the tag's hash."""
    texts = ["1", "2", "3", "18", "19", "99999999999", "+2", "0", "-1", "x"]
    log = Log(
        [
            Record(topic=SCHEDULE_TOPIC, queue_offset=number, properties=f"DELAY\x01{text}\x02".encode())
            for number, text in enumerate(texts)
        ]
    )
    table = log.table()
    result = scan(log, table, DispatchBuffers(64, 100, 1, delays_ms=delays_ms))
    (units,) = units_of(result, table).values()
    stored_ms = log.messages[0].store_timestamp_ms
    levels = [min(level, len(delays_ms)) for level in (1, 2, 3, 18, 19, 99, 2)]
    wanted = [stored_ms + delays_ms[level - 1] for level in levels] + [0, 0, 0]
    assert [unit[3] for unit in units] == wanted


def test_run_has_end_of_its_last_record() -> None:
    messages = [Record(queue_id=index % 2, queue_offset=index // 2, store_timestamp_ms=index) for index in range(1, 8)]
    log = Log(messages)
    table = log.table()
    result = scan(log, table, DispatchBuffers(64, 100, 1))
    assert result.runs.shape == (2, RUN_COLUMNS)
    by_queue = {table.names[run[dispatch.RUN_QUEUE]][1]: run for run in result.runs.tolist()}
    assert by_queue[1][dispatch.RUN_PHYSICAL_END] == SEGMENT_START + log.end
    assert by_queue[1][dispatch.RUN_STORE_TIMESTAMP_MS] == 7
    assert by_queue[0][dispatch.RUN_PHYSICAL_END] == SEGMENT_START + log.starts[6]
    assert [by_queue[0][dispatch.RUN_FIRST_OFFSET], by_queue[0][dispatch.RUN_COUNT]] == [1, 3]


def test_a_blank_ends_a_segment() -> None:
    log = Log([Record()], tail=struct.pack(">ii", 1234, record.MAGIC_BLANK) + b"stale bytes")
    result = scan(log, log.table(), DispatchBuffers(64, 100, 1), limit=len(log.view), stop=len(log.view))
    assert (result.stopped_at, result.records, result.reason) == (log.end, 1, StopReason.BLANK)


@pytest.mark.parametrize("tail", [b"\0" * 200, struct.pack(">ii", 100, record.MAGIC_V1), b"\1"])
def test_scan_stops_at_invalid_record(tail: bytes) -> None:
    log = Log([Record(), Record(queue_offset=1)], tail=tail)
    result = scan(log, log.table(), DispatchBuffers(64, 100, 1), limit=len(log.view), stop=len(log.view))
    assert (result.stopped_at, result.records, result.reason) == (log.end, 2, StopReason.BAD_RECORD)
    assert len(result.units) == 40


def test_record_at_wrong_position_is_bad() -> None:
    log = Log([Record()])
    result = scan(log, log.table(), DispatchBuffers(64, 100, 1), segment_start=0)
    assert result.reason == StopReason.BAD_RECORD


def test_scan_stops_before_record_of_unknown_queue() -> None:
    log = Log([Record(), Record(queue_id=7, properties=b"KEYS\x01a\x02")])
    buffers = DispatchBuffers(64, 100, 1)
    table = Table([("TopicTest", 0)])
    result = scan(log, table, buffers)
    assert (result.stopped_at, result.reason) == (log.starts[1], StopReason.UNKNOWN_QUEUE)
    assert (result.records, result.entries) == (1, 0)
    table.add("TopicTest", 7)
    assert scan(log, table, buffers).reason == StopReason.LIMIT


def delete(table: Table, number: int, physical_offset: int, next_offset: int) -> None:
    table.set(number, table_layout.STATE, table_layout.STATE_TOMBSTONE)
    table.set(number, table_layout.DELETED_AT, physical_offset)
    table.set(number, table_layout.DELETED_NEXT, next_offset)


def test_deleted_queue_has_entries_and_no_units() -> None:
    log = Log([Record(properties=b"KEYS\x01a\x02"), Record(queue_id=1)])
    table = log.table()
    delete(table, 0, SEGMENT_START + log.end, 1)
    result = scan(log, table, DispatchBuffers(64, 100, 1))
    assert result.reason == StopReason.LIMIT
    assert list(units_of(result, table)) == [("TopicTest", 1)]
    assert result.entries == 1


@settings(max_examples=200 if COMPILED else 40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("AB"), st.integers(0, 1)), min_size=1, max_size=30), st.data())
def test_recreated_queue_has_units_of_its_own_records_only(places: list[tuple[str, int]], data: st.DataObject) -> None:
    """All queues are deleted; A's are then recreated, B's are recreated or remain deleted."""
    log = Log(numbered([Record(topic, queue_id) for topic, queue_id in places], []))
    table = log.table()
    positions = [SEGMENT_START + start for start in (*log.starts, log.end)]
    split = data.draw(st.integers(0, len(places)))
    remade = "AB" if data.draw(st.booleans()) else "A"
    for number, name in enumerate(table.names):
        offsets = [each.queue_offset for each in log.messages[:split] if (each.topic, each.queue_id) == name]
        delete(table, number, positions[split], max(offsets, default=4) + 1)
        if name[0] in remade:
            table.set(number, table_layout.STATE, table_layout.STATE_LIVE)
    result = scan(log, table, DispatchBuffers(64, 100, 1))
    # After the deletion, a record of a deleted queue waits until the queue is recreated.
    stop = next((at for at in range(split, len(places)) if places[at][0] not in remade), len(places))
    assert result.records == stop
    assert result.reason == (StopReason.LIMIT if stop == len(places) else StopReason.UNKNOWN_QUEUE)
    expected = {}
    for name, units in log.model.units.items():
        if kept := [unit for unit in units if positions[split] <= unit[1] < positions[stop]]:
            expected[name] = kept
    assert units_of(result, table) == expected


def test_deleted_record_needs_lower_position_and_queue_offset() -> None:
    """A log may be truncated below a deletion; another program may restart a queue at offset 0."""
    log = Log([Record(queue_offset=7), Record(queue_id=1, queue_offset=0)])
    table = log.table()
    delete(table, 0, SEGMENT_START + 10_000, 7)
    delete(table, 1, SEGMENT_START + log.starts[1], 50)
    for number in (0, 1):
        table.set(number, table_layout.STATE, table_layout.STATE_LIVE)
    result = scan(log, table, DispatchBuffers(64, 100, 1))
    assert units_of(result, table) == log.model.units


def test_entries_beyond_buffer_are_left_for_next_scan() -> None:
    many = b"KEYS\x01" + b"k " * 16_000 + b"\x02"
    log = Log([Record(properties=many), Record(properties=many, queue_offset=1)])
    buffers = DispatchBuffers(64, 100, 1)
    result = scan(log, log.table(), buffers)
    assert (result.records, result.entries, result.reason) == (1, 16_000, StopReason.ENTRIES_FULL)
    result = scan(log, log.table(), buffers, result.stopped_at)
    assert (result.records, result.entries, result.reason) == (1, 16_000, StopReason.LIMIT)


def test_record_with_maximum_number_of_keys_fits() -> None:
    keys = b"KEYS\x01" + b"k " * (record.PROPERTIES_SIZE_MAX // 2 - 3)
    log = Log([Record(properties=keys)])
    result = scan(log, log.table(), DispatchBuffers(64, 1, 1))
    assert result.records == 1
    assert result.entries == len(keys[5:]) // 2 <= dispatch.RECORD_ENTRIES_MAX


def test_record_with_a_tag_and_maximum_keys_fits() -> None:
    properties = b"TAGS\x01t\x02KEYS\x01" + b"k " * (record.PROPERTIES_SIZE_MAX // 2 - 7)
    log = Log([Record(properties=properties)])
    result = scan(log, log.table(), DispatchBuffers(64, 1, 1), entries=IndexEntries.KEYS_AND_TAGS)
    assert result.records == 1
    assert result.entries == properties.count(b"k ") + 1 <= dispatch.RECORD_ENTRIES_MAX


def test_without_index_there_are_no_entries() -> None:
    log = Log([Record(properties=b"KEYS\x01a\x02TAGS\x01b\x02")])
    table = log.table()
    result = scan(log, table, DispatchBuffers(64, 100, 1), entries=IndexEntries.NONE)
    assert result.entries == 0
    assert units_of(result, table) == log.model.units


def test_the_scan_has_one_signature() -> None:
    dispatch.warm()
    if COMPILED:
        assert len(dispatch.scan.signatures) == 1  # type: ignore[attr-defined]


@pytest.mark.skipif(not COMPILED, reason="runs this very file uncompiled")
def test_uncompiled_passes_all_tests() -> None:
    """Run all tests of this file as plain Python."""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout[-3000:]
