"""Handlers for asyncio: as `handling`, with tasks in the place of threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from mqproc.client.amounts import at_least_one
from mqproc.client.handling import BUSY_S, IDLE_S, MESSAGES_AT_ONCE
from mqproc.errors import MessageNotFoundError
from mqproc.message import StoredMessage

if TYPE_CHECKING:
    from mqproc.client.aio_consumer import AsyncConsumer

_log = logging.getLogger("mqproc.consumer")


class AsyncHandling:
    """One run of a handler."""

    def __init__(
        self,
        consumer: AsyncConsumer,
        handler: Callable[[StoredMessage], Awaitable[object]],
        workers: int,
        tries_in_order: int | None,
        stop: asyncio.Event,
        pause_s: float,
    ) -> None:
        """`tries_in_order`: after how many failures a message is a dead letter; None when order does not matter."""
        self._consumer = consumer
        self._handler = handler
        self._workers = at_least_one("workers", workers)
        self._tries_in_order = tries_in_order
        self._stop = stop
        self._pause_s = pause_s

    async def run(self) -> None:
        """Until the stop. What the consumer raises, and what acknowledging raises, is raised here."""
        under_way: set[asyncio.Task[None]] = set()
        try:
            while not self._stop.is_set():
                if len(under_way) >= self._workers:
                    await asyncio.wait(under_way, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
                under_way = _raised(under_way)
                if len(under_way) < self._workers:
                    room = self._workers - len(under_way)
                    for run in await self._receive(room, BUSY_S if under_way else IDLE_S):
                        under_way.add(asyncio.ensure_future(self._each(run)))
        finally:
            await asyncio.gather(*under_way, return_exceptions=True)
        _raised(under_way)

    async def _receive(self, room: int, timeout_s: float) -> list[list[StoredMessage]]:
        """Messages by what is handled one after the other."""
        if self._tries_in_order is None:
            return [[message] for message in await self._consumer.receive(room, timeout_s)]
        queues: dict[tuple[str, int], list[StoredMessage]] = {}
        for message in await self._consumer.receive(MESSAGES_AT_ONCE, timeout_s, ordered=True):
            queues.setdefault((message.topic, message.queue_id), []).append(message)
        return list(queues.values())

    async def _each(self, messages: Iterable[StoredMessage]) -> None:
        for message in messages:
            failures = 0
            while not await self._handled(message):
                failures += 1
                if self._tries_in_order is None or failures > self._tries_in_order:
                    await self._again_later(message)
                    break
                if await self._stopped_within(self._pause_s):
                    return

    async def _again_later(self, message: StoredMessage) -> None:
        """A message that is gone would come again for ever, and hold up those behind it: it is done."""
        if self._consumer.is_broadcast:
            _log.error("message %s of %s is passed over: it was broadcast", message.message_id, message.topic)
            await self._consumer.ack(message)
            return
        try:
            await self._consumer.nack(message, delay_level=0 if self._tries_in_order is None else -1)
        except MessageNotFoundError as error:
            _log.error("message %s of %s is passed over: %s", message.message_id, message.topic, error)
            await self._consumer.ack(message)

    async def _handled(self, message: StoredMessage) -> bool:
        try:
            await self._handler(message)
        except Exception:
            _log.warning("handling message %s of %s failed", message.message_id, message.topic, exc_info=True)
            return False
        await self._consumer.ack(message)
        return True

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return False
        return True


def _raised(under_way: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Those that are not through; raises the error of one that failed."""
    for task in under_way:
        if task.done():
            task.result()
    return {task for task in under_way if not task.done()}
