"""Handling of messages by a function: retries, redelivery, order within a queue."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from mqproc.client._async.background import is_cancelled
from mqproc.client.local_redelivery import (
    AGAIN_S,
    BUSY_S,
    IDLE_S,
    NO_ROOM,
    ORDERED_MESSAGES,
    STOP_CHECK_S,
    HandlerRun,
    LocalRedelivery,
    check_handler,
    check_stop,
    log_refused,
    queue_of,
)
from mqproc.errors import BadRequestError, MessageNotFoundError
from mqproc.types import StoredMessage
from mqproc.util.arguments import at_least_one, not_below_zero

_WRONG_HANDLER = "handler {!r} returned no awaitable: give an async function"  # async only
# sync: _WRONG_HANDLER = "handler {!r} returned an awaitable, for consumers of AsyncClient: give a function"
AsyncHandler = Callable[[StoredMessage], Awaitable[object]]
_log = logging.getLogger("mqproc.consumer")


class _Consumer(Protocol):
    @property
    def is_broadcast(self) -> bool: ...

    def check(self) -> None: ...

    def holds(self, message: StoredMessage) -> bool: ...

    def take_back(self, messages: Sequence[StoredMessage]) -> None: ...

    async def receive(self, max_messages: int, timeout: float, *, ordered: bool = False) -> list[StoredMessage]: ...

    async def ack(self, *messages: StoredMessage) -> None: ...

    async def nack(self, *messages: StoredMessage, delay_level: int = 0) -> None: ...


class AsyncHandling:
    """One run of a handler. A subclass runs the workers."""

    def __init__(
        self,
        consumer: _Consumer,
        handler: AsyncHandler,
        workers: int,
        tries_in_order: int | None,
        stop: asyncio.Event,
        pause_s: float,
    ) -> None:
        """`tries_in_order`: failures before a message is a dead letter; None without order."""
        self._consumer = consumer
        self._handler = check_handler(handler)
        self._workers = at_least_one("workers", workers)
        self._tries_in_order = tries_in_order
        self._stop = check_stop(stop, awaited=True)  # sync: self._stop = check_stop(stop, awaited=False)
        self._pause_s = not_below_zero("pause_s", pause_s)
        self._state = HandlerRun(consumer, stop, in_order=tries_in_order is not None)
        self._redelivery = LocalRedelivery(self._state)

    async def _receive(self, most: int, timeout_s: float) -> list[list[StoredMessage]]:
        """Receive messages, in lists that are handled one message after the other."""
        if (again := self._redelivery.due()) is not None:
            return [[again]]
        timeout_s = self._redelivery.left_s(timeout_s)
        if self._redelivery.is_full:
            self._consumer.check()
            await self._pause(min(timeout_s, STOP_CHECK_S))
            return []
        if self._tries_in_order is None:
            return [[message] for message in await self._consumer.receive(most, timeout_s)]
        queues: dict[tuple[str, int], list[StoredMessage]] = {}
        for message in await self._consumer.receive(ORDERED_MESSAGES, timeout_s, ordered=True):
            queues.setdefault(queue_of(message), []).append(message)
        return list(queues.values())

    async def _handle_each(self, messages: list[StoredMessage]) -> None:
        done = 0
        try:
            while done < len(messages) and self._state.continues(messages[done]) and await self._finish(messages[done]):
                done += 1
        finally:
            self._state.leave(messages[done:])

    async def _finish(self, message: StoredMessage) -> bool:
        """Handle a message or have it redelivered; False when the run must not handle it."""
        failures = 0
        while not await self._handle(message):
            failures += 1
            pause_s = self._pause_s
            if self._tries_in_order is None or failures > self._tries_in_order:
                if self._state.is_latest(message) and await self._redeliver_later(message):
                    return True
                pause_s = AGAIN_S
            if not await self._continues_after(message, pause_s):
                return False
        return True

    async def _handle(self, message: StoredMessage) -> bool:
        try:
            result = self._handler(message)
            if is_awaitable := inspect.isawaitable(result):  # async only
                await result
        except (Exception, asyncio.CancelledError) as error:  # sync: except Exception:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():  # async only
                raise
            _log.warning("handling message %s of %s failed", message.message_id, message.topic, exc_info=True)
            return False
        if not is_awaitable:  # sync: if result is not None and inspect.isawaitable(result):
            # sync: if inspect.iscoroutine(result):
            # sync:     result.close()
            raise BadRequestError(_WRONG_HANDLER.format(self._handler))
        if self._state.is_latest(message):
            await self._consumer.ack(message)
        return True

    async def _redeliver_later(self, message: StoredMessage) -> bool:
        """Nack a message; False, with order, when the store has no room for it.

        A message that is gone counts as done: it would be redelivered for ever and hold up later ones.
        """
        if self._consumer.is_broadcast:
            _log.error("message %s of %s is skipped: broadcast has no redelivery", message.message_id, message.topic)
            await self._consumer.ack(message)
            return True
        try:
            await self._consumer.nack(message, delay_level=0 if self._tries_in_order is None else -1)
        except MessageNotFoundError as error:
            _log.error("message %s of %s is skipped: %s", message.message_id, message.topic, error)
            await self._consumer.ack(message)
        except NO_ROOM as error:
            if self._tries_in_order is not None:
                log_refused(message, error)
                return False
            self._redelivery.put(message, error)
        return True

    async def _continues_after(self, message: StoredMessage, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self._state.continues(message) and (left_s := end - time.monotonic()) > 0:
            await self._pause(min(left_s, STOP_CHECK_S))
        return self._state.continues(message)

    async def _pause(self, seconds: float) -> None:
        """Sleep until the stop, at most so long."""
        # sync: self._stop.wait(seconds)
        with contextlib.suppress(TimeoutError):  # async only
            async with asyncio.timeout(seconds):
                await self._stop.wait()


class HandlerTasks(AsyncHandling):  # async only
    """A run of a handler by up to `workers` tasks."""

    async def run(self) -> None:
        """Run until the stop. Raises errors of the consumer and of acknowledging.

        Handlers that run then finish; all other received messages are redelivered.
        """
        in_flight: set[asyncio.Task[None]] = set()
        try:
            await self._start_tasks(in_flight)
        except BaseException:
            self._state.broken = True
            raise
        finally:
            try:
                await asyncio.gather(*in_flight, return_exceptions=True)
            finally:
                # A second cancellation cancels the handlers: their messages are redelivered all the same.
                self._redelivery.leave()
                self._state.give_back()
        _raise_errors(in_flight)

    async def _start_tasks(self, in_flight: set[asyncio.Task[None]]) -> None:
        latest: dict[tuple[str, int], asyncio.Task[None]] = {}  # by queue, with order
        while not self._stop.is_set():
            if len(in_flight) >= self._workers:
                await asyncio.wait(in_flight, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
            in_flight -= _raise_errors(in_flight)
            room = self._workers - len(in_flight)
            if room <= 0:
                continue
            for messages in await self._receive(room, BUSY_S if in_flight else IDLE_S):
                if self._tries_in_order is None:
                    in_flight.add(asyncio.ensure_future(self._handle_each(messages)))
                    continue
                self._state.begin(messages)
                queue = queue_of(messages[0])
                task = asyncio.ensure_future(self._handle_each_after(latest.get(queue), messages))
                latest[queue] = task
                in_flight.add(task)

    async def _handle_each_after(self, before: asyncio.Task[None] | None, messages: list[StoredMessage]) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
        except BaseException:
            self._state.leave(messages)
            raise
        await self._handle_each(messages)


def _raise_errors(in_flight: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:  # async only
    """The finished tasks; raises the error of one that failed."""
    finished = {task for task in in_flight if task.done()}
    for task in finished:
        task.result()
    return finished
