"""Topics through a real group: created in thousands, kept through kills, deleted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from mqproc.client import Client
from mqproc.errors import PermissionDeniedError, TopicNotFoundError
from mqproc.types import PullStatus
from tests.support.group import Group, wait_until


def test_topics_survive_a_kill_of_the_group(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with group.client() as client:
        for number in range(200):
            client.create_topic(f"topic-{number}", 3)
        client.delete_topic("topic-7")
    group.kill()
    group.start()
    with group.client() as client:
        found = {topic.topic: topic.queues for topic in client.topics()}
    assert found == {f"topic-{number}": 3 for number in range(200) if number != 7}


def test_topics_created_by_sends_keep_all_queues_after_a_kill(
    make_group: Callable[..., Group],
) -> None:
    """Only the first one is in topics.json by then."""
    group = make_group(default_topic_queue_nums=4)
    names = ["A", "B", "C"]
    with group.client() as client:
        for name in names:
            client.send(name, b"first", queue_id=1)
    group.kill()
    group.start()
    with group.client() as client:
        assert [(info.topic, info.queues) for info in client.topics()] == [(name, 4) for name in names]


def test_deleted_topic_is_gone_and_can_be_recreated(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with group.client() as client:
        client.create_topic("gone", 1)
        for _ in range(3):
            client.send("gone", b"first life")
        group.wait_dispatched()
        client.delete_topic("gone")
        with pytest.raises(TopicNotFoundError):
            client.delete_topic("gone")
        assert not (group.paths.consume_queue / "gone").exists()
        assert client.pull("gone", 0, 0).status is PullStatus.NO_MATCHED_LOGIC_QUEUE
        # Offsets of a queue are never reused.
        assert client.send("gone", b"second life", queue_id=0).queue_offset == 3
        group.wait_dispatched()
        assert_second_life(client)
    assert group.stop() == 0
    group.start()
    with group.client() as client:
        assert_second_life(client)


def assert_second_life(client: Client) -> None:
    pulled = client.pull("gone", 0, 0)
    assert (pulled.status, pulled.next_offset, pulled.min_offset) == (PullStatus.OFFSET_TOO_SMALL, 3, 3)
    pulled = client.pull("gone", 0, pulled.next_offset)
    assert [(message.queue_offset, message.body) for message in pulled.messages] == [(3, b"second life")]


def test_topic_can_be_closed_to_sends_and_reopened(group: Group) -> None:
    with group.client() as client:
        client.create_topic("frozen", 2)
        client.send("frozen", b"later", delay=0.5)
        sent = [client.send("frozen", b"x") for _ in range(10)]
        client.create_topic("frozen", 2, perm=4)
        with client.producer(linger_ms=0) as producer:
            future = producer.send("frozen", b"x")
        for send in (lambda: client.send("frozen", b"x"), lambda: client.send_batch("frozen", [b"x"]), future.result):
            with pytest.raises(PermissionDeniedError, match="'frozen' may not be sent to"):
                send()
        wait_until(lambda: client.count("frozen") == len(sent) + 1, what="what waited")
        # More queues do not open it, nor does an import, which makes sure that its topic is there.
        client.create_topic("frozen", 4)
        with pytest.raises(PermissionDeniedError, match="'frozen' may not be sent to"):
            client.send("frozen", b"x", queue_id=3)
        client.create_topic("frozen", 4, perm=6)
        assert client.send("frozen", b"x", queue_id=3).queue_offset == 0


def test_killed_writer_remembers_its_topics(group: Group) -> None:
    with group.client() as client:
        client.create_topic("kept", 5)
        pid = group.pid("writer")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: group.pid("writer") not in (0, pid), what="new writer")
        assert client.send("kept", b"x", queue_id=4).queue_id == 4


def test_topics_failed_save_ends_no_writer_and_delays_no_stop(make_group: Callable[..., Group]) -> None:
    """A folder in the place of the temporary file: every save fails, the journal does not."""
    group = make_group()
    obstacle = group.paths.topics.with_name("topics.json.tmp")
    obstacle.mkdir()
    pid = group.pid("writer")
    with group.client() as client:
        client.create_topic("made", 3)
        wait_until(lambda: "topics could not be saved yet" in group.output.read_text(), what="a save that fails")
        # Counted before it is logged.
        assert group.words()["writer.errors"] > 0
        assert client.send("sent", b"x").physical_offset == 0
        client.create_topic("gone", 1)
        client.delete_topic("gone")
        assert group.pid("writer") == pid
    assert group.stop() == 0
    assert not group.paths.topics.exists()
    obstacle.rmdir()
    group.start()
    with group.client() as client:
        assert [(topic.topic, topic.queues) for topic in client.topics()] == [("made", 3), ("sent", 8)]
    wait_until(group.paths.topics.exists, what="topics.json")
