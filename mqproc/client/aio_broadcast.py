"""Broadcast for asyncio: as `broadcast`, with a task in the place of the thread."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mqproc.client import core
from mqproc.client.assignment import Cursor
from mqproc.client.broadcast import LOOK_S, LocalProgress, start_in
from mqproc.client.subscription import Subscription
from mqproc.errors import MqprocError
from mqproc.message import QueueInfo
from mqproc.wire.group_operations import GroupAssignment

if TYPE_CHECKING:
    from mqproc.client.aio import AsyncClient


class AsyncBroadcast:
    """In the place of an `AsyncMembership`."""

    def __init__(
        self,
        client: AsyncClient,
        subscription: Subscription,
        path: str,
        on_assignment: Callable[[GroupAssignment], None],
        on_end: Callable[[BaseException], None],
    ) -> None:
        self._client = client
        self._subscription = subscription
        self._on_assignment = on_assignment
        self._on_end = on_end
        self._progress = LocalProgress(Path(path))
        self._known: list[tuple[str, int]] | None = None
        self._generation = 0
        self._task: asyncio.Task[None] | None = None
        self.valid_until = math.inf
        """Nobody else reads for this consumer."""

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

    def commit(self, sent: Sequence[tuple[Cursor[Any], int]]) -> None:
        """Positions are this consumer's progress now."""
        for cursor, position in sent:
            self._progress.put(cursor.topic, cursor.queue_id, position)

    def save(self) -> None:
        """Write the file. Raises OSError."""
        self._progress.save()

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
        queues = sorted((info.topic, info.queue_id) for info in found)
        if queues == self._known:
            return
        self._known = queues
        self._generation += 1
        rows = [(info.topic, info.queue_id, 0, await self._offset_of(info)) for info in found]
        self._on_assignment(GroupAssignment(self._subscription.name, self._generation, True, rows))

    async def _offset_of(self, info: QueueInfo) -> int:
        offset = self._progress.offset(info.topic, info.queue_id)
        if offset is None:
            start = start_in(info, self._subscription, self._progress)
            offset = start if isinstance(start, int) else await self._client.run(start)
            self._progress.put(info.topic, info.queue_id, offset)
        return offset
