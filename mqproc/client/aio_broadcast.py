"""Broadcast for asyncio: as `broadcast`, with a task in the place of the thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from mqproc.client import tasks
from mqproc.client.broadcast import LOOK_S, OwnProgress
from mqproc.client.driving import drive_async
from mqproc.client.subscription import Subscription
from mqproc.errors import MqprocError
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
        try:
            await drive_async(self._client.run, self.looking())
        except BaseException:
            self.give_up()
            raise
        self._task = asyncio.ensure_future(self._run())

    async def leave(self, *, told: bool = True) -> None:
        """End the task and save; nobody is to be told."""
        try:
            if self._task is not None:
                await tasks.end(self._task, self._client.timeout_s)
        finally:
            self.end()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await drive_async(self._client.run, self.looking())
            except OSError as error:
                self._on_end(error)
                return
            except MqprocError:
                continue  # The group is away; what is fetched then says so.
