"""Delay levels and timer through real groups, with the numbers of RocketMQ's tests."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest

from mqproc.topic_names import SCHEDULE_TOPIC
from mqproc.types import Message
from tests.support.group import Group, assert_below, wait_until

pytestmark = pytest.mark.timeout(400)  # Slow: with `-n …` it starts before others.

AT_ONCE_S = 0.2


def test_delay_levels_of_5_and_8_seconds_and_above(tmp_path: Path) -> None:
    """With `messageDelayLevel=5s 8s`, level 3 equals level 2. Too large offsets are reset to 0."""
    group = Group(tmp_path / "store", message_delay_level="5s 8s")
    group.paths.config.mkdir(parents=True)
    group.paths.delay_offsets.write_text(json.dumps({"offsetTable": {"1": 100, "2": 100}}))
    group.start()
    try:
        with group.client() as client:
            appended = group.words()["appended_messages"]
            sent = {level: client.send("t", b"level %d" % level, delay_level=level) for level in (3, 1)}
            assert group.words()["appended_messages"] - appended == 2
            client.wait_dispatched()
            parked = {level: client.pull(SCHEDULE_TOPIC, level - 1, 0).messages[0] for level in (1, 2)}
            assert parked[2].body == b"level 3"
            assert parked[2].properties["DELAY"] == "2"
            assert (parked[2].queue_id, parked[2].queue_offset) == (sent[3].queue_id, 0) == (1, 0)
            consumer = client.consumer("g", "t", start="earliest")
            with consumer:
                found = {message.body: message for message in itertools.islice(consumer.messages(timeout=30), 2)}
            for level, body, delay_ms in ((1, b"level 1", 5_000), (2, b"level 3", 8_000)):
                waited_ms = found[body].store_timestamp_ms - parked[level].store_timestamp_ms
                assert waited_ms >= delay_ms
            assert list(found) == [b"level 1", b"level 3"]
    finally:
        group.close()


def test_ten_topics_of_delayed_messages_are_delivered_and_counted(group: Group) -> None:
    topics = [f"topic-{number}" for number in range(10)]
    with group.client() as client:
        due_ms = time.time_ns() // 1_000_000 + 10_000  # Ten topics are created before the first message is sent.
        client.send_many(Message(topic, b"%d" % n, deliver_at_ms=due_ms) for topic in topics for n in range(5))
        wait_until(lambda: group.words()["timed_messages"] == 50, what="all filed")
        for topic in topics:
            with client.consumer("g", topic, start="earliest") as consumer:
                found = list(itertools.islice(consumer.messages(timeout=30), 5))
            assert sorted(message.body for message in found) == [b"0", b"1", b"2", b"3", b"4"]
            assert min(message.store_timestamp_ms for message in found) >= due_ms
        wait_until(lambda: group.words()["timed_messages"] == 0, what="none counted")
        assert group.words()["delivered_messages"] == 50


def test_timer_message_due_in_the_past_arrives_within_200_ms(group: Group) -> None:
    with group.client() as client:
        client.create_topic("past", 1)
        offsets = itertools.count()

        def late_s() -> float:
            offset = next(offsets)
            began = time.monotonic()
            client.send("past", b"x", deliver_at=(time.time() - 60) * 1000)
            (found,) = client.pull("past", 0, offset, timeout=60).messages
            assert found.body == b"x"
            return time.monotonic() - began

        # Best of three: a role that misses a wake-up polls once a second, and may be in time by chance.
        assert_below(AT_ONCE_S, lambda: max(late_s() for _ in range(3)))
