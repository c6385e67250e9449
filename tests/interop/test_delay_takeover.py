"""Stores of RocketMQ's with delayed messages are gone on with: what is due is delivered, what was delivered is not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from mqproc.layout.properties import decode, encode
from mqproc.names import SCHEDULE_TOPIC
from mqproc.store import rocketmq_json
from tests.conftest import Group, wait_until
from tests.golden.fixtures import KEPT, load_fixture


def opened(tmp_path: Path, name: str) -> Group:
    """A group on a fixture's store, whose file sizes it adopts."""
    fixture = load_fixture(name, tmp_path)
    group = Group(fixture.store)
    group.options = KEPT | {"max_message_size": 32768, "transaction_check_interval": 86_400_000}
    return group.start()


def test_parked_messages_without_a_file_are_all_delivered(tmp_path: Path) -> None:
    fixture = load_fixture("e_delay", tmp_path / "read")
    waiting = [line for line in fixture.manifest if line["topic"] == SCHEDULE_TOPIC]
    parked = [line for line in waiting if "REAL_TOPIC" in line["properties"]]
    group = opened(tmp_path, "e_delay")
    try:
        wait_until(lambda: group.words()["delivered_messages"] == len(parked))
        group.wait_dispatched()
        # Some of the fixture's were put there without a topic to go to: told, counted, passed over.
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


def test_a_brokers_store_goes_on_where_it_stood(tmp_path: Path) -> None:
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


def test_a_kill_right_behind_the_first_delivery_makes_none_twice(tmp_path: Path) -> None:
    """RocketMQ's file does not say from where on deliveries bear marks, and what is delivered is saved later."""
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
