"""The synchronous client: the calls of `core` and `sending` by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mqproc.client import core, key_steps, sending, tracing
from mqproc.client.amounts import whole_number
from mqproc.client.batch import Batch
from mqproc.client.calls import Calls
from mqproc.client.consumer import Consumer
from mqproc.client.core import (
    IN_FLIGHT,
    PULL_BYTES,
    PULL_MESSAGES,
    QUERY,
    WRITER,
    Call,
    Page,
    QueryMessageResult,
    Time,
    TimeKind,
)
from mqproc.client.delayed_batches import Delay, Delays, Times, deliver_at_ms
from mqproc.client.dispatch_wait import DispatchWait
from mqproc.client.driving import drive
from mqproc.client.groups import Groups
from mqproc.client.many import send_many
from mqproc.client.producer import Producer
from mqproc.client.replay import Replay, ReplayPosition, ReplayProgress, ReplaySource, begin_of
from mqproc.client.simple_consumer import SimpleConsumer
from mqproc.client.subscription import (
    CONSUMER_PULL_MESSAGES,
    SESSION_TIMEOUT_S,
    broadcast_path,
    filter_of,
    subscription,
    trials_of,
)
from mqproc.client.tracing import Trace
from mqproc.client.transaction_calls import half_message
from mqproc.client.transactions import Checker, Transaction, TransactionProducer, Transactions
from mqproc.errors import BadRequestError
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


class Client(Calls):
    """A store's client. Connects at the first call and again after a loss.

        with mqproc.Client("/var/lib/store") as client:
            client.send("orders", b"…", keys="order-1", tag="new")
            for message in client.by_key("orders", "order-1"):
                print(message.body)

    `timeout` in seconds bounds each call, retries included; a pull's own waiting time comes on top. `max_spin_us`: look
    for an answer at most so long before sleeping, where answers usually come in that time; 0 for never.
    """

    # Sending

    def send(
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
        """Store one message, given as a Message or as topic and body.

        `wait` False is answered before the sync of a SYNC_FLUSH store. With `delay_level` (1 to 18), `deliver_at` or
        `delay` (seconds or a timedelta) the message waits first, and the result tells where. What has one
        `sharding_key` goes to one queue, in its order. Raises SendOutcomeUnknownError when the answer was lost.
        """
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
        return self.run(sending.send(message, wait=wait))

    def send_many(
        self, messages: Iterable[Message], *, in_flight: int = IN_FLIGHT, wait: bool = True
    ) -> list[SendResult]:
        """Store messages of any topics, grouped into frames by topic; the results are in the order of the messages.

        At an error, one of `messages` itself too, the frames under way are finished first; its notes tell how many
        messages were stored.
        `in_flight=1` keeps the order of what has one sharding key when the store refuses a frame for now.
        """
        return send_many(self, messages, in_flight=in_flight, wait=wait)

    def send_batch(
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
        """Store columns of messages for one topic; see `Batch` for what columns may be.

        A batch larger than a frame (65,536 messages, 64 MiB) goes as several, unless `batch` wants all or nothing.
        Messages wait as those of `send` do: `delay_level`, `deliver_at` and `delay` are one for all, or an array with
        one for each, which goes as a frame for each distinct time.
        """
        columns = topic, bodies, keys, tags, queue_id, queue_ids, born_timestamps_ms, properties, flags, batch, wait
        times = {"delay_level": delay_level, "deliver_at_ms": deliver_at_ms(deliver_at, delay)}
        batched = Batch(*columns, **times, sharding_keys=sharding_keys)
        calls = sending.BatchCalls(batched, self._frame_bytes_max)
        results: list[BatchResult] = []
        try:
            for result in self.run_all(calls, WRITER, calls.in_flight):
                results.append(result)
        except BadRequestError as error:
            raise calls.placed(error, results) from None
        return sending.joined(topic, results, calls.places)

    def send_batches(self, batches: Iterable[Batch], *, in_flight: int = IN_FLIGHT) -> Iterator[BatchResult]:
        """Store many batches with up to `in_flight` frames under way; iterate to send, results come in order.

        A batch larger than a frame gives one result for each frame.
        """
        return self.run_all(sending.send_batches(batches, self._frame_bytes_max), WRITER, in_flight)

    def send_oneway(
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
        self.run(sending.send_oneway(message, self._frame_bytes_max))

    def producer(
        self,
        *,
        linger_ms: float = 5.0,
        max_batch_messages: int = sending.GROUP_MESSAGES_MAX,
        max_batch_bytes: int = sending.GROUP_BYTES_MAX,
        max_in_flight: int = IN_FLIGHT,
        max_buffered_bytes: int = 64 << 20,
    ) -> Producer:
        """A producer that gathers messages of many threads into frames; see `Producer`."""
        producer = Producer(
            self,
            linger_ms=linger_ms,
            max_batch_messages=max_batch_messages,
            max_batch_bytes=max_batch_bytes,
            max_in_flight=max_in_flight,
            max_buffered_bytes=max_buffered_bytes,
        )
        self._producers.add(producer)
        return producer

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
    ) -> Consumer:
        """Become a member of a consumer group; see `Consumer`. `filter` may be the text of a TagFilter.

        `start` says where the group begins in topics that it has no progress in: "latest", "earliest", or a time. A
        member that is silent for `session_timeout` seconds (0.3 to 300) loses its queues. With `broadcast` it is no
        member: it reads every queue, and keeps its progress in the file `offsets_path`, which is its own and whose
        folder is made, or in one that goes by its name.
        """
        wanted = subscription(group, topics, name, session_timeout, start)
        path = broadcast_path(self.store, group, name, offsets_path, broadcast=broadcast)
        asked = filter_of(filter)
        for trial in trials_of(asked, wanted):
            self.run(trial)
        consumer = Consumer(self, wanted, asked, pull_messages, path)
        self._consumers.add(consumer)
        return consumer

    def simple_consumer(
        self,
        group: str,
        topics: str | Sequence[str],
        *,
        filter: Filter | str | None = None,
        start: Time = "latest",
    ) -> SimpleConsumer:
        """Messages one by one, for a time nobody else's; see `SimpleConsumer`. The rest as in `consumer`."""
        return SimpleConsumer(self, subscription(group, topics, "", SESSION_TIMEOUT_S, start), filter_of(filter))

    @property
    def groups(self) -> Groups:
        """Consumer groups: looking at them, and changing them."""
        return Groups(self)

    # Transactions

    def transaction(self, group: str, message: Message, *, check_immunity_time: int | None = None) -> Transaction:
        """A message of a producer group that is delivered when its transaction commits; see `Transaction`.

        With `check_immunity_time` in seconds no check comes before; later only a check can decide.
        """
        return Transaction(self, half_message(group, message, check_immunity_time))

    def transaction_producer(self, group: str, checker: Checker) -> TransactionProducer:
        """Be asked about transactions of a producer group that nobody has ended; see `TransactionProducer`."""
        return TransactionProducer(self, group, checker)

    @property
    def transactions(self) -> Transactions:
        """Open transactions: looking at them, and deciding them in the place of their producers."""
        return Transactions(self)

    # Topics

    def create_topic(self, topic: str, queues: int = 8, *, perm: int | None = None) -> None:
        """Make a topic, or give it more queues. Raises TopicExistsError when that would take something away.

        With `perm` 4 sends to it are refused from then on, by PermissionDeniedError; what waits for its time arrives.
        A new topic has 6, read and write; one that is there keeps what it has where none is given.
        """
        self.run(core.create_topic(topic, queues, perm))

    def delete_topic(self, topic: str) -> None:
        """Remove a topic and its queues. Raises TopicNotFoundError."""
        self.run(core.delete_topic(topic))

    def topics(self) -> list[TopicInfo]:
        """All topics."""
        return self.run(core.topics())

    def queues(self, topic: str = "") -> list[QueueInfo]:
        """The queues of a topic, or of all."""
        return self.run(core.queues(topic))

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The first offset that a queue can be read from."""
        return self.run(core.queue(topic, queue_id)).min_offset

    def max_offset(self, topic: str, queue_id: int) -> int:
        """The offset that a queue's next message will get, as far as it has been dispatched."""
        return self.run(core.queue(topic, queue_id)).max_offset

    def offset_at(self, topic: str, queue_id: int, time: Time, *, upper: bool = False) -> int:
        """The first offset whose store time is at or after `time`; with `upper` the last at or before it."""
        return self.run(core.offset_at(topic, queue_id, time, upper))

    # Reading

    def pull(
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
        """Messages of a queue from `offset` on, with RocketMQ's status and next offset.

        `tags` is a filter like "a || b", short for `filter=TagFilter("a || b")`; an SqlFilter goes by properties. Where
        few match, an answer without messages may still have a next offset further on. With `timeout` seconds the server
        waits that long for a message. `rocketmq_limits` gives RocketMQ's own answers: at most 32 messages and 256 KiB,
        filtered by tag hash.
        """
        most_bytes = min(whole_number("max_bytes", max_bytes), self.pull_bytes_max)
        request = core.pull_request(
            topic, queue_id, offset, max_messages, most_bytes, tags, timeout, rocketmq_limits, filter
        )
        return self.run(core.pull(request))

    def pull_arrow(
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
        return self.run(core.pull_as(request, core.arrow_parser(columns)))

    def get(self, message_id: str, topic: str = "") -> StoredMessage:
        """The message with an offset id (32 or 56 hex digits) or a unique id; a unique id needs its topic.

        Raises MessageNotFoundError.
        """
        return self.run(core.get(message_id, topic))

    def trace(self, message_id: str, topic: str = "") -> Trace:
        """Where a message is: queue, index, the groups' progress, copies. Raises MessageNotFoundError."""
        return drive(self.run, tracing.trace(message_id, topic, self.pull_bytes_max))

    def by_key(
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
        return drive(self.run, steps)

    def query_message(
        self, topic: str, key: str, max_messages: int = 32, begin: Time = None, end: Time = None
    ) -> QueryMessageResult:
        """RocketMQ's own answer by key: whatever the index points to, other keys of the same hash included.

        It is one answer, and an error where it exceeds the client's `max_frame_bytes`; `by_key` asks page by page.
        """
        return self.run(core.query_message(topic, key, max_messages, begin, end))

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
    ) -> Iterator[StoredMessage]:
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
    ) -> Iterator[StoredMessage]:
        """Messages found by a pass over the whole log: by topic, time, one property, and bytes in the body."""
        place = topic, begin, end, properties, body_contains, physical_offset
        request = core.scan_request(*place, page_messages, self.pull_bytes_max)
        return self._pages(core.scan_page(request))

    def _pages(self, call: Call[Page] | None) -> Iterator[StoredMessage]:
        while call is not None:
            page = self.run(call)
            yield from page.messages
            call = page.next_call

    def replay(
        self,
        topic: str,
        to: str,
        begin: Time = None,
        end: Time = None,
        *,
        key: str = "",
        filter: Filter | None = None,
        rate: float = 0.0,
        name: str = "",
        position: ReplayPosition | None = None,
        told: Callable[[ReplayProgress], None] | None = None,
    ) -> ReplayProgress:
        """Send the messages of `topic` with begin ≤ store time < end once more, to the topic `to`; see `Replay`.

        `rate` in messages a second. Under a `name` a replay can be gone on with: nothing is copied twice, and
        `position`, which `told` is told after each answer, saves looking through what was copied before.
        """
        begin_of(position, told)  # Before the topic is made.
        source = ReplaySource(topic, begin, end, key, filter)
        return Replay(self, source, to, name=name, rate=rate).run(position, told)

    def count(
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
        return self.run(core.count(topic, begin, end, tags, filter, time))

    # State

    def stats(self) -> dict[str, int]:
        """Every word of the control file by name."""
        return self.run(core.stats())

    def wait_dispatched(self, timeout: float = 10.0) -> None:
        """Return when everything written before this call can be found: by queue, key and time.

        Raises RequestTimeoutError when dispatch does not get there within `timeout` seconds.
        """
        wait = DispatchWait(timeout)
        while not wait.reached(self.stats()):
            time.sleep(core.DISPATCH_LOOK_S)

    def health(self) -> Health:
        """Whether all roles run and beat, and what does not."""
        return self.run(core.health())

    def ping(self) -> None:
        """Return when both roles answer."""
        for role in (WRITER, QUERY):
            self.run(core.ping(role))
