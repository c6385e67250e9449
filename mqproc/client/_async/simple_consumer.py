"""The simple consumer: received messages are invisible to the group for a time."""

from __future__ import annotations

import asyncio
from typing import Protocol, TypeVar

from mqproc.client import group_requests
from mqproc.client.requests import Call
from mqproc.client.subscription import (
    INVISIBLE_S,
    SIMPLE_RECEIVE_MESSAGES,
    OfGroup,
    ReceiveRequests,
    ReceiveWait,
    Subscription,
)
from mqproc.types import Filter, StoredMessage

T = TypeVar("T")


class _Client(Protocol):
    pull_bytes_max: int

    async def run(self, call: Call[T]) -> T: ...


class AsyncSimpleConsumer(OfGroup):
    """A simple consumer of a group, made by `AsyncClient.simple_consumer`.

    Tasks and threads may share it.

        consumer = client.simple_consumer("billing", "orders")
        for message in await consumer.receive(16, invisible_duration=30, timeout=10):
            handle(message)
            await consumer.ack(message)

    It has no state of its own: any simple consumer of the group, in any process, can acknowledge a received message.
    """

    def __init__(self, client: _Client, subscription: Subscription, filter: Filter | None) -> None:
        self._client = client
        self._subscription = subscription
        self._requests = ReceiveRequests(subscription, filter, client.pull_bytes_max)
        self._before_ms: int | None = None
        """Start of the last receive that was answered."""

    async def receive(
        self,
        max_messages: int = SIMPLE_RECEIVE_MESSAGES,
        invisible_duration: float = INVISIBLE_S,
        *,
        timeout: float = 0.0,
    ) -> list[StoredMessage]:
        """Receive up to so many messages of one queue, waiting up to `timeout` seconds.

        With a filter a receive scans a part of the queue at a time: one that does not wait may return no message, and
        the next one continues after that part.

        The messages are invisible to the rest of the group for `invisible_duration` seconds (1 to 43,200). One that is
        not acknowledged by then is redelivered with `reconsume_times` increased by one, and becomes a dead letter after
        the group's `retry_max_times`. An asynchronous receive that waits uses a connection of its own, which counts
        towards the store's `max_connections`: a cancelled one takes no message.
        """
        waiting = ReceiveWait(timeout, self._before_ms)
        while True:
            found = await self._client.run(self._requests.receive(max_messages, invisible_duration, waiting))
            self._before_ms = waiting.begun_ms
            if found or waiting.is_over():
                return found
            await asyncio.sleep(waiting.pause_s)

    async def ack(self, *messages: StoredMessage) -> int:
        """Acknowledge messages; returns how many were still this receiver's.

        The others were done or are redelivered.

        A message whose invisible time was nearly over may be done though it is not counted, when the role was killed
        meanwhile.
        """
        calls = group_requests.acks(self._subscription.group, messages)
        return sum([await self._client.run(call) for call in calls])

    async def change_invisible_duration(self, message: StoredMessage, invisible_duration: float) -> StoredMessage:
        """Keep a received message invisible for so many seconds from now on.

        Returns it with its new handle, which acknowledges it. Raises BadRequestError when the message is no longer the
        receiver's.
        """
        call = group_requests.change_invisible(self._subscription.group, message, invisible_duration)
        return await self._client.run(call)
