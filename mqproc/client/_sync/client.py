# Generated from mqproc/client/_async/client.py by tests/client/generate_sync.py: do not edit.
"""The client: requests by name, over the connections of an event loop or of threads."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from mqproc.arrow.columns import needs_package
from mqproc.client import requests, send_requests, timer_requests, tracing
from mqproc.client._sync.connection_pool import Connections, run_steps, send_many
from mqproc.client._sync.consumer import Consumer, SimpleConsumer
from mqproc.client._sync.groups import Groups
from mqproc.client._sync.producer import Producer
from mqproc.client._sync.transactions import (
    Checker,
    Transaction,
    TransactionProducer,
    Transactions,
)
from mqproc.client.batch import Batch, Delay, Delays, Times, deliver_at_ms
from mqproc.client.codecs import encoded, encoded_arguments, encoded_bodies, encoded_messages
from mqproc.client.dispatch_barrier import DispatchWait
from mqproc.client.replay import Replay, ReplayPosition, ReplayProgress, ReplaySource, begin_of
from mqproc.client.requests import IN_FLIGHT, MANY_IN_FLIGHT, PULL_BYTES, PULL_MESSAGES, Call
from mqproc.client.send_results import SendResults
from mqproc.client.subscription import (
    CONSUMER_PULL_MESSAGES,
    SESSION_TIMEOUT_S,
    Subscription,
    broadcast_path,
    subscription,
    trials_of,
)
from mqproc.client.tracing import Trace
from mqproc.client.transaction_requests import half_message
from mqproc.errors import BadRequestError, MqprocError
from mqproc.filters.selection import TimeKind, chosen
from mqproc.types import (
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
from mqproc.util.arguments import Time, whole_number

if TYPE_CHECKING:
    from mqproc.arrow.reading import ArrowStream
    from mqproc.client.arrow import ArrowPullResult


class Client(Connections):
    """A store's client. Connects at the first call and again after a loss.

        with mqproc.Client("/var/lib/store") as client:
            client.send("orders", b"…", keys="order-1", tag="new")
            for message in client.by_key("orders", "order-1"):
                print(message.body)

    `timeout` in seconds bounds each call, retries included; the waiting time of a pull is added. Several threads may
    share a synchronous client, several tasks of one event loop an asynchronous one. `max_spin_us`, of synchronous
    clients: how long a thread polls for an answer before it sleeps, where answers usually arrive in that time; 0 for
    never. Pulls, queries, counts and lists of topics wait until they have the messages that this client sent before,
    unless `read_your_writes` is False.

    With a `codec` ("json", "msgpack", "text", or an object with `encode` and `decode`) a body may be any value that it
    encodes; bytes stay as they are. `message.value` decodes the body of a message that this client read.

    Invalid arguments raise BadRequestError or a subclass. Every request may raise NotRunningError, RequestTimeoutError,
    and StoreBusyError when the store refuses it for longer than `timeout`.
    """

    # Sending

    def send(
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
        delay_level: int = 0,
        deliver_at: Time = None,
        delay: Delay | None = None,
        wait: bool = True,
    ) -> SendResult:
        """Store one message, given as a Message or as topic and body.

        With `wait` False a SYNC_FLUSH store answers before it syncs. With `delay_level` (1 to 18), `deliver_at` or
        `delay` (seconds or a timedelta) the message is delivered later, and the result names the place where it waits.
        Messages with one `sharding_key` go to one queue, in order. Raises SendOutcomeUnknownError when the answer was
        lost, DiskFullError, StoreReadOnlyError, PermissionDeniedError for a topic without permission to write.

        Example:
            client.send("orders", b"paid", keys="order-1", tag="new", properties={"region": "north"})
            client.send(Message("orders", b"remind", delay_level=3))
        """
        if self._codec is not None:
            topic, body = encoded_arguments(self._codec, topic, body)
        numbers, times = (queue_id, flag, born_timestamp_ms), (delay_level, deliver_at, delay)
        message = send_requests.message_of(topic, body, tag, keys, properties, sharding_key, numbers, times)
        return self.run(send_requests.send(message, wait=wait))

    def send_many(
        self, messages: Iterable[Message], *, in_flight: int = MANY_IN_FLIGHT, wait: bool = True
    ) -> SendResults:
        """Store messages of any topics, grouped into frames by topic; results are in order.

        The results are a sequence that makes each SendResult when it is asked for.

        At an error, also one of the iterable `messages`, the frames in flight are finished first; the error's notes
        name the stored messages, which may include later ones than the invalid message. `in_flight=1` keeps the order
        of messages with one sharding key even when the store refuses a frame for now. Raises as `send`.
        Example: `client.send_many(Message("orders", b"%d" % n) for n in range(10))`
        """
        if self._codec is not None:
            messages = encoded_messages(self._codec, messages)
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
        """Store columns of messages for one topic; see `Batch` for the forms of columns.

        A batch larger than a frame (65,536 messages, 64 MiB) is sent as several, unless `batch` asks for all or
        nothing, which may raise FrameTooLargeError. `delay_level`, `deliver_at` and `delay` delay the messages as those
        of `send`: one value for all, or an array with one for each, which is sent as one frame for each distinct time.
        Raises as `send`.
        Example: `client.send_batch("orders", [b"a", b"b"], keys=["order-1", "order-2"], tags="new")`
        """
        if self._codec is not None:
            bodies = encoded_bodies(self._codec, bodies)
        columns = topic, bodies, keys, tags, queue_id, queue_ids, born_timestamps_ms, properties, flags, batch, wait
        times = {"delay_level": delay_level, "deliver_at_ms": deliver_at_ms(deliver_at, delay)}
        batched = Batch(*columns, **times, sharding_keys=sharding_keys)
        calls = send_requests.BatchCalls(batched, self._frame_bytes_max)
        results: list[BatchResult] = []
        try:
            for result in self.run_all(calls, calls.in_flight):
                results.append(result)
        except BadRequestError as error:
            raise calls.placed(error, results) from None
        return send_requests.joined(topic, results, calls.places)

    def send_batches(self, batches: Iterable[Batch], *, in_flight: int = IN_FLIGHT) -> Iterator[BatchResult]:
        """Store batches as the result is iterated over, with up to `in_flight` frames in flight.

        A batch larger than a frame gives one result for each frame. Raises as `send_batch`.

        Example:
            for result in client.send_batches(Batch("orders", [b"a"] * 100) for _ in range(3)):
                print(len(result), result.queue_offsets.max())
        """
        if self._codec is not None:
            batches = encoded_messages(self._codec, batches)
        return self.run_all(send_requests.send_batches(batches, self._frame_bytes_max), in_flight)

    def send_oneway(
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
    ) -> None:
        """Send one message without waiting for an answer; errors of the store are not reported.

        Example: `client.send_oneway("metrics", b"load 0.7")`
        """
        if self._codec is not None:
            topic, body = encoded_arguments(self._codec, topic, body)
        numbers = queue_id, flag, born_timestamp_ms
        message = send_requests.message_of(topic, body, tag, keys, properties, sharding_key, numbers)
        self.run(send_requests.send_oneway(message, self._frame_bytes_max))

    def cancel(self, message_id: str) -> None:
        """Cancel a message that waits for its delivery time, by its offset id or unique id.

        One that is due within a second or two may still be delivered. Raises MessageNotFoundError when no such message
        waits, BadTimeError when it was due already, BadRequestError for one with a delay level.

        Example:
            sent = client.send("orders", b"remind", delay=3600)
            client.cancel(sent.message_id)
        """
        run_steps(self.run, timer_requests.cancel(message_id))

    def producer(
        self,
        *,
        linger_ms: float = 5.0,
        max_batch_messages: int = send_requests.PRODUCER_MESSAGES_MAX,
        max_batch_bytes: int = send_requests.GROUP_BYTES_MAX,
        max_in_flight: int = IN_FLIGHT,
        max_buffered_bytes: int = 64 << 20,
    ) -> Producer:
        """Make a producer that gathers messages of threads or tasks into frames.

        Example:
            with client.producer(linger_ms=2) as producer:
                handle = producer.send("orders", b"paid", keys="order-1")
            print(handle)
        """
        sizes = max_batch_messages, max_batch_bytes, max_in_flight, max_buffered_bytes
        return Producer(self, send_requests.Limits.of_user(linger_ms, *sizes))

    # Consuming

    def consumer(
        self,
        group: str,
        topics: str | Sequence[str],
        *,
        filter: Filter | str | None = None,
        change_filter: bool = False,
        start: Time = "latest",
        name: str = "",
        session_timeout: float = SESSION_TIMEOUT_S,
        pull_messages: int = CONSUMER_PULL_MESSAGES,
        broadcast: bool = False,
        offsets_path: str | Path | None = None,
    ) -> Consumer:
        """Become a member of a consumer group; see `Consumer`.

        `filter` may be the text of a TagFilter, but not SQL92. All live consumers of a group have the same filter in a
        topic, since a rejected message is done for the group; `change_filter` ends those with another one. `start` says
        where the group begins in topics without progress: "latest", "earliest", or a time. A member that sends no
        heartbeat for `session_timeout` seconds (0.3 to 300) loses its queues. With `broadcast` the consumer is not a
        member: it reads every queue and keeps its progress in the file `offsets_path`, whose folder is created, or in a
        file under its name. An asynchronous consumer joins when it is awaited or entered. Raises PermissionDeniedError
        for a disabled group, FilterSyntaxError, FilterMismatchError beside consumers with another filter,
        GroupInUseError for progress that another broadcast consumer uses.

        Example:
            with client.consumer("billing", "orders", filter="new || paid", start="earliest") as consumer:
                for message in consumer.messages(timeout=1):
                    print(message.body)
        """
        subscribed = subscription(group, topics, name, session_timeout, start, filter, change_filter)
        path = broadcast_path(self.store, group, name, offsets_path, broadcast=broadcast)
        return self._join(subscribed, pull_messages, path)

    def _join(self, subscribed: Subscription, pull_messages: int, broadcast: str) -> Consumer:
        for trial in trials_of(subscribed):
            self.run(trial)
        consumer = Consumer(self, subscribed, pull_messages, broadcast)
        try:
            consumer.start()
            self._consumers.add(consumer)
        except BaseException:
            with contextlib.suppress(MqprocError, OSError):
                consumer.close()
            raise
        return consumer

    def simple_consumer(
        self,
        group: str,
        topics: str | Sequence[str],
        *,
        filter: Filter | str | None = None,
        change_filter: bool = False,
        start: Time = "latest",
    ) -> SimpleConsumer:
        """Make a simple consumer; see `SimpleConsumer`. The parameters are as for `consumer`.

        A simple consumer counts as live until a minute after its last receive, or its invisible time if longer, or
        until its process ends.

        Example:
            consumer = client.simple_consumer("shipping", "orders", start="earliest")
            consumer.ack(*consumer.receive(16, invisible_duration=30))
        """
        subscribed = subscription(group, topics, "", SESSION_TIMEOUT_S, start, filter, change_filter)
        return SimpleConsumer(self, subscribed)

    @property
    def groups(self) -> Groups:
        """Administration of consumer groups."""
        return Groups(self)

    # Transactions

    def transaction(self, group: str, message: Message, *, check_immunity_time: int | None = None) -> Transaction:
        """Make a transaction, whose message is delivered when it commits.

        With `check_immunity_time` in seconds no check comes earlier; after that time only a check can decide.

        Example:
            with client.transaction("billing", Message("orders", b"paid")) as transaction:
                print(transaction.transaction_id)
        """
        if self._codec is not None:
            message = encoded(self._codec, message)
        return Transaction(self, half_message(group, message, check_immunity_time))

    def transaction_producer(self, group: str, checker: Checker) -> TransactionProducer:
        """Make a producer that answers checks of its group; see `TransactionProducer`.

        Example:
            with client.transaction_producer("billing", lambda message: True) as producer:
                with producer.transaction(Message("orders", b"paid")):
                    print("the work that the message reports")
        """
        return TransactionProducer(self, group, checker)

    @property
    def transactions(self) -> Transactions:
        """Open transactions: inspection, and decisions in place of their producers."""
        return Transactions(self)

    # Topics

    def create_topic(self, topic: str, queues: int = 8, *, perm: int | None = None) -> None:
        """Create a topic, or give it more queues.

        With `perm` 4 sends to it are refused with PermissionDeniedError; scheduled messages still arrive. A new topic
        has 6, read and write; an existing one keeps its permission when none is given. Raises TopicExistsError when
        queues would be removed, TopicReservedError, TooManyQueuesError.
        Example: `client.create_topic("orders", queues=8)`
        """
        self.run(requests.create_topic(topic, queues, perm))

    def delete_topic(self, topic: str) -> None:
        """Delete a topic and its queues. Raises TopicNotFoundError, TopicReservedError.

        Example: `client.delete_topic("old")`
        """
        self.run(requests.delete_topic(topic))

    def topics(self) -> list[TopicInfo]:
        """List all topics. Example: `client.topics()`"""
        return self.run(requests.topics())

    def queues(self, topic: str = "") -> list[QueueInfo]:
        """List the queues of a topic, or of all. Example: `client.queues("orders")`"""
        return self.run(requests.queues(topic))

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The first readable offset of a queue. Raises TopicNotFoundError, NoSuchQueueError.

        Example: `client.min_offset("orders", 0)`
        """
        return (self.run(requests.queue(topic, queue_id))).min_offset

    def max_offset(self, topic: str, queue_id: int) -> int:
        """The offset of a queue's next message, as far as messages are dispatched.

        Raises TopicNotFoundError, NoSuchQueueError. Example: `client.max_offset("orders", 0)`
        """
        return (self.run(requests.queue(topic, queue_id))).max_offset

    def offset_at(self, topic: str, queue_id: int, time: Time, *, upper: bool = False) -> int:
        """The first offset stored at or after `time`; with `upper` the last at or before it.

        0 for an unknown queue. Example: `client.offset_at("orders", 0, "2026-11-21T10:00")`
        """
        return self.run(requests.offset_at(topic, queue_id, time, upper))

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
        """Read messages of a queue from `offset` on, with RocketMQ's status and next offset.

        `tags` is a filter like "a || b", short for `filter=TagFilter("a || b")`; an SqlFilter selects by properties.
        Where few messages match, an answer without messages may still have a higher next offset. The server waits up to
        `timeout` seconds for a message. `rocketmq_limits` gives RocketMQ's own answers: at most 32 messages and 256
        KiB, filtered by tag hash. Raises FilterSyntaxError.

        Example:
            result = client.pull("orders", 0, offset=0, filter=SqlFilter("region = 'north'"))
            print(result.status, result.messages, result.next_offset)
        """
        max_bytes = min(whole_number("max_bytes", max_bytes), self.pull_bytes_max)
        selection = chosen(tags, filter)
        request = requests.pull_request(topic, queue_id, offset, max_messages, max_bytes, selection, timeout)
        if rocketmq_limits is not False:
            request = msgspec.structs.replace(request, rocketmq_limits=rocketmq_limits)
        return self.run(requests.pull(request, self.pull_bytes_max))

    def pull_arrow(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int = PULL_MESSAGES,
        *,
        columns: Sequence[str] | str | None = None,
        tags: str = "",
        filter: Filter | None = None,
        timeout: float = 0.0,
        max_bytes: int = PULL_BYTES,
    ) -> ArrowPullResult:
        """Read messages as `pull` does, as a pyarrow.RecordBatch with the columns of `read`.

        Bodies are as they are stored. The columns share memory: a reference to one of them keeps all of it. Raises
        ConfigurationError without pyarrow.
        Example: `(client.pull_arrow("orders", 0, 0, columns=["queue_offset", "body"])).batch.to_pylist()`
        """
        max_bytes = min(whole_number("max_bytes", max_bytes), self.pull_bytes_max)
        selection = chosen(tags, filter)
        request = requests.pull_request(topic, queue_id, offset, max_messages, max_bytes, selection, timeout)
        return self.run(requests.pull_as(request, requests.arrow_parser(columns)))

    def read(
        self,
        topic: str,
        begin: Time = None,
        end: Time = None,
        *,
        queue_ids: int | Sequence[int] | None = None,
        starting_offsets: Mapping[int, int] | None = None,
        ending_offsets: Mapping[int, int] | None = None,
        tags: str = "",
        filter: Filter | None = None,
        time: TimeKind = "store",
        columns: Sequence[str] | str | None = None,
        fail_on_data_loss: bool = True,
    ) -> ArrowStream:
        """Read a topic's messages with begin ≤ time < end as a lazy `ArrowStream`.

        The messages are those that exist now, of these queues or of all, at the offsets from `starting_offsets` on and
        below `ending_offsets` (by queue id), with tags or filter as in `pull`. Columns are those of `columns`, all but
        RocketMQ's internal ones by default, and these too with "all". Bodies are as they were sent; with the column
        `sys_flag` as they are stored, perhaps compressed. Damaged messages, and those deleted meanwhile, raise
        CorruptStoreError, unless `fail_on_data_loss` is False. Raises TopicNotFoundError, NoSuchQueueError,
        OffsetOutOfRangeError, FilterSyntaxError, and ConfigurationError without pyarrow.

        Example:
            stream = client.read("orders", begin="2026-11-21T10:00", tags="new", columns=["keys", "body"])
            table = stream.to_arrow()
        """
        with needs_package("arrow"):
            from mqproc.arrow.reading import ArrowStream, TopicRead
            from mqproc.client import read_requests
        read = TopicRead.of_user(
            topic,
            begin,
            end,
            time=time,
            queue_ids=queue_ids,
            starting_offsets=starting_offsets,
            ending_offsets=ending_offsets,
            tags=tags,
            filter=filter,
            columns=columns,
            fail_on_data_loss=fail_on_data_loss,
        )
        plan = run_steps(self.run, read_requests.plan(read, self.store))
        max_bytes = self.pull_bytes_max
        return ArrowStream(plan, lambda: read_requests.pages(self, plan, max_bytes))

    def get(self, message_id: str, topic: str = "") -> StoredMessage:
        """The message with an offset id (32 or 56 hex digits), or a unique id with its topic.

        Raises MessageNotFoundError. Example: `client.get(message.unique_id, "orders")`
        """
        return self.run(requests.get(message_id, topic))

    def trace(self, message_id: str, topic: str = "") -> Trace:
        """Locate a message: queue, index, the groups' progress, copies. Raises MessageNotFoundError.

        Example: `(client.trace(message.message_id)).progress`
        """
        return run_steps(self.run, tracing.trace(message_id, topic, self.pull_bytes_max))

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
        """Find messages by key with begin ≤ time < end; `unique` searches a unique id.

        Returns the newest when there are more than `max_messages`, whose limit is 65,536; none for an unknown topic.
        Example: `client.by_key("orders", "order-1", begin="2026-01-01")`
        """
        steps = requests.all_by_key(topic, key, begin, end, max_messages, unique, time, self.pull_bytes_max)
        return run_steps(self.run, steps)

    def by_tag(
        self,
        topic: str,
        tag: str,
        begin: Time = None,
        end: Time = None,
        *,
        max_messages: int = 64,
        time: TimeKind = "store",
    ) -> list[StoredMessage]:
        """Find messages by tag through the index, as `by_key`; `range` with a filter needs no index.

        Raises BadRequestError if the index has no entries for tags (option `message_index_tags`). Example:
        `client.by_tag("orders", "paid", begin="2026-01-01")`
        """
        steps = requests.all_by_tag(topic, tag, begin, end, max_messages, time, self.pull_bytes_max)
        return run_steps(self.run, steps)

    def query_message(
        self, topic: str, key: str, max_messages: int = 32, begin: Time = None, end: Time = None
    ) -> requests.QueryMessageResult:
        """RocketMQ's own answer by key, with messages of other keys of the same hash.

        It is a single answer, and FrameTooLargeError when it exceeds the client's `max_frame_bytes`; `by_key` reads in
        pages. Example: `(client.query_message("orders", "order-1")).messages`
        """
        return self.run(requests.query_message(topic, key, max_messages, begin, end))

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
        """Iterate over a topic's messages with begin ≤ time < end, queue by queue.

        Empty for an unknown topic. Raises FilterSyntaxError.

        Example:
            for message in client.range("orders", begin="2026-11-21T10:00", tags="new"):
                print(message.queue_id, message.queue_offset)
        """
        selection = chosen(tags, filter)
        call = requests.range_page(topic, begin, end, selection, page_messages, self.pull_bytes_max, time)
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
        """Search the whole log for messages by topic, time, one property, and bytes in the body.

        Example:
            for message in client.scan("orders", properties={"region": "north"}, body_contains=b"paid"):
                print(message.message_id)
        """
        place = topic, begin, end, properties, body_contains, physical_offset
        request = requests.scan_request(*place, page_messages, self.pull_bytes_max)
        return self._pages(requests.scan_page(request))

    def _pages(self, call: Call[requests.Page] | None) -> Iterator[StoredMessage]:
        left: deque[StoredMessage] = deque()
        return self._rest_of_pages([call], left)

    def _rest_of_pages(
        self, calls: list[Call[requests.Page] | None], left: deque[StoredMessage]
    ) -> Iterator[StoredMessage]:
        """Messages of the rest of a page, then of the pages that `calls` names."""
        while left or calls[0] is not None:
            while left:
                yield left.popleft()
            if calls[0] is not None:
                page = self.run(calls[0])
                left.extend(page.messages)
                calls[0] = page.next_call

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
        """Send the messages of `topic` with begin ≤ store time < end again, to the topic `to`.

        `rate` in messages a second. A replay with a `name` can be continued without duplicates; `position`, which the
        callback `told` gets after each answer, saves the search for messages that were copied before. An asynchronous
        client calls it in the event loop; a cancelled replay ends after the next answer. Raises TopicNotFoundError, and
        as `send`.
        Example: `client.replay("orders", "orders-again", begin="2026-11-21", name="second-try", rate=1000)`
        """
        arguments = position, told
        begin_of(*arguments)  # Before the topic is created.
        source = ReplaySource(topic, begin, end, key, filter)
        return Replay(self, source, to, name=name, rate=rate).run(*arguments)

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
        """Count the messages of a topic with begin ≤ time < end.

        By store time without a filter only messages at the bounds are read, so messages of undetected damage count.
        Raises FilterSyntaxError. Example: `client.count("orders", tags="new")`
        """
        return self.run(requests.count(topic, begin, end, tags, filter, time))

    # State

    def stats(self) -> dict[str, int]:
        """Every word of the control file by name. Example: `(client.stats())["dispatched"]`"""
        return self.run(requests.stats())

    def wait_dispatched(self, timeout: float = 10.0) -> None:
        """Return when all messages written before this call can be found by queue, key and time.

        Raises RequestTimeoutError when dispatch takes longer than `timeout` seconds.
        Example: `client.wait_dispatched(timeout=5)`
        """
        wait = DispatchWait(timeout)
        while not wait.reached(self.stats()):
            time.sleep(requests.DISPATCH_POLL_S)

    def health(self) -> Health:
        """Whether all roles run and send heartbeats, with the problems found.

        Example: `(client.health()).problems`
        """
        return self.run(requests.health())

    def ping(self) -> None:
        """Return when both roles answer. Example: `client.ping()`"""
        for role in (requests.WRITER, requests.QUERY):
            self.run(requests.ping(role))
