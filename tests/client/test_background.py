"""Tasks that end when cancelled, and one that does not."""

from __future__ import annotations

import asyncio

import pytest

from mqproc.client._async import background as tasks
from tests.support.group import PATIENCE_S


def test_end_task_stubborn_returns_after_timeout() -> None:
    async def run() -> None:
        held, going = asyncio.Event(), asyncio.Event()

        async def stubborn() -> None:
            try:
                going.set()
                await asyncio.sleep(PATIENCE_S)
            except asyncio.CancelledError:
                await held.wait()

        task = asyncio.ensure_future(stubborn())
        await going.wait()
        async with asyncio.timeout(PATIENCE_S):
            await tasks.end_task(task, 0.01)
        assert not task.done()
        held.set()
        await task

    asyncio.run(run())


def test_end_task_failed_raises_its_error() -> None:
    async def run() -> None:
        async def fail() -> None:
            raise OSError("no room")

        task = asyncio.ensure_future(fail())
        await asyncio.wait([task])
        with pytest.raises(OSError, match="no room"):
            await tasks.end_task(task, PATIENCE_S)
        ending = asyncio.ensure_future(asyncio.sleep(PATIENCE_S))
        await tasks.end_task(ending, PATIENCE_S)
        assert ending.cancelled()

    asyncio.run(run())
