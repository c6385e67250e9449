"""Takeover of a broker's groups: their consumers receive the undelivered messages only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mqproc.store import rocketmq_json
from mqproc.topic_names import SCHEDULE_TOPIC
from mqproc.types import StoredMessage
from tests.golden.fixtures import KEPT, load_fixture
from tests.support.group import Group, wait_until

TOPIC, EVERYTHING, TAG_A = "LifeTopic", "cg_all_LifeTopic", "cg_tagA_LifeTopic"
RETRY = f"%RETRY%{EVERYTHING}"
LEFT = {f"k{number}" for number in range(60, 70)}
"""Keys of the messages sent after the broker's consumers ended."""
QUIET_S = 1.0
Place = tuple[str, int, int]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    """A group, not started, on the broker's store; it does not check transactions."""
    group = Group(load_fixture("i_broker", tmp_path).store)
    group.options = KEPT | {"max_message_size": 32768, "transaction_check_interval": 86_400_000}
    yield group
    group.close()


def place(message: StoredMessage) -> Place:
    return message.stored_topic, message.queue_id, message.queue_offset


def consumed(group: Group, name: str, count: int, tags: str | None = None) -> dict[Place, StoredMessage]:
    """Consume `count` messages, and no more within a second; return them by place."""
    found: list[StoredMessage] = []
    with group.client() as client, client.consumer(name, TOPIC, filter=tags, start="earliest") as consumer:

        def came() -> bool:
            messages = consumer.receive(64, timeout=0.5)
            consumer.ack(*messages)
            found.extend(messages)
            return len(found) >= count

        wait_until(came, what=f"{count} messages for {name}")
        more = consumer.receive(64, timeout=QUIET_S)
        assert [place(message) for message in more] == []
    places = {place(message): message for message in found}
    assert len(places) == len(found), "none came twice"
    return places


def identity(message: StoredMessage) -> tuple[str, bytes, int]:
    """The parts of a message that delivery does not change."""
    return message.keys[0], message.body, message.reconsume_times


def offsets(path: Path) -> dict[str, dict[str, int]]:
    """Offsets by "topic@group", or by level."""
    table: dict[str, dict[str, int]] = rocketmq_json.parse(path.read_text())["offsetTable"]
    return table


def set_back(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def ends(group: Group, topic: str) -> Mapping[str, int]:
    with group.client() as client:
        return {str(queue.queue_id): queue.max_offset for queue in client.queues(topic)}


def test_brokers_group_consumer_receives_remaining_messages(group: Group) -> None:
    before = offsets(group.paths.consumer_offsets)
    group.start()
    begun = {int(queue): offset for queue, offset in before[f"{TOPIC}@{EVERYTHING}"].items()}
    left = {
        (TOPIC, int(queue), at) for queue, end in ends(group, TOPIC).items() for at in range(begun[int(queue)], end)
    }
    found = consumed(group, EVERYTHING, len(LEFT))
    assert found.keys() == left
    assert {message.keys[0] for message in found.values()} == LEFT
    assert {message.reconsume_times for message in found.values()} == {0}
    end = ends(group, TOPIC)
    # No remaining message has the other group's tag.
    with group.client() as client:
        client.send(TOPIC, b"new", keys=["new"], tag="TagA", queue_id=2)
    (new,) = consumed(group, TAG_A, 1, "TagA").values()
    assert (new.keys, new.queue_id, new.queue_offset) == (("new",), 2, end["2"])
    assert group.stop() == 0
    after = offsets(group.paths.consumer_offsets)
    assert after[f"{TOPIC}@{EVERYTHING}"] == end
    assert after[f"{TOPIC}@{TAG_A}"]["2"] == end["2"] + 1
    assert after[f"{RETRY}@{EVERYTHING}"] == before[f"{RETRY}@{EVERYTHING}"] == {"0": 8}


def test_brokers_pending_retries_and_delays_arrive_once(group: Group) -> None:
    """The broker's files have an earlier state, as after a kill before it saves them.

    Half of its eight retries are not consumed; a delayed message and three more retries wait in their levels.
    """
    set_back(group.paths.consumer_offsets, "{0:8\n", "{0:4\n")
    set_back(group.paths.delay_offsets, "{1:2,2:2,3:6,4:4\n", "{1:1,2:2,3:4,4:3\n")
    group.start()
    with group.client() as client:
        waiting = [
            message
            for level, offset in ((1, 1), (2, 2), (3, 4), (4, 3))
            for message in client.pull(SCHEDULE_TOPIC, level - 1, offset).messages
        ]
        pending = client.pull(RETRY, 0, 4, 4).messages
    assert [message.properties["REAL_TOPIC"] for message in waiting] == [TOPIC, RETRY, RETRY, RETRY]
    wait_until(lambda: group.words()["delivered_messages"] == len(waiting), what="the due messages")
    group.wait_dispatched()
    found = consumed(group, EVERYTHING, len(LEFT) + len(pending) + len(waiting))
    came = [message for message in found.values() if message.keys[0] not in LEFT]
    assert sorted(map(identity, came)) == sorted(map(identity, [*pending, *waiting]))
    assert {message.queue_offset for message in came if message.stored_topic == RETRY} == set(range(4, 11))
    assert {message.topic for message in came} == {TOPIC}
    assert {message.keys[0] for message in found.values()} >= LEFT
    assert group.words()["delivered_messages"] == len(waiting)
    assert group.stop() == 0
    assert offsets(group.paths.consumer_offsets)[f"{RETRY}@{EVERYTHING}"] == {"0": 11}
    after = rocketmq_json.parse(group.paths.delay_offsets.read_text())
    assert after["offsetTable"] == {"1": 2, "2": 2, "3": 6, "4": 4}
