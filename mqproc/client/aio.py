"""The asynchronous client: the calls of `core` over one connection a role, shared by all tasks of an event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mqproc.client import core, key_steps, sending, tracing
from mqproc.client.aio_calls import AsyncCalls
from mqproc.client.aio_consumer import AsyncConsumer, JoiningConsumer
from mqproc.client.aio_groups import AsyncGroups
from mqproc.client.aio_producer import AsyncProducer
from mqproc.client.aio_replay import AsyncReplays
from mqproc.client.aio_transactions import AsyncTransactionCalls
from mqproc.client.amounts import at_least_one, whole_number
from mqproc.client.batch import Batch
from mqproc.client.core import IN_FLIGHT, PULL_BYTES, PULL_MESSAGES, Call, Time, TimeKind
from mqproc.client.delayed_batches import Delay, Delays, Times, deliver_at_ms
from mqproc.client.dispatch_wait import DispatchWait
from mqproc.client.driving import drive_async
from mqproc.client.simple_consumer import AsyncSimpleConsumer
from mqproc.client.subscription import (
    CONSUMER_PULL_MESSAGES,
    SESSION_TIMEOUT_S,
    Subscription,
    broadcast_path,
    filter_of,
    subscription,
    trials_of,
)
from mqproc.client.tracing import Trace
from mqproc.errors import BadRequestError, MqprocError
from mqproc.message import (
    BatchResult,
    Filter,
    Health,
    Message,
    PullResult,
    QueueInfo,
    SendResult,
    StoredMessage,
    TopicInfo,
)

if TYPE_CHECKING:
    from mqproc.client.arrow import ArrowPullResult


class AsyncClient(AsyncCalls, AsyncReplays, AsyncTransactionCalls):
    """A store's client for asyncio, with the calls of `Client`. Connects at the first call and again after a loss.

        async with mqproc.AsyncClient("/var/lib/store") as client:
            await client.send("orders", b"…", keys="order-1", tag="new")
            for message in await client.by_key("orders", "order-1"):
                print(message.body)

    Tasks may call at the same time. `timeout` in seconds bounds each call, retries included; a pull's own waiting time
    comes on top.
    """

    # Sending

    async def send(
        self,
        topic: Message | str,
        body: bytes | None = None,
        *,
        tag: str = "",
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        queue_id: int | None = None,
        flag: int = 0,
        born_timestamp_ms: int | None = None,
        sharding_key: str = "",
        delay_level: int = 0,
        deliver_at: Time = None,
        delay: Delay | None = None,
        wait: bool = True,
    ) -> SendResult:
        """Store one message; see `Client.send`."""
        message = sending.message_of(
            topic,
            body,
            tag,
            keys,
            properties,
            queue_id,
            flag,
            born_timestamp_ms,
            delay_level=delay_level,
            deliver_at=deliver_at,
            delay=delay,
            sharding_key=sharding_key,
        )
        return await self.run(sending.send(message, wait=wait))

    async def send_group(self, messages: Sequence[Message], *, wait: bool = True) -> list[SendResult]:
        """Store messages of one topic in one frame; either all name a queue or none does."""
        return await self.run(sending.send_group(messages, wait=wait))

    async def send_many(
        self, messages: Iterable[Message], *, in_flight: int = IN_FLIGHT, wait: bool = True
    ) -> list[SendResult]:
        """Store messages of any topics; see `Client.send_many`."""
        in_flight = at_least_one("in_flight", in_flight)
        results: dict[int, SendResult] = {}
        under_way: set[asyncio.Task[None]] = set()
        failures: list[Exception] = []

        async def deliver(call: Call[list[SendResult]], places: list[int]) -> None:
            try:
                found = await self.run(call)
                results.update(zip(places, found, strict=True))
            except MqprocError as error:
                failures.append(sending.at_its_place(error, places))

        try:
            try:
                for group in sending.groups_of(messages):
                    if failures:
                        break
                    places = [index for index, _ in group]
                    call = sending.send_group([message for _, message in group], wait=wait, places=places)
                    under_way.add(asyncio.ensure_future(deliver(call, places)))
                    await asyncio.sleep(0)
                    if len(under_way) >= in_flight:
                        _, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            except Exception as error:  # Of whoever makes the messages, or of one that cannot be sent.
                failures.append(error)
            await asyncio.gather(*under_way)
        finally:
            for task in under_way:  # Of a caller that is cancelled.
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
        if failures:
            failures[0].add_note(f"{len(results):,} messages were stored")
            raise failures[0]
        return [results[index] for index in range(len(results))]

    async def send_batch(
        self,
        topic: str,
        bodies: Any,
        *,
        keys: Any = None,
        tags: Any = None,
        queue_id: int | None = None,
        queue_ids: Any = None,
        born_timestamps_ms: Any = None,
        properties: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
        flags: Any = None,
        batch: bool = False,
        wait: bool = True,
        delay_level: Any = 0,
        deliver_at: Times = None,
        delay: Delays = None,
        sharding_keys: Any = None,
    ) -> BatchResult:
        """Store columns of messages for one topic; see `Client.send_batch`."""
        columns = topic, bodies, keys, tags, queue_id, queue_ids, born_timestamps_ms, properties, flags, batch, wait
        times = {"delay_level": delay_level, "deliver_at_ms": deliver_at_ms(deliver_at, delay)}
        batched = Batch(*columns, **times, sharding_keys=sharding_keys)
        calls = sending.BatchCalls(batched, self._frame_bytes_max)
        results: list[BatchResult] = []
        try:
            async for result in self.run_all(calls, calls.in_flight):
                results.append(result)
        except BadRequestError as error:
            raise calls.placed(error, results) from None
        return sending.joined(topic, results, calls.places)

    def send_batches(self, batches: Iterable[Batch], *, in_flight: int = IN_FLIGHT) -> AsyncIterator[BatchResult]:
        """Store many batches with up to `in_flight` frames under way; see `Client.send_batches`."""
        return self.run_all(sending.send_batches(batches, self._frame_bytes_max), in_flight)

    async def send_oneway(
        self,
        topic: Message | str,
        body: bytes | None = None,
        *,
        tag: str = "",
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        queue_id: int | None = None,
        flag: int = 0,
        born_timestamp_ms: int | None = None,
        sharding_key: str = "",
    ) -> None:
        """Hand one message to the writer and do not ask what became of it."""
        message = sending.message_of(
            topic, body, tag, keys, properties, queue_id, flag, born_timestamp_ms, sharding_key=sharding_key
        )
        await self.run(sending.send_oneway(message, self._frame_bytes_max))

    def producer(
        self,
        *,
        linger_ms: float = 5.0,
        max_batch_messages: int = sending.GROUP_MESSAGES_MAX,
        max_batch_bytes: int = sending.GROUP_BYTES_MAX,
        max_in_flight: int = IN_FLIGHT,
        max_buffered_bytes: int = 64 << 20,
    ) -> AsyncProducer:
        """A producer that gathers messages of many tasks into frames; see `AsyncProducer`."""
        return AsyncProducer(
            self,
            linger_ms=linger_ms,
            max_batch_messages=max_batch_messages,
            max_batch_bytes=max_batch_bytes,
            max_in_flight=max_in_flight,
            max_buffered_bytes=max_buffered_bytes,
        )

    # Consuming

    def consumer(
        self,
        group: str,
        topics: str | Sequence[str],
        *,
        filter: Filter | str | None = None,
        start: Time = "latest",
        name: str = "",
        session_timeout: float = SESSION_TIMEOUT_S,
        pull_messages: int = CONSUMER_PULL_MESSAGES,
        broadcast: bool = False,
        offsets_path: str | Path | None = None,
    ) -> JoiningConsumer:
        """Become a member of a consumer group, when it is awaited or entered; see `Client.consumer`."""
        wanted = subscription(group, topics, name, session_timeout, start)
        path = broadcast_path(self.store, group, name, offsets_path, broadcast=broadcast)
        return JoiningConsumer(functools.partial(self._join, wanted, filter_of(filter), pull_messages, path))

    async def _join(
        self, wanted: Subscription, filter: Filter | None, pull_messages: int, broadcast: str
    ) -> AsyncConsumer:
        for trial in trials_of(filter, wanted):
            await self.run(trial)
        consumer = AsyncConsumer(self, wanted, filter, pull_messages, broadcast)
        await consumer.start()
        return consumer

    def simple_consumer(
        self,
        group: str,
        topics: str | Sequence[str],
        *,
        filter: Filter | str | None = None,
        start: Time = "latest",
    ) -> AsyncSimpleConsumer:
        """Messages one by one, for a time nobody else's; see `SimpleConsumer`. The rest as in `consumer`."""
        return AsyncSimpleConsumer(self, subscription(group, topics, "", SESSION_TIMEOUT_S, start), filter_of(filter))

    @property
    def groups(self) -> AsyncGroups:
        """Consumer groups: looking at them, and changing them."""
        return AsyncGroups(self)

    # Topics

    async def create_topic(self, topic: str, queues: int = 8, *, perm: int | None = None) -> None:
        """Make a topic, or give it more queues; see `Client.create_topic`."""
        await self.run(core.create_topic(topic, queues, perm))

    async def delete_topic(self, topic: str) -> None:
        """Remove a topic and its queues. Raises TopicNotFoundError."""
        await self.run(core.delete_topic(topic))

    async def topics(self) -> list[TopicInfo]:
        """All topics."""
        return await self.run(core.topics())

    async def queues(self, topic: str = "") -> list[QueueInfo]:
        """The queues of a topic, or of all."""
        return await self.run(core.queues(topic))

    async def min_offset(self, topic: str, queue_id: int) -> int:
        """The first offset that a queue can be read from."""
        return (await self.run(core.queue(topic, queue_id))).min_offset

    async def max_offset(self, topic: str, queue_id: int) -> int:
        """The offset that a queue's next message will get, as far as it has been dispatched."""
        return (await self.run(core.queue(topic, queue_id))).max_offset

    async def offset_at(self, topic: str, queue_id: int, time: Time, *, upper: bool = False) -> int:
        """The first offset whose store time is at or after `time`; with `upper` the last at or before it."""
        return await self.run(core.offset_at(topic, queue_id, time, upper))

    # Reading

    async def pull(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int = PULL_MESSAGES,
        *,
        tags: str = "",
        filter: Filter | None = None,
        timeout: float = 0.0,
        max_bytes: int = PULL_BYTES,
        rocketmq_limits: bool = False,
    ) -> PullResult:
        """Messages of a queue from `offset` on; see `Client.pull`."""
        most_bytes = min(whole_number("max_bytes", max_bytes), self.pull_bytes_max)
        request = core.pull_request(
            topic, queue_id, offset, max_messages, most_bytes, tags, timeout, rocketmq_limits, filter
        )
        return await self.run(core.pull(request))

    async def pull_arrow(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int = PULL_MESSAGES,
        *,
        columns: Sequence[str] | None = None,
        tags: str = "",
        filter: Filter | None = None,
        timeout: float = 0.0,
        max_bytes: int = PULL_BYTES,
    ) -> ArrowPullResult:
        """As `pull`, with the messages as a pyarrow.RecordBatch of the named columns, or of all.

        These share memory: who keeps one column keeps the others, too.
        """
        most_bytes = min(whole_number("max_bytes", max_bytes), self.pull_bytes_max)
        request = core.pull_request(topic, queue_id, offset, max_messages, most_bytes, tags, timeout, False, filter)
        return await self.run(core.pull_as(request, core.arrow_parser(columns)))

    async def get(self, message_id: str, topic: str = "") -> StoredMessage:
        """The message with an offset id or a unique id; see `Client.get`."""
        return await self.run(core.get(message_id, topic))

    async def trace(self, message_id: str, topic: str = "") -> Trace:
        """Where a message is: queue, index, the groups' progress, copies. Raises MessageNotFoundError."""
        return await drive_async(self.run, tracing.trace(message_id, topic, self.pull_bytes_max))

    async def by_key(
        self,
        topic: str,
        key: str,
        begin: Time = None,
        end: Time = None,
        *,
        max_messages: int = 64,
        unique: bool = False,
        time: TimeKind = "store",
    ) -> list[StoredMessage]:
        """Messages that have the key, begin ≤ time ≤ end, none twice; `unique` looks for a unique id.

        The newest of them when there are more than `max_messages`, of which there may be 65,536.
        """
        steps = key_steps.by_key(topic, key, begin, end, max_messages, unique, time, self.pull_bytes_max)
        return await drive_async(self.run, steps)

    async def query_message(
        self, topic: str, key: str, max_messages: int = 32, begin: Time = None, end: Time = None
    ) -> core.QueryMessageResult:
        """RocketMQ's own answer by key: whatever the index points to, other keys of the same hash included.

        It is one answer, and an error where it exceeds the client's `max_frame_bytes`; `by_key` asks page by page.
        """
        return await self.run(core.query_message(topic, key, max_messages, begin, end))

    def range(
        self,
        topic: str,
        begin: Time = None,
        end: Time = None,
        *,
        tags: str = "",
        filter: Filter | None = None,
        time: TimeKind = "store",
        page_messages: int = 4096,
    ) -> AsyncIterator[StoredMessage]:
        """All messages of a topic with begin ≤ time < end, queue by queue; asked for page by page."""
        call = core.range_page(topic, begin, end, tags, filter, page_messages, self.pull_bytes_max, time)
        return self._pages(call)

    def scan(
        self,
        topic: str = "",
        begin: Time = None,
        end: Time = None,
        *,
        properties: Mapping[str, str] | None = None,
        body_contains: bytes = b"",
        physical_offset: int = -1,
        page_messages: int = 256,
    ) -> AsyncIterator[StoredMessage]:
        """Messages found by a pass over the whole log: by topic, time, one property, and bytes in the body."""
        place = topic, begin, end, properties, body_contains, physical_offset
        request = core.scan_request(*place, page_messages, self.pull_bytes_max)
        return self._pages(core.scan_page(request))

    async def _pages(self, call: Call[core.Page] | None) -> AsyncIterator[StoredMessage]:
        while call is not None:
            page = await self.run(call)
            for message in page.messages:
                yield message
            call = page.next_call

    async def count(
        self,
        topic: str,
        begin: Time = None,
        end: Time = None,
        *,
        tags: str = "",
        filter: Filter | None = None,
        time: TimeKind = "store",
    ) -> int:
        """How many messages of a topic have begin ≤ time < end.

        By store time without a filter only those at the borders are read, so each of damage that no recovery has found
        yet counts.
        """
        return await self.run(core.count(topic, begin, end, tags, filter, time))

    # State

    async def stats(self) -> dict[str, int]:
        """Every word of the control file by name."""
        return await self.run(core.stats())

    async def wait_dispatched(self, timeout: float = 10.0) -> None:
        """Return when everything written before this call can be found: by queue, key and time.

        Raises RequestTimeoutError when dispatch does not get there within `timeout` seconds.
        """
        wait = DispatchWait(timeout)
        while not wait.reached(await self.stats()):
            await asyncio.sleep(core.DISPATCH_LOOK_S)

    async def health(self) -> Health:
        """Whether all roles run and beat, and what does not."""
        return await self.run(core.health())

    async def ping(self) -> None:
        """Return when both roles answer."""
        for role in (core.WRITER, core.QUERY):
            await self.run(core.ping(role))
