"""Retention and consumer groups: what they have not consumed is kept or counted, their progress never left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqproc.config.options import RetentionGuard
from mqproc.io.store_io import StoreIO
from mqproc.layout import control as words_of
from mqproc.layout import timer_log
from mqproc.store import rocketmq_json
from mqproc.store.offsets import consumer_offset_json
from mqproc.store.offsets.consumer_offset_json import CommittedOffset
from mqproc.store.offsets.offset_store import read_unconsumed
from mqproc.store.schedule.timer_store import TimerStore, TimerUnits
from mqproc.topic_names import SCHEDULE_TOPIC, TIMER_TOPIC
from tests.store.retention.retaining import OLD, SEGMENT, YOUNG, Aged, DiskIO


def write_progress(store: Aged, table: dict[str, dict[int, int]]) -> None:
    """As RocketMQ writes it: integer keys are unquoted."""
    queues = ",".join(
        f'"{name}":{{{",".join(f"{queue}:{offset}" for queue, offset in offsets.items())}}}'
        for name, offsets in table.items()
    )
    path = store.paths.consumer_offsets
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{"dataVersion":{{"counter":7}},"theirs":{{"12":["T"]}},"offsetTable":{{{queues}}}}}')


def stored_progress(store: Aged) -> dict[tuple[str, str, int], int]:
    return {
        (at.group, at.topic, at.queue_id): at.offset for at in consumer_offset_json.load(store.io, store.paths).progress
    }


def aged(root: Path, **options: Any) -> Aged:
    """Queue T/0 has 6 old records and 2 young ones, queue T/1 3 old ones and a young one between them."""
    store = Aged(root, **options)
    store.fill(3, OLD, "T", 0)
    store.fill(3, OLD, "T", 1)
    store.fill(3, OLD, "T", 0)
    store.fill(1, YOUNG, "T", 1)
    store.fill(2, YOUNG, "T", 0)
    return store


def test_progress_below_the_minimum_is_raised_and_what_was_skipped_is_counted(tmp_path: Path) -> None:
    store = aged(tmp_path)
    write_progress(store, {"T@slow": {0: 1, 1: 0}, "T@fast": {0: 8, 1: 3}, "gone@slow": {0: 5}, "T@half": {0: 6}})
    store.pass_by(3)
    assert (store.min_offset("T", 0), store.min_offset("T", 1)) == (6, 3)
    assert stored_progress(store) == {
        ("slow", "T", 0): 6,
        ("slow", "T", 1): 3,
        ("fast", "T", 0): 8,
        ("fast", "T", 1): 3,
        ("slow", "gone", 0): 5,
        ("half", "T", 0): 6,
    }
    assert store.words[words_of.RETENTION_UNCONSUMED] == 5 + 3
    assert read_unconsumed(StoreIO(), store.paths) == {"slow": {"T": 8}}
    told = [figures for event, figures in store.told if event.startswith("messages were deleted")]
    assert told == [{"group": "slow", "messages": 8}]
    # RocketMQ reads it again: integer keys unquoted, fields of others as they were, the old one beside it.
    text = store.paths.consumer_offsets.read_text()
    assert '"T@half":{0:6' in text
    value = rocketmq_json.parse(text)
    assert value["dataVersion"] == {"counter": 8, "stateVersion": 0, "timestamp": store.now_ms}
    assert value["groupTopicMap"] == {"fast": ["T"], "half": ["T"], "slow": ["T", "gone"]}
    assert value["theirs"] == {"12": ["T"]}
    assert store.paths.consumer_offsets.with_name("consumerOffset.json.bak").exists()
    # Nothing more is skipped, so nothing more is counted.
    store.pass_by(2)
    assert store.words[words_of.RETENTION_UNCONSUMED] == 8


def test_what_is_skipped_adds_up_over_restarts(tmp_path: Path) -> None:
    store = aged(tmp_path)
    write_progress(store, {"T@slow": {0: 4}})
    store.pass_by(3)
    store.fill(2, 0, "T", 0)
    store.now_ms += 73 * 3_600_000
    store.fill(1, 0, "T", 0)
    store.pass_by(3)
    assert read_unconsumed(StoreIO(), store.paths) == {"slow": {"T": 2 + 4}}


def test_progress_that_was_below_before_is_corrected_at_the_start(tmp_path: Path) -> None:
    store = aged(tmp_path)
    store.pass_by(3)
    write_progress(store, {"T@late": {0: 2}})
    store.pass_by(1)
    assert stored_progress(store) == {("late", "T", 0): 6}
    assert store.words[words_of.RETENTION_UNCONSUMED] == 4


def test_the_guard_keeps_what_a_group_has_not_consumed(tmp_path: Path) -> None:
    store = aged(tmp_path, retention_guard=RetentionGuard.GROUPS)
    # Record 1 of T/1 lies in segment 4, record 4 of T/0 in segment 7.
    write_progress(store, {"T@slow": {1: 1}, "T@other": {0: 4}})
    store.pass_by(3)
    assert (store.segments()[0], store.held_by()) == (4, "consumer group")
    ((_, figures),) = [told for told in store.told if told[0].endswith("held back")]
    assert figures["detail"] == "group slow is at 1 of T/1"
    assert store.words[words_of.RETENTION_UNCONSUMED] == 0
    write_progress(store, {"T@slow": {1: 4}, "T@other": {0: 4}})
    store.pass_by(3)
    assert store.segments()[0] == 7
    write_progress(store, {"T@slow": {1: 4}, "T@other": {0: 8}})
    store.pass_by(3)
    assert (store.segments()[0], store.held_by()) == (9, "nothing")


def test_the_guard_keeps_what_waits_in_a_delay_level(tmp_path: Path) -> None:
    """A nacked message is nowhere else."""
    store = Aged(tmp_path, retention_guard=RetentionGuard.GROUPS)
    store.fill(2, OLD)
    store.fill(3, OLD, SCHEDULE_TOPIC, 2)
    store.fill(3, OLD)
    store.fill(1, YOUNG)
    write_progress(store, {"T@all": {0: 6}})
    for delivered, first in ((None, 2), (1, 3), (3, 8)):
        if delivered is not None:
            store.paths.delay_offsets.write_text(f'{{"offsetTable":{{3:{delivered}}}}}')
        store.pass_by(3)
        assert store.segments()[0] == first
    told = [figures["detail"] for event, figures in store.told if event.endswith("held back")]
    assert told == ["group of the delay levels is at 0 of SCHEDULE_TOPIC_XXXX/2"]


def test_the_guard_keeps_what_waits_in_the_timer(tmp_path: Path) -> None:
    """What is not filed yet, then the first that is filed and not delivered."""
    store = Aged(tmp_path, retention_guard=RetentionGuard.GROUPS)
    store.fill(2, OLD)
    places = store.fill(4, OLD, TIMER_TOPIC)
    store.fill(3, OLD)
    store.fill(1, YOUNG)
    write_progress(store, {"T@all": {0: 6}})
    store.pass_by(3)
    assert store.segments()[0] == 2
    timer = TimerStore(store.io, store.io, store.paths, 1000, 1024)
    timer.open(store.now_ms, lambda _: None)
    waiting, none = len(places), np.zeros(len(places), np.int64)
    slots_ms = timer.slot_of(store.now_ms) + 60_000 * np.arange(waiting)
    filed = TimerUnits(slots_ms, none + timer_log.MAGIC_DEFAULT, np.array(places), none + 100, none)
    assert timer.put(filed, store.now_ms, np.zeros(waiting, np.int32)) == waiting
    timer.queue_offset = len(places)
    for delivered, first in ((0, 2), (1, 3), (3, 5), (4, 9)):
        timer.read_ms = timer.slot_of(store.now_ms) + 60_000 * delivered - 30_000
        timer.write(timer.synced_snapshot(0, 0, store.now_ms))
        store.pass_by(3)
        assert store.segments()[0] == first
    timer.close()
    told = [figures["detail"] for event, figures in store.told if event.endswith("held back")]
    assert told == ["group of the timer is at 0 of rmq_sys_wheel_timer/0"]


@pytest.mark.parametrize("guarded", [True, False])
def test_the_guard_keeps_what_is_received_and_not_acknowledged(tmp_path: Path, guarded: bool) -> None:
    store = aged(tmp_path, retention_guard=RetentionGuard.GROUPS if guarded else RetentionGuard.NONE)
    write_progress(store, {"T@all": {0: 8, 1: 4}})
    # As of a group that has begun: query has not said yet what is open.
    store.words[words_of.RECEIVED_FROM] = 0
    store.pass_by(3)
    assert (store.segments()[0], store.held_by()) == ((0, "received messages") if guarded else (9, "nothing"))
    store.words[words_of.RECEIVED_FROM] = 4 * SEGMENT + 100
    store.pass_by(3)
    assert (store.segments()[0], store.held_by()) == ((4, "received messages") if guarded else (9, "nothing"))
    store.words[words_of.RECEIVED_FROM] = store.engine.written
    store.pass_by(3)
    assert (store.segments()[0], store.held_by()) == (9, "nothing")


def test_the_guard_holds_against_a_full_disk_too(tmp_path: Path) -> None:
    store = aged(tmp_path, retention_guard=RetentionGuard.GROUPS)
    assert isinstance(store.io, DiskIO)
    store.io.disk = (99, 1)
    write_progress(store, {"T@slow": {0: 0}})
    store.pass_by(3)
    assert (store.segments()[0], store.held_by()) == (0, "consumer group")
    assert store.words[words_of.RETENTION_TRIGGER] == words_of.DUE_FORCED


def test_the_guard_passes_over_progress_of_no_queue_and_below_the_minimum(tmp_path: Path) -> None:
    store = aged(tmp_path, retention_guard=RetentionGuard.GROUPS)
    write_progress(store, {"gone@slow": {0: 0}, "T@none": {7: 0}, "T@done": {0: 8, 1: 99}})
    store.pass_by(3)
    assert store.segments()[0] == 9


def test_without_a_file_of_progress_the_guard_keeps_nothing(tmp_path: Path) -> None:
    store = aged(tmp_path, retention_guard=RetentionGuard.GROUPS)
    store.pass_by(3)
    assert store.segments()[0] == 9


@pytest.mark.parametrize(
    "text",
    ["{half", '{"offsetTable":[]}', '{"offsetTable":{"T@g":{0:"x"}}}', '{"offsetTable":{"nogroup":{0:1}}}', "[1]"],
)
def test_progress_that_cannot_be_read_holds_all_back_with_the_guard_and_is_told_without(
    tmp_path: Path, text: str
) -> None:
    store = aged(tmp_path / "guarded", retention_guard=RetentionGuard.GROUPS)
    store.paths.config.mkdir()
    store.paths.consumer_offsets.write_text(text)
    store.pass_by(3)
    assert (store.segments()[0], store.held_by()) == (0, "unreadable progress")
    assert store.paths.consumer_offsets.read_text() == text
    open_ = aged(tmp_path / "open")
    open_.paths.config.mkdir()
    open_.paths.consumer_offsets.write_text(text)
    open_.pass_by(3)
    assert open_.segments()[0] == 9
    assert "consumer progress cannot be read, so it is not corrected" in [event for event, _ in open_.told]
    assert open_.paths.consumer_offsets.read_text() == text


def test_the_copy_is_read_when_the_file_is_empty(tmp_path: Path) -> None:
    store = aged(tmp_path)
    write_progress(store, {"T@slow": {0: 1}})
    path = store.paths.consumer_offsets
    path.rename(path.with_name(path.name + ".bak"))
    path.write_text("")
    assert consumer_offset_json.load(store.io, store.paths).progress == [CommittedOffset("slow", "T", 0, 1)]


def test_a_group_may_have_a_name_that_is_a_number(tmp_path: Path) -> None:
    store = aged(tmp_path)
    write_progress(store, {"T@42": {0: 1}})
    store.pass_by(3)
    assert stored_progress(store) == {("42", "T", 0): 6}
    assert json.loads(store.paths.unconsumed.read_text()) == {"42": {"T": 5}}


def test_strings_that_look_like_keys_stay_strings(tmp_path: Path) -> None:
    path = tmp_path / "config" / "x.json"
    value = {"a": 'say "1": 2', "12": {"3": "4", "b5": ["6"]}, "back\\slash": "\\"}
    rocketmq_json.save(StoreIO(), StoreIO(), path, value, integer_keys=True)
    text = path.read_text()
    assert "12: {" in text
    assert '3: "4"' in text
    assert rocketmq_json.parse(text) == value
