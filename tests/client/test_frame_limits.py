"""A client that takes smaller frames than what waits for it."""

from __future__ import annotations

import asyncio

import pytest

from mqproc import AsyncClient, Client, FrameTooLargeError, StoredMessage
from tests.support.group import PATIENCE_S, Group, all_of, bodies_of, fill

FRAME_BYTES = 64 << 10
TOLD = r"frame of 1[\d,]{6} bytes exceeds this client's max_frame_bytes = 65,536; ask for fewer"


@pytest.fixture(scope="module")
def filled(shared: Group) -> Group:
    """A topic with more small messages than a frame takes, and one with a large message."""
    with shared.client() as client:
        fill(client, "Small", 4_000, queues=1)
        client.create_topic("Large", 1)
        client.send_batch("Large", [b"0", bytes(100_000), b"2"], queue_ids=[0, 0, 0])
        client.wait_dispatched()
    return shared


def test_many_small_messages_come_in_as_many_frames_as_they_need(filled: Group) -> None:
    with Client(filled.store, max_frame_bytes=FRAME_BYTES, timeout=PATIENCE_S) as client:
        assert len(client.pull("Small", 0, 0, 4_000).messages) > 100
        with client.consumer("small", "Small", start="earliest") as consumer:
            assert len(bodies_of(all_of(consumer, 4_000))) == 4_000


def test_simple_consumers_receive_no_more_than_fits(filled: Group) -> None:
    """Messages received but not read are given back, not redelivered until dead letters."""
    with Client(filled.store, max_frame_bytes=FRAME_BYTES, timeout=PATIENCE_S) as client:
        consumer = client.simple_consumer("simple", "Small", start="earliest")
        received: list[StoredMessage] = []
        while len(received) < 4_000:
            received += consumer.receive(1_024, timeout=PATIENCE_S)
        assert len(bodies_of(received)) == len(set(bodies_of(received))) == 4_000


def test_dead_letters_come_in_as_many_frames_as_they_need(filled: Group) -> None:
    with Client(filled.store, max_frame_bytes=FRAME_BYTES, timeout=PATIENCE_S) as client:
        with client.consumer("dead", "Small", start="earliest") as consumer:
            messages = consumer.receive(1_000, timeout=PATIENCE_S)
            consumer.nack(*messages, delay_level=-1)
        client.wait_dispatched()
        assert len(list(client.groups.dead_letters("dead"))) == len(messages) > 300


def test_pages_fit_the_frame_limit(filled: Group) -> None:
    """The server's page is larger than these clients accept."""
    with filled.client() as client:
        client.create_topic("Keyed", 2)
        sent = client.send_batch("Keyed", [bytes(20_000)] * 12, keys=["all"] * 12)
        client.wait_dispatched()
    offsets = sorted(sent.physical_offsets.tolist())
    with Client(filled.store, max_frame_bytes=FRAME_BYTES, timeout=PATIENCE_S) as client:
        assert [each.physical_offset for each in client.by_key("Keyed", "all")] == offsets
        assert sorted(each.physical_offset for each in client.range("Keyed")) == offsets
        assert [each.physical_offset for each in client.scan("Keyed")] == offsets
        first = client.get(client.by_key("Keyed", "all", max_messages=1)[0].message_id)
        assert all(key.indexed is not False for key in client.trace(first.message_id).keys)
        assert client.replay("Keyed", "Keyed-again").sent == 12
        assert client.replay("Keyed", "Keyed-by-key", key="all").sent == 12


def test_so_it_is_page_by_page_for_asyncio(filled: Group) -> None:
    with filled.client() as client:
        sent = client.send_batch("KeyedToo", [bytes(20_000)] * 12, keys=["all"] * 12)
        client.wait_dispatched()
    offsets = sorted(sent.physical_offsets.tolist())

    async def ask() -> None:
        async with AsyncClient(filled.store, max_frame_bytes=FRAME_BYTES, timeout=PATIENCE_S) as client:
            assert [each.physical_offset for each in await client.by_key("KeyedToo", "all")] == offsets
            assert sorted([each.physical_offset async for each in client.range("KeyedToo")]) == offsets
            assert [each.physical_offset async for each in client.scan("KeyedToo")] == offsets

    asyncio.run(ask())


def test_a_message_that_fits_in_no_frame_is_an_error_that_names_the_option(filled: Group) -> None:
    """The request is not repeated, and the log has no lost connection."""
    with Client(filled.store, max_frame_bytes=FRAME_BYTES, timeout=PATIENCE_S) as client:
        with pytest.raises(FrameTooLargeError, match=TOLD):
            client.pull("Large", 0, 1)
        with (
            pytest.raises(FrameTooLargeError, match=TOLD),
            client.consumer("large", "Large", start="earliest") as consumer,
        ):
            list(consumer.messages(timeout=PATIENCE_S))


def test_answer_larger_than_frame_names_the_limit(filled: Group) -> None:
    with filled.client() as client:
        client.send_batch("Large", [bytes(60_000)] * 3, keys="key")
        client.wait_dispatched()
    with Client(filled.store, max_frame_bytes=FRAME_BYTES, timeout=PATIENCE_S) as client:
        with pytest.raises(FrameTooLargeError, match=TOLD):
            client.query_message("Large", "key")
        assert len(client.query_message("Large", "key", 1).messages) == 1


def test_so_it_is_for_asyncio(filled: Group) -> None:
    async def consume() -> None:
        async with (
            AsyncClient(filled.store, max_frame_bytes=FRAME_BYTES, timeout=PATIENCE_S) as client,
            client.consumer("large-async", "Large", start="earliest") as consumer,
        ):
            async for _message in consumer.messages(timeout=PATIENCE_S):
                pass

    with pytest.raises(FrameTooLargeError, match=TOLD):
        asyncio.run(consume())
