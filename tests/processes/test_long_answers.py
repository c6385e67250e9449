"""Answers beyond the server's frame limit: a client requests the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mqproc import AsyncClient
from tests.support.group import Group

COUNT = 40


def test_by_key_returns_as_many_as_requested(make_group: Callable[..., Group]) -> None:
    group = make_group(max_pull_bytes=4096)
    with group.client() as client:
        client.send_batch("T", [b"%03d" % number * 100 for number in range(COUNT)], keys="k")
        client.wait_dispatched()
        numbers = [int(message.body[:3]) for message in client.by_key("T", "k")]
        assert numbers == list(range(COUNT))
        numbers = [int(message.body[:3]) for message in client.by_key("T", "k", max_messages=17)]
        assert numbers == list(range(COUNT - 17, COUNT)), "the newest"
        assert len(client.by_key("T", "k", time="born")) == COUNT

    async def found() -> int:
        async with AsyncClient(group.store) as client:
            return len(await client.by_key("T", "k"))

    assert asyncio.run(found()) == COUNT
