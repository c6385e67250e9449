"""Reads of a store: pulls with their statuses, damage, ranges, ids and scans."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqproc.errors import BadRequestError, CorruptStoreError, MessageNotFoundError, StoreAccessError
from mqproc.layout import consume_queue, record
from mqproc.layout import control as words_of
from mqproc.layout import queue_table as table_layout
from mqproc.layout.record_codec import decode_records
from mqproc.store.cooperative import RecordPage, finish
from mqproc.store.read.reader import StoreReader
from mqproc.store.read.records import Conditions
from mqproc.types import PullStatus
from tests.support.records import columns_of, encode_message_id
from tests.support.store_builders import (
    FIRST_MS,
    FRAME_MESSAGES,
    MESSAGE_COUNT,
    STORE_HOST,
    NumberedStore,
    all_numbers,
    numbers_of,
)

# Pulls


def test_pull_any_step_reads_to_the_end(store: NumberedStore) -> None:
    for step in (1, 7, 1000):
        offset, found = 0, []
        while (pulled := store.reading.pull("Orders", 1, offset, step, 1 << 20)).status is PullStatus.FOUND:
            assert pulled.next_offset == offset + pulled.count <= offset + step
            found += numbers_of(pulled.records)
            offset = pulled.next_offset
        assert pulled.status is PullStatus.OFFSET_OVERFLOW_ONE
        assert found == [number for number in range(MESSAGE_COUNT) if number % 4 == 1]


@pytest.mark.parametrize(
    ("queue", "offset", "status", "following"),
    [
        (("Orders", 9), 0, PullStatus.NO_MATCHED_LOGIC_QUEUE, 0),
        (("Unknown", 0), 5, PullStatus.NO_MATCHED_LOGIC_QUEUE, 0),
        (("Orders", 0), -1, PullStatus.OFFSET_TOO_SMALL, 0),
        (("Orders", 0), MESSAGE_COUNT // 4, PullStatus.OFFSET_OVERFLOW_ONE, MESSAGE_COUNT // 4),
        (("Orders", 0), MESSAGE_COUNT // 4 + 1, PullStatus.OFFSET_OVERFLOW_BADLY, MESSAGE_COUNT // 4),
    ],
)
def test_pull_offset_outside_queue_returns_status(
    store: NumberedStore, queue: tuple[str, int], offset: int, status: PullStatus, following: int
) -> None:
    pulled = store.reading.pull(*queue, offset, 32, 1 << 20)
    assert (pulled.status, pulled.next_offset, pulled.count) == (status, following, 0)


def test_pull_empty_queue_returns_no_message(fresh: NumberedStore) -> None:
    fresh.engine.table.create_queue("Empty", 0)
    pulled = fresh.reading.pull("Empty", 0, 3, 32, 1 << 20)
    assert (pulled.status, pulled.next_offset) == (PullStatus.NO_MESSAGE_IN_QUEUE, 0)


def test_pull_limits_count_and_bytes(store: NumberedStore) -> None:
    pulled = store.reading.pull("Orders", 0, 0, 1000, 1)
    assert pulled.count == 1
    size = len(pulled.records)
    assert store.reading.pull("Orders", 0, 0, 1000, 3 * size + 20).count == 3
    assert store.reading.pull("Orders", 0, 0, 0, 1 << 20).count == 1
    assert store.reading.pull("Orders", 0, 0, 10**9, 1 << 30).count == MESSAGE_COUNT // 4
    assert store.reading.get_message("Orders", 0, 0, 1000, 1 << 20).count == 32
    # A call reads one ConsumeQueue file, of 100 units.
    assert store.reading.get_message("Orders", 0, 95, 32, 1 << 20).next_offset == 100


def test_pull_tags_without_match_skips_to_the_end(store: NumberedStore) -> None:
    pulled = store.reading.pull("Orders", 2, 0, 1000, 1 << 20, ["Tag1", "Tag3"])
    assert numbers_of(pulled.records) == [n for n in range(MESSAGE_COUNT) if n % 4 == 2 and n % 5 in (1, 3)]
    pulled = store.reading.pull("Orders", 2, 0, 1000, 1 << 20, ["none"])
    assert (pulled.status, pulled.next_offset) == (PullStatus.NO_MATCHED_MESSAGE, MESSAGE_COUNT // 4)


def test_pull_columns_match_records(store: NumberedStore) -> None:
    pulled = store.reading.pull("Orders", 0, 0, 100, 1 << 20)
    columns = columns_of(pulled.records, pulled.count, ["queue_offset", "body"])
    assert columns["queue_offset"].tolist() == list(range(100))  # type: ignore[union-attr]


def test_pull_damaged_records_are_reported_and_skipped(fresh: NumberedStore) -> None:
    for frame in range(3):
        fresh.put("T", frame, queues=1)
    fresh.dispatch()
    for number in (10, 11, 20):
        fresh.damage(fresh.offsets[number], record.BODY + 2, b"\xff")
    offset, found, corrupt = 0, [], []
    while (pulled := fresh.reading.pull("T", 0, offset, 1000, 1 << 20)).status is not PullStatus.OFFSET_OVERFLOW_ONE:
        if pulled.status is PullStatus.CORRUPT:
            corrupt.append((offset, pulled.next_offset))
            assert f"log [{fresh.offsets[offset]}, {fresh.offsets[pulled.next_offset]})" in pulled.detail
        found += numbers_of(pulled.records)
        offset = pulled.next_offset
    assert corrupt == [(10, 12), (20, 21)]
    assert found == [number for number in range(75) if number not in (10, 11, 20)]
    with pytest.raises(CorruptStoreError):
        fresh.reading.record_at(fresh.offsets[10])
    # Ranges, keys and scans skip the damaged records.
    batch = finish(fresh.reading.range("T", 0, 1 << 60, max_messages=1000, max_bytes=1 << 20))
    assert all_numbers(batch) == found
    assert finish(fresh.reading.by_key("T", "n10", max_messages=9, max_bytes=1 << 20)).count == 0
    scanned = finish(fresh.reading.scan(Conditions(), -1, max_messages=1000, max_bytes=1 << 20, max_scan_bytes=1 << 30))
    assert all_numbers(scanned) == found


def test_pull_fillers_are_a_hole(fresh: NumberedStore) -> None:
    fresh.put("T", 0, queues=1)
    fresh.dispatch()
    units = np.zeros(5, ">i8").tobytes()
    filler = units[:8] + consume_queue.FILLER_SIZE.to_bytes(4, "big") + bytes(8)
    fresh.files.write_run("T", 0, 5, np.frombuffer(bytearray(filler * 5), np.uint8))
    assert fresh.reading.pull("T", 0, 0, 1000, 1 << 20).next_offset == 5
    pulled = fresh.reading.pull("T", 0, 5, 1000, 1 << 20)
    assert (pulled.status, pulled.next_offset) == (PullStatus.CORRUPT, 10)
    assert fresh.reading.pull("T", 0, 10, 1000, 1 << 20).count == 15
    # RocketMQ treats unreadable records as removed.
    assert fresh.reading.get_message("T", 0, 5, 32, 1 << 20).status is not PullStatus.CORRUPT


@pytest.mark.parametrize("by_fillers", [True, False])
def test_range_finds_times_around_a_long_hole(fresh: NumberedStore, by_fillers: bool) -> None:
    """The hole is longer than the number of units that a search inspects after its middle."""
    frames, first, stop = 60, 200, 1300
    for frame in range(frames):
        fresh.put("T", frame, queues=1)
    fresh.dispatch()
    if by_fillers:
        filler = bytes(8) + consume_queue.FILLER_SIZE.to_bytes(4, "big") + bytes(8)
        fresh.files.write_run("T", 0, first, np.frombuffer(bytearray(filler * (stop - first)), np.uint8))
    else:
        for offset in fresh.offsets[first:stop]:
            fresh.overwrite(offset, bytes(64))
    left = [*range(first), *range(stop, frames * FRAME_MESSAGES)]
    for frame in (0, 3, 8, 30, 51, 52, 53, 58, 60):
        time_ms = FIRST_MS + 100 * frame
        before = [number for number in left if number < frame * FRAME_MESSAGES]
        found = finish(fresh.reading.range("T", 0, time_ms, max_messages=9999, max_bytes=1 << 30))
        assert all_numbers(found) == before
        after = finish(fresh.reading.range("T", time_ms, 1 << 60, max_messages=9999, max_bytes=1 << 30))
        assert all_numbers(after) == left[len(before) :]
        # An offset in the hole leads to the next message after it.
        offset = finish(fresh.reading.offset_at("T", 0, time_ms))
        assert next((number for number in left if number >= offset), None) == next(iter(left[len(before) :]), None)


@pytest.mark.parametrize("deleted", [slice(1), slice(3), slice(1, 3), slice(2, None)])
def test_range_continues_after_missing_queue_files(fresh: NumberedStore, deleted: slice) -> None:
    """RocketMQ or an operator may delete files."""
    frames = 40
    for frame in range(frames):
        fresh.put("T", frame, queues=1)
    fresh.dispatch()
    per_file = fresh.files.units_per_file
    starts = fresh.files.starts("T", 0)
    assert len(starts) > 3
    lost: set[int] = set()
    for start in starts[deleted]:
        fresh.files.path("T", 0, start).unlink()
        first = start // consume_queue.UNIT_SIZE
        lost.update(range(first, first + per_file))
    fresh.reading.close()

    def numbers(begin_ms: int, end_ms: int, **kind: Any) -> list[int]:
        found: list[int] = []
        batch = RecordPage(0, [], complete=False)
        while not batch.complete:
            limits = {"cursor": batch.cursor, "max_messages": 9999, "max_bytes": 1 << 30}
            batch = finish(fresh.reading.range("T", begin_ms, end_ms, **limits, **kind))
            found += all_numbers(batch)
        return found

    left = [number for number in range(frames * FRAME_MESSAGES) if number not in lost]
    for frame in range(0, frames + 1, 4):
        time_ms = FIRST_MS + 100 * frame
        before = [number for number in left if number < frame * FRAME_MESSAGES]
        assert numbers(0, time_ms) == before
        assert numbers(time_ms, 1 << 60) == left[len(before) :]
    assert numbers(0, 1 << 60, born_time=True) == left


def test_range_over_many_queues_runs_in_slices(fresh: NumberedStore) -> None:
    fresh.put("T", 0, count=64, rotation=0, queues=64, keys=None, tags=None)
    fresh.dispatch()
    slices = sum(1 for _ in fresh.reading.range("T", 0, FIRST_MS, max_messages=9, max_bytes=1 << 20))
    assert slices >= 4, "other requests are served between slices"


def test_count_excludes_units_of_holes(fresh: NumberedStore) -> None:
    """The units of the records in the hole remain."""
    fresh.put("T", 0, queues=1)
    fresh.dispatch()
    start, stop = fresh.offsets[3], fresh.offsets[5]
    fresh.overwrite(start, bytes(stop - start))
    assert finish(fresh.reading.count("T")) == FRAME_MESSAGES, "the hole is not recorded yet"
    hole = {"start": start, "stop": stop, "kind": "bad magic"}
    fresh.engine.paths.damage.write_text(json.dumps({"holes": [hole]}))
    found = finish(fresh.reading.range("T", 0, 1 << 60, max_messages=99, max_bytes=1 << 20))
    assert finish(fresh.reading.count("T")) == found.count == FRAME_MESSAGES - 2


def test_pull_removed_segment_is_skipped(fresh: NumberedStore) -> None:
    frame = 0
    while fresh.engine.written < 2 * 65536 + 1000:
        fresh.put("T", frame, queues=1)
        frame += 1
    fresh.dispatch()
    fresh.engine.segments.path(0).unlink()
    fresh.engine.words[words_of.MIN_PHYSICAL_OFFSET] = 65536
    pulled = fresh.reading.pull("T", 0, 0, 8, 1 << 20)
    assert pulled.status is PullStatus.FOUND
    assert decode_records(pulled.records.data)[0].physical_offset == 65536
    first = decode_records(pulled.records.data)[0].queue_offset
    removed = fresh.reading.get_message("T", 0, 0, 8, 1 << 20)
    assert removed.status in (PullStatus.FOUND, PullStatus.MESSAGE_WAS_REMOVING)
    assert finish(fresh.reading.offset_at("T", 0, FIRST_MS - 1)) == first
    assert fresh.reading.store_time_ms("T", 0, 0) == -1


def test_get_message_unknown_queue_is_empty(store: NumberedStore) -> None:
    found = store.reading.get_message("Nowhere", 7, 5, 32, 1 << 20)
    assert (found.status, found.next_offset) == (PullStatus.NO_MESSAGE_IN_QUEUE, 0)
    assert store.reading.pull("Nowhere", 7, 5, 32, 1 << 20).status is PullStatus.NO_MATCHED_LOGIC_QUEUE
    assert finish(store.reading.offset_in_queue_by_time("Nowhere", 7, FIRST_MS)) == 0


@pytest.mark.parametrize(
    ("expression", "passing"),
    [
        ("*", ["Aa", "BB", " ", ""]),
        ("", ["Aa", "BB", " ", ""]),
        ("BB", ["Aa", "BB"]),
        (" none ||Aa ", ["Aa", "BB"]),
        ("none", []),
        (" ", []),
        ("||", []),
    ],
)
def test_get_message_filters_by_hash_only(fresh: NumberedStore, expression: str, passing: list[str]) -> None:
    """`Aa` and `BB` have the same hash. A blank subscription matches nothing."""
    fresh.put("T", 0, 4, queues=1, keys=None, tags=["Aa", "BB", " ", ""])
    fresh.dispatch()
    found = decode_records(fresh.reading.get_message("T", 0, 0, 32, 1 << 20, expression).records.data)
    assert [message.tag for message in found] == passing


def test_get_message_minimum_is_in_the_first_file(fresh: NumberedStore) -> None:
    """A queue file whose units all precede the log counts until it is deleted."""
    frame = 0
    while fresh.engine.written < 2 * 65536 + 1000:
        fresh.put("T", frame, queues=1)
        frame += 1
    fresh.dispatch()
    fresh.engine.segments.path(0).unlink()
    fresh.engine.words[words_of.MIN_PHYSICAL_OFFSET] = 65536
    minimum = next(queue_offset for queue_offset, place in enumerate(fresh.offsets) if place >= 65536)
    assert minimum > 100
    number = fresh.engine.table.find("T", 0)
    fresh.engine.table.store(number, table_layout.MIN_OFFSET, minimum)
    reading = fresh.reading
    assert reading.pull("T", 0, 0, 8, 1 << 20).status is PullStatus.OFFSET_TOO_SMALL
    found = reading.get_message("T", 0, 0, 8, 1 << 20)
    assert (found.status, found.next_offset, found.min_offset) == (PullStatus.MESSAGE_WAS_REMOVING, 100, 0)
    assert finish(reading.offset_in_queue_by_time("T", 0, 0, upper=True)) == minimum - 1
    assert finish(reading.offset_at("T", 0, 0, upper=True)) == minimum
    # With a minimum inside the first file both are equal.
    fresh.engine.table.store(number, table_layout.MIN_OFFSET, 99)
    assert reading.rocketmq_queues.bounds("T", 0).min_offset == 99


def test_get_message_filters_in_each_removed_segment(fresh: NumberedStore) -> None:
    """The status is that of the last inspected unit: filtered out or removed."""
    for number in range(90):
        tag = "First" if number == 0 else "Other"
        fresh.engine.append("T", [bytes(1500)], FIRST_MS + number, queues=1, tags=[tag])
    fresh.dispatch()
    for start in (0, 65536):
        fresh.engine.segments.path(start).unlink()
    fresh.engine.words[words_of.MIN_PHYSICAL_OFFSET] = 131072
    assert fresh.reading.get_message("T", 0, 0, 32, 1 << 20, "First").status is PullStatus.NO_MATCHED_MESSAGE
    assert fresh.reading.get_message("T", 0, 0, 32, 1 << 20, "none").status is PullStatus.NO_MATCHED_MESSAGE
    assert fresh.reading.get_message("T", 0, 0, 32, 1 << 20, "Other").status is PullStatus.FOUND
    fresh.engine.segments.path(131072).unlink()
    fresh.engine.words[words_of.MIN_PHYSICAL_OFFSET] = fresh.engine.written
    assert fresh.reading.get_message("T", 0, 0, 32, 1 << 20, "Other").status is PullStatus.MESSAGE_WAS_REMOVING


# Times


def test_offset_at_returns_bounds_of_time(store: NumberedStore) -> None:
    times = [FIRST_MS + 100 * (number // FRAME_MESSAGES) for number in range(MESSAGE_COUNT) if number % 4 == 0]
    for time_ms in (0, times[0] - 1, times[0], times[40], times[40] + 1, times[-1], times[-1] + 1, 1 << 60):
        lower = sum(each < time_ms for each in times)
        upper = sum(each <= time_ms for each in times) - 1
        assert finish(store.reading.offset_at("Orders", 0, time_ms)) == lower
        assert finish(store.reading.offset_at("Orders", 0, time_ms, upper=True)) == max(upper, 0)
    assert store.reading.store_time_ms("Orders", 0, 40) == times[40]
    assert store.reading.store_time_ms("Orders", 0, len(times)) == -1
    assert finish(store.reading.offset_at("Unknown", 0, FIRST_MS)) == 0


def test_range_resumes_at_cursor(store: NumberedStore) -> None:
    begin, end = FIRST_MS + 250, FIRST_MS + 2950
    expected = {n for n in range(MESSAGE_COUNT) if begin <= FIRST_MS + 100 * (n // FRAME_MESSAGES) < end}
    for tags in ([], ["Tag2"]):
        expected_numbers = {n for n in expected if not tags or n % 5 == 2}
        cursor: tuple[int, ...] = ()
        found: list[int] = []
        while True:
            batch = finish(
                store.reading.range("Orders", begin, end, tags=tags, cursor=cursor, max_messages=17, max_bytes=1 << 20)
            )
            assert batch.count <= 17
            found += all_numbers(batch)
            if batch.complete:
                break
            cursor = batch.cursor
        assert len(found) == len(expected_numbers)
        assert set(found) == expected_numbers
        assert finish(store.reading.count("Orders", begin, end, tags=tags)) == len(expected_numbers)


def test_range_byte_limit_loses_nothing(store: NumberedStore) -> None:
    cursor: tuple[int, ...] = ()
    found: list[int] = []
    for _ in range(MESSAGE_COUNT):
        batch = finish(store.reading.range("Orders", 0, 1 << 60, cursor=cursor, max_messages=999, max_bytes=700))
        found += all_numbers(batch)
        if batch.complete:
            break
        cursor = batch.cursor
    assert sorted(found) == list(range(MESSAGE_COUNT))


def test_count_by_born_time_selects_from_whole_queues(store: NumberedStore) -> None:
    born = FIRST_MS
    assert finish(store.reading.count("Orders", born, born + 1, born_time=True)) == MESSAGE_COUNT
    assert finish(store.reading.count("Orders", 0, born, born_time=True)) == 0
    assert finish(store.reading.count("Orders", 0, 1 << 60)) == MESSAGE_COUNT
    assert finish(store.reading.count("Orders", 5, 5)) == 0
    assert finish(store.reading.count("Unknown")) == 0


# Ids


def test_get_by_message_id(store: NumberedStore) -> None:
    found = finish(store.reading.get(encode_message_id(STORE_HOST, store.offsets[5])))
    assert decode_records(found.data)[0].physical_offset == store.offsets[5]
    for unknown in (
        encode_message_id(STORE_HOST, store.offsets[5] + 1),
        encode_message_id(bytes(8), store.offsets[5]),
        "F" * 32,
        "no id",
    ):
        with pytest.raises(MessageNotFoundError):
            finish(store.reading.get(unknown))
    with pytest.raises(BadRequestError):
        finish(store.reading.get(""))


def test_get_by_unique_id(fresh: NumberedStore) -> None:
    prefix = "AC110001000000002A9F00000000"
    changes = {"unique_counter": 65530, "parts": (f"UNIQ_KEY\x01{prefix}".encode(), b"\x02", b"", b"")}
    fresh.put("T", 0, count=10, keys=None, tags=None, queues=1, **changes)
    fresh.dispatch()
    found = [message.unique_id for message in decode_records(fresh.reading.pull("T", 0, 0, 99, 1 << 20).records.data)]
    assert found[6] == f"{prefix}0000"
    for topic in ("T", ""):
        message = decode_records(finish(fresh.reading.get(found[6], topic)).data)[0]
        assert message.physical_offset == fresh.offsets[6]


# Scans


def scan(store: NumberedStore, max_messages: int = 1000, max_scan_bytes: int = 1 << 30, **conditions: Any) -> list[int]:
    """Return all pages of a scan."""
    found: list[int] = []
    at = -1
    while True:
        batch = finish(
            store.reading.scan(
                Conditions(**conditions),
                at,
                max_messages=max_messages,
                max_bytes=1 << 20,
                max_scan_bytes=max_scan_bytes,
            )
        )
        assert batch.count <= max_messages
        found += all_numbers(batch)
        if batch.complete:
            return found
        assert batch.cursor[0] > at
        at = batch.cursor[0]


@pytest.mark.parametrize("pages", [{}, {"max_messages": 3}, {"max_scan_bytes": 1000}])
def test_scan_returns_messages_that_match_conditions(store: NumberedStore, pages: dict[str, int]) -> None:
    assert scan(store, topic="Orders", property_name="TAGS", property_value="Tag3", **pages) == list(
        range(3, MESSAGE_COUNT, 5)
    )
    assert scan(store, topic="Orders", body_contains=b"body 77body", **pages) == [77]
    expected = [n for n in range(MESSAGE_COUNT) if 2 <= n // FRAME_MESSAGES < 4]
    assert scan(store, topic="Orders", begin_ms=FIRST_MS + 200, end_ms=FIRST_MS + 400, **pages) == expected


def test_scan_may_start_inside_a_record(store: NumberedStore) -> None:
    batch = finish(
        store.reading.scan(
            Conditions(), store.offsets[3] + 5, max_messages=1, max_bytes=1 << 20, max_scan_bytes=1 << 20
        )
    )
    assert decode_records(batch.records[0].data)[0].physical_offset == store.offsets[4]
    with pytest.raises(BadRequestError):
        finish(store.reading.scan(Conditions(property_value="x"), -1, max_messages=1, max_bytes=1, max_scan_bytes=1))


# StoreReader


def test_reader_without_server_finds_the_same(store: NumberedStore) -> None:
    options = dataclasses.replace(store.engine.options, mapped_file_size_commit_log=1 << 30)
    with StoreReader(store.engine.paths.root, options) as reader:
        assert not reader.running
        assert reader.options.mapped_file_size_commit_log == 65536
        assert [topic.topic for topic in reader.topics()] == ["Orders", "Pay"]
        assert reader.topics()[0].message_count == MESSAGE_COUNT
        assert reader.queues("Pay") == finish(store.reading.queue_infos("Pay"))
        assert reader.reading.records.visible().end == store.engine.written
        assert len(list(reader.messages("Orders"))) == MESSAGE_COUNT
        assert len(list(reader.range("Orders", FIRST_MS + 250, FIRST_MS + 2950, tags=["Tag2"]))) == reader.count(
            "Orders", FIRST_MS + 250, FIRST_MS + 2950, tags=["Tag2"]
        )
        assert [message.physical_offset for message in reader.by_key("Orders", "n77")] == [
            message.physical_offset for message in reader.scan(Conditions("Orders", "KEYS", "key-77 n77"))
        ]
        message = reader.get(encode_message_id(STORE_HOST, store.offsets[9]))
        assert message == reader.look(store.offsets[9])


def test_reader_folder_without_store_is_rejected(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(StoreAccessError):
            StoreReader(folder)
    assert not list(tmp_path.iterdir())


def test_reader_unreadable_settings_are_ignored(fresh: NumberedStore) -> None:
    """Sizes are derived from the files."""
    fresh.put("T", 0)
    fresh.dispatch()
    for wrong in ("{", "[]", '{"max_index_num": -1}', "\x00", "[" * 100_000):
        fresh.engine.paths.settings.write_text(wrong)
        with StoreReader(fresh.engine.paths.root) as reader:
            assert reader.count("T") == FRAME_MESSAGES
    fresh.engine.paths.settings.unlink()
    fresh.engine.paths.settings.mkdir()
    with StoreReader(fresh.engine.paths.root) as reader:
        assert reader.count("T") == FRAME_MESSAGES
