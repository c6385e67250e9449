"""Broadcast for asyncio: as `broadcast`, with a task in the place of the thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from mqproc.client import core
from mqproc.client.broadcast import LOOK_S, OwnProgress, start_in
from mqproc.client.subscription import Subscription
from mqproc.errors import MqprocError
from mqproc.message import QueueInfo
from mqproc.wire.group_operations import GroupAssignment

if TYPE_CHECKING:
    from mqproc.client.aio import AsyncClient


class AsyncBroadcast(OwnProgress):
    """In the place of an `AsyncMembership`."""

    def __init__(
        self,
        client: AsyncClient,
        subscription: Subscription,
        path: str,
        on_assignment: Callable[[GroupAssignment], None],
        on_end: Callable[[BaseException], None],
    ) -> None:
        super().__init__(subscription, path, on_assignment, on_end)
        self._client = client
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Find the queues, and go on in a task. Raises what looking for them raises."""
        await self._look()
        for topic in self._subscription.topics:
            self._progress.begin(topic)
        self._task = asyncio.ensure_future(self._run())

    async def leave(self) -> None:
        """End the task and save."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.save()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
                self.save()
            except OSError as error:
                self._on_end(error)
                return
            except MqprocError:
                continue  # The group is away; what is fetched then says so.

    async def _look(self) -> None:
        found = [info for topic in self._subscription.topics for info in await self._client.run(core.queues(topic))]
        if not self._are_known(found):
            self._assign(found, [await self._offset_of(info) for info in found])

    async def _offset_of(self, info: QueueInfo) -> int:
        offset = self._progress.offset(info.topic, info.queue_id)
        if offset is None:
            start = start_in(info, self._subscription, self._progress)
            offset = start if isinstance(start, int) else await self._client.run(start)
            self._progress.put(info.topic, info.queue_id, offset)
        return offset
