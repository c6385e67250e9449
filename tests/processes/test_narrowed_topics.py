"""Topics of RocketMQ whose readQueueNums and writeQueueNums differ."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from mqproc import AsyncClient, Client, Message, ResetTo
from mqproc.spark.jobs import replaying
from mqproc.spark.options import WriteOptions
from mqproc.spark.sink import RowSender
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
        path = narrowed.store / "progress.json"
        with client.consumer("cast", "reads", start="earliest", broadcast=True, offsets_path=path) as consumer:
            assert consumer.queues == expected
        simple, seen = client.simple_consumer("simple", "reads", start="earliest"), set()
        while found := simple.receive(COUNT):
            seen |= {message.queue_id for message in found}
        assert seen == set(range(NARROW))


def test_group_reset_and_lag_use_read_queues(narrowed: Group) -> None:
    with narrowed.client() as client:
        client.send_batch("reads", [b""] * COUNT)
        client.wait_dispatched()
        moves = client.groups.plan_reset("lagging", ResetTo(earliest=True), ["reads"])
        assert [move.queue_id for move in moves] == list(range(NARROW))
        client.groups.execute("lagging", moves)
        with client.consumer("lagging", "reads") as consumer:
            assert consumer.lag() == COUNT * NARROW // WIDE
            for _ in consumer.messages(timeout=0.1):
                pass
            consumer.commit()
            assert consumer.lag() == 0
        assert {each.group: each.lag for each in client.groups.all()}["lagging"] == 0


def test_transactions_and_async_producers_use_write_queues(narrowed: Group) -> None:
    async def send() -> set[int]:
        async with AsyncClient(narrowed.store) as client, client.producer() as producer:
            futures = [await producer.send("writes", b"%d" % number) for number in range(COUNT)]
            return {(await future).queue_id for future in futures}

    assert asyncio.run(send()) == set(range(NARROW))
    with narrowed.client() as client:
        for number in range(COUNT):
            with client.transaction("paying", Message("writes", b"%d" % number)):
                pass
        wait_until(lambda: sum(queue.max_offset for queue in client.queues("writes")) == 2 * COUNT, what="all messages")
        assert all(queue.max_offset == 0 for queue in client.queues("writes") if queue.queue_id >= NARROW)


def test_replay_and_import_use_write_queues(narrowed: Group, tmp_path: Path) -> None:
    lines = tmp_path / "messages.txt"
    lines.write_text("".join(f"{number}\n" for number in range(COUNT)))
    with narrowed.client() as client:
        client.send_batch("reads", [b""] * COUNT)
        client.wait_dispatched()
        client.replay("reads", to="writes")
        assert call("import", lines, "--topic", "writes", "--store", narrowed.store).code == 0
        client.wait_dispatched()
        found = {queue.queue_id: queue.max_offset for queue in client.queues("writes")}
        assert sum(found.values()) == 2 * COUNT
        assert all(count == 0 for queue_id, count in found.items() if queue_id >= NARROW)


def test_spark_writes_and_replays_use_write_queues(narrowed: Group) -> None:
    rows = pa.RecordBatch.from_pydict({"body": [b"%d" % number for number in range(COUNT)]})
    with RowSender(WriteOptions(str(narrowed.store), "writes"), "write", WIDE - 1, None) as sender:
        sender.send(rows)
        sender.end()
    narrowed.wait_dispatched()
    with narrowed.client() as client:
        assert {queue.queue_id for queue in client.queues("writes") if queue.max_offset} == {(WIDE - 1) % NARROW}
    assert replaying.replay_target(str(narrowed.store), "writes", "name", 0.0, 0).queues == NARROW


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
