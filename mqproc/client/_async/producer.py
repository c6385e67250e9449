"""The batching producer for asyncio, with tasks instead of a thread.

As in the synchronous one, a message's handle is its group and its number.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from mqproc.client import send_requests
from mqproc.client._async.background import with_own_arguments
from mqproc.client.codecs import encoded_arguments
from mqproc.client.encoding import check_message, is_plain, plain_message
from mqproc.client.send_requests import Batcher, Limits, ProducerGroup, ProducerHandle, Waiter, text_bytes
from mqproc.errors import BadRequestError, MqprocError
from mqproc.types import Message, SendResult

if TYPE_CHECKING:
    from mqproc.client._async.connection import AsyncConnections

_clock = time.monotonic
# A default argument is this object; an equal value may have another type.
_ZERO: Final = 0
_NO_TEXT: Final = ""


class LoopGroup(ProducerGroup):
    """A group of the producer of one event loop."""

    __slots__ = ("loop",)

    def __init__(self, due: float) -> None:
        super().__init__(due)
        self.loop = asyncio.get_running_loop()

    def call_soon(self, callbacks: Iterable[Waiter]) -> None:
        """Let the event loop call callbacks."""
        for handle, on_done in callbacks:
            self.loop.call_soon(on_done, handle)


class AsyncSendHandle(ProducerHandle, eq=False, frozen=True, gc=False):
    """Outcome of one message, returned by `AsyncProducer.send`; it is awaitable.

        handle = await producer.send("orders", b"paid")
        print((await handle).queue_offset)

    `asyncio.gather` takes it; `asyncio.wait` and `asyncio.as_completed` take its `future()`. A wait that is cancelled,
    as by `asyncio.wait_for`, does not cancel the message. An error that no handle is asked for is logged.
    """

    _group: LoopGroup
    _number: int

    def __await__(self) -> Generator[Any, None, SendResult]:
        if not self.done():
            yield from self.future()
        return self.result()

    def result(self) -> SendResult:
        """Return the SendResult of a stored message.

        Raises the message's error, asyncio.InvalidStateError while it waits, asyncio.CancelledError after `cancel`.
        Example: `print(handle.result().queue_offset)`
        """
        return self._group.result(self._outcome())

    def exception(self) -> BaseException | None:
        """Return the message's error, None when it is stored; raises as `result` otherwise.

        Example: `print(handle.exception())`
        """
        outcome = self._outcome()
        return outcome if isinstance(outcome, BaseException) else None

    def _outcome(self) -> SendResult | BaseException:
        if self.cancelled():
            raise asyncio.CancelledError
        if not self.done():
            raise asyncio.InvalidStateError("the message has no outcome yet: await its handle")
        return self._group.outcome(self._number)

    def cancel(self) -> bool:
        """Drop the message; False when it is being sent or done. Example: `handle.cancel()`"""
        if not self._group.taken and not self.cancelled():
            self._group.call_soon(self._group.cancel(self._number))
        return self.cancelled()

    def add_done_callback(self, fn: Callable[[AsyncSendHandle], object]) -> None:
        """Let the event loop call `fn` with the handle when the outcome is known.

        Example: `handle.add_done_callback(lambda handle: print(handle.exception()))`
        """
        if self.done():
            self._group.call_soon([(self, fn)])
        else:
            self._group.add_waiter(self._number, self, fn)

    def future(self) -> asyncio.Future[SendResult]:
        """Return an asyncio.Future; cancelling it does not cancel the message.

        Raises BadRequestError in another event loop than the producer's.
        Example: `print(await handle.future())`
        """
        if asyncio.get_running_loop() is not self._group.loop:
            raise BadRequestError("the producer belongs to another event loop: make one in each")
        future: asyncio.Future[SendResult] = self._group.loop.create_future()

        def settle(handle: AsyncSendHandle) -> None:
            if future.done():
                return
            if handle.cancelled():
                future.cancel()
            elif (error := handle.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(handle.result())

        self.add_done_callback(settle)
        return future


class AsyncProducer:
    """Made by `AsyncClient.producer`.

        async with client.producer(linger_ms=2) as producer:
            handle = await producer.send("orders", b"…", keys="order-1")
        print((await handle).queue_offset)

    As `Producer`; `send` waits for room in the buffer, its handle for the outcome: instead of `on_done` the handle has
    `add_done_callback`. It belongs to the event loop of its
    first use, whose end sends no messages: without `close` it warns of the remaining ones.
    """

    def __init__(self, client: AsyncConnections, limits: Limits) -> None:
        self._limits = limits
        self._client = client
        self._codec = client._codec
        self._batcher = Batcher(self._limits, LoopGroup)
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
    ) -> AsyncSendHandle:
        """Queue a message, waiting while the buffer is full; its handle gets the outcome.

        Raises BadRequestError at once for a message that cannot be sent.
        Example: `print((await (await producer.send("orders", b"paid"))).queue_offset)`
        """
        if self._codec is not None:
            topic, body = encoded_arguments(self._codec, topic, body)
        self._check_loop()
        if self._batcher.has_full and self._wake.is_set():
            # A loop of sends must let the sender run, and other tasks.
            await asyncio.sleep(0)
        if (
            properties is None
            and queue_id is born_timestamp_ms is None
            and flag is _ZERO
            and sharding_key is _NO_TEXT
            and (group := self._add_plain(topic, body, tag, keys)) is not None
        ):
            return AsyncSendHandle(group, len(group.messages) - 1)
        numbers = queue_id, flag, born_timestamp_ms
        message = send_requests.message_of(topic, body, tag, keys, properties, sharding_key, numbers)
        message = check_message(message)
        size = text_bytes(message)
        while not self._closing and not self._batcher.has_room(size):
            await self._next_resolved()
        if self._closing:
            raise BadRequestError("the producer is closed")
        if self._sender is None:
            self._loop = asyncio.get_running_loop()
            self._sender = self._loop.create_task(self._run())
        group, wake = self._batcher.add(message, size, plain=is_plain(message))
        if wake:
            self._wake.set()
        return AsyncSendHandle(group, len(group.messages) - 1)

    def _add_plain(self, topic: object, body: object, tag: object, keys: object) -> LoopGroup | None:
        """Queue a message if it is plain and its group is open; returns the group."""
        plain = plain_message(topic, body, tag, keys)
        return None if plain is None or self._closing else self._batcher.add_plain(plain)

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
                group.take()
                if not group.messages:
                    self._batcher.done(group)
                    self._resolved.set()
                    continue
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

    async def _deliver(self, group: LoopGroup) -> None:
        outcomes: Sequence[SendResult | BaseException]
        try:
            results = await self._client.run(group.call())
            outcomes = results
        except BadRequestError as error:
            outcomes = await self._one_by_one(group, error)
        except Exception as error:
            # Any error, as for a missing descriptor: no caller must wait for ever.
            outcomes = [error] * len(group.messages)
        finally:
            self._batcher.done(group)
        group.call_soon(group.settle(outcomes))

    async def _one_by_one(self, group: LoopGroup, error: BadRequestError) -> list[SendResult | BaseException]:
        """Send the messages of a refused frame one by one, as only one of them may be invalid."""
        if len(group.messages) == 1:
            return [send_requests.without_place(error)]
        outcomes: list[SendResult | BaseException] = []
        for message in group.messages:
            try:
                result = await self._client.run(send_requests.send(message))
                outcomes.append(result)
            except MqprocError as own:
                outcomes.append(send_requests.without_place(own))
            except Exception as own:
                outcomes.append(own)
        return outcomes
