"""Retention and consumer groups: the guard, counted messages and corrected offsets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqproc.config.options import RetentionGuard
from mqproc.io.store_io import StoreIO
from mqproc.layout import control as words_of
from mqproc.layout import timer_files
from mqproc.store import rocketmq_json
from mqproc.store.offsets import consumer_offset_json
from mqproc.store.offsets.consumer_offset_json import CommittedOffset
from mqproc.store.offsets.offset_store import read_unconsumed
from mqproc.store.schedule.timer_store import TimerStore, TimerUnits
from mqproc.topic_names import SCHEDULE_TOPIC, TIMER_TOPIC
from tests.support.store_builders import AGED_SEGMENT, OLD, YOUNG, AgedStore, DiskIO


def write_offsets(store: AgedStore, table: dict[str, dict[int, int]]) -> None:
    """Write consumerOffset.json like RocketMQ, with unquoted integer keys."""
    queues = ",".join(
        f'"{name}":{{{",".join(f"{queue}:{offset}" for queue, offset in offsets.items())}}}'
        for name, offsets in table.items()
    )
    path = store.paths.consumer_offsets
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{"dataVersion":{{"counter":7}},"unknown":{{"12":["T"]}},"offsetTable":{{{queues}}}}}')


def stored_offsets(store: AgedStore) -> dict[tuple[str, str, int], int]:
    return {
        (at.group, at.topic, at.queue_id): at.offset for at in consumer_offset_json.load(store.io, store.paths).progress
    }


def two_queue_store(root: Path, **options: Any) -> AgedStore:
    """Interleave 6 old and 2 young records of T/0 with 3 old and 1 young of T/1."""
    store = AgedStore(root, **options)
    store.fill(3, OLD, "T", 0)
    store.fill(3, OLD, "T", 1)
    store.fill(3, OLD, "T", 0)
    store.fill(1, YOUNG, "T", 1)
    store.fill(2, YOUNG, "T", 0)
    return store


def test_survey_offset_below_minimum_is_raised_and_counted(tmp_path: Path) -> None:
    store = two_queue_store(tmp_path)
    write_offsets(store, {"T@slow": {0: 1, 1: 0}, "T@fast": {0: 8, 1: 3}, "gone@slow": {0: 5}, "T@half": {0: 6}})
    store.run_passes(3)
    assert (store.min_offset("T", 0), store.min_offset("T", 1)) == (6, 3)
    assert stored_offsets(store) == {
        ("slow", "T", 0): 6,
        ("slow", "T", 1): 3,
        ("fast", "T", 0): 8,
        ("fast", "T", 1): 3,
        ("slow", "gone", 0): 5,
        ("half", "T", 0): 6,
    }
    assert store.words[words_of.RETENTION_UNCONSUMED] == 5 + 3
    assert read_unconsumed(StoreIO(), store.paths) == {"slow": {"T": 8}}
    reported = [figures for event, figures in store.reported if event.startswith("messages were deleted")]
    assert reported == [{"group": "slow", "messages": 8}]
    # RocketMQ can read the file: unquoted integer keys, unknown fields preserved, a backup of the old file.
    text = store.paths.consumer_offsets.read_text()
    assert '"T@half":{0:6' in text
    value = rocketmq_json.parse(text)
    assert value["dataVersion"] == {"counter": 8, "stateVersion": 0, "timestamp": store.now_ms}
    assert value["groupTopicMap"] == {"fast": ["T"], "half": ["T"], "slow": ["T", "gone"]}
    assert value["unknown"] == {"12": ["T"]}
    assert store.paths.consumer_offsets.with_name("consumerOffset.json.bak").exists()
    # No further messages are skipped or counted.
    store.run_passes(2)
    assert store.words[words_of.RETENTION_UNCONSUMED] == 8


def test_survey_skipped_messages_add_up_over_restarts(tmp_path: Path) -> None:
    store = two_queue_store(tmp_path)
    write_offsets(store, {"T@slow": {0: 4}})
    store.run_passes(3)
    store.fill(2, 0, "T", 0)
    store.now_ms += 73 * 3_600_000
    store.fill(1, 0, "T", 0)
    store.run_passes(3)
    assert read_unconsumed(StoreIO(), store.paths) == {"slow": {"T": 2 + 4}}


def test_survey_offset_below_minimum_is_corrected_at_start(tmp_path: Path) -> None:
    store = two_queue_store(tmp_path)
    store.run_passes(3)
    write_offsets(store, {"T@late": {0: 2}})
    store.run_passes(1)
    assert stored_offsets(store) == {("late", "T", 0): 6}
    assert store.words[words_of.RETENTION_UNCONSUMED] == 4


def test_guard_keeps_unconsumed_messages(tmp_path: Path) -> None:
    store = two_queue_store(tmp_path, retention_guard=RetentionGuard.GROUPS)
    # Record 1 of T/1 is in segment 4, record 4 of T/0 in segment 7.
    write_offsets(store, {"T@slow": {1: 1}, "T@other": {0: 4}})
    store.run_passes(3)
    assert (store.segments()[0], store.held_by()) == (4, "consumer group")
    ((_, figures),) = [each for each in store.reported if each[0].endswith("held back")]
    assert figures["detail"] == "group slow is at 1 of T/1"
    assert store.words[words_of.RETENTION_UNCONSUMED] == 0
    write_offsets(store, {"T@slow": {1: 4}, "T@other": {0: 4}})
    store.run_passes(3)
    assert store.segments()[0] == 7
    write_offsets(store, {"T@slow": {1: 4}, "T@other": {0: 8}})
    store.run_passes(3)
    assert (store.segments()[0], store.held_by()) == (9, "nothing")


def test_guard_keeps_messages_of_delay_levels(tmp_path: Path) -> None:
    """A nacked message is stored in its delay level only."""
    store = AgedStore(tmp_path, retention_guard=RetentionGuard.GROUPS)
    store.fill(2, OLD)
    store.fill(3, OLD, SCHEDULE_TOPIC, 2)
    store.fill(3, OLD)
    store.fill(1, YOUNG)
    write_offsets(store, {"T@all": {0: 6}})
    for delivered, first in ((None, 2), (1, 3), (3, 8)):
        if delivered is not None:
            store.paths.delay_offsets.write_text(f'{{"offsetTable":{{3:{delivered}}}}}')
        store.run_passes(3)
        assert store.segments()[0] == first
    reported = [figures["detail"] for event, figures in store.reported if event.endswith("held back")]
    assert reported == ["group of the delay levels is at 0 of SCHEDULE_TOPIC_XXXX/2"]


def test_guard_keeps_messages_of_the_timer(tmp_path: Path) -> None:
    """First the unread messages, then the first undelivered one."""
    store = AgedStore(tmp_path, retention_guard=RetentionGuard.GROUPS)
    store.fill(2, OLD)
    places = store.fill(4, OLD, TIMER_TOPIC)
    store.fill(3, OLD)
    store.fill(1, YOUNG)
    write_offsets(store, {"T@all": {0: 6}})
    store.run_passes(3)
    assert store.segments()[0] == 2
    timer = TimerStore(store.io, store.io, store.paths, 1000, 1024)
    timer.open(store.now_ms, lambda _: None, clean=False)
    waiting, none = len(places), np.zeros(len(places), np.int64)
    slots_ms = timer.slot_of(store.now_ms) + 60_000 * np.arange(waiting)
    filed = TimerUnits(slots_ms, none + timer_files.MAGIC_DEFAULT, np.array(places), none + 100, none)
    assert timer.put(filed, store.now_ms, np.zeros(waiting, np.int32)) == waiting
    timer.queue_offset = len(places)
    for delivered, first in ((0, 2), (1, 3), (3, 5), (4, 9)):
        timer.read_ms = timer.slot_of(store.now_ms) + 60_000 * delivered - 30_000
        timer.write(timer.synced_snapshot(0, 0, store.now_ms))
        store.run_passes(3)
        assert store.segments()[0] == first
    timer.close()
    reported = [figures["detail"] for event, figures in store.reported if event.endswith("held back")]
    assert reported == ["group of the timer is at 0 of rmq_sys_wheel_timer/0"]


@pytest.mark.parametrize("guarded", [True, False])
def test_guard_keeps_unacknowledged_messages(tmp_path: Path, guarded: bool) -> None:
    store = two_queue_store(tmp_path, retention_guard=RetentionGuard.GROUPS if guarded else RetentionGuard.NONE)
    write_offsets(store, {"T@all": {0: 8, 1: 4}})
    # A new group: query has not published its open receipts.
    store.words[words_of.RECEIVED_FROM] = 0
    store.run_passes(3)
    assert (store.segments()[0], store.held_by()) == ((0, "received messages") if guarded else (9, "nothing"))
    store.words[words_of.RECEIVED_FROM] = 4 * AGED_SEGMENT + 100
    store.run_passes(3)
    assert (store.segments()[0], store.held_by()) == ((4, "received messages") if guarded else (9, "nothing"))
    store.words[words_of.RECEIVED_FROM] = store.engine.written
    store.run_passes(3)
    assert (store.segments()[0], store.held_by()) == (9, "nothing")


def test_guard_applies_on_full_disk(tmp_path: Path) -> None:
    store = two_queue_store(tmp_path, retention_guard=RetentionGuard.GROUPS)
    assert isinstance(store.io, DiskIO)
    store.io.disk = (99, 1)
    write_offsets(store, {"T@slow": {0: 0}})
    store.run_passes(3)
    assert (store.segments()[0], store.held_by()) == (0, "consumer group")
    assert store.words[words_of.RETENTION_TRIGGER] == words_of.DUE_FORCED


def test_guard_ignores_offsets_of_missing_queues(tmp_path: Path) -> None:
    store = two_queue_store(tmp_path, retention_guard=RetentionGuard.GROUPS)
    write_offsets(store, {"gone@slow": {0: 0}, "T@none": {7: 0}, "T@done": {0: 8, 1: 99}})
    store.run_passes(3)
    assert store.segments()[0] == 9


def test_guard_without_offsets_file_keeps_nothing(tmp_path: Path) -> None:
    store = two_queue_store(tmp_path, retention_guard=RetentionGuard.GROUPS)
    store.run_passes(3)
    assert store.segments()[0] == 9


@pytest.mark.parametrize(
    "text",
    ["{half", '{"offsetTable":[]}', '{"offsetTable":{"T@g":{0:"x"}}}', '{"offsetTable":{"nogroup":{0:1}}}', "[1]"],
)
def test_guard_unreadable_offsets_hold_all_segments(tmp_path: Path, text: str) -> None:
    store = two_queue_store(tmp_path / "guarded", retention_guard=RetentionGuard.GROUPS)
    store.paths.config.mkdir()
    store.paths.consumer_offsets.write_text(text)
    store.run_passes(3)
    assert (store.segments()[0], store.held_by()) == (0, "unreadable progress")
    assert store.paths.consumer_offsets.read_text() == text
    unguarded = two_queue_store(tmp_path / "open")
    unguarded.paths.config.mkdir()
    unguarded.paths.consumer_offsets.write_text(text)
    unguarded.run_passes(3)
    assert unguarded.segments()[0] == 9
    assert "consumer progress cannot be read, so it is not corrected" in [event for event, _ in unguarded.reported]
    assert unguarded.paths.consumer_offsets.read_text() == text


def test_consumer_offsets_empty_file_falls_back_to_copy(tmp_path: Path) -> None:
    store = two_queue_store(tmp_path)
    write_offsets(store, {"T@slow": {0: 1}})
    path = store.paths.consumer_offsets
    path.rename(path.with_name(path.name + ".bak"))
    path.write_text("")
    assert consumer_offset_json.load(store.io, store.paths).progress == [CommittedOffset("slow", "T", 0, 1)]


def test_survey_numeric_group_name_is_kept(tmp_path: Path) -> None:
    store = two_queue_store(tmp_path)
    write_offsets(store, {"T@42": {0: 1}})
    store.run_passes(3)
    assert stored_offsets(store) == {("42", "T", 0): 6}
    assert json.loads(store.paths.unconsumed.read_text()) == {"42": {"T": 5}}


def test_rocketmq_json_strings_resembling_keys_stay_strings(tmp_path: Path) -> None:
    path = tmp_path / "config" / "x.json"
    value = {"a": 'say "1": 2', "12": {"3": "4", "b5": ["6"]}, "back\\slash": "\\"}
    rocketmq_json.save(StoreIO(), StoreIO(), path, value, integer_keys=True)
    text = path.read_text()
    assert "12: {" in text
    assert '3: "4"' in text
    assert rocketmq_json.parse(text) == value
