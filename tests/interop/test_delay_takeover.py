"""Takeover of RocketMQ's stores with delayed messages: each due message is delivered once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from mqproc.layout.properties import decode, encode
from mqproc.store import rocketmq_json
from mqproc.topic_names import SCHEDULE_TOPIC
from tests.golden.fixtures import KEPT, load_fixture
from tests.support.group import Group, wait_until


def opened(tmp_path: Path, name: str) -> Group:
    """A group on a fixture's store, whose file sizes it adopts."""
    fixture = load_fixture(name, tmp_path)
    group = Group(fixture.store)
    group.options = KEPT | {"max_message_size": 32768, "transaction_check_interval": 86_400_000}
    return group.start()


def test_delayed_messages_without_offset_file_are_delivered(tmp_path: Path) -> None:
    fixture = load_fixture("e_delay", tmp_path / "read")
    waiting = [line for line in fixture.manifest if line["topic"] == SCHEDULE_TOPIC]
    parked = [line for line in waiting if "REAL_TOPIC" in line["properties"]]
    group = opened(tmp_path, "e_delay")
    try:
        wait_until(lambda: group.words()["delivered_messages"] == len(parked))
        group.wait_dispatched()
        # Some messages of the fixture have no target topic: reported, counted, skipped.
        assert group.words()["deliveries_lost"] == len(waiting) - len(parked) > 0
        expected = Counter((line["properties"]["REAL_TOPIC"], int(line["properties"]["REAL_QID"])) for line in parked)
        with group.client() as client:
            for (topic, queue_id), count in expected.items():
                messages = client.pull(topic, queue_id, 0, 4096).messages
                delivered = [message for message in messages if message.prepared_transaction_offset]
                assert len(delivered) == count
                by_key = {line["uniqKey"]: line for line in parked}
                for message in delivered:
                    line = by_key[message.unique_id]
                    assert message.properties == line["properties"]
                    assert message.reconsume_times == line["reconsumeTimes"]
                    assert message.born_host == line["bornHost"]
            ends = {queue.queue_id + 1: queue.max_offset for queue in client.queues(SCHEDULE_TOPIC)}
        assert group.stop() == 0
        saved = rocketmq_json.parse(group.paths.delay_offsets.read_text())["offsetTable"]
        assert saved == {str(level): end for level, end in ends.items() if end}
    finally:
        group.close()


def test_delayed_messages_of_broker_continue_at_its_offsets(tmp_path: Path) -> None:
    group = opened(tmp_path, "i_broker")
    try:
        before = rocketmq_json.parse(group.paths.delay_offsets.read_text())["offsetTable"]
        with group.client() as client:
            written = group.words()["written"]
            parked = client.pull(SCHEDULE_TOPIC, 0, 0).messages
            for message in parked:
                text = encode(message.properties)
                assert decode(text) == dict(message.properties)
                assert list(message.properties) == list(decode(text)), "RocketMQ's order is the one that we write in"
            client.send("LifeTopic", b"ours", delay_level=1)
            wait_until(lambda: group.words()["delivered_messages"] == 1)
            group.wait_dispatched()
            assert [message.body for message in client.scan(physical_offset=written)] == [b"ours", b"ours"]
        assert group.stop() == 0
        after = rocketmq_json.parse(group.paths.delay_offsets.read_text())["offsetTable"]
        assert after == before | {"1": before["1"] + 1}
    finally:
        group.close()


def test_kill_after_first_delivery_delivers_none_twice(tmp_path: Path) -> None:
    """RocketMQ's file lacks the start of delivery marks, and is saved after deliveries."""
    group = opened(tmp_path, "i_broker")
    try:
        written = group.words()["written"]
        with group.client() as client:
            client.send("LifeTopic", b"ours", delay_level=1)
        wait_until(lambda: group.words()["delivered_messages"] == 1)
        group.kill()
        group.start()
        with group.client() as client:
            client.send("LifeTopic", b"next", delay_level=1)

            def delivered() -> list[bytes]:
                found = client.scan(physical_offset=written)
                return [message.body for message in found if message.topic == "LifeTopic"]

            wait_until(lambda: b"next" in delivered(), what="the next one is delivered")
            assert delivered() == [b"ours", b"next"]
        assert group.stop() == 0
    finally:
        group.close()
