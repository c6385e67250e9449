"""Redeliveries: the subscribed topic, and only those of the consumer's own group."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from mqproc import Client, StoredMessage
from mqproc.client._sync.consumer import SimpleConsumer
from mqproc.topic_names import retries_of_group, retries_of_topic
from tests.support.group import PATIENCE_S, Group, fill, wait_until

SOON_S = 1.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """A group whose retries follow at once."""
    group = Group(tmp_path_factory.mktemp("redelivered") / "store", message_delay_level=" ".join(["0s"] * 18)).start()
    yield group
    group.close()


@pytest.fixture
def client(shared: Group) -> Iterator[Client]:
    with shared.client() as client:
        yield client


def received(consumer: SimpleConsumer, invisible_s: float = 300.0) -> StoredMessage:
    (message,) = wait_until(lambda: consumer.receive(1, invisible_s, timeout=1), what="a message")
    return message


def test_member_sees_the_subscribed_topic_at_redelivery(client: Client) -> None:
    for topic in ("Orders", "Mails"):
        fill(client, topic, 1, queues=1)
    seen: list[StoredMessage] = []
    with client.consumer("billing", ["Orders", "Mails"], start="earliest") as consumer:
        while len(seen) < 4:
            for message in consumer.receive(4, timeout=PATIENCE_S):
                seen.append(message)
                if message.reconsume_times == 0:
                    consumer.nack(message)
                else:
                    consumer.ack(message)
        consumer.commit()
        wait_until(lambda: client.groups.info("billing").lag == 0, what="everything committed")
    assert sorted((each.topic, each.stored_topic, each.reconsume_times) for each in seen) == [
        ("Mails", "%RETRY%billing", 1),
        ("Mails", "Mails", 0),
        ("Orders", "%RETRY%billing", 1),
        ("Orders", "Orders", 0),
    ]


def test_handler_and_loop_see_the_subscribed_topic_at_redelivery(client: Client) -> None:
    fill(client, "Run", 1, queues=1)
    with client.consumer("run", "Run", start="earliest") as consumer:
        consumer.nack(*consumer.receive(1, timeout=PATIENCE_S))
        for message in consumer.messages(timeout=PATIENCE_S):
            assert (message.topic, message.stored_topic) == ("Run", "%RETRY%run")
            break


def test_batches_have_the_subscribed_topic_at_redelivery(client: Client) -> None:
    fill(client, "Arrow", 1, queues=1)
    with client.consumer("arrow", "Arrow", start="earliest") as consumer:
        consumer.nack(*consumer.receive(1, timeout=PATIENCE_S))
    with client.consumer("arrow", "Arrow") as consumer:
        for batch in consumer.batches(["body", "topic"], timeout=PATIENCE_S):
            assert batch.to_pylist() == [{"body": b"0", "topic": "Arrow"}]
            break


def test_simple_consumer_sees_the_subscribed_topic_at_redelivery(client: Client) -> None:
    fill(client, "Pop", 1, queues=1)
    consumer = client.simple_consumer("pop", "Pop", start="earliest")
    received(consumer, SOON_S)
    again = received(consumer)
    assert (again.topic, again.stored_topic, again.reconsume_times) == ("Pop", "%RETRY%pop_Pop", 1)
    # Another process may acknowledge it.
    assert consumer.ack(pickle.loads(pickle.dumps(again))) == 1
    assert client.groups.info("pop").lag == 0


def test_json_of_a_redelivery_has_both_topics(client: Client) -> None:
    fill(client, "Json", 1, queues=1)
    consumer = client.simple_consumer("json", "Json", start="earliest")
    first, again = received(consumer, SOON_S), received(consumer)
    assert (first.stored_topic, "stored_topic" in first.to_json()) == ("Json", False)
    found = again.to_json()
    assert (found["topic"], found["stored_topic"]) == ("Json", "%RETRY%json_Json")


def test_groups_that_share_a_retry_topic_get_their_own_messages(client: Client) -> None:
    """Topic b_c of group a, topic c of a_b, and members of a_b_c use %RETRY%a_b_c."""
    for topic in ("b_c", "c"):
        fill(client, topic, 1, queues=1)
    ones, others = (client.simple_consumer(*of, start="earliest") for of in (("a", "b_c"), ("a_b", "c")))
    received(ones, SOON_S)
    other = received(others)
    with client.consumer("a_b_c", "b_c", start="earliest") as member:
        member.nack(*member.receive(1, timeout=PATIENCE_S))
        assert client.groups.resend("a_b_c", *client.groups.dead_letters("a_b_c")) == 0
        wait_until(lambda: sum(each.max_offset for each in client.queues("%RETRY%a_b_c")) == 2, what="both copies")
        (again,) = wait_until(lambda: member.receive(2, timeout=1), what="the member's own")
        assert again.properties["REAL_TOPIC"] == "%RETRY%a_b_c"
        member.ack(again)
        assert member.receive(2, timeout=0.5) == []
    redelivered = received(ones)
    assert (redelivered.topic, "REAL_TOPIC" in redelivered.properties) == ("b_c", False)
    assert ones.ack(redelivered) == 1
    assert others.ack(other) == 1
    assert [each.receive(2, timeout=0.5) for each in (ones, others)] == [[], []]
    assert [client.groups.info(name).lag for name in ("a", "a_b", "a_b_c")] == [0, 0, 0]


def test_dead_letters_resent_reach_a_group_with_underscores(client: Client) -> None:
    fill(client, "parcels", 1, queues=1)
    with client.consumer("my_parcels", "parcels", start="earliest") as member:
        member.nack(*member.receive(1, timeout=PATIENCE_S), delay_level=-1)
        client.wait_dispatched()
        assert client.groups.resend("my_parcels", *client.groups.dead_letters("my_parcels")) == 1
        (again,) = wait_until(lambda: member.receive(1, timeout=1), what="the resent message")
        assert again.topic == "parcels"
        member.ack(again)


def test_members_get_only_redeliveries_of_their_group_when_they_take_over(client: Client) -> None:
    """Redeliveries of simple consumers move to the topic of the group's members."""
    for topic in ("y_z", "z"):
        fill(client, topic, 1, queues=1)
    ones, others = (client.simple_consumer(*of, start="earliest") for of in (("x", "y_z"), ("x_y", "z")))
    received(ones, SOON_S)
    received(others, SOON_S)
    wait_until(
        lambda: client.queues("%RETRY%x_y_z") and client.queues("%RETRY%x_y_z")[0].max_offset == 2, what="copies"
    )
    with client.consumer("x", "y_z") as member:
        (again,) = wait_until(lambda: member.receive(2, timeout=1), what="its redelivery")
        assert again.topic == "y_z"
        member.ack(again)
        assert member.receive(2, timeout=1.5) == []
    assert received(others).topic == "z"


def test_retry_conditions_name_group_and_topic() -> None:
    assert retries_of_group("plain") == ""
    assert "'a_b'" in retries_of_group("a_b")
    assert "'b_c'" in retries_of_topic("a", "b_c")
