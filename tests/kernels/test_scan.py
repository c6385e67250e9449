"""Log scans: the end of whole records and the next valid record; compiled and plain agree."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mqproc.io.store_io import StoreIO
from mqproc.kernels import log_match, record_check, scan
from mqproc.kernels.jit.compile import plain
from mqproc.kernels.jit.intrinsics import load_be32
from mqproc.kernels.record_check import body_length_at
from mqproc.layout import record
from mqproc.store.consumequeue.table import QueueTable
from tests.support.records import (
    BASE,
    SmallLog,
    check_record,
    decode_record,
    encode_record,
    kernel_bytes,
    mutated,
    outcomes_uncompiled,
    small_log,
)

MUTATIONS = 60


@pytest.fixture(scope="module")
def log() -> SmallLog:
    return small_log()


def scanned(data: bytes, start: int = 0, stop: int | None = None, verify: int = record_check.VERIFY_CRCS) -> list[int]:
    """The output of a scan; the plain twin must return the same."""
    view = kernel_bytes(data)
    found = []
    for kernel in (scan.scan_records, plain(scan.scan_records)):
        out = np.full(scan.SCAN_SIZE, 77, np.int64)
        reason = kernel(view, start, len(data) if stop is None else stop, BASE, verify, out)
        assert reason == out[scan.REASON]
        found.append(out.tolist())
    assert found[0] == found[1]
    return found[0]


def test_scan_of_segment_ends_at_blank(log: SmallLog) -> None:
    out = scanned(log.segment)
    last = log.places[-1]
    assert out[scan.STOPPED_AT] == log.end
    assert out[scan.REASON] == record_check.BLANK
    assert out[scan.COUNT] == len(log.places)
    assert (out[scan.LAST_START], out[scan.LAST_SIZE]) == last
    assert out[scan.LAST_STORE_TIMESTAMP_MS] == 2_000_000 + len(log.places) - 1


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 50])
def test_scan_stops_before_partial_record(log: SmallLog, cut: int) -> None:
    start = log.places[10][0]
    out = scanned(log.segment, stop=start + cut)
    assert (out[scan.STOPPED_AT], out[scan.REASON], out[scan.COUNT]) == (start, record_check.REACHED_STOP, 10)


def test_scan_stops_at_record_cut_by_view(log: SmallLog) -> None:
    out = scanned(log.segment[: log.places[10][0] + 50])
    assert (out[scan.STOPPED_AT], out[scan.REASON]) == (log.places[10][0], record_check.BAD_SIZE)


def patched(log: SmallLog, number: int, at: int, data: bytes) -> bytes:
    start = log.places[number][0] + at
    return log.segment[:start] + data + log.segment[start + len(data) :]


@pytest.mark.parametrize(
    ("at", "data", "reason"),
    [
        (0, bytes(8), record_check.ZERO),
        (4, bytes(4), record_check.BAD_MAGIC),
        (0, struct.pack(">i", -5), record_check.BAD_SIZE),
        (0, struct.pack(">i", 1 << 30), record_check.BAD_SIZE),
        (record.PHYSICAL_OFFSET, struct.pack(">q", BASE + 1), record_check.BAD_OFFSET),
        (record.BODY_LENGTH, struct.pack(">i", -1), record_check.BAD_SIZE),
        (record.QUEUE_ID, b"\x55", record_check.BAD_PROPERTY_CRC),
    ],
)
def test_scan_reports_reason_of_damage(at: int, data: bytes, reason: int) -> None:
    log = small_log(count=6)
    # Record 0 has its own CRC and IPv4 hosts.
    out = scanned(patched(log, 0, at, data))
    assert (out[scan.REASON], out[scan.STOPPED_AT]) == (reason, 0)


def test_a_flipped_body_byte_is_a_bad_body(log: SmallLog) -> None:
    made = encode_record(topic="T", body=b"hello", physical_offset=BASE)
    data = made[: record.BODY] + b"j" + made[record.BODY + 1 :] + log.segment[-100:]
    assert scanned(data)[scan.REASON] == record_check.BAD_BODY_CRC
    assert scanned(data, verify=0)[scan.COUNT] == 1


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 1 << 30), st.integers(0, 40))
@example(65115, 0)
def test_scan_of_damaged_bytes_matches_codec(seed: int, tail: int) -> None:
    """The walk ends where `check_record` fails and ignores bytes past the view.

    Exception: RocketMQ and the codec treat a negative body length as zero, the walk as damage.
    """
    rng = random.Random(seed)
    data = mutated(small_log(count=8, seed=seed % 4).segment, rng)
    guarded = kernel_bytes(data + bytes([0xDA]) * tail)
    out = np.zeros(scan.SCAN_SIZE, np.int64)
    scan.scan_records(guarded[: len(data)], 0, len(data), BASE, 0, out)
    assert out.tolist() == scanned(data, verify=0)
    at = 0
    while True:
        check = check_record(data, at, check_crc=False)
        intact = (
            check.success and check.size > 0 and decode_record(data, at, check_crc=False).physical_offset == BASE + at
        )
        if not intact or load_be32(guarded, body_length_at(guarded, at)) < 0:
            break
        at += check.size
    assert out[scan.STOPPED_AT] == at


def test_find_record_after_damage(log: SmallLog) -> None:
    view = kernel_bytes(patched(log, 4, 0, bytes(8)))
    out = np.zeros(scan.SCAN_SIZE, np.int64)
    for kernel in (scan.find_record, plain(scan.find_record)):
        assert kernel(view, log.places[4][0], len(view), BASE, out) == log.places[5][0]
        assert (out[scan.COUNT], out[scan.LAST_SIZE]) == (1, log.places[5][1])
    assert scan.find_record(view, log.places[-1][0] + 1, len(view), BASE, out) == log.end
    assert out[scan.REASON] == record_check.BLANK
    assert scan.find_record(view, log.end + 1, len(view), BASE, out) == -1
    # At another log position the same bytes are not records.
    assert scan.find_record(view, 0, log.end, BASE + 1, out) == -1


def test_next_offsets_are_raised_per_queue(tmp_path, log: SmallLog) -> None:  # type: ignore[no-untyped-def]
    table = QueueTable.create(StoreIO(), tmp_path / "queues", 64)
    expected: dict[tuple[str, int], int] = {}
    for start, _size in log.places:
        message = decode_record(log.segment, start)
        # "Pay" 0 remains unknown; prepared records have no queue offset.
        known = (message.topic, message.queue_id) != ("Pay", 0)
        if known:
            table.create_queue(message.topic, message.queue_id)
        if known and message.sys_flag & record.SYS_FLAG_TRANSACTION_MASK != record.SYS_FLAG_PREPARED:
            expected[message.topic, message.queue_id] = message.queue_offset + 1
    view = kernel_bytes(log.segment)
    for kernel in (scan.update_next_offsets, plain(scan.update_next_offsets)):
        next_offsets = np.zeros(64, np.int64)
        out = np.zeros(scan.SCAN_SIZE, np.int64)
        reason = kernel(view, 0, log.end, BASE, table.bytes_view, table.cells, table.slots, next_offsets, out)
        assert (reason, out[scan.COUNT]) == (record_check.REACHED_STOP, len(log.places))
        assert out[scan.UNKNOWN] > 0
        assert out[scan.MAX_STORE_TIMESTAMP_MS] == 2_000_000 + len(log.places) - 1
        found = {(topic, queue_id): int(next_offsets[number]) for number, topic, queue_id in table.live()}
        assert {queue: offset for queue, offset in found.items() if offset} == expected
    table.close()


@pytest.mark.parametrize("made_again", [True, False])
def test_next_offsets_ignore_records_before_deletion(tmp_path: Path, made_again: bool) -> None:
    """Three of six records precede the deletion; the rest is unknown until a recreation."""
    data, starts = b"", []
    for queue_offset in range(6):
        starts.append(len(data))
        data += encode_record(topic="T", body=b"x", queue_offset=queue_offset, physical_offset=BASE + len(data))
    table = QueueTable.create(StoreIO(), tmp_path / "queues", 64)
    table.remember_deletion("T", 0, BASE + starts[3], 3)
    if made_again:
        table.create_queue("T", 0)
    view = kernel_bytes(data)
    for kernel in (scan.update_next_offsets, plain(scan.update_next_offsets)):
        next_offsets, out = np.zeros(64, np.int64), np.zeros(scan.SCAN_SIZE, np.int64)
        arguments = (BASE, table.bytes_view, table.cells, table.slots, next_offsets, out)
        kernel(view, 0, starts[3], *arguments)
        assert (next_offsets[0], out[scan.COUNT], out[scan.UNKNOWN]) == (0, 3, 0)
        kernel(view, 0, len(data), *arguments)
        told = (next_offsets[0], out[scan.COUNT], out[scan.UNKNOWN], out[scan.FIRST_UNKNOWN])
        assert told == ((6, 6, 0, -1) if made_again else (0, 6, 3, starts[3]))
    table.close()


def borders_of(part: np.ndarray) -> np.ndarray:
    """Borders of a text in a body; compiled and plain must agree."""
    found = []
    for kernel in (log_match.find_borders, plain(log_match.find_borders)):
        borders = np.zeros(len(part), np.int64)
        kernel(part, borders)
        found.append(borders)
    assert found[0].tolist() == found[1].tolist()
    return found[0]


def matched(data: bytes, **conditions: bytes | int) -> tuple[int, list[int]]:
    """Numbers of the matching records; compiled and plain must agree."""
    arguments: list[Any] = [kernel_bytes(conditions.get(name, b"")) for name in ("topic", "name", "value", "part")]  # type: ignore[arg-type]
    arguments.append(borders_of(arguments[-1]))
    found = []
    for kernel in (log_match.match_records, plain(log_match.match_records)):
        state = np.zeros(log_match.STATE_SIZE, np.int64)
        state[log_match.STOP], state[log_match.BASE], state[log_match.MATCHES_MAX] = (
            len(data),
            BASE,
            conditions.get("most", 1000),
        )
        state[log_match.BEGIN_MS], state[log_match.END_MS] = conditions.get("begin", 0), conditions.get("end", 1 << 62)
        matches = np.zeros(1000, np.int64)
        reason = kernel(kernel_bytes(data), *arguments, matches, state)
        found.append((reason, matches[: state[log_match.MATCHES]].tolist()))
    assert found[0] == found[1]
    return found[0]


def test_match_requires_all_conditions(log: SmallLog) -> None:
    messages = [(start, decode_record(log.segment, start)) for start, _ in log.places]
    assert matched(log.segment)[1] == [start for start, _ in messages]
    assert matched(log.segment, topic=b"Pay")[1] == [start for start, each in messages if each.topic == "Pay"]
    assert matched(log.segment, name=b"TAGS", value=b"Tag1")[1] == [
        start for start, each in messages if each.tag == "Tag1"
    ]
    assert matched(log.segment, name=b"KEYS")[1] == [start for start, each in messages if each.keys]
    part = messages[3][1].body[1:9] or messages[4][1].body[1:9]
    assert matched(log.segment, part=part)[1] == [start for start, each in messages if part in each.body]
    assert matched(log.segment, begin=2_000_005, end=2_000_007)[1] == [messages[5][0], messages[6][0]]
    assert matched(log.segment, most=2) == (log_match.MATCHES_FULL, [messages[0][0], messages[1][0]])


@given(st.binary(max_size=60).map(lambda data: bytes(byte % 3 for byte in data)), st.data())
def test_match_text_in_body_as_python_does(body: bytes, data: st.DataObject) -> None:
    """Repetitive texts, in which a beginning is also an end."""
    part = bytes(byte % 3 for byte in data.draw(st.binary(min_size=1, max_size=12)))
    segment = encode_record(topic="T", body=body, physical_offset=BASE)
    assert matched(segment, part=part)[1] == [0] * (part in body)


def test_match_text_in_repetitive_body_takes_linear_time() -> None:
    """Half of the positions begin a match of 4 MiB: comparing each would take an hour."""
    segment = kernel_bytes(encode_record(topic="T", body=b"a" * (8 << 20), physical_offset=BASE))
    empty, part = kernel_bytes(b""), kernel_bytes(b"a" * (4 << 20) + b"b")
    borders, state = np.zeros(len(part), np.int64), np.zeros(log_match.STATE_SIZE, np.int64)
    log_match.find_borders(part, borders)
    state[[log_match.STOP, log_match.BASE, log_match.END_MS]] = len(segment), BASE, 1 << 62
    log_match.match_records(segment, empty, empty, empty, part, borders, np.zeros(1, np.int64), state)
    assert (state[log_match.RECORDS], state[log_match.MATCHES]) == (1, 0)


def outcomes() -> list[list[int]]:
    """Results of scans and searches over damaged segments."""
    found = []
    for seed in range(MUTATIONS):
        data = mutated(small_log(count=6, seed=seed % 3).segment, random.Random(seed))
        view, out = kernel_bytes(data), np.zeros(scan.SCAN_SIZE, np.int64)
        scan.scan_records(view, 0, len(data), BASE, record_check.VERIFY_CRCS, out)
        said = out.tolist()
        scan.find_record(view, min(len(data), said[0] + 1), len(data), BASE, out)
        said += out.tolist()
        state = np.zeros(log_match.STATE_SIZE, np.int64)
        state[log_match.STOP], state[log_match.BASE], state[log_match.END_MS], state[log_match.MATCHES_MAX] = (
            len(data),
            BASE,
            1 << 62,
            9,
        )
        arguments = [kernel_bytes(text) for text in (b"Orders", b"KEYS", b"", b"")] + [np.zeros(0, np.int64)]
        log_match.match_records(view, *arguments, np.zeros(9, np.int64), state)
        found.append(said + state.tolist())
    return found


def test_uncompiled_gives_the_same_within_buffers() -> None:
    assert outcomes_uncompiled(__file__) == outcomes()


if __name__ == "__main__":
    print(json.dumps(outcomes()))


def test_first_record_without_property_crc_is_found(log: SmallLog) -> None:
    view = kernel_bytes(log.segment)
    first, second, third = (place for place, _size in log.places[:3])  # The second has no CRC.
    for kernel in (scan.find_without_crc, plain(scan.find_without_crc)):
        assert kernel(view, first, log.end) == second
        assert kernel(view, third, log.end) == log.places[3][0]
        assert kernel(view, first, second) == -1
        assert kernel(view, first, first) == -1
