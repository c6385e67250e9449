"""Sharding keys in a real group: the writer picks the queue, a key's messages stay in order."""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from mqproc.layout import properties
from mqproc.layout.control import WRITER
from mqproc.layout.properties import java_hash, queue_of_hash
from mqproc.topic_names import SCHEDULE_TOPIC
from mqproc.types import Message, StoredMessage
from tests.support.group import Group, wait_until

QUEUES = 5
# Lengths around a word of eight bytes, and non-ASCII letters.
KEYS = [
    "a",
    "order-1",
    "order-12",
    "order-123",
    "a key of many words, and longer than two words",
    "é",
    "価格",
    "\U0001f600",
]


def queue_of(key: str, queues: int = QUEUES) -> int:
    return queue_of_hash(java_hash(key), queues)


def stored(client: Any, topic: str = "orders", queues: int = QUEUES) -> list[StoredMessage]:
    """All messages of a topic in store order."""
    client.wait_dispatched()
    found = [each for queue_id in range(queues) for each in client.pull(topic, queue_id, 0, 4096).messages]
    return sorted(found, key=lambda message: message.physical_offset)


@pytest.mark.parametrize("own", [{}, {"zone": "z"}], ids=["columns", "whole property strings"])
def test_sharding_key_picks_queue_by_java_hash(group: Group, own: dict[str, str]) -> None:
    with group.client() as client:
        client.create_topic("orders", QUEUES)
        sent = client.send_many([Message("orders", key.encode(), properties=own, sharding_key=key) for key in KEYS])
        batch = client.send_batch("orders", [key.encode() for key in KEYS], sharding_keys=KEYS, properties=own)
        wanted = [queue_of(key) for key in KEYS]
        assert [result.queue_id for result in sent] == batch.queue_ids.tolist() == wanted
        assert len(set(wanted)) > 2
        found = stored(client)
        assert [(each.sharding_key, each.body.decode(), each.queue_id) for each in found] == [
            (key, key, queue_of(key)) for key in KEYS * 2
        ]


def test_sharding_key_property_is_at_rocketmq_position(group: Group) -> None:
    # Some of these sort before it and some after it among the constant properties.
    constant = dict.fromkeys(["PGROUP2", "CLUSTER", "TIMER_LIKE", "zone", "a", "b", "c", "d", "e", "f"], "value")
    with group.client() as client:
        client.create_topic("orders", QUEUES)
        client.send_batch("orders", [b"1", b"2"], sharding_keys=["a", None], tags="t", keys="k", properties=constant)
        client.send(Message("orders", b"3", "t", ("k",), constant, sharding_key="a"))
        with_key, without, whole = stored(client)
        names = list(with_key.properties)
        assert names == list(whole.properties)
        assert [properties.bucket(name) for name in names] == sorted(map(properties.bucket, names))
        assert 0 < names.index("__SHARDINGKEY") < names.index("UNIQ_KEY")
        assert list(without.properties) == [name for name in names if name != "__SHARDINGKEY"]
        assert with_key.properties == {**whole.properties, "UNIQ_KEY": with_key.unique_id}


def test_sharding_key_messages_are_consumed_in_order(group: Group) -> None:
    """Threads send for separate accounts while members join and leave; accounts stay in order."""
    accounts, per_account = 12, 200
    with group.client() as client:
        client.create_topic("accounts", 4)
        seen: dict[str, list[int]] = defaultdict(list)
        handled = threading.Lock()
        stop = threading.Event()

        def handle(message: StoredMessage) -> None:
            with handled:
                seen[message.sharding_key].append(int(message.body))

        def consume() -> None:
            with group.client() as own, own.consumer("ledger", "accounts", start="earliest") as consumer:
                consumer.run(handle, workers=3, ordered=True, stop=stop)

        def send(producer: Any, names: list[str]) -> None:
            for number in range(per_account):
                for name in names:
                    producer.send("accounts", b"%d" % number, sharding_key=name)

        def all_came() -> bool:
            with handled:
                return len(seen) == accounts and all(max(each) == per_account - 1 for each in seen.values())

        names = [f"account-{number}" for number in range(accounts)]
        members = [threading.Thread(target=consume) for _ in range(2)]
        try:
            with client.producer(linger_ms=1) as producer:
                senders = [threading.Thread(target=send, args=(producer, names[part::3])) for part in range(3)]
                for thread in (*senders, *members):
                    thread.start()
                for thread in senders:
                    thread.join()
            wait_until(all_came, what="every account's last message")
        finally:
            stop.set()
            for thread in members:
                thread.join(20)
        for name in names:
            in_queue = [each for each in stored(client, "accounts", 4) if each.sharding_key == name]
            assert {each.queue_id for each in in_queue} == {queue_of(name, 4)}
            assert [int(each.body) for each in in_queue] == list(range(per_account))
            # Messages handled but not committed before a rebalance are redelivered, in order.
            firsts = list(dict.fromkeys(seen[name]))
            assert firsts == list(range(per_account))


def test_sharding_key_delayed_message_reaches_its_queue(group: Group) -> None:
    with group.client() as client:
        client.create_topic("orders", QUEUES)
        for key in KEYS:
            client.send("orders", b"level", sharding_key=key, delay_level=1)
            client.send("orders", b"time", properties={"zone": "z"}, sharding_key=key, delay=1.2)
            with client.transaction("billing", Message("orders", b"half", sharding_key=key)):
                pass
        client.send_batch("orders", [b"batch"] * 3, sharding_keys="order-1", delay=[0.3, 0.6, 0.9])
        with client.producer() as producer:
            for key in KEYS:
                producer.send(Message("orders", b"producer", sharding_key=key, delay_level=1))
        parked = stored(client, SCHEDULE_TOPIC, 1)
        assert [each.properties["REAL_QID"] for each in parked] == [str(queue_of(each.sharding_key)) for each in parked]
        wait_until(lambda: len(stored(client)) == 4 * len(KEYS) + 3, what="all are delivered")
        found = stored(client)
        assert [each.queue_id for each in found] == [queue_of(each.sharding_key) for each in found]
        kinds: dict[bytes, set[str]] = defaultdict(set)
        for each in found:
            kinds[each.body].add(each.sharding_key)
        assert kinds.pop(b"batch") == {"order-1"}
        assert kinds == {body: set(KEYS) for body in (b"level", b"time", b"half", b"producer")}


def test_sharding_dropped_duplicates_keep_other_queues(make_group: Callable[..., Group]) -> None:
    group = make_group(dedupe_window_messages=1000)
    with group.client() as client:
        client.create_topic("orders", QUEUES)
        messages = [
            Message("orders", key.encode(), unique_id=f"id-{number}", sharding_key=key)
            for number, key in enumerate(KEYS)
        ]
        some = client.send_many(messages[1::3])
        all_of_them = client.send_many(messages)
        assert [each.physical_offset for each in all_of_them[1::3]] == [each.physical_offset for each in some]
        assert [result.queue_id for result in all_of_them] == [queue_of(key) for key in KEYS]
        assert sorted(each.body.decode() for each in stored(client)) == sorted(KEYS)


def test_sharding_rule_survives_widening_and_killed_writer(group: Group) -> None:
    with group.client(timeout=30) as client:
        client.create_topic("orders", QUEUES)
        client.send("orders", b"before", sharding_key="order-1")
        client.create_topic("orders", 8)
        assert client.send("orders", b"wider", sharding_key="order-1").queue_id == queue_of("order-1", 8)
        killed = group.pid(WRITER)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: group.pid(WRITER) not in (0, killed), what="the next writer")
        assert client.send_many([Message("orders", b"x", sharding_key="order-1")])[0].queue_id == queue_of("order-1", 8)
