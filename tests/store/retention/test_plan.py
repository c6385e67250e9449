"""What is due, what has expired, and the order of reasons: hour, disk, request."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from mqproc.config.options import Options
from mqproc.config.parse import load_options
from mqproc.errors import ConfigurationError
from mqproc.layout import control as words_of
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.cooperative import finish
from mqproc.store.retention.plan import MS_PER_HOUR, DeletionLimit, Due, LogPlanner, bytes_above, due_now
from tests.store.retention.retaining import HOUR_MS, SEGMENT, Aged


def at(hour: int, minute: int = 0) -> int:
    """A moment by the local clock."""
    return int(datetime.datetime(2026, 11, 21, hour, minute).timestamp() * 1000)


@pytest.mark.parametrize(
    ("when", "hour", "minute", "due"),
    [
        ("04", 4, 0, True),
        ("04", 4, 59, True),
        ("04", 5, 0, False),
        ("04", 3, 59, False),
        ("4", 4, 30, True),
        ("04;16", 16, 30, True),
        ("04;16", 10, 0, False),
        (" 0 ; 23 ;", 23, 0, True),
        ("00", 0, 1, True),
    ],
)
def test_the_hour_is_due_as_long_as_it_lasts(when: str, hour: int, minute: int, due: bool) -> None:
    found = due_now(Options(delete_when=when), at(hour, minute), 1, 99)
    assert found == (Due(words_of.DUE_HOUR, 72 * MS_PER_HOUR) if due else None)


@pytest.mark.parametrize("when", ["", ";", "24", "-1", "4.5", "four", "04,16", "004", "٤"])
def test_hours_that_are_none_are_refused(when: str) -> None:
    with pytest.raises(ConfigurationError, match="delete_when"):
        load_options(flags=[f"delete_when={when}"], environment={})


@pytest.mark.parametrize(
    ("used", "trigger"),
    [
        (7400, None),
        (7500, None),
        (7501, words_of.DUE_DISK),
        (8500, words_of.DUE_DISK),
        (8501, words_of.DUE_FORCED),
        (9999, words_of.DUE_FORCED),
    ],
)
def test_the_disks_thresholds_are_strict(used: int, trigger: int | None) -> None:
    found = due_now(Options(), at(12), used, 10_000 - used)
    assert (found.trigger if found else None) == trigger
    if found and trigger == words_of.DUE_FORCED:
        assert found.wanted_bytes == used - 8500
        assert due_now(Options(), at(12), used - found.wanted_bytes, 10_000 - used + found.wanted_bytes) is not None
        left = due_now(Options(), at(12), used - found.wanted_bytes, 10_000 - used + found.wanted_bytes)
        assert left is not None
        assert left.trigger == words_of.DUE_DISK


def test_a_disk_of_no_bytes_wants_nothing() -> None:
    assert bytes_above(0, 0, 85) == 0


def test_a_request_is_due_at_any_hour_and_a_full_disk_goes_before_it() -> None:
    assert due_now(Options(), at(12), 1, 99, requested_ms=5) == Due(words_of.DUE_REQUEST, 5)
    assert due_now(Options(), at(12), 90, 10, requested_ms=5) == Due(words_of.DUE_FORCED, 5, 5)
    careful = Options(clean_file_forcibly_enable=False)
    assert due_now(careful, at(12), 90, 10, requested_ms=5) == Due(words_of.DUE_REQUEST, 5)
    assert due_now(careful, at(12), 90, 10) == Due(words_of.DUE_DISK, 72 * MS_PER_HOUR)


def test_the_names_are_rocketmqs(tmp_path: Path) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text(
        "fileReservedTime=48\ndeleteWhen=04;16\ndiskMaxUsedSpaceRatio=70\ndiskSpaceCleanForciblyRatio=80\n"
        "diskSpaceWarningLevelRatio=88\ncleanFileForciblyEnable=false\ncleanResourceInterval=5000\n"
        "deleteFileBatchMax=20\ndeleteCommitLogFilesInterval=50\ndeleteConsumeQueueFilesInterval=60\n"
    )
    found = load_options(conf, environment={})
    assert (found.file_reserved_time, found.delete_when, found.disk_max_used_space_ratio) == (48, "04;16", 70)
    assert (found.disk_space_clean_forcibly_ratio, found.disk_space_warning_level_ratio) == (80, 88)
    assert (found.clean_file_forcibly_enable, found.clean_resource_interval) == (False, 5000)
    assert (found.delete_file_batch_max, found.delete_commit_log_files_interval) == (20, 50)
    assert found.delete_consume_queue_files_interval == 60
    defaults = Options()
    assert (defaults.file_reserved_time, defaults.delete_when, defaults.delete_file_batch_max) == (72, "04", 10)
    assert (defaults.disk_max_used_space_ratio, defaults.disk_space_clean_forcibly_ratio) == (75, 85)
    assert (defaults.disk_space_warning_level_ratio, defaults.clean_resource_interval) == (90, 10_000)
    assert (defaults.delete_commit_log_files_interval, defaults.delete_consume_queue_files_interval) == (100, 100)
    assert defaults.clean_file_forcibly_enable


def test_the_lowest_limit_counts(tmp_path: Path) -> None:
    store = Aged(tmp_path)
    store.fill(6, 100)
    planner = LogPlanner(LogSegments(store.io, store.paths.commit_log, SEGMENT))
    limits = [
        DeletionLimit(4 * SEGMENT, words_of.HELD_DISPATCH),
        DeletionLimit(3 * SEGMENT + 1, words_of.HELD_GROUP, "g"),
    ]
    due = Due(words_of.DUE_HOUR, HOUR_MS)
    plan = finish(planner.plan(0, store.engine.written, due, limits, store.now_ms, batch_max=10))
    assert ([deletions.start for deletions in plan.deletions], plan.minimum) == ([0, SEGMENT, 2 * SEGMENT], 3 * SEGMENT)
    assert plan.held == limits[1]


def test_the_segment_that_is_written_to_is_not_looked_at(tmp_path: Path) -> None:
    """Its last record's time is not its last yet; a time that was remembered then would delete it too early."""
    store = Aged(tmp_path)
    store.fill(3, 100)
    planner = LogPlanner(LogSegments(store.io, store.paths.commit_log, SEGMENT))
    limit = [DeletionLimit(1 << 40, words_of.HELD_DISPATCH)]
    due = Due(words_of.DUE_HOUR, HOUR_MS)
    plan = finish(planner.plan(0, store.engine.written, due, limit, store.now_ms, batch_max=10))
    assert plan.minimum == 2 * SEGMENT
    # A small young record goes to the end of the old segment.
    store.engine.append("T", [b"young"], store.now_ms)
    store.fill(1, 0)
    plan = finish(planner.plan(0, store.engine.written, due, limit, store.now_ms, batch_max=10))
    assert plan.minimum == 2 * SEGMENT
    later = store.now_ms + HOUR_MS
    assert finish(planner.plan(0, store.engine.written, due, limit, later, batch_max=10)).minimum == 3 * SEGMENT


def test_the_minimum_passes_over_segments_that_are_missing(tmp_path: Path) -> None:
    store = Aged(tmp_path)
    store.fill(5, 100)
    for number in (1, 2):
        (store.paths.commit_log / f"{number * SEGMENT:020d}").unlink()
    store.fill(1, 0)
    planner = LogPlanner(LogSegments(store.io, store.paths.commit_log, SEGMENT))
    limit = [DeletionLimit(1 << 40, words_of.HELD_DISPATCH)]
    due = Due(words_of.DUE_HOUR, HOUR_MS)
    plan = finish(planner.plan(0, store.engine.written, due, limit, store.now_ms, batch_max=1))
    assert plan.minimum == 3 * SEGMENT
