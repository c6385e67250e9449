"""Retention plan: triggers, expired segments and store times."""

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
from mqproc.store.retention.plan import MS_PER_HOUR, DeletionLimit, Due, LogPlanner, SegmentTimes, bytes_above, due_now
from mqproc.util.units import KIB
from tests.support.store_builders import AGED_SEGMENT, HOUR_MS, AgedStore, Engine


def at(hour: int, minute: int = 0) -> int:
    """Return a time of the local clock in milliseconds."""
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
def test_due_now_delete_when_lasts_the_whole_hour(when: str, hour: int, minute: int, due: bool) -> None:
    found = due_now(Options(delete_when=when), at(hour, minute), 1, 99)
    assert found == (Due(words_of.DUE_HOUR, 72 * MS_PER_HOUR) if due else None)


@pytest.mark.parametrize("when", ["", ";", "24", "-1", "4.5", "four", "04,16", "004", "٤"])
def test_options_invalid_delete_when_is_rejected(when: str) -> None:
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
def test_due_now_disk_thresholds_are_exclusive(used: int, trigger: int | None) -> None:
    found = due_now(Options(), at(12), used, 10_000 - used)
    assert (found.trigger if found else None) == trigger
    if found and trigger == words_of.DUE_FORCED:
        assert found.bytes_to_free == used - 8500
        assert due_now(Options(), at(12), used - found.bytes_to_free, 10_000 - used + found.bytes_to_free) is not None
        left = due_now(Options(), at(12), used - found.bytes_to_free, 10_000 - used + found.bytes_to_free)
        assert left is not None
        assert left.trigger == words_of.DUE_DISK


def test_bytes_above_empty_disk_returns_zero() -> None:
    assert bytes_above(0, 0, 85) == 0


def test_due_now_full_disk_precedes_request() -> None:
    assert due_now(Options(), at(12), 1, 99, requested_ms=5) == Due(words_of.DUE_REQUEST, 5)
    assert due_now(Options(), at(12), 90, 10, requested_ms=5) == Due(words_of.DUE_FORCED, 5, 5)
    careful = Options(clean_file_forcibly_enable=False)
    assert due_now(careful, at(12), 90, 10, requested_ms=5) == Due(words_of.DUE_REQUEST, 5)
    assert due_now(careful, at(12), 90, 10) == Due(words_of.DUE_DISK, 72 * MS_PER_HOUR)


def test_options_have_rocketmq_names_and_defaults(tmp_path: Path) -> None:
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


def test_planner_applies_the_lowest_limit(tmp_path: Path) -> None:
    store = AgedStore(tmp_path)
    store.fill(6, 100)
    planner = LogPlanner(LogSegments(store.io, store.paths.commit_log, AGED_SEGMENT))
    limits = [
        DeletionLimit(4 * AGED_SEGMENT, words_of.HELD_DISPATCH),
        DeletionLimit(3 * AGED_SEGMENT + 1, words_of.HELD_GROUP, "g"),
    ]
    due = Due(words_of.DUE_HOUR, HOUR_MS)
    plan = finish(planner.plan(0, store.engine.written, due, limits, store.now_ms, batch_max=10))
    assert ([deletions.start for deletions in plan.deletions], plan.minimum) == (
        [0, AGED_SEGMENT, 2 * AGED_SEGMENT],
        3 * AGED_SEGMENT,
    )
    assert plan.held == limits[1]


def test_planner_does_not_inspect_the_active_segment(tmp_path: Path) -> None:
    """Its last store time may still rise; a cached time would delete the segment too early."""
    store = AgedStore(tmp_path)
    store.fill(3, 100)
    planner = LogPlanner(LogSegments(store.io, store.paths.commit_log, AGED_SEGMENT))
    limit = [DeletionLimit(1 << 40, words_of.HELD_DISPATCH)]
    due = Due(words_of.DUE_HOUR, HOUR_MS)
    plan = finish(planner.plan(0, store.engine.written, due, limit, store.now_ms, batch_max=10))
    assert plan.minimum == 2 * AGED_SEGMENT
    # A small new record fits into the old segment.
    store.engine.append("T", [b"young"], store.now_ms)
    store.fill(1, 0)
    plan = finish(planner.plan(0, store.engine.written, due, limit, store.now_ms, batch_max=10))
    assert plan.minimum == 2 * AGED_SEGMENT
    later = store.now_ms + HOUR_MS
    assert finish(planner.plan(0, store.engine.written, due, limit, later, batch_max=10)).minimum == 3 * AGED_SEGMENT


def test_planner_missing_segments_are_skipped(tmp_path: Path) -> None:
    store = AgedStore(tmp_path)
    store.fill(5, 100)
    for number in (1, 2):
        (store.paths.commit_log / f"{number * AGED_SEGMENT:020d}").unlink()
    store.fill(1, 0)
    planner = LogPlanner(LogSegments(store.io, store.paths.commit_log, AGED_SEGMENT))
    limit = [DeletionLimit(1 << 40, words_of.HELD_DISPATCH)]
    due = Due(words_of.DUE_HOUR, HOUR_MS)
    plan = finish(planner.plan(0, store.engine.written, due, limit, store.now_ms, batch_max=1))
    assert plan.minimum == 3 * AGED_SEGMENT


# Store times of a segment's first and last record

SEGMENT_BYTES = 256 * KIB
START_MS = 1_700_000_000_000


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """Fill segment 0 with records of 1 KiB, stored one second apart."""
    engine = Engine(tmp_path, mapped_file_size_commit_log=SEGMENT_BYTES, max_message_size=SEGMENT_BYTES // 2)
    number = 0
    while engine.written < SEGMENT_BYTES:
        engine.append("T", [b"x" * 900], START_MS + 1000 * number)
        number += 1
    return engine


def times_of(engine: Engine) -> SegmentTimes:
    return SegmentTimes(LogSegments(engine.io, engine.paths.commit_log, SEGMENT_BYTES))


def last_record(engine: Engine) -> int:
    """Return the offset of the last record of segment 0."""
    data = engine.log_bytes(0, SEGMENT_BYTES)
    at = 0
    while int.from_bytes(data[at + 4 : at + 8], "big") != 0xCBD43194:
        begin, at = at, at + int.from_bytes(data[at : at + 4], "big")
    return begin


def damage(engine: Engine, at: int, size: int) -> None:
    path = engine.segments.path(0)
    data = bytearray(path.read_bytes())
    data[at : at + size] = b"\xa5" * size
    path.write_bytes(data)


def count_in_first(engine: Engine) -> int:
    data = engine.log_bytes(0, SEGMENT_BYTES)
    return data.count(b"x" * 900)


def test_segment_times_full_segment_returns_first_and_last(engine: Engine) -> None:
    count = count_in_first(engine)
    assert times_of(engine).full_span(0) == (START_MS, START_MS + 1000 * (count - 1))


def test_segment_times_large_last_record_is_found(tmp_path: Path) -> None:
    engine = Engine(tmp_path, mapped_file_size_commit_log=SEGMENT_BYTES, max_message_size=SEGMENT_BYTES)
    engine.append("T", [b"first"], START_MS)
    engine.append("T", [b"x" * (SEGMENT_BYTES - 10 * KIB)], START_MS + 5)
    engine.append("T", [b"x" * (20 * KIB)], START_MS + 9)
    assert engine.written > SEGMENT_BYTES
    assert times_of(engine).full_span(0) == (START_MS, START_MS + 5)


def test_segment_times_damaged_last_record_uses_the_previous(engine: Engine) -> None:
    count = count_in_first(engine)
    damage(engine, last_record(engine) + 100, 50)
    assert times_of(engine).full_span(0) == (START_MS, START_MS + 1000 * (count - 2))


def test_segment_times_damage_at_both_ends_is_skipped(engine: Engine) -> None:
    damage(engine, 0, 3000)
    damage(engine, SEGMENT_BYTES - 70 * KIB, 70 * KIB)
    first, last = times_of(engine).full_span(0) or (0, 0)
    assert START_MS < first < START_MS + 6000
    assert first < last


def test_segment_times_clock_set_back_returns_the_latest(engine: Engine, tmp_path: Path) -> None:
    other = Engine(tmp_path / "other", mapped_file_size_commit_log=SEGMENT_BYTES, max_message_size=SEGMENT_BYTES)
    for time_ms in (START_MS, START_MS + 7000, START_MS - 1_000_000):
        other.append("T", [b"x" * 900], time_ms)
    other.append("T", [b"x" * (SEGMENT_BYTES - 2000)], START_MS)
    first, last = times_of(other).full_span(0) or (0, 0)
    assert (first, last) == (START_MS, START_MS + 7000)


def test_segment_times_no_valid_record_returns_none(engine: Engine) -> None:
    damage(engine, 0, SEGMENT_BYTES)
    times = times_of(engine)
    assert times.full_span(0) is None
    assert times.first_ms(0) is None


def test_segment_times_first_record_is_found_once_written(engine: Engine) -> None:
    times = times_of(engine)
    engine.make_segment(2 * SEGMENT_BYTES)
    assert times.first_ms(2 * SEGMENT_BYTES) is None
    while engine.written < 2 * SEGMENT_BYTES:
        engine.append("T", [b"x" * (100 * KIB)], START_MS + 77)
    assert times.first_ms(2 * SEGMENT_BYTES) == START_MS + 77


def test_segment_times_missing_segment_raises_unless_cached(engine: Engine) -> None:
    times = times_of(engine)
    known = times.full_span(0)
    engine.segments.path(0).unlink()
    assert times.full_span(0) == known
    times.forget_below(SEGMENT_BYTES)
    with pytest.raises(FileNotFoundError):
        SegmentTimes(LogSegments(engine.io, engine.paths.commit_log, SEGMENT_BYTES)).full_span(0)
