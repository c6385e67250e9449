"""Retention: when files are deleted, and which files are kept."""

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
from mqproc.store.retention import delete, plan
from mqproc.types import PullStatus
from tests.support.store_builders import (
    AGED_SEGMENT,
    HOUR_MS,
    OLD,
    YOUNG,
    AgedStore,
    DiskIO,
    check_minima,
    distant_hour,
    expired_store,
)

# RocketMQ's scenario of file deletion


def test_retention_delete_when_hour_deletes_in_batches(tmp_path: Path) -> None:
    store = expired_store(tmp_path)
    store.run_passes()
    assert store.segments()[0] == 10
    assert store.queue_files() == list(range(1, 8))
    assert store.words[words_of.RETENTION_SEGMENTS] == 10
    assert store.words[words_of.RETENTION_QUEUE_FILES] == 10 // 7
    assert store.words[words_of.RETENTION_INDEX_FILES] == 10 // 7
    check_minima(store)
    store.run_passes()
    assert store.segments()[0] == 15
    assert store.queue_files() == list(range(2, 8))
    assert store.words[words_of.RETENTION_SEGMENTS] == 15
    assert store.words[words_of.RETENTION_QUEUE_FILES] == 15 // 7
    assert store.words[words_of.RETENTION_INDEX_FILES] == 15 // 7
    check_minima(store)
    store.run_passes()
    assert store.segments()[0] == 15
    assert store.words[words_of.RETENTION_TRIGGER] == words_of.DUE_HOUR


@pytest.mark.parametrize("interval_ms", [0, 50])
def test_retention_waits_between_two_segments(tmp_path: Path, interval_ms: int) -> None:
    store = expired_store(tmp_path, delete_commit_log_files_interval=interval_ms)
    keeper = store.retention()
    store.run(keeper, 1000)
    deleted = [store.segments()[0]]
    while deleted[-1] < 10:
        store.run(keeper, 50)
        deleted.append(store.segments()[0])
    assert deleted == ([10] if interval_ms == 0 else list(range(1, 11)))
    keeper.close()


@pytest.mark.parametrize("deleted", [0, 1, 3])
def test_retention_finish_completes_the_started_batch(tmp_path: Path, deleted: int) -> None:
    """The interval between two segments is ignored; no further batch starts."""
    store = expired_store(tmp_path, delete_commit_log_files_interval=60_000)
    keeper = store.retention()
    while store.segments()[0] < deleted:
        store.run(keeper, 1000)
    assert store.segments()[0] == deleted
    while not keeper.finish(store.now_ns):
        pass
    keeper.close()
    assert store.minimum() == (10 if deleted else 0)
    check_minima(store)


def test_retention_other_hour_deletes_only_at_disk_threshold(tmp_path: Path) -> None:
    store = expired_store(tmp_path, delete_when=distant_hour())
    store.run_passes(3)
    assert store.segments()[0] == 0
    assert store.words[words_of.RETENTION_TRIGGER] == words_of.DUE_NOTHING
    assert isinstance(store.io, DiskIO)
    store.io.disk = (75, 25)
    store.run_passes(3)
    assert store.segments()[0] == 0
    store.io.disk = (7501, 2499)
    store.run_passes()
    assert store.segments()[0] == 10
    assert store.words[words_of.RETENTION_TRIGGER] == words_of.DUE_DISK
    store.run_passes(3)
    assert store.segments()[0] == 15


def test_retention_full_disk_deletes_young_segments_in_batches(tmp_path: Path) -> None:
    store = expired_store(tmp_path, delete_when=distant_hour())
    assert isinstance(store.io, DiskIO)
    store.io.disk = (86 * AGED_SEGMENT, 14 * AGED_SEGMENT)
    store.io.disk = (10_000_000, 1)
    for passes in range(1, 6):
        store.run_passes()
        assert store.segments()[0] == 10 * passes
        check_minima(store)
    assert store.words[words_of.RETENTION_TRIGGER] == words_of.DUE_FORCED
    store.run_passes(3)
    # The active segment and those created ahead are kept on a full disk.
    assert store.segments()[0] == 54


def test_retention_full_disk_deletes_no_more_than_needed(tmp_path: Path) -> None:
    store = expired_store(tmp_path, delete_when=distant_hour())
    assert isinstance(store.io, DiskIO)
    size = store.io.allocated_of(store.paths.commit_log / f"{0:020d}")
    store.io.disk = (1000 * size, 174 * size)
    # 85 % of 1,174 segments are 997.9.
    store.run_passes()
    assert store.segments()[0] == 10
    # Expired segments are deleted in any case, younger ones only as needed.
    store.io.disk = (1000 * size, 174 * size)
    store.run_passes()
    assert store.segments()[0] == 15
    store.io.disk = (1000 * size, 174 * size)
    store.run_passes()
    assert store.segments()[0] == 18


def test_retention_forced_cleanup_disabled_keeps_young_segments(tmp_path: Path) -> None:
    store = expired_store(tmp_path, delete_when=distant_hour(), clean_file_forcibly_enable=False)
    assert isinstance(store.io, DiskIO)
    store.io.disk = (99, 1)
    store.run_passes(4)
    assert store.segments()[0] == 15
    assert store.words[words_of.RETENTION_TRIGGER] == words_of.DUE_DISK


def test_retention_request_runs_until_nothing_has_expired(tmp_path: Path) -> None:
    store = expired_store(tmp_path, delete_when=distant_hour(), clean_resource_interval=3_600_000)
    keeper = store.retention()
    store.run(keeper, 10)
    request = plan.submit_request(store.io, store.paths)
    keeper.poll_request()
    assert request.exists()
    store.run(keeper, 5000)
    assert (store.words[words_of.RETENTION_ANSWERED], request.exists()) == (1, False)
    assert store.segments()[0] == 15
    # The next request deletes segments older than half an hour.
    request = plan.submit_request(store.io, store.paths, HOUR_MS // 2)
    keeper.poll_request()
    store.run(keeper, 60_000)
    assert (store.words[words_of.RETENTION_ANSWERED], request.exists()) == (2, False)
    assert store.segments()[0] == 54
    check_minima(store)
    keeper.close()


def test_retention_request_of_killed_keeper_is_executed(tmp_path: Path) -> None:
    store = expired_store(tmp_path, delete_when=distant_hour())
    first = store.retention()
    request = plan.submit_request(store.io, store.paths)
    first.poll_request()
    # The first keeper is killed before it deletes anything.
    second = store.retention()
    second.poll_request()
    store.run(second, 10_000)
    assert (request.exists(), store.segments()[0]) == (False, 15)
    second.close()


def test_retention_requests_are_executed_in_order(tmp_path: Path) -> None:
    store = expired_store(tmp_path, delete_when=distant_hour())
    requests = [plan.submit_request(store.io, store.paths, age_ms) for age_ms in (None, HOUR_MS // 2, None)]
    keeper = store.retention()
    for answered in (1, 2, 3):
        keeper.poll_request()
        store.run(keeper, 10_000)
        assert store.words[words_of.RETENTION_ANSWERED] == answered
        assert sum(path.exists() for path in requests) == 3 - answered
    assert store.segments()[0] == 54
    keeper.close()


def test_retention_request_ends_when_segments_are_held(tmp_path: Path) -> None:
    store = expired_store(tmp_path, delete_when=distant_hour())
    store.words[words_of.COMMITLOG_MARK] = 3 * AGED_SEGMENT + 1
    request = plan.submit_request(store.io, store.paths)
    keeper = store.retention()
    keeper.poll_request()
    store.run(keeper, 1000)
    assert (request.exists(), store.segments()[0], store.held_by()) == (False, 3, "commitlog mark")
    keeper.close()


def test_retention_request_on_full_disk_is_accepted(tmp_path: Path) -> None:
    class Full(StoreIO):
        def pwrite(self, fd: int, data: Any, offset: int) -> None:
            if memoryview(data).nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = expired_store(tmp_path, delete_when=distant_hour())
    request = plan.submit_request(Full(), store.paths, HOUR_MS // 2)
    keeper = store.retention()
    keeper.poll_request()
    store.run(keeper, 10_000)
    assert (request.exists(), store.segments()[0]) == (False, 54)
    keeper.close()


def test_retention_request_path_is_a_folder_is_ignored(tmp_path: Path) -> None:
    store = expired_store(tmp_path, delete_when=distant_hour())
    folder = store.paths.retention_request("0")
    folder.mkdir()
    request = plan.submit_request(store.io, store.paths)
    keeper = store.retention()
    keeper.poll_request()
    store.run(keeper, 10_000)
    keeper.poll_request()
    assert (folder.exists(), request.exists(), store.segments()[0]) == (True, False, 15)
    keeper.close()


def test_retention_unreadable_request_is_reported_and_removed(tmp_path: Path) -> None:
    store = expired_store(tmp_path)
    garbage = store.paths.retention_request("x")
    garbage.write_text("{half")
    store.paths.retention_request("y.tmp").write_text("")
    keeper = store.retention()
    keeper.poll_request()
    assert [event for event, _ in store.reported] == ["a request to retention cannot be read"]
    keeper.poll_request()
    assert (len(store.reported), garbage.exists()) == (1, False)
    keeper.close()


# Age


def test_retention_age_is_store_time_not_file_time(tmp_path: Path) -> None:
    store = expired_store(tmp_path)
    for path in store.paths.commit_log.iterdir():
        young = int(path.name) < 15 * AGED_SEGMENT
        time_s = store.now_ms / 1000 - (0 if young else 1000 * 3600)
        os.utime(path, (time_s, time_s))
    store.run_passes(3)
    assert store.segments()[0] == 15


def test_retention_clock_set_back_deletes_nothing(tmp_path: Path) -> None:
    store = expired_store(tmp_path)
    right_ms = store.now_ms
    for back_hours in (2, 80, 24 * 365 * 20):
        store.now_ms = right_ms - back_hours * HOUR_MS
        store.run_passes(2)
        assert store.segments()[0] == 0
    store.now_ms = right_ms
    store.run_passes(3)
    assert store.segments()[0] == 15


def test_retention_store_time_going_back_counts_as_the_previous(tmp_path: Path) -> None:
    store = AgedStore(tmp_path)
    store.fill(2, OLD)
    store.fill(2, YOUNG)
    # The clock is a year behind during three segments, then correct again.
    store.fill(3, 24 * 365)
    store.fill(3, YOUNG)
    store.run_passes(3)
    assert store.segments()[0] == 2
    store.now_ms += 72 * HOUR_MS
    store.run_passes()
    assert store.segments()[0] == 9


def test_retention_segment_expires_to_the_millisecond(tmp_path: Path) -> None:
    store = AgedStore(tmp_path)
    store.fill(1, 72)
    store.fill(2, YOUNG)
    keeper = store.retention()
    store.now_ms -= 2000
    # The first pass runs a second before the segment expires.
    store.run(keeper, 1000)
    assert store.segments()[0] == 0
    store.run(keeper, 1000)
    assert store.segments()[0] == 1
    keeper.close()


def test_retention_reserved_time_zero_keeps_active_segment(tmp_path: Path) -> None:
    store = AgedStore(tmp_path, file_reserved_time=0)
    store.fill(4, 0)
    store.run_passes(2)
    assert store.segments()[0] == 3
    check_minima(store)
    reading = store.open_queries()
    assert reading.pull("T", 0, 3, 10, 1 << 20).count == 1
    reading.close()


# Queues and index


def test_retention_sets_queue_minimum_and_keeps_last_queue_file(tmp_path: Path) -> None:
    store = AgedStore(tmp_path)
    store.fill(3, OLD, "quiet")
    store.fill(9, OLD, "busy")
    store.fill(2, YOUNG, "busy")
    store.fill(1, YOUNG, "new")
    store.run_passes(3)
    assert store.minimum() == 12
    assert [store.min_offset(topic) for topic in ("quiet", "busy", "new")] == [3, 9, 0]
    assert store.queue_files("quiet") == [0]
    assert store.queue_files("busy") == [1]
    check_minima(store)
    reading = store.open_queries()
    quiet = reading.pull("quiet", 0, 0, 10, 1 << 20)
    assert (quiet.status, quiet.next_offset) == (PullStatus.OFFSET_TOO_SMALL, 3)
    assert reading.pull("quiet", 0, 3, 10, 1 << 20).status is PullStatus.OFFSET_OVERFLOW_ONE
    busy = reading.pull("busy", 0, 2, 10, 1 << 20)
    assert (busy.status, busy.next_offset, busy.min_offset, busy.max_offset) == (
        PullStatus.OFFSET_TOO_SMALL, 9, 9, 11,
    )  # fmt: skip
    reading.close()
    # Later messages continue at the queue's maximum offset.
    (place,) = store.fill(1, 0, "quiet")
    assert store.min_offset("quiet") == 3
    reading = store.open_queries()
    assert reading.pull("quiet", 0, 3, 10, 1 << 20).count == 1
    assert reading.record_at(place) is not None
    reading.close()


def test_retention_full_queue_file_is_deleted_after_the_next_starts(tmp_path: Path) -> None:
    store = AgedStore(tmp_path)
    store.fill(7, OLD, "full")
    store.fill(2, YOUNG, "other")
    store.run_passes(2)
    assert (store.min_offset("full"), store.queue_files("full")) == (7, [0])
    store.fill(1, YOUNG, "full")
    assert store.queue_files("full") == [0, 1]
    store.now_ms += 72 * HOUR_MS
    store.fill(2, 0, "other")
    store.run_passes(2)
    assert (store.min_offset("full"), store.queue_files("full")) == (8, [1])


def test_retention_keeps_the_index_file_in_use_by_dispatch(tmp_path: Path) -> None:
    store = expired_store(tmp_path)
    before = store.index_files()
    # A successor rolls back to the second file: the step that created the others was not committed.
    second = sorted(path.name for path in store.paths.index.iterdir())[1]
    for slot in (0, 1):
        store.words[words_of.COMMIT_INDEX_MS[slot]] = file_ms(second)
    store.run_passes(3)
    assert store.segments()[0] == 15
    assert store.index_files() == before - 1


def test_retention_start_deletes_leftovers_of_rocketmq(tmp_path: Path) -> None:
    """RocketMQ deletes segments first, queues and index later; it may have stopped in between."""
    store = expired_store(tmp_path, delete_when=distant_hour())
    for number in range(15):
        (store.paths.commit_log / f"{number * AGED_SEGMENT:020d}").unlink()
    store.words[words_of.MIN_PHYSICAL_OFFSET] = 15 * AGED_SEGMENT
    number = store.table.find("T", 0)
    store.table.raise_min_offset(number, 15)
    keeper = store.retention()
    store.run(keeper, 500)
    assert store.queue_files() == list(range(2, 8))
    assert store.words[words_of.RETENTION_INDEX_FILES] == 2
    keeper.close()


def test_retention_reads_return_the_remaining_messages(tmp_path: Path) -> None:
    store = AgedStore(tmp_path)
    deleted = store.fill(15, OLD)
    kept = store.fill(3, YOUNG)
    reading = store.open_queries()
    before = finish(reading.count("T"))
    ids = [reading.record_at(place) for place in (deleted[0], kept[0])]
    assert all(record is not None for record in ids)
    store.run_passes(3)
    assert before == 18
    assert finish(reading.count("T")) == 3
    assert reading.record_at(deleted[0]) is None
    assert reading.record_at(kept[0]) is not None
    assert finish(reading.offset_at("T", 0, 0)) == 15
    assert reading.store_time_ms("T", 0, 14) == -1
    positions = range(reading.records.visible().begin, kept[0] + 1)
    assert next(at for at in positions if reading.record_at(at) is not None) == kept[0]
    with pytest.raises(MessageNotFoundError):
        finish(reading.get("AB" * 16, "T"))
    reading.close()


def test_retention_publishes_oldest_store_time(tmp_path: Path) -> None:
    store = expired_store(tmp_path)
    store.run_passes(3)
    oldest_ms = store.words[words_of.OLDEST_STORE_TIMESTAMP_MS]
    reading = store.open_queries()
    assert oldest_ms == reading.store_time_ms("T", 0, 15)
    reading.close()


def test_retention_report_describes_the_last_pass(tmp_path: Path) -> None:
    store = expired_store(tmp_path)
    store.run_passes()
    found = json.loads(store.paths.retention_report.read_text())["last"]
    assert {name: found[name] for name in ("trigger", "minimum", "segments", "queue_files", "index_files")} == {
        "trigger": "hour",
        "minimum": 10 * AGED_SEGMENT,
        "segments": 10,
        "queue_files": 1,
        "index_files": 1,
    }
    assert found["bytes"] == store.words[words_of.RETENTION_BYTES] > 10 * AGED_SEGMENT
    assert StoreIO().read_json(store.paths.retention_report, plan.RetentionReport).last is not None


def test_retention_pending_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delete, "PENDING_FILES_MAX", 3)
    monkeypatch.setattr(delete, "STEP_BYTES", AGED_SEGMENT // 2)
    store = expired_store(tmp_path, delete_file_batch_max=100, delete_commit_log_files_interval=0)
    keeper = store.retention()
    most = 0
    for _ in range(3000):
        store.run(keeper, 1)
        most = max(most, store.words[words_of.RETENTION_PENDING_BYTES])
    # Without the limit 15 segments would be pending; small index files add to it.
    assert 0 < most < 4 * AGED_SEGMENT
    assert (store.segments()[0], store.words[words_of.RETENTION_PENDING_BYTES]) == (15, 0)
    keeper.close()


def test_retention_batch_does_not_wait_for_queue_files(tmp_path: Path) -> None:
    """Slow deletion of queue files does not delay the log on a filling disk."""
    store = AgedStore(tmp_path, delete_consume_queue_files_interval=60_000, delete_commit_log_files_interval=0)
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
