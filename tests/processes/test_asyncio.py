"""Behaviour that the asyncio client shares with the synchronous one, with a real group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from mqproc.client._async.client import AsyncClient
from mqproc.errors import MessageNotFoundError
from mqproc.types import Message, TransactionResolution
from tests.support.group import PATIENCE_S, Group


def run(group: Group, program: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * PATIENCE_S), AsyncClient(group.store) as client:
            await program(client)

    asyncio.run(main())


async def bodies(client: AsyncClient, topic: str) -> list[bytes]:
    await client.wait_dispatched()
    return [message.body for message in (await client.pull(topic, 0, 0)).messages]


def test_async_dead_letters_are_resent_and_traced(group: Group) -> None:
    async def program(client: AsyncClient) -> None:
        await client.create_topic("orders", 1)
        await client.groups.change("billing", retry_max_times=0)
        sent = await client.send("orders", b"x", keys="k")
        await client.wait_dispatched()
        async with client.consumer("billing", "orders", start="earliest") as consumer:
            (message,) = await consumer.receive(1, timeout=PATIENCE_S)
            await consumer.nack(message)
            await consumer.commit()
            assert (await client.groups.info("billing")).queues[0].offset == 1, "committed before the consumer ends"
        await client.wait_dispatched()
        traced = await client.trace(sent.message_id)
        assert (traced.unit, [key.indexed for key in traced.keys]) == ("FOUND", [True, True])
        assert [(each.group, each.passed) for each in traced.progress] == [("billing", True)]
        assert [(each.kind, each.topic) for each in traced.copies] == [("dead letter", "%DLQ%billing")]
        dead = [each async for each in client.groups.dead_letters("billing")]
        assert [each.body for each in dead] == [b"x"]
        assert await client.groups.resend("billing", *dead) == 1
        await client.wait_dispatched()
        kinds = {each.kind for each in (await client.trace(sent.message_id)).copies}
        assert kinds == {"dead letter", "retry"}
        with pytest.raises(MessageNotFoundError):
            await client.trace("0" * 32, "orders")

    run(group, program)


def test_async_transactions_end_by_call_and_by_operator(group: Group) -> None:
    async def program(client: AsyncClient) -> None:
        await client.create_topic("bills", 1)
        kept, lost, listed, dropped = [
            await client.transaction("billing", Message("bills", body)).begin()
            for body in (b"kept", b"lost", b"listed", b"dropped")
        ]
        await kept.commit()
        await lost.rollback()
        assert (kept.resolution, lost.resolution) == (TransactionResolution.COMMIT, TransactionResolution.ROLLBACK)
        assert await bodies(client, "bills") == [b"kept"]
        ids = [listed.transaction_id, dropped.transaction_id]
        while len(found := await client.transactions.open("billing")) != 2:
            await asyncio.sleep(0.01)
        by_id = {each.transaction_id: each for each in found}
        assert sorted(by_id) == sorted(ids)
        await client.transactions.commit(by_id[ids[0]])
        await client.transactions.rollback(by_id[ids[1]])
        assert await bodies(client, "bills") == [b"kept", b"listed"]
        assert await client.transactions.open("billing") == []

    run(group, program)
