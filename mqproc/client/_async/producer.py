"""The batching producer for asyncio, with tasks instead of a thread."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mqproc.client import send_requests
from mqproc.client._async.background import with_own_arguments
from mqproc.client.codecs import encoded_arguments
from mqproc.client.encoding import check_message, is_plain
from mqproc.client.send_requests import Batcher, Limits, MessageGroup, text_bytes
from mqproc.errors import BadRequestError
from mqproc.types import Message, SendResult

if TYPE_CHECKING:
    from mqproc.client._async.connection import AsyncConnections

Results = asyncio.Future[SendResult]
_clock = time.monotonic


class AsyncProducer:
    """Made by `AsyncClient.producer`.

        async with client.producer(linger_ms=2) as producer:
            future = await producer.send("orders", b"…", keys="order-1")
        print((await future).queue_offset)

    As `Producer`; `send` waits for room in the buffer, its future for the outcome. It belongs to the event loop of its
    first use, whose end sends no messages: without `close` it warns of the remaining ones.
    """

    def __init__(self, client: AsyncConnections, limits: Limits) -> None:
        self._limits = limits
        self._client = client
        self._codec = client._codec
        self._batcher = Batcher(self._limits, MessageGroup)
        self._wake = asyncio.Event()
        self._resolved = asyncio.Event()
        self._in_flight: set[asyncio.Task[None]] = set()
        self._flushing = 0
        self._closing = False
        self._sender: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @with_own_arguments
    async def send(
        self,
        topic: Message | str,
        body: Any = None,
        *,
        tag: str = "",
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        queue_id: int | None = None,
        flag: int = 0,
        born_timestamp_ms: int | None = None,
        sharding_key: str = "",
    ) -> Results:
        """Queue a message, waiting while the buffer is full; the future gets the outcome.

        Raises BadRequestError at once for a message that cannot be sent.
        Example: `print((await (await producer.send("orders", b"paid"))).queue_offset)`
        """
        if self._codec is not None:
            topic, body = encoded_arguments(self._codec, topic, body)
        numbers = queue_id, flag, born_timestamp_ms
        message = send_requests.message_of(topic, body, tag, keys, properties, sharding_key, numbers)
        message = check_message(message)
        size = text_bytes(message)
        self._check_loop()
        while not self._closing and not self._batcher.has_room(size):
            await self._next_resolved()
        if self._closing:
            raise BadRequestError("the producer is closed")
        if self._sender is None:
            self._loop = asyncio.get_running_loop()
            self._sender = self._loop.create_task(self._run())
        future: Results = asyncio.get_running_loop().create_future()
        group, wake = self._batcher.add(message, size, plain=is_plain(message))
        group.waiters.append(future)
        if wake:
            self._wake.set()
        return future

    def _check_loop(self) -> None:
        """Raise BadRequestError in another loop or process, which do not run the task."""
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise BadRequestError("the producer belongs to another event loop: make one in each")

    async def _next_resolved(self) -> None:
        self._resolved.clear()
        await self._resolved.wait()

    async def flush(self) -> None:
        """Return when all messages so far have their outcomes. Example: `await producer.flush()`"""
        self._check_loop()
        self._flushing += 1
        try:
            while not self._batcher.empty or self._in_flight:
                self._wake.set()
                await self._next_resolved()
        finally:
            self._flushing -= 1

    async def close(self) -> None:
        """Send the remaining messages and accept no more. Example: `await producer.close()`"""
        self._check_loop()
        self._closing = True
        self._wake.set()
        self._resolved.set()
        if self._sender is not None:
            # A cancelled close does not cancel the sender; the caller may close again.
            await asyncio.shield(self._sender)

    async def _run(self) -> None:
        try:
            await self._send_all()
        finally:
            if left := self._batcher.messages:
                warnings.warn(f"{left:,} messages of a producer were not sent: close it", stacklevel=1)

    async def _send_all(self) -> None:
        """Send a frame whenever a group is due and fewer than `max_in_flight` frames are in flight."""
        while True:
            while len(self._in_flight) < self._limits.in_flight:
                everything = bool(self._flushing) or self._closing
                group = self._batcher.take(_clock(), everything=everything)
                if group is None:
                    break
                task = asyncio.ensure_future(self._deliver(group))
                self._in_flight.add(task)
                task.add_done_callback(self._frame_done)
            if self._closing and self._batcher.empty and not self._in_flight:
                return
            await self._sleep()

    async def _sleep(self) -> None:
        """Sleep until a group is due, or a message, a flush or an outcome arrives."""
        crowded = len(self._in_flight) >= self._limits.in_flight
        wait_s = None if crowded else self._batcher.wait_s(_clock())
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _frame_done(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._wake.set()
        self._resolved.set()

    async def _deliver(self, group: MessageGroup) -> None:
        try:
            results = await self._client.run(group.call())
            for future, result in zip(group.waiters, results, strict=True):
                _resolve(future, result)
        except BadRequestError as error:
            await self._one_by_one(group, error)
        except Exception as error:
            # Any error, as for a missing descriptor: no caller must wait for ever.
            for future in group.waiters:
                _resolve(future, error)
        finally:
            self._batcher.done(group)

    async def _one_by_one(self, group: MessageGroup, error: BadRequestError) -> None:
        """Send the messages of a refused frame one by one, as only one of them may be invalid."""
        for message, future in zip(group.messages, group.waiters, strict=True):
            if len(group.messages) == 1:
                _resolve(future, error)
                return
            try:
                result = await self._client.run(send_requests.send(message))
                _resolve(future, result)
            except Exception as own:
                _resolve(future, own)


def _resolve(future: Results, outcome: SendResult | Exception) -> None:
    """Set a future that is not cancelled."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
