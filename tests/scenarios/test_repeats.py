"""Retried sends after a lost answer, against a running group whose writer drops duplicates."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from mqproc.client._async.client import AsyncClient
from mqproc.client.retry import RetryPolicy
from mqproc.types import Message
from tests.support.group import Group, wait_until

SAFE = RetryPolicy(repeat_sends=True)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    started = Group(tmp_path_factory.mktemp("repeats") / "store", dedupe_window_messages=50_000).start()
    yield started
    started.close()


def bodies(group: Group, topic: str) -> Counter[bytes]:
    group.wait_dispatched()
    with group.client() as client:
        return Counter(message.body for message in client.range(topic))


def test_duplicate_send_returns_first_offset(group: Group) -> None:
    dropped = group.words()["dropped_repeats"]
    with group.client() as client:
        message = Message("one", b"body", "tag", ("key",), {"color": "red"}, unique_id="ORDER-1-PAID")
        first = client.send(message)
        again = client.send(message)
        assert (again.queue_id, again.queue_offset, again.message_id) == (
            first.queue_id,
            first.queue_offset,
            first.message_id,
        )
        found = client.send_many([message, Message("one", b"other"), message])
        assert [result.message_id == first.message_id for result in found] == [True, False, True]
    assert bodies(group, "one") == {b"body": 1, b"other": 1}
    assert group.words()["dropped_repeats"] == dropped + 3


def test_duplicates_are_known_after_killed_writer(group: Group) -> None:
    messages = [Message("restarted", b"%d" % number, unique_id=f"RESTARTED-{number}") for number in range(500)]
    with group.client() as client:
        first = client.send_many(messages)
        incarnation = group.words()["writer.incarnation"]
        os.kill(group.pid("writer"), signal.SIGKILL)
        wait_until(lambda: group.words()["writer.incarnation"] > incarnation and group.ready())
        again = client.send_many(messages)
    assert [result.message_id for result in again] == [result.message_id for result in first]
    assert set(bodies(group, "restarted").values()) == {1}


def test_sends_during_writer_kills_are_stored_once(group: Group) -> None:
    """The writer is killed three times during sends: no error, no loss, no duplicate."""
    expected: Counter[bytes] = Counter()

    def kill() -> None:
        for _ in range(3):
            before = group.words()["appended_frames"]
            wait_until(lambda before=before: group.words()["appended_frames"] > before + 20)
            os.kill(group.pid("writer"), signal.SIGKILL)
            wait_until(group.ready)

    async def send_some(first: int) -> None:
        async with AsyncClient(group.store, retry=SAFE) as client:
            await asyncio.gather(*(client.send("through", b"async %d" % (first + number)) for number in range(50)))

    killer = threading.Thread(target=kill)
    killer.start()
    turn = 0
    with group.client(retry=SAFE) as client:
        while killer.is_alive():
            sent = [b"sync %d" % turn, *(b"batch %d" % (1000 * turn + number) for number in range(1000))]
            client.send("through", sent[0])
            client.send_batch("through", sent[1:])
            asyncio.run(send_some(50 * turn))
            expected.update(sent)
            expected.update(b"async %d" % (50 * turn + number) for number in range(50))
            turn += 1
    killer.join()
    assert bodies(group, "through") == expected


def test_duplicate_ids_of_delayed_messages_are_per_topic(group: Group) -> None:
    """Delayed messages wait in one system topic: by level, by time, or as half messages."""
    topics = "Bills", "Mails"
    with group.client() as client:
        for topic in topics:
            for _ in range(2):
                client.send(Message(topic, b"level", unique_id="BY-LEVEL", delay_level=1))
                client.send(Message(topic, b"time", unique_id="BY-TIME", deliver_at_ms=int(time.time() * 1000) + 3000))
            with client.transaction("payers", Message(topic, b"committed", unique_id="COMMITTED")):
                pass
        for topic in topics:
            wait_until(lambda topic=topic: sum(bodies(group, topic).values()) >= 3)
            assert bodies(group, topic) == {b"level": 1, b"time": 1, b"committed": 1}


def test_duplicate_of_delivered_delayed_message_is_dropped(group: Group) -> None:
    """Duplicates are dropped after the delivery too; a message already due is stored directly."""
    message = Message("Bells", b"ring", unique_id="RING", deliver_at_ms=int(time.time() * 1000) + 1000)
    with group.client() as client:
        first = client.send(message)
        wait_until(lambda: bodies(group, "Bells"))
        later = Message("Bells", b"later", unique_id="LATER", deliver_at_ms=message.deliver_at_ms)
        found = client.send_many([message, later, message])
        assert [result.message_id == first.message_id for result in found] == [True, False, True]
        assert client.send(later).message_id == found[1].message_id
    assert bodies(group, "Bells") == {b"ring": 1, b"later": 1}


def test_duplicate_of_deleted_topic_delayed_message_is_stored(group: Group) -> None:
    message = Message("Begun", b"again", unique_id="AGAIN", deliver_at_ms=int(time.time() * 1000) + 500)
    with group.client() as client:
        client.send(message)
        wait_until(lambda: bodies(group, "Begun"))
        client.delete_topic("Begun")
        client.create_topic("Begun", 4)
        again = client.send(message)
        assert client.send(message).message_id == again.message_id
    assert bodies(group, "Begun") == {b"again": 1}
