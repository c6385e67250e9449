"""Topics of RocketMQ whose readQueueNums and writeQueueNums differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc import Client, Message
from mqproc.store.topics import TopicConfig
from tests.support.command_line import call
from tests.support.group import Group, wait_until

WIDE, NARROW, COUNT = 8, 2, 32


def configured(group: Group) -> dict[str, tuple[int, int]]:
    """Read and write queues by topic, in topics.json."""
    table = json.loads(group.paths.topics.read_bytes())["topicConfigTable"]
    return {name: (each["readQueueNums"], each["writeQueueNums"]) for name, each in table.items()}


@pytest.fixture
def narrowed(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path / "store")
    group.paths.topics.parent.mkdir(parents=True, mode=0o700)
    configs = [
        TopicConfig("writes", WIDE, read_queues=WIDE, write_queues=NARROW),
        TopicConfig("reads", WIDE, read_queues=NARROW, write_queues=WIDE),
    ]
    table = {config.topic: config.to_rocketmq() for config in configs}
    version = {"counter": 1, "stateVersion": 0, "timestamp": 1}
    group.paths.topics.write_text(json.dumps({"dataVersion": version, "topicConfigTable": table}))
    group.start()
    yield group
    group.close()


def used_queues(client: Client, topic: str) -> list[set[int]]:
    """Queues that each way of sending without a queue id uses."""
    bodies, keys = [b"%d" % number for number in range(COUNT)], [f"key-{number}" for number in range(COUNT)]
    with client.producer() as producer:
        sent = [producer.send(topic, body) for body in bodies]
    return [
        {client.send(topic, body).queue_id for body in bodies},
        {client.send(topic, body, sharding_key=key).queue_id for body, key in zip(bodies, keys, strict=True)},
        {result.queue_id for result in client.send_many(Message(topic, body) for body in bodies)},
        set(client.send_batch(topic, bodies).queue_ids.tolist()),
        set(client.send_batch(topic, bodies, sharding_keys=keys).queue_ids.tolist()),
        {each.result().queue_id if hasattr(each, "result") else each.queue_id for each in sent},
    ]


def test_producers_use_write_queues(narrowed: Group) -> None:
    with narrowed.client() as client:
        assert used_queues(client, "writes") == [set(range(NARROW))] * 6
        assert used_queues(client, "reads") == [set(range(WIDE))] * 6
        # As in RocketMQ, a producer may name any queue.
        assert client.send("writes", b"", queue_id=WIDE - 1).queue_id == WIDE - 1


def test_delayed_messages_use_write_queues(narrowed: Group) -> None:
    with narrowed.client() as client:
        for number in range(COUNT):
            client.send("writes", b"%d" % number, delay=0.5)
            client.send("writes", b"%d" % number, delay=0.5, sharding_key=f"key-{number}")

        def arrived() -> dict[int, int]:
            return {queue.queue_id: queue.max_offset for queue in client.queues("writes") if queue.max_offset}

        wait_until(lambda: sum(arrived().values()) == 2 * COUNT, what="all messages")
        assert set(arrived()) == set(range(NARROW))


def test_consumers_use_read_queues(narrowed: Group) -> None:
    with narrowed.client() as client:
        client.send_batch("reads", [b""] * COUNT)
        client.wait_dispatched()
        with client.consumer("members", ["reads", "writes"], start="earliest") as consumer:
            expected = [("reads", queue_id) for queue_id in range(NARROW)]
            assert consumer.queues == expected + [("writes", queue_id) for queue_id in range(WIDE)]
        simple, seen = client.simple_consumer("simple", "reads", start="earliest"), set()
        while found := simple.receive(COUNT):
            seen |= {message.queue_id for message in found}
        assert seen == set(range(NARROW))


def test_topic_info_shows_read_and_write_queues(narrowed: Group) -> None:
    with narrowed.client() as client:
        found = {info.topic: (info.queues, info.read_queues, info.write_queues) for info in client.topics()}
        assert (found["writes"], found["reads"]) == ((WIDE, WIDE, NARROW), (WIDE, NARROW, WIDE))
    shown = call("topic", "info", "writes", "--json", "--store", narrowed.store).json
    assert (shown["queues"], shown["read_queues"], shown["write_queues"]) == (WIDE, WIDE, NARROW)


def test_narrowed_topics_survive_restarts_until_they_are_widened(narrowed: Group) -> None:
    kept = {"writes": (WIDE, NARROW), "reads": (NARROW, WIDE)}
    with narrowed.client() as client:
        client.create_topic("other", 1)
        wait_until(lambda: "other" in configured(narrowed), what="saved topics")
        assert configured(narrowed).items() >= kept.items()
        client.create_topic("writes", WIDE)
        wait_until(lambda: configured(narrowed)["writes"] == (WIDE, WIDE), what="the wider topic")
        assert used_queues(client, "writes") == [set(range(WIDE))] * 6
    narrowed.kill()
    narrowed.start()
    assert configured(narrowed).items() >= {"writes": (WIDE, WIDE), "reads": (NARROW, WIDE)}.items()
