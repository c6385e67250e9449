"""Delayed sends: the request as redirected by the writer, as by RocketMQ's broker."""

from __future__ import annotations

import msgspec
import pytest

from mqproc.config.options import Options
from mqproc.errors import BadLevelError, BadMessageError, BadTimeError
from mqproc.layout.properties import decode, encode
from mqproc.roles.writer.append_plan import check_slot, delayed_request, is_delayed, target_queue
from mqproc.topic_names import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.wire.operations import QUEUE_ANY, QUEUE_COLUMN, AppendRequest
from tests.client.memory_roles import read_append

NOW = 1_700_000_000_500
OPTIONS = Options()
NOTHING = memoryview(b"")


def request(**changes: object) -> AppendRequest:
    base = AppendRequest("T", 1, unique_prefix="A" * 28, tag="tag", bodies_bytes=0)
    return msgspec.structs.replace(base, **changes)


def properties_of(found: AppendRequest) -> str:
    """The string that the writer's kernel makes for the frame's only message, without keys."""
    return read_append(found, bytes(4))[0].properties


@pytest.mark.parametrize(("level", "queue_id"), [(1, 0), (3, 2), (18, 17)])
def test_delay_level_is_a_queue(level: int, queue_id: int) -> None:
    found = delayed_request(request(delay_level=level), 5, OPTIONS, NOW)
    assert (found.topic, found.queue_id) == (SCHEDULE_TOPIC, queue_id)
    pairs = decode(properties_of(found))
    assert (pairs["DELAY"], pairs["REAL_TOPIC"], pairs["REAL_QID"]) == (str(queue_id + 1), "T", "5")


def test_delay_level_above_the_configured_uses_the_last() -> None:
    options = Options(message_delay_level="5s 8s")
    found = [delayed_request(request(delay_level=level), 0, options, NOW) for level in (1, 2, 3, 18)]
    assert [each.queue_id for each in found] == [0, 1, 1, 1]
    assert decode(properties_of(found[2]))["DELAY"] == "2"


@pytest.mark.parametrize("level", [-1, 19, 99, 1 << 40])
def test_delay_level_beyond_all_stores_is_refused(level: int) -> None:
    with pytest.raises(BadLevelError, match=rf"delay level {level} is out of range: from 0 to 18"):
        is_delayed(request(delay_level=level), NOTHING, NOW)


def test_half_message_is_redirected_to_the_half_topic() -> None:
    assert is_delayed(request(transaction=True), NOTHING, NOW)
    found = delayed_request(request(transaction=True), 3, OPTIONS, NOW)
    assert (found.topic, found.queue_id) == (HALF_TOPIC, 0)
    pairs = decode(properties_of(found))
    assert (pairs["REAL_TOPIC"], pairs["REAL_QID"]) == ("T", "3")


def test_delayed_properties_are_in_rocketmq_order() -> None:
    found = delayed_request(request(delay_level=2, gap_after_keys=b"TRACE_ON\x01true\x02"), 0, OPTIONS, NOW)
    text = properties_of(found)
    assert text == encode(decode(text))


@pytest.mark.parametrize(
    ("ahead_ms", "out_ms"),
    [(1, 0), (499, 0), (500, 0), (501, 1000), (1500, 1000), (1501, 2000), (259_199_500, 259_199_000)],
)
def test_timer_slot_is_the_second_before_the_due_time(ahead_ms: int, out_ms: int) -> None:
    """RocketMQ files a message under the second before its due time, also a whole second."""
    found = delayed_request(request(deliver_at_ms=NOW + ahead_ms), 1, OPTIONS, NOW)
    assert (found.topic, found.queue_id) == (TIMER_TOPIC, 0)
    pairs = decode(properties_of(found))
    assert int(pairs["TIMER_OUT_MS"]) == NOW - 500 + out_ms
    assert int(pairs["TIMER_DELIVER_MS"]) == NOW + ahead_ms


def test_delayed_requests_are_recognised() -> None:
    assert not is_delayed(request(), NOTHING, NOW)
    assert not is_delayed(request(deliver_at_ms=NOW), NOTHING, NOW)
    assert is_delayed(request(deliver_at_ms=NOW + 1), NOTHING, NOW)
    assert is_delayed(request(delay_level=1), NOTHING, NOW)


def test_delayed_request_invalid_combinations_are_refused() -> None:
    with pytest.raises(BadTimeError, match="259,200"):
        delayed_request(request(deliver_at_ms=NOW + 259_200_001), 0, OPTIONS, NOW)
    with pytest.raises(BadMessageError, match="use one of them"):
        delayed_request(request(deliver_at_ms=NOW + 5, delay_level=2), 0, OPTIONS, NOW)
    with pytest.raises(BadMessageError, match="batch"):
        delayed_request(request(delay_level=2, batch=True), 0, OPTIONS, NOW)
    for changes in ({"delay_level": 1}, {"deliver_at_ms": NOW + 5}, {"count": 2}):
        with pytest.raises(BadMessageError, match="only one of its frame"):
            delayed_request(request(transaction=True, **changes), 0, OPTIONS, NOW)
    with pytest.raises(BadMessageError, match="one queue"):
        target_queue(request(queue_id=QUEUE_COLUMN), 8, 0)
    with pytest.raises(BadTimeError, match="the message to cancel is already due"):
        is_delayed(request(deliver_at_ms=NOW, gap_before_tag=b"TIMER_DEL_UNIQKEY\x01k\x02"), NOTHING, NOW)
    with pytest.raises(BadTimeError, match="the message to cancel is already due"):
        is_delayed(request(deliver_at_ms=NOW, properties_bytes=20), memoryview(b"TIMER_DEL_UNIQKEY\x01k\x02"), NOW)


def test_delayed_frames_rotate_over_the_target_queues() -> None:
    assert target_queue(request(queue_id=QUEUE_ANY), 3, 2) == (2, 0)
    assert target_queue(request(queue_id=1), 3, 2) == (1, 2)


@pytest.mark.parametrize(("waiting", "count", "fits"), [(99, 1, 1), (100, 1, 0), (0, 100, 1), (1, 100, 0)])
def test_timer_slot_accepts_up_to_its_limit(waiting: int, count: int, fits: int) -> None:
    options = Options(timer_congest_num_each_slot=100)
    asked: list[int] = []

    def count_waiting(slot_ms: int) -> int:
        asked.append(slot_ms)
        return waiting

    for_later = delayed_request(request(deliver_at_ms=NOW + 2000, count=count), 0, options, NOW)
    if fits:
        check_slot(for_later, NOTHING, options, NOW, count_waiting)
    else:
        with pytest.raises(BadTimeError, match=rf"holds {waiting} messages; timer_congest_num_each_slot = 100"):
            check_slot(for_later, NOTHING, options, NOW, count_waiting)
    assert asked == [NOW - 500 + 2000]
    cancel = memoryview(b"TIMER_DEL_UNIQKEY\x01k\x02")
    cancels = delayed_request(request(deliver_at_ms=NOW + 2000, properties_bytes=len(cancel)), 0, options, NOW)
    check_slot(cancels, cancel, options, NOW, lambda slot_ms: 100)


def test_timer_slot_is_not_counted_without_limit_or_for_levels() -> None:
    def count_waiting(slot_ms: int) -> int:
        raise AssertionError(slot_ms)

    check_slot(
        delayed_request(request(deliver_at_ms=NOW + 2000), 0, OPTIONS, NOW), NOTHING, OPTIONS, NOW, count_waiting
    )
    limited = Options(timer_congest_num_each_slot=1)
    check_slot(delayed_request(request(delay_level=2), 0, limited, NOW), NOTHING, limited, NOW, count_waiting)
