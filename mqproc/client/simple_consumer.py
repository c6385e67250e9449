"""The simple consumer, sync and async: messages one by one, each for a time nobody else's."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from mqproc.client import group_calls
from mqproc.client.amounts import milliseconds, moment_after
from mqproc.client.core import Call, chosen
from mqproc.client.subscription import OfGroup, Subscription
from mqproc.message import Filter, StoredMessage
from mqproc.wire.group_operations import AT_TIME, LATEST, RECEIVE_MS_MAX, GroupReceiveRequest

if TYPE_CHECKING:
    from mqproc.client.aio import AsyncClient
    from mqproc.client.sync import Client

RECEIVE_MESSAGES: Final = 32
INVISIBLE_S: Final = 60.0
HANDLES_BYTES: Final = 8 << 10
"""Room in an answer for its messages' handles."""
AGAIN_S: Final = 0.1
"""The pause before a receive is made again that was told too early that there is nothing."""


@dataclass(frozen=True, slots=True)
class _Calls:
    subscription: Subscription
    filter: Filter | None
    max_bytes: int

    def receive(self, max_messages: int, invisible_duration: float, waiting: _Waiting) -> Call[list[StoredMessage]]:
        """The next request of one that waits, or asks now and then.

        Made again, it begins at the moment when the waiting began, or the receive before: "latest" would be behind what
        has come since into a topic that was not there, and only the server that is gone knew who was to get that.
        """
        wanted = self.subscription
        times = milliseconds("invisible_duration", invisible_duration), milliseconds("timeout", waiting.held_s)
        request = GroupReceiveRequest(
            wanted.group,
            list(wanted.topics),
            max_messages,
            *times,
            wanted.start,
            wanted.start_ms,
            *chosen("", self.filter),
            max(1, self.max_bytes - HANDLES_BYTES),
        )
        call = group_calls.receive(request)
        if wanted.start == LATEST:
            since = msgspec.structs.replace(request, start=AT_TIME, start_ms=waiting.since_ms)
            call.again = group_calls.receive(since)
        return call.again or call if waiting.is_again else call


class _Waiting:
    """How long one receive still waits: the role holds it for a minute at most, and lets it go when it ends itself."""

    def __init__(self, timeout: float, before_ms: int | None) -> None:
        """`before_ms`: when the consumer's receive before, which was answered, began; None: there was none."""
        milliseconds("timeout", timeout)
        self._deadline = moment_after("timeout", timeout)
        self.left_s = float(timeout)
        self.is_again = before_ms is not None
        self.begun_ms = time.time_ns() // 1_000_000
        self.since_ms = self.begun_ms + 1 if before_ms is None else before_ms
        """What was stored in its first millisecond may have been before; not so in a topic that was not there."""

    @property
    def held_s(self) -> float:
        """What the next request asks for."""
        return min(self.left_s, RECEIVE_MS_MAX / 1000)

    def is_over(self) -> bool:
        """Look at the clock. Less than a millisecond is not asked for."""
        self.left_s = self._deadline - time.monotonic()
        self.is_again = True
        return self.left_s < 0.001

    @property
    def pause_s(self) -> float:
        return min(self.left_s, AGAIN_S)


class SimpleConsumer(OfGroup):
    """A simple consumer of a group, made by `Client.simple_consumer`. May be called by several threads.

        consumer = client.simple_consumer("billing", "orders")
        for message in consumer.receive(16, invisible_duration=30, timeout=10):
            handle(message)
            consumer.ack(message)

    It holds nothing: a received message can be acknowledged by any simple consumer of its group, in any process.
    """

    def __init__(self, client: Client, subscription: Subscription, filter: Filter | None) -> None:
        self._client = client
        self._subscription = subscription
        self._calls = _Calls(subscription, filter, client.pull_bytes_max)
        self._before_ms: int | None = None
        """When the last receive that was answered began."""

    def receive(
        self,
        max_messages: int = RECEIVE_MESSAGES,
        invisible_duration: float = INVISIBLE_S,
        *,
        timeout: float = 0.0,
    ) -> list[StoredMessage]:
        """Up to so many messages of one queue; none when none comes within `timeout` seconds.

        With a filter a receive looks at a part of what is stored at a time: one that does not wait may give none, and
        the next one goes on behind it.

        For `invisible_duration` seconds (1 to 43,200) nobody else of the group gets them. What is not acknowledged by
        then comes again, with `reconsume_times` one more, and is a dead letter after the group's `retry_max_times`.
        """
        waiting = _Waiting(timeout, self._before_ms)
        while True:
            found = self._client.run(self._calls.receive(max_messages, invisible_duration, waiting))
            self._before_ms = waiting.begun_ms
            if found or waiting.is_over():
                return found
            time.sleep(waiting.pause_s)

    def ack(self, *messages: StoredMessage) -> int:
        """Messages are done. How many of them were still the receiver's: others come again, or were done before.

        One whose time was nearly over may be done though it does not count, when the role was killed meanwhile.
        """
        return sum(self._client.run(call) for call in group_calls.acks(self._subscription.group, messages))

    def change_invisible_duration(self, message: StoredMessage, invisible_duration: float) -> StoredMessage:
        """Nobody else gets the message for so many seconds from now on.

        Returns it with its new handle, to acknowledge it by. Raises BadRequestError when it is not the receiver's.
        """
        return self._client.run(group_calls.change_invisible(self._subscription.group, message, invisible_duration))


class AsyncSimpleConsumer(OfGroup):
    """A simple consumer of a group, made by `AsyncClient.simple_consumer`; see `SimpleConsumer`."""

    def __init__(self, client: AsyncClient, subscription: Subscription, filter: Filter | None) -> None:
        self._client = client
        self._subscription = subscription
        self._calls = _Calls(subscription, filter, client.pull_bytes_max)
        self._before_ms: int | None = None
        """When the last receive that was answered began."""

    async def receive(
        self,
        max_messages: int = RECEIVE_MESSAGES,
        invisible_duration: float = INVISIBLE_S,
        *,
        timeout: float = 0.0,
    ) -> list[StoredMessage]:
        """Up to so many messages of one queue; see `SimpleConsumer.receive`.

        One that waits has a connection of its own, of the store's `max_connections`: cancelled, it takes nothing.
        """
        import asyncio  # The sync client shall not pay for it.

        waiting = _Waiting(timeout, self._before_ms)
        while True:
            found = await self._client.run(self._calls.receive(max_messages, invisible_duration, waiting))
            self._before_ms = waiting.begun_ms
            if found or waiting.is_over():
                return found
            await asyncio.sleep(waiting.pause_s)

    async def ack(self, *messages: StoredMessage) -> int:
        """Messages are done; see `SimpleConsumer.ack`."""
        return sum([await self._client.run(call) for call in group_calls.acks(self._subscription.group, messages)])

    async def change_invisible_duration(self, message: StoredMessage, invisible_duration: float) -> StoredMessage:
        """Nobody else gets the message for so many seconds from now on; see `SimpleConsumer`."""
        return await self._client.run(
            group_calls.change_invisible(self._subscription.group, message, invisible_duration)
        )
