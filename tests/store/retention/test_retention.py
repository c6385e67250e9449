"""Retention: what goes when, what never goes, and that nothing that can be seen points at something gone."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mqproc.errors import MessageNotFoundError
from mqproc.io.store_io import StoreIO
from mqproc.layout import control as words_of
from mqproc.store.cooperative import finish
from mqproc.store.index.files import file_ms
from mqproc.store.retention import delete as deleted_files
from mqproc.store.retention import delete as retention
from mqproc.store.retention import request as retention_request
from mqproc.types import PullStatus
from tests.store.retention.retaining import HOUR_MS, OLD, SEGMENT, YOUNG, Aged, DiskIO, aged, another_hour, check_minima

# RocketMQ's scenario: clean files


def test_the_hour_deletes_what_has_expired_in_batches(tmp_path: Path) -> None:
    store = aged(tmp_path)
    store.pass_by()
    assert store.segments()[0] == 10
    assert store.queue_files() == list(range(1, 8))
    assert store.words[words_of.RETENTION_SEGMENTS] == 10
    assert store.words[words_of.RETENTION_QUEUE_FILES] == 10 // 7
    assert store.words[words_of.RETENTION_INDEX_FILES] == 10 // 7
    check_minima(store)
    store.pass_by()
    assert store.segments()[0] == 15
    assert store.queue_files() == list(range(2, 8))
    assert store.words[words_of.RETENTION_SEGMENTS] == 15
    assert store.words[words_of.RETENTION_QUEUE_FILES] == 15 // 7
    assert store.words[words_of.RETENTION_INDEX_FILES] == 15 // 7
    check_minima(store)
    store.pass_by()
    assert store.segments()[0] == 15
    assert store.words[words_of.RETENTION_TRIGGER] == words_of.DUE_HOUR


@pytest.mark.parametrize("interval_ms", [0, 50])
def test_a_pause_lies_between_two_segments(tmp_path: Path, interval_ms: int) -> None:
    store = aged(tmp_path, delete_commit_log_files_interval=interval_ms)
    keeper = store.retention()
    store.run(keeper, 1000)
    gone = [store.segments()[0]]
    while gone[-1] < 10:
        store.run(keeper, 50)
        gone.append(store.segments()[0])
    assert gone == ([10] if interval_ms == 0 else list(range(1, 11)))
    keeper.close()


@pytest.mark.parametrize("gone", [0, 1, 3])
def test_a_stop_ends_with_the_segments_that_are_being_deleted(tmp_path: Path, gone: int) -> None:
    """However long the pause between two of them; what had not begun does not begin."""
    store = aged(tmp_path, delete_commit_log_files_interval=60_000)
    keeper = store.retention()
    while store.segments()[0] < gone:
        store.run(keeper, 1000)
    assert store.segments()[0] == gone
    while not keeper.finish(store.now_ns):
        pass
    keeper.close()
    assert store.minimum() == (10 if gone else 0)
    check_minima(store)


def test_another_hour_deletes_nothing_until_the_disk_wants_it(tmp_path: Path) -> None:
    store = aged(tmp_path, delete_when=another_hour())
    store.pass_by(3)
    assert store.segments()[0] == 0
    assert store.words[words_of.RETENTION_TRIGGER] == words_of.DUE_NOTHING
    assert isinstance(store.io, DiskIO)
    store.io.disk = (75, 25)
    store.pass_by(3)
    assert store.segments()[0] == 0
    store.io.disk = (7501, 2499)
    store.pass_by()
    assert store.segments()[0] == 10
    assert store.words[words_of.RETENTION_TRIGGER] == words_of.DUE_DISK
    store.pass_by(3)
    assert store.segments()[0] == 15


def test_a_nearly_full_disk_takes_young_segments_ten_at_a_time(tmp_path: Path) -> None:
    store = aged(tmp_path, delete_when=another_hour())
    assert isinstance(store.io, DiskIO)
    store.io.disk = (86 * SEGMENT, 14 * SEGMENT)
    store.io.disk = (10_000_000, 1)
    for looks in range(1, 6):
        store.pass_by()
        assert store.segments()[0] == 10 * looks
        check_minima(store)
    assert store.words[words_of.RETENTION_TRIGGER] == words_of.DUE_FORCED
    store.pass_by(3)
    # The last record's segment stays whatever the disk says, with those made ahead of it.
    assert store.segments()[0] == 54


def test_no_more_young_segments_go_than_the_disk_needs(tmp_path: Path) -> None:
    store = aged(tmp_path, delete_when=another_hour())
    assert isinstance(store.io, DiskIO)
    size = store.io.allocated_of(store.paths.commit_log / f"{0:020d}")
    store.io.disk = (1000 * size, 174 * size)
    # 85 % of 1,174 segments are 997.9.
    store.pass_by()
    assert store.segments()[0] == 10
    # What has expired goes in any case, the younger ones only as long as they are needed.
    store.io.disk = (1000 * size, 174 * size)
    store.pass_by()
    assert store.segments()[0] == 15
    store.io.disk = (1000 * size, 174 * size)
    store.pass_by()
    assert store.segments()[0] == 18


def test_young_segments_may_be_kept_whatever_the_disk_says(tmp_path: Path) -> None:
    store = aged(tmp_path, delete_when=another_hour(), clean_file_forcibly_enable=False)
    assert isinstance(store.io, DiskIO)
    store.io.disk = (99, 1)
    store.pass_by(4)
    assert store.segments()[0] == 15
    assert store.words[words_of.RETENTION_TRIGGER] == words_of.DUE_DISK


def test_a_request_goes_on_until_nothing_is_left(tmp_path: Path) -> None:
    store = aged(tmp_path, delete_when=another_hour(), clean_resource_interval=3_600_000)
    keeper = store.retention()
    store.run(keeper, 10)
    asked = retention_request.submit(store.io, store.paths)
    keeper.poll_request()
    assert asked.exists()
    store.run(keeper, 5000)
    assert (store.words[words_of.RETENTION_ANSWERED], asked.exists()) == (1, False)
    assert store.segments()[0] == 15
    # Half an hour old is old enough for the next one.
    asked = retention_request.submit(store.io, store.paths, HOUR_MS // 2)
    keeper.poll_request()
    store.run(keeper, 60_000)
    assert (store.words[words_of.RETENTION_ANSWERED], asked.exists()) == (2, False)
    assert store.segments()[0] == 54
    check_minima(store)
    keeper.close()


def test_a_request_that_a_predecessor_had_begun_is_carried_out(tmp_path: Path) -> None:
    store = aged(tmp_path, delete_when=another_hour())
    first = store.retention()
    asked = retention_request.submit(store.io, store.paths)
    first.poll_request()
    # Killed before it did anything.
    second = store.retention()
    second.poll_request()
    store.run(second, 10_000)
    assert (asked.exists(), store.segments()[0]) == (False, 15)
    second.close()


def test_several_requests_are_carried_out_one_after_the_other(tmp_path: Path) -> None:
    store = aged(tmp_path, delete_when=another_hour())
    asked = [retention_request.submit(store.io, store.paths, age_ms) for age_ms in (None, HOUR_MS // 2, None)]
    keeper = store.retention()
    for answered in (1, 2, 3):
        keeper.poll_request()
        store.run(keeper, 10_000)
        assert store.words[words_of.RETENTION_ANSWERED] == answered
        assert sum(path.exists() for path in asked) == 3 - answered
    assert store.segments()[0] == 54
    keeper.close()


def test_what_holds_segments_back_ends_a_request_too(tmp_path: Path) -> None:
    store = aged(tmp_path, delete_when=another_hour())
    store.words[words_of.COMMITLOG_MARK] = 3 * SEGMENT + 1
    asked = retention_request.submit(store.io, store.paths)
    keeper = store.retention()
    keeper.poll_request()
    store.run(keeper, 1000)
    assert (asked.exists(), store.segments()[0], store.held_by()) == (False, 3, "commitlog mark")
    keeper.close()


def test_a_full_disk_has_room_for_a_request(tmp_path: Path) -> None:
    class Full(StoreIO):
        def pwrite(self, fd: int, data: Any, offset: int) -> None:
            if memoryview(data).nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = aged(tmp_path, delete_when=another_hour())
    asked = retention_request.submit(Full(), store.paths, HOUR_MS // 2)
    keeper = store.retention()
    keeper.poll_request()
    store.run(keeper, 10_000)
    assert (asked.exists(), store.segments()[0]) == (False, 54)
    keeper.close()


def test_a_folder_in_the_place_of_a_request_is_left_alone(tmp_path: Path) -> None:
    store = aged(tmp_path, delete_when=another_hour())
    folder = store.paths.retention_request("0")
    folder.mkdir()
    asked = retention_request.submit(store.io, store.paths)
    keeper = store.retention()
    keeper.poll_request()
    store.run(keeper, 10_000)
    keeper.poll_request()
    assert (folder.exists(), asked.exists(), store.segments()[0]) == (True, False, 15)
    keeper.close()


def test_garbage_in_the_place_of_a_request_is_told_and_gone(tmp_path: Path) -> None:
    store = aged(tmp_path)
    garbage = store.paths.retention_request("x")
    garbage.write_text("{half")
    store.paths.retention_request("y.tmp").write_text("")
    keeper = store.retention()
    keeper.poll_request()
    assert [event for event, _ in store.told] == ["a request to retention cannot be read"]
    keeper.poll_request()
    assert (len(store.told), garbage.exists()) == (1, False)
    keeper.close()


# Age


def test_the_age_is_that_of_the_records_whatever_the_files_say(tmp_path: Path) -> None:
    store = aged(tmp_path)
    for path in store.paths.commit_log.iterdir():
        young = int(path.name) < 15 * SEGMENT
        time_s = store.now_ms / 1000 - (0 if young else 1000 * 3600)
        os.utime(path, (time_s, time_s))
    store.pass_by(3)
    assert store.segments()[0] == 15


def test_a_clock_set_back_deletes_nothing(tmp_path: Path) -> None:
    store = aged(tmp_path)
    right_ms = store.now_ms
    for back_hours in (2, 80, 24 * 365 * 20):
        store.now_ms = right_ms - back_hours * HOUR_MS
        store.pass_by(2)
        assert store.segments()[0] == 0
    store.now_ms = right_ms
    store.pass_by(3)
    assert store.segments()[0] == 15


def test_records_stamped_by_a_clock_that_was_set_back_count_as_young_as_those_before_them(tmp_path: Path) -> None:
    store = Aged(tmp_path)
    store.fill(2, OLD)
    store.fill(2, YOUNG)
    # The clock is a year behind for three segments, then right again.
    store.fill(3, 24 * 365)
    store.fill(3, YOUNG)
    store.pass_by(3)
    assert store.segments()[0] == 2
    store.now_ms += 72 * HOUR_MS
    store.pass_by()
    assert store.segments()[0] == 9


def test_a_segment_expires_to_the_millisecond(tmp_path: Path) -> None:
    store = Aged(tmp_path)
    store.fill(1, 72)
    store.fill(2, YOUNG)
    keeper = store.retention()
    store.now_ms -= 2000
    # The look comes after a second: a second too early.
    store.run(keeper, 1000)
    assert store.segments()[0] == 0
    store.run(keeper, 1000)
    assert store.segments()[0] == 1
    keeper.close()


def test_nothing_reserved_leaves_the_segment_that_is_written_to(tmp_path: Path) -> None:
    store = Aged(tmp_path, file_reserved_time=0)
    store.fill(4, 0)
    store.pass_by(2)
    assert store.segments()[0] == 3
    check_minima(store)
    reading = store.reading()
    assert reading.pull("T", 0, 3, 10, 1 << 20).count == 1
    reading.close()


# Queues and index


def test_every_queue_gets_its_own_minimum_and_a_quiet_one_keeps_its_last_file(tmp_path: Path) -> None:
    store = Aged(tmp_path)
    store.fill(3, OLD, "quiet")
    store.fill(9, OLD, "busy")
    store.fill(2, YOUNG, "busy")
    store.fill(1, YOUNG, "new")
    store.pass_by(3)
    assert store.minimum() == 12
    assert [store.min_offset(topic) for topic in ("quiet", "busy", "new")] == [3, 9, 0]
    assert store.queue_files("quiet") == [0]
    assert store.queue_files("busy") == [1]
    check_minima(store)
    reading = store.reading()
    quiet = reading.pull("quiet", 0, 0, 10, 1 << 20)
    assert (quiet.status, quiet.next_offset) == (PullStatus.OFFSET_TOO_SMALL, 3)
    assert reading.pull("quiet", 0, 3, 10, 1 << 20).status is PullStatus.OFFSET_OVERFLOW_ONE
    busy = reading.pull("busy", 0, 2, 10, 1 << 20)
    assert (busy.status, busy.next_offset, busy.min_offset, busy.max_offset) == (
        PullStatus.OFFSET_TOO_SMALL, 9, 9, 11,
    )  # fmt: skip
    reading.close()
    # What comes later goes on where the queue stood.
    (place,) = store.fill(1, 0, "quiet")
    assert store.min_offset("quiet") == 3
    reading = store.reading()
    assert reading.pull("quiet", 0, 3, 10, 1 << 20).count == 1
    assert reading.record_at(place) is not None
    reading.close()


def test_a_full_last_file_of_an_expired_queue_goes_when_another_follows(tmp_path: Path) -> None:
    store = Aged(tmp_path)
    store.fill(7, OLD, "full")
    store.fill(2, YOUNG, "other")
    store.pass_by(2)
    assert (store.min_offset("full"), store.queue_files("full")) == (7, [0])
    store.fill(1, YOUNG, "full")
    assert store.queue_files("full") == [0, 1]
    store.now_ms += 72 * HOUR_MS
    store.fill(2, 0, "other")
    store.pass_by(2)
    assert (store.min_offset("full"), store.queue_files("full")) == (8, [1])


def test_the_index_file_that_the_dispatcher_stands_in_stays(tmp_path: Path) -> None:
    store = aged(tmp_path)
    before = store.index_files()
    # A successor rolls back to the second file: the step that made the others was not committed.
    second = sorted(path.name for path in store.paths.index.iterdir())[1]
    for slot in (0, 1):
        store.words[words_of.COMMIT_INDEX_MS[slot]] = file_ms(second)
    store.pass_by(3)
    assert store.segments()[0] == 15
    assert store.index_files() == before - 1


def test_what_rocketmq_left_of_queues_and_index_goes_at_the_start(tmp_path: Path) -> None:
    """Its cleaner deletes segments first, queues and index later: a store may have been closed in between."""
    store = aged(tmp_path, delete_when=another_hour())
    for number in range(15):
        (store.paths.commit_log / f"{number * SEGMENT:020d}").unlink()
    store.words[words_of.MIN_PHYSICAL_OFFSET] = 15 * SEGMENT
    number = store.table.find("T", 0)
    store.table.raise_min_offset(number, 15)
    keeper = store.retention()
    store.run(keeper, 500)
    assert store.queue_files() == list(range(2, 8))
    assert store.words[words_of.RETENTION_INDEX_FILES] == 2
    keeper.close()


def test_searches_find_what_is_left(tmp_path: Path) -> None:
    store = Aged(tmp_path)
    gone = store.fill(15, OLD)
    kept = store.fill(3, YOUNG)
    reading = store.reading()
    before = finish(reading.count("T"))
    ids = [reading.record_at(place) for place in (gone[0], kept[0])]
    assert all(record is not None for record in ids)
    store.pass_by(3)
    assert before == 18
    assert finish(reading.count("T")) == 3
    assert reading.record_at(gone[0]) is None
    assert reading.record_at(kept[0]) is not None
    assert reading.offset_at("T", 0, 0) == 15
    assert reading.store_time_ms("T", 0, 14) == -1
    assert reading.records.first_record() == kept[0]
    with pytest.raises(MessageNotFoundError):
        finish(reading.get("AB" * 16, "T"))
    reading.close()


def test_the_oldest_records_time_is_told(tmp_path: Path) -> None:
    store = aged(tmp_path)
    store.pass_by(3)
    oldest_ms = store.words[words_of.OLDEST_STORE_TIMESTAMP_MS]
    reading = store.reading()
    assert oldest_ms == reading.store_time_ms("T", 0, 15)
    reading.close()


def test_a_report_says_what_the_last_pass_did(tmp_path: Path) -> None:
    store = aged(tmp_path)
    store.pass_by()
    found = json.loads(store.paths.retention_report.read_text())["last"]
    assert {name: found[name] for name in ("trigger", "minimum", "segments", "queue_files", "index_files")} == {
        "trigger": "hour",
        "minimum": 10 * SEGMENT,
        "segments": 10,
        "queue_files": 1,
        "index_files": 1,
    }
    assert found["bytes"] == store.words[words_of.RETENTION_BYTES] > 10 * SEGMENT
    assert retention_request.read_report(StoreIO(), store.paths).last is not None


def test_no_more_files_are_held_than_there_are_descriptors_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "PENDING_FILES_MAX", 3)
    monkeypatch.setattr(deleted_files, "STEP_BYTES", SEGMENT // 2)
    store = aged(tmp_path, delete_file_batch_max=100, delete_commit_log_files_interval=0)
    keeper = store.retention()
    most = 0
    for _ in range(3000):
        store.run(keeper, 1)
        most = max(most, store.words[words_of.RETENTION_PENDING_BYTES])
    # Small index files come on top; of segments alone 15 would be held otherwise.
    assert 0 < most < 4 * SEGMENT
    assert (store.segments()[0], store.words[words_of.RETENTION_PENDING_BYTES]) == (15, 0)
    keeper.close()


def test_a_batch_waits_for_nothing_but_its_segments(tmp_path: Path) -> None:
    """Slow queues do not hold up the log: a disk that fills cannot wait for them."""
    store = Aged(tmp_path, delete_consume_queue_files_interval=60_000, delete_commit_log_files_interval=0)
    for queue_id in range(3):
        store.fill(8, OLD, "T", queue_id)
    store.fill(2, YOUNG)
    keeper = store.retention()
    store.run(keeper, 4000)
    assert store.segments()[0] == 24
    assert store.words[words_of.RETENTION_QUEUE_FILES] == 1
    store.run(keeper, 180_000)
    assert store.words[words_of.RETENTION_QUEUE_FILES] == 3
    keeper.close()
