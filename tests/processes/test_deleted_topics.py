"""Topics deleted and recreated in a real group: before dispatch, during kills, restarts.

An existing topic contains exactly the messages that were sent since its last creation. At the end the ConsumeQueues
equal a rebuild from the log and `config/`, byte for byte.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mqproc import StoreReader
from mqproc.client import Client
from mqproc.errors import MqprocError, TopicNotFoundError
from mqproc.layout import control as words_of
from mqproc.types import PullStatus
from tests.support.group import PATIENCE_S, Group, all_of, assert_equals_rebuild, wait_until

MakeGroup = Callable[..., Group]


def messages_of(client: Client, topic: str) -> dict[tuple[int, int], bytes]:
    """Every message found by pulls, by (queue id, queue offset)."""
    found = {}
    for queue in client.queues(topic):
        offset = queue.min_offset
        while offset < queue.max_offset:
            pulled = client.pull(topic, queue.queue_id, offset, max_messages=4096)
            assert pulled.status is PullStatus.FOUND, pulled
            found |= {(message.queue_id, message.queue_offset): message.body for message in pulled.messages}
            offset = pulled.next_offset
    return found


def send(client: Client, topic: str, bodies: list[bytes]) -> dict[tuple[int, int], bytes]:
    """Send; return the messages by the offsets in the answers."""
    told = client.send_batch(topic, bodies, keys=["k"] * len(bodies))
    places = zip(told.queue_ids.tolist(), told.queue_offsets.tolist(), strict=True)
    return dict(zip(places, bodies, strict=True))


def bodies(text: str, count: int) -> list[bytes]:
    return [b"%s %d" % (text.encode(), number) for number in range(count)]


def stop_and_compare(group: Group) -> None:
    group.wait_dispatched()
    assert group.stop() == 0
    assert_equals_rebuild(group)


def kill_role(group: Group, role: str) -> None:
    pid = group.pid(role)
    os.kill(pid, signal.SIGKILL)

    def back() -> bool:
        words = group.words()
        return words[f"{role}.pid"] not in (0, pid) and words[f"{role}.state"] == words_of.STATE_RUNNING

    wait_until(back, what=f"{role} back")


def test_deleted_topic_undispatched_records_skip_successor(group: Group) -> None:
    with group.client() as client:
        client.create_topic("T", 2)
        with group.stopped_role(words_of.DISPATCHER):
            first = send(client, "T", bodies("first", 2500))
            client.delete_topic("T")
            second = send(client, "T", bodies("second", 300))
            assert group.words()["dispatched"] == 0
        group.wait_dispatched()
        assert len(first) == 2500
        assert not first.keys() & second.keys()
        assert messages_of(client, "T") == second
    stop_and_compare(group)
    group.start()
    # Queues may lack their deleted messages.
    assert "lost units" not in group.output.read_text()
    with group.client() as client:
        assert messages_of(client, "T") == second
        third = send(client, "T", bodies("third", 10))
        group.wait_dispatched()
        assert messages_of(client, "T") == second | third


def test_deleted_topic_recreated_with_other_queue_count(group: Group) -> None:
    with group.client() as client:
        used: set[tuple[int, int]] = set()
        for queues in (4, 1, 6, 2):
            client.create_topic("T", queues)
            sent = send(client, "T", bodies(f"of {queues}", 60))
            assert not used & sent.keys()
            used |= sent.keys()
            group.wait_dispatched()
            assert [queue.queue_id for queue in client.queues("T")] == list(range(queues))
            assert messages_of(client, "T") == sent
            client.delete_topic("T")
            assert not (group.paths.consume_queue / "T").exists()
        client.create_topic("T", 6)
        for queue in client.queues("T"):
            assert queue.min_offset == queue.max_offset > 0
    assert group.stop() == 0
    group.start()
    with group.client() as client:
        sent = send(client, "T", bodies("last", 60))
        assert not used & sent.keys()
        group.wait_dispatched()
        assert messages_of(client, "T") == sent
    stop_and_compare(group)


def test_deleted_topic_files_are_held_by_no_role(group: Group) -> None:
    with group.client() as client:
        client.create_topic("T", 3)
        send(client, "T", bodies("gone", 30))
        group.wait_dispatched()
        assert len(messages_of(client, "T")) == 30
        client.delete_topic("T")

    def kept() -> list[str]:
        links = [link for role in words_of.ROLES for link in Path(f"/proc/{group.pid(role)}/fd").iterdir()]
        names = [os.readlink(link) for link in links if link.is_symlink()]
        return [name for name in names if name.startswith(f"{group.paths.consume_queue}/") and "(deleted)" in name]

    wait_until(lambda: not kept(), what="deleted files closed")


def test_deleted_topic_consumer_learns_new_minimum(group: Group) -> None:
    with group.client() as client:
        client.create_topic("T", 1)
        send(client, "T", bodies("first", 20))
        group.wait_dispatched()
        assert client.pull("T", 0, 15).messages[0].body == b"first 15"
        client.delete_topic("T")
        assert client.pull("T", 0, 15).status is PullStatus.NO_MATCHED_LOGIC_QUEUE
        client.create_topic("T", 1)
        pulled = client.pull("T", 0, 15)
        assert (pulled.status, pulled.next_offset) == (PullStatus.OFFSET_TOO_SMALL, 20)
        assert client.pull("T", 0, 20).status is PullStatus.OFFSET_OVERFLOW_ONE
        send(client, "T", bodies("second", 5))
        group.wait_dispatched()
        assert client.pull("T", 0, 15).status is PullStatus.OFFSET_TOO_SMALL
        assert [message.body for message in client.pull("T", 0, 20).messages] == bodies("second", 5)


def test_recreated_topic_is_consumed_by_old_group(group: Group) -> None:
    """Committed and queue offsets continue: no new message is skipped, no old one is delivered."""
    with group.client() as client:
        client.create_topic("T", 1)
        send(client, "T", bodies("first", 20))
        with client.consumer("g", "T", start="earliest") as consumer:
            done = [message.body for message in itertools.islice(consumer.messages(timeout=PATIENCE_S), 12)]
            assert done == bodies("first", 20)[:12]
        client.delete_topic("T")
        client.create_topic("T", 1)
        send(client, "T", bodies("second", 5))
        group.wait_dispatched()
        with client.consumer("g", "T", start="latest") as consumer:
            assert [message.body for message in all_of(consumer, 5)] == bodies("second", 5)
        places = {queue.topic: (queue.offset, queue.lag) for queue in client.groups.info("g").queues}
        assert places["T"] == (25, 0)


def test_deleted_topic_keys_find_nothing(group: Group) -> None:
    """Index entries of deleted records remain; they never match a recreated topic."""
    with group.client() as client:
        client.create_topic("T", 2)
        old = [client.send("T", b"old %d" % number, keys=["same"], queue_id=number % 2) for number in range(6)]
        group.wait_dispatched()
        assert [message.body for message in client.by_key("T", "same")] == [b"old %d" % number for number in range(6)]
        client.delete_topic("T")
        assert client.by_key("T", "same") == []
        client.create_topic("T", 2)
        assert client.by_key("T", "same") == []
        new = [client.send("T", b"new %d" % number, keys=["same"], queue_id=number % 2) for number in range(3)]
        group.wait_dispatched()
        assert [message.body for message in client.by_key("T", "same")] == [b"new 0", b"new 1", b"new 2"]
        assert client.by_key("T", old[0].unique_id, unique=True) == []
        assert len(client.by_key("T", new[0].unique_id, unique=True)) == 1
    assert group.stop() == 0
    with StoreReader(group.store) as reader:
        assert [message.body for message in reader.by_key("T", "same")] == [b"new 0", b"new 1", b"new 2"]


@pytest.mark.parametrize("messages", [0, 5])
def test_deleted_topic_answers_waiting_pull(group: Group, messages: int) -> None:
    """The answer comes at once, although nothing is dispatched: the queue no longer exists."""
    with group.client() as waiting, group.client() as client, ThreadPoolExecutor(1) as thread:
        client.create_topic("T", 1)
        send(client, "T", bodies("first", messages))
        group.wait_dispatched()
        pulled = thread.submit(waiting.pull, "T", 0, messages, timeout=30.0)
        wait_until(lambda: group.words()["waiting_pulls"] == 1)
        client.delete_topic("T")
        assert pulled.result(timeout=15).status is PullStatus.NO_MATCHED_LOGIC_QUEUE


@pytest.mark.parametrize("point", ["topic.deletion_durable", "topic.queues_deleted"])
def test_topic_deletion_survives_killed_writer(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setenv("MQPROC_CRASH", point)
    group = make_group()
    with group.client() as client:
        send(client, "T", bodies("first", 200))
        kept = send(client, "V", bodies("kept", 50))
        group.wait_dispatched()
        pid = group.pid(words_of.WRITER)
        with pytest.raises(MqprocError):
            client.delete_topic("T")
        wait_until(lambda: group.pid(words_of.WRITER) not in (0, pid), what="a new writer")
        # The line was durable, so the deletion is valid, although the client got no answer.
        with pytest.raises(TopicNotFoundError):
            client.delete_topic("T")
        assert not (group.paths.consume_queue / "T").exists()
        second = send(client, "T", bodies("second", 100))
        group.wait_dispatched()
        assert messages_of(client, "T") == second
        assert messages_of(client, "V") == kept
    stop_and_compare(group)
    group.start()
    with group.client() as client:
        assert messages_of(client, "T") == second


def test_topic_deletion_survives_killed_group(make_group: MakeGroup) -> None:
    group = make_group()
    with group.client() as client:
        first = send(client, "T", bodies("first", 300)) | send(client, "U", bodies("first", 300))
        group.wait_dispatched()
        client.delete_topic("T")
        client.delete_topic("U")
    group.kill()
    group.start()
    with group.client() as client:
        assert client.topics() == []
        assert list(group.paths.consume_queue.iterdir()) == []
        second = send(client, "T", bodies("second", 30))
        assert not first.keys() & second.keys()
    group.kill()
    group.start()
    with group.client() as client:
        assert [topic.topic for topic in client.topics()] == ["T"]
        assert messages_of(client, "T") == second
    stop_and_compare(group)


@pytest.mark.parametrize("role", [words_of.WRITER, words_of.DISPATCHER])
def test_topic_deletion_under_kills_loses_and_revives_nothing(group: Group, role: str) -> None:
    with group.client(timeout=20.0) as client:
        expected: dict[tuple[int, int], bytes] = {}
        used: set[tuple[int, int]] = set()
        for turn in range(4):
            expected = send(client, "T", bodies(f"a{turn}", 400))
            if turn % 2:
                kill_role(group, role)
            expected |= send(client, "T", bodies(f"b{turn}", 400))
            assert not used & expected.keys()
            used |= expected.keys()
            if turn < 3:
                client.delete_topic("T")
                if turn % 2 == 0:
                    kill_role(group, role)
        group.wait_dispatched()
        assert messages_of(client, "T") == expected
    stop_and_compare(group)


def test_topic_deletion_survives_removed_own_folder(make_group: MakeGroup) -> None:
    group = make_group()
    with group.client() as client:
        kept = send(client, "V", bodies("kept", 100))
        send(client, "T", bodies("first", 100))
        send(client, "U", bodies("last of the log", 100))
        group.wait_dispatched()
        client.delete_topic("T")
        client.delete_topic("U")
        second = send(client, "T", bodies("second", 5))
    assert group.stop() == 0
    shutil.rmtree(group.paths.own)
    group.start()
    with group.client() as client:
        assert [topic.topic for topic in client.topics()] == ["T", "V"]
        assert messages_of(client, "V") == kept
        assert messages_of(client, "T") == second
    stop_and_compare(group)
