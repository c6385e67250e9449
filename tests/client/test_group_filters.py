"""Consumers of one group with different filters: refused, or the group's filter is changed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from mqproc import AsyncClient, Client, Consumer, FilterMismatchError, ResetTo, SqlFilter, TagFilter
from mqproc.types import Filter
from tests.support.command_line import call
from tests.support.group import PATIENCE_S, Group, wait_until

COUNT = 20


@pytest.fixture
def client(shared: Group) -> Iterator[Client]:
    with shared.client() as client:
        yield client


def fill_tagged(client: Client, topic: str, queues: int = 4) -> dict[str, list[bytes]]:
    """Messages with the tags a and b in turn; their bodies by tag."""
    client.create_topic(topic, queues)
    bodies = [b"%d" % number for number in range(COUNT)]
    client.send_batch(topic, bodies, tags=["a", "b"] * (COUNT // 2))
    client.wait_dispatched()
    return {"a": bodies[::2], "b": bodies[1::2]}


def first_bodies(consumer: Consumer, count: int) -> list[bytes]:
    return [message.body for message in itertools.islice(consumer.messages(timeout=PATIENCE_S), count)]


def test_member_with_another_filter_is_refused(client: Client) -> None:
    """Its own messages would be skipped in the queues of the other member."""
    sent = fill_tagged(client, "Two")
    with client.consumer("two", "Two", filter="a", start="earliest", name="first") as consumer:
        with pytest.raises(FilterMismatchError, match=r"'b'.*member first of group two has 'a'.*change_filter"):
            client.consumer("two", "Two", filter="b")
        with pytest.raises(FilterMismatchError, match=r"'\*'"):
            client.consumer("two", "Two")
        with pytest.raises(FilterMismatchError, match="SQL92: TAGS = 'a'"):
            client.consumer("two", "Two", filter=SqlFilter("TAGS = 'a'"))
        found = first_bodies(consumer, len(sent["a"]))
    assert sorted(found) == sorted(sent["a"])


@pytest.mark.parametrize("other", ["b || a", TagFilter(" a||b||a ")], ids=["text", "filter"])
def test_members_with_the_same_tags_share_a_group(client: Client, other: Filter | str) -> None:
    fill_tagged(client, "Same")
    with client.consumer("same", "Same", filter="a || b"), client.consumer("same", "Same", filter=other):
        assert len(client.groups.info("same").members) == 2


def test_members_may_filter_different_topics_differently(client: Client) -> None:
    fill_tagged(client, "Left")
    fill_tagged(client, "Right")
    with client.consumer("sides", "Left", filter="a"), client.consumer("sides", "Right", filter="b"):
        assert client.groups.info("sides").filters == {"Left": "a", "Right": "b"}
        with pytest.raises(FilterMismatchError, match="in topic 'Right'"):
            client.consumer("sides", ["Left", "Right"], filter="a")


def test_group_without_live_members_takes_any_filter(client: Client) -> None:
    fill_tagged(client, "Later")
    with client.consumer("later", "Later", filter="a"):
        pass
    with client.consumer("later", "Later", filter="b"):
        assert client.groups.info("later").filters == {"Later": "b"}


def test_change_filter_ends_members_with_another_filter(client: Client) -> None:
    sent = fill_tagged(client, "Change")
    before = client.consumer("change", "Change", filter="a", start="latest")
    client.groups.execute("change", client.groups.plan_reset("change", ResetTo(earliest=True)))
    with client.consumer("change", "Change", filter="b", change_filter=True) as consumer:
        found = first_bodies(consumer, len(sent["b"]))
        with pytest.raises(FilterMismatchError, match="has 'b'"):
            wait_until(lambda: before.check() or False, what="the end of the other member")
        assert [member.filter for member in client.groups.info("change").members] == ["b"]
    before.close()
    assert sorted(found) == sorted(sent["b"])


def test_receive_with_another_filter_is_refused(client: Client) -> None:
    sent = fill_tagged(client, "Pop", queues=1)
    first = client.simple_consumer("pop", "Pop", filter="a", start="earliest")
    second = client.simple_consumer("pop", "Pop", filter="b", start="earliest")
    received = first.receive(4)
    with pytest.raises(FilterMismatchError, match=r"'b'.*a simple consumer of group pop has 'a'"):
        second.receive(4)
    assert client.groups.info("pop").filters == {"Pop": "a"}
    with pytest.raises(FilterMismatchError, match="a simple consumer"):
        client.consumer("pop", "Pop", filter="b")
    while found := first.receive(COUNT):
        received += found
    assert [message.body for message in received] == sent["a"]


def test_receive_with_change_filter_refuses_the_earlier_one(client: Client) -> None:
    fill_tagged(client, "Pops", queues=1)
    first = client.simple_consumer("pops", "Pops", filter="a", start="earliest")
    second = client.simple_consumer("pops", "Pops", filter="b", start="earliest", change_filter=True)
    assert [message.body for message in first.receive(1)] == [b"0"]
    assert [message.body for message in second.receive(1)] == [b"1"]
    with pytest.raises(FilterMismatchError, match="has 'b'"):
        first.receive(1)
    # A consumer changes the filter once: the next change is not undone.
    client.simple_consumer("pops", "Pops", filter="a", change_filter=True).receive(1)
    with pytest.raises(FilterMismatchError, match="has 'a'"):
        second.receive(1)


def test_waiting_receive_ends_when_the_filter_changes(shared: Group) -> None:
    async def program() -> None:
        async with AsyncClient(shared.store, timeout=PATIENCE_S) as client:
            await client.create_topic("Held", 1)
            first = client.simple_consumer("held", "Held", filter="a")
            waiting = asyncio.ensure_future(first.receive(1, timeout=PATIENCE_S))
            while not await is_known(client):
                await asyncio.sleep(0.01)
            second = client.simple_consumer("held", "Held", filter="b", change_filter=True)
            await second.receive(1)
            await client.send("Held", b"a", tag="a")
            with pytest.raises(FilterMismatchError, match="has 'b'"):
                await waiting

    async def is_known(client: AsyncClient) -> bool:
        return bool((await client.groups.info("held")).filters) if "held" in await names(client) else False

    async def names(client: AsyncClient) -> list[str]:
        return [each.group for each in await client.groups.all()]

    asyncio.run(program())


def test_group_info_shows_the_filter(client: Client, shared: Group) -> None:
    fill_tagged(client, "Shown")
    with client.consumer("shown", "Shown", filter="b || a"):
        shown = call("group", "info", "shown", "--store", shared.store)
        document = call("group", "info", "shown", "--json", "--store", shared.store).json
    assert "filter in Shown: a || b" in shown.out
    assert document["filters"] == {"Shown": "a || b"}
    assert document["members"][0]["filter"] == "a || b"
