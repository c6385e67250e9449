"""Groups of 121 to 255 bytes, which a store of RocketMQ may have."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from mqproc import BadRequestError, ResetTo
from mqproc.topic_names import GROUP_BYTES_MAX, RETRY_PREFIX, RETRY_TOPIC_BYTES_MAX, STORED_GROUP_BYTES_MAX
from tests.support.command_line import call
from tests.support.group import PATIENCE_S, Group, fill, wait_until

LENGTHS = [GROUP_BYTES_MAX + 1, 200, RETRY_TOPIC_BYTES_MAX - len(RETRY_PREFIX), STORED_GROUP_BYTES_MAX]
NAMES = {length: "g" * length for length in LENGTHS}


@pytest.fixture(scope="module")
def taken_over(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(tmp_path_factory.mktemp("long") / "store", message_delay_level=" ".join(["0s"] * 18))
    config = group.paths.topics.parent
    config.mkdir(parents=True, mode=0o700)
    settings = {"consumeEnable": True, "retryMaxTimes": 16, "retryQueueNums": 1}
    table = {name: settings | {"groupName": name} for name in NAMES.values()}
    version = {"counter": 1, "stateVersion": 0, "timestamp": 1}
    text = json.dumps({"dataVersion": version, "subscriptionGroupTable": table})
    (config / "subscriptionGroup.json").write_text(text)
    group.start()
    with group.client() as client:
        fill(client, "Orders", 2, queues=1)
    yield group
    group.close()


@pytest.mark.parametrize("length", LENGTHS)
def test_long_group_of_a_store_is_usable(taken_over: Group, length: int) -> None:
    name = NAMES[length]
    with taken_over.client() as client:
        assert name in [each.group for each in client.groups.all()]
        with client.consumer(name, "Orders", start="earliest") as consumer:
            first, second = consumer.receive(2, timeout=PATIENCE_S)
            consumer.ack(first)
            if len(RETRY_PREFIX) + length > RETRY_TOPIC_BYTES_MAX:
                with pytest.raises(BadRequestError, match="nothing can be redelivered"):
                    consumer.nack(second)
                consumer.ack(second)
            else:
                consumer.nack(second)
                (again,) = wait_until(lambda: consumer.receive(1, timeout=1), what="the redelivery")
                assert (again.topic, again.body) == ("Orders", second.body)
                consumer.nack(again, delay_level=-1)
        client.wait_dispatched()
        if len(RETRY_PREFIX) + length <= RETRY_TOPIC_BYTES_MAX:
            assert [letter.body for letter in client.groups.dead_letters(name)] == [second.body]
        client.groups.change(name, retry_max_times=3)
        client.groups.execute(name, client.groups.plan_reset(name, ResetTo(earliest=True), ["Orders"]))
        assert {queue.offset for queue in client.groups.info(name).queues if queue.topic == "Orders"} == {0}
    assert call("group", "lag", name, "--json", "--store", taken_over.store).json["lag"] >= 2


def test_long_group_simple_consumer_needs_room_for_its_retry_topic(taken_over: Group) -> None:
    with taken_over.client() as client:
        simple = client.simple_consumer(NAMES[200], "Orders", start="earliest")
        assert simple.ack(*simple.receive(2)) == 2
        with pytest.raises(BadRequestError, match="nothing can be redelivered"):
            client.simple_consumer(NAMES[STORED_GROUP_BYTES_MAX], "Orders").receive(1)


def test_new_long_group_is_refused(taken_over: Group) -> None:
    name = "n" * (GROUP_BYTES_MAX + 1)
    with taken_over.client() as client:
        for use in (
            lambda: client.consumer(name, "Orders"),
            lambda: client.simple_consumer(name, "Orders").receive(1),
            lambda: client.groups.change(name, retry_max_times=1),
            lambda: client.groups.commit(name, "Orders", 0, 1),
        ):
            with pytest.raises(BadRequestError, match=f"exceeds {GROUP_BYTES_MAX}, the limit of new ones"):
                use()
        with pytest.raises(BadRequestError, match=f"exceeds {STORED_GROUP_BYTES_MAX}"):
            client.consumer("n" * (STORED_GROUP_BYTES_MAX + 1), "Orders")
