"""Handlers for asyncio: as `handling`, with tasks in the place of threads."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from mqproc.client import tasks
from mqproc.client.amounts import at_least_one, not_below_zero
from mqproc.client.aside import AGAIN_S, NO_ROOM, Aside, tell_refused
from mqproc.client.handling import BUSY_S, IDLE_S, LOOK_S, MESSAGES_AT_ONCE, Rest, check_handler, check_stop, queue_of
from mqproc.errors import BadRequestError, MessageNotFoundError
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
        self._handler = check_handler(handler)
        self._workers = at_least_one("workers", workers)
        self._tries_in_order = tries_in_order
        self._stop = check_stop(stop, awaited=True)
        self._pause_s = not_below_zero("pause_s", pause_s)
        self._rest = Rest(consumer, stop, in_order=tries_in_order is not None)
        self._aside = Aside(self._rest)
        self._latest: dict[tuple[str, int], asyncio.Task[None]] = {}
        """In order: what handles each queue."""

    async def run(self) -> None:
        """Until the stop. What the consumer raises, and what acknowledging raises, is raised here.

        What is being handled then is handled to its end; all else that was received comes again.
        """
        under_way: set[asyncio.Task[None]] = set()
        try:
            await self._go_on(under_way)
        except BaseException:
            self._rest.broken = True
            raise
        finally:
            try:
                await asyncio.gather(*under_way, return_exceptions=True)
            finally:
                # Cancelled once more the handlers are cancelled too: what they have comes again all the same.
                self._aside.leave()
                self._rest.give_back()
        _raised(under_way)

    async def _go_on(self, under_way: set[asyncio.Task[None]]) -> None:
        while not self._stop.is_set():
            if len(under_way) >= self._workers:
                await asyncio.wait(under_way, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
            under_way -= _raised(under_way)
            if len(under_way) < self._workers:
                room = self._workers - len(under_way)
                for run in await self._receive(room, BUSY_S if under_way else IDLE_S):
                    under_way.add(self._begun(run))

    def _begun(self, messages: list[StoredMessage]) -> asyncio.Task[None]:
        if self._tries_in_order is None:
            return asyncio.ensure_future(self._each(messages))
        self._rest.begin(messages)
        queue = queue_of(messages[0])
        task = self._latest[queue] = asyncio.ensure_future(self._each_behind(self._latest.get(queue), messages))
        return task

    async def _receive(self, room: int, timeout_s: float) -> list[list[StoredMessage]]:
        """Messages by what is handled one after the other."""
        if (again := self._aside.due()) is not None:
            return [[again]]
        timeout_s = self._aside.left_s(timeout_s)
        if self._aside.is_full:
            self._consumer.check()
            await self._waits(min(timeout_s, LOOK_S))
            return []
        if self._tries_in_order is None:
            return [[message] for message in await self._consumer.receive(room, timeout_s)]
        queues: dict[tuple[str, int], list[StoredMessage]] = {}
        for message in await self._consumer.receive(MESSAGES_AT_ONCE, timeout_s, ordered=True):
            queues.setdefault(queue_of(message), []).append(message)
        return list(queues.values())

    async def _each_behind(self, before: asyncio.Task[None] | None, messages: list[StoredMessage]) -> None:
        """When `before` has ended."""
        try:
            if before is not None:
                await asyncio.wait([before])
        except BaseException:
            self._rest.leave(messages)
            raise
        await self._each(messages)

    async def _each(self, messages: list[StoredMessage]) -> None:
        done = 0
        try:
            while done < len(messages) and self._rest.goes_on(messages[done]) and await self._settled(messages[done]):
                done += 1
        finally:
            self._rest.leave(messages[done:])

    async def _settled(self, message: StoredMessage) -> bool:
        """Handled, or left to come again later; False when it is not to be handled here any more."""
        failures = 0
        while not await self._handled(message):
            failures += 1
            pause_s = self._pause_s
            if self._tries_in_order is None or failures > self._tries_in_order:
                if self._rest.is_latest(message) and await self._again_later(message):
                    return True
                pause_s = AGAIN_S
            if not await self._goes_on_after(message, pause_s):
                return False
        return True

    async def _again_later(self, message: StoredMessage) -> bool:
        """False without room for it, in order: nothing behind it is handled meanwhile.

        A message that is gone would come again for ever, and hold up those behind it: it is done.
        """
        if self._consumer.is_broadcast:
            _log.error("message %s of %s is passed over: it was broadcast", message.message_id, message.topic)
            await self._consumer.ack(message)
            return True
        try:
            await self._consumer.nack(message, delay_level=0 if self._tries_in_order is None else -1)
        except MessageNotFoundError as error:
            _log.error("message %s of %s is passed over: %s", message.message_id, message.topic, error)
            await self._consumer.ack(message)
        except NO_ROOM as error:
            if self._tries_in_order is not None:
                tell_refused(message, error)
                return False
            self._aside.put(message, error)
        return True

    async def _handled(self, message: StoredMessage) -> bool:
        try:
            given = self._handler(message)
            if is_awaitable := inspect.isawaitable(given):
                await given
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and tasks.is_cancelled():
                raise
            _log.warning("handling message %s of %s failed", message.message_id, message.topic, exc_info=True)
            return False
        if not is_awaitable:
            raise BadRequestError(f"handler {self._handler!r} gave nothing to await: give an async function")
        if self._rest.is_latest(message):
            await self._consumer.ack(message)
        return True

    async def _goes_on_after(self, message: StoredMessage, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self._rest.goes_on(message) and (left_s := end - time.monotonic()) > 0:
            await self._waits(min(left_s, LOOK_S))
        return self._rest.goes_on(message)

    async def _waits(self, seconds: float) -> None:
        """Returns at the stop too."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()


def _raised(under_way: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Those that are through; raises the error of one that failed."""
    through = {task for task in under_way if task.done()}
    for task in through:
        task.result()
    return through
