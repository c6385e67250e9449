"""The group consumer, and the simple consumer.

    membership ──assignment──▶ cursors ◀──pulls── fetcher ◀── the caller that iterates or receives
                                  └──positions──▶ commits ──▶ query role

The caller fetches and commits; the membership sends heartbeats in the background, however long a message takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from mqproc.client import group_requests, requests
from mqproc.client._async.background import AsyncFetcher, continued
from mqproc.client._async.connection import AsyncConnections, run_steps
from mqproc.client._async.handling import HandlerTasks
from mqproc.client._async.membership import UNREACHABLE, AsyncBroadcast, AsyncMembership
from mqproc.client.assignment import (
    COMMIT_S,
    LOOK_S,
    MOVED,
    RECEIVE_MESSAGES,
    # sync: TURN_S,
    Assignment,
    Cursor,
    Piece,
    Queue,
    entries,
    pull_call,
)
from mqproc.client.group_requests import Move, Nacking, ResetTo, lag_behind, seek_moves
from mqproc.client.retry import ConnectionLost
from mqproc.client.subscription import (
    INVISIBLE_S,
    SIMPLE_RECEIVE_MESSAGES,
    OfGroup,
    ReceiveWait,
    Subscription,
    receive_call,
)
from mqproc.errors import BadRequestError, FrameTooLargeError, MqprocError, NotAMemberError, RequestTimeoutError
from mqproc.topic_names import RETRY_MAX_TIMES, retries_of_group, retry_topic
from mqproc.types import PullStatus, SqlFilter, StoredMessage
from mqproc.util.arguments import at_least_one, moment_after, true_or_false
from mqproc.util.signals import stopping_signals

if TYPE_CHECKING:
    import pyarrow as pa

    from mqproc.wire.operations import GroupAssignment

# sync: _ENDS = (MqprocError, OSError)
_ENDS = (MqprocError, OSError, asyncio.CancelledError)  # async only
"""Errors of one step of a close, after which the next is made all the same."""
SEEK_CHECK_S = 0.001
_clock = time.monotonic


class AsyncConsumer(OfGroup):
    """A member of a consumer group, made by `AsyncClient.consumer`.

        async with client.consumer("billing", "orders") as consumer:
            async for message in consumer:
                await handle(message)

    A message is done when the next one is requested, or when the block ends without an error; finished messages are
    committed. `nack` has one redelivered later. Messages of `receive` are done by `ack`. All methods but `messages`,
    `batches` and `run` may be called by several threads of the process, or tasks of the event loop, that made the
    consumer.
    """

    def __init__(
        self,
        client: AsyncConnections,
        subscription: Subscription,
        pull_messages: int,
        broadcast: str,
    ) -> None:
        """`broadcast`: file with this consumer's own progress, "" for a member of the group."""
        self._client = client
        self._pid = os.getpid()
        self._subscription = subscription
        self._retry_topic = retry_topic(subscription.group)
        # Redelivered messages have passed the consumer's filter before.
        own_retries = retries_of_group(subscription.group)
        self._own_retries = SqlFilter(own_retries) if own_retries else None
        self._pull_messages = at_least_one("pull_messages", pull_messages)
        self._assignment: Assignment[Any] = Assignment()
        self._parse: Callable[[Any, memoryview], Any] = requests.unread_pull
        self._error: BaseException | None = None
        self._closed = False
        self._left = False
        self._commit_at = 0.0
        self._local: AsyncBroadcast | None = None
        self._member: AsyncMembership | AsyncBroadcast
        if broadcast:
            self._local = AsyncBroadcast(client, subscription, broadcast, self._assignment, self._assigned, self._end)
            self._member = self._local
        else:
            self._member = AsyncMembership(client, subscription, self._assignment, self._assigned, self._end)
        name = f"consumer of group {subscription.group}"
        self._fetcher = AsyncFetcher(client, name)  # sync: self._fetcher = Fetcher(client, name, self._begin_again)

    async def start(self) -> None:
        """Join the group. Raises the error that refused the join.

        After any exception `close` must be called.
        """
        await self._member.start()

    async def __aenter__(self) -> AsyncConsumer:
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self._assignment.leave_loops()
        await self.close()

    async def close(self) -> None:
        """Commit finished messages and leave the group. It may be repeated after an interrupt.

        Example: `await consumer.close()`
        """
        if self._left or os.getpid() != self._pid:
            return  # The member is the parent of this forked process and remains.
        self._fetcher.check_owner()
        self._closed = True
        failure: BaseException | None = None
        try:
            await self.commit()
        except _ENDS as error:
            failure = error
        try:
            await self._member.leave(reachable=not isinstance(failure, UNREACHABLE))
        except _ENDS as error:
            failure = error
        await self._fetcher.close()
        self._left = True
        if failure is not None:
            raise failure

    # State

    @property
    def queues(self) -> list[tuple[str, int]]:
        """Topic and queue id of the assigned queues."""
        return self._assignment.queues()

    @property
    def member_id(self) -> str:
        """Name of the consumer in `mqproc group info`."""
        return self._assignment.member_id

    @property
    def is_broadcast(self) -> bool:
        """Whether the consumer reads all queues without being a member: there is no redelivery."""
        return self._local is not None

    def positions(self) -> dict[tuple[str, int], int]:
        """Position of each assigned queue by topic and queue id: all messages below it are done.

        Example: `consumer.positions()[("orders", 0)]`
        """
        return self._assignment.positions()

    async def lag(self) -> int:
        """Number of messages that the group, or a broadcast consumer itself, has not consumed.

        Example: `await consumer.lag()`
        """
        if self.is_broadcast:
            return await run_steps(self._client.run, lag_behind(self.positions()))
        return (await self._client.run(group_requests.info(self._subscription.group))).lag

    async def seek(self, to: ResetTo, topics: str | Sequence[str] = ()) -> list[Move]:
        """Move to other offsets, in all topics or these; returns the moves.

        A move shows an offset that lies outside the queue. The group's progress moves there, durably. Returns when the
        next messages come from there; `ack` no longer affects messages received before. Raises RequestTimeoutError when
        that takes too long, TopicNotFoundError for a topic that the consumer does not read.
        Example: `await consumer.seek(ResetTo(time="2026-11-21T10:00"))`
        """
        self.check()
        positions, epochs = self._assignment.seekable(self._subscription.among(topics))
        moves = await run_steps(self._client.run, seek_moves(positions, to))
        targets = [(move.topic, move.queue_id, move.after) for move in moves]
        if self._local is not None:
            self._local.commit([self._assignment.go_to((topic, queue), at) for topic, queue, at in targets])
            return moves
        await self._client.run(group_requests.reset(self._subscription.group, targets))
        deadline = _clock() + self._client.timeout_s
        while epochs.items() & self._assignment.epochs(epochs).items():
            if _clock() >= deadline:
                raise RequestTimeoutError("progress has moved, but the queues were not reassigned in time")
            await asyncio.sleep(SEEK_CHECK_S)
        return moves

    def _assigned(self, answer: GroupAssignment) -> None:
        """Apply an assignment; called by the membership in the background."""
        self._assignment.apply(answer)
        self._fetcher.wake()
        self._release()

    def _end(self, error: BaseException) -> None:
        self._error = error
        self._fetcher.wake()

    def _release(self) -> None:
        """Release queues that were taken away, once none of their messages is in progress."""
        if self._left:
            return  # A loop that is closed after its consumer must open no connection.
        # sync: try:
        # sync:     found = self._assignment.to_release()
        # sync:     if found is not None and self._local is None:
        # sync:         self._release_queues(*found)
        # sync: except BaseException:  # Raised by a signal handler.
        # sync:     self._fetcher.interrupted = True
        # sync:     raise
        found = self._assignment.to_release()  # async only
        if found is not None and self._local is None:  # async only
            self._fetcher.spawn(self._release_queues(*found))

    # sync: def _begin_again(self) -> None:
    # sync:     self._assignment.begin_again()
    # sync:     self._release()

    async def _release_queues(self, generation: int, cursors: Sequence[Cursor[Any]]) -> None:
        group, member_id = self._subscription.group, self._assignment.member_id
        done = [(each, each.position) for each in cursors if each.position > each.committed and not each.lost]
        try:
            if done:
                await self._client.run(group_requests.commit_of_member(group, member_id, entries(done)))
            await self._client.run(group_requests.release(group, member_id, generation))
        except MqprocError:
            # The membership gets the same error and joins again; the next assignment is released again.
            self._assignment.not_released()

    # Fetching and committing, by the caller

    def _tend(self) -> None:
        """Process answers, pull more, commit."""
        self.check()
        self._fetcher.poll()
        self._pull()
        self._commit_soon()

    def check(self) -> None:
        """Raise the error that ended the consumer, if any. Example: `consumer.check()`"""
        self._fetcher.check_owner()
        if self._error is not None:
            raise self._error
        if self._closed:
            raise BadRequestError("the consumer is closed")

    def _pull(self) -> None:
        if not self._fetcher.usable:
            return
        max_bytes = min(self._assignment.pull_bytes, self._client.pull_bytes_max)
        object_bytes = self._client.pull_bytes_max if self._parse is requests.unread_pull else 0
        for cursor in self._assignment.start_pulls(_clock()):
            filter, parse = self._subscription.filter, self._parse
            if cursor.topic == self._retry_topic:
                filter, parse = self._own_retries, requests.redelivered_pull(parse)
            call = pull_call(cursor, filter, self._pull_messages, max_bytes, parse, object_bytes)
            self._fetcher.start(call, functools.partial(self._pulled, cursor))

    def _pulled(self, cursor: Cursor[Any], found: Any, error: MqprocError | ConnectionLost | None) -> None:
        if error is not None:
            cursor.pulling = False
            if isinstance(error, BadRequestError | FrameTooLargeError):
                self._error = error
        elif found.status is PullStatus.NO_MATCHED_LOGIC_QUEUE:
            cursor.absent(_clock())
        else:
            piece = Piece(found.batch, found.next_offset)
            self._assignment.fetched(cursor, piece, found.status in MOVED, _clock())

    def _commit_soon(self, *, idle: bool = False) -> None:
        """Start a commit of finished messages, at once when `idle`; the answer is processed later."""
        now = _clock()
        if (now < self._commit_at and not idle) or not self._fetcher.usable:
            return
        self._commit_at = now + COMMIT_S
        if self._local is not None:
            self._local.commit_done(self._assignment)
            return
        sent = self._assignment.to_commit()
        if not sent:
            return
        call = group_requests.commit_of_member(self._subscription.group, self._assignment.member_id, entries(sent))
        self._fetcher.start(call, functools.partial(self._committed, sent))

    def _committed(
        self,
        sent: Sequence[tuple[Cursor[Any], int]],
        refused: group_requests.Refusals | None,
        error: MqprocError | ConnectionLost | None,
    ) -> None:
        if error is None:
            self._assignment.committed(sent, refused or {})
        else:
            self._assignment.not_committed(sent)

    async def commit(self) -> None:
        """Return when all finished messages are committed. Example: `await consumer.commit()`"""
        self._fetcher.check_owner()
        sent = self._assignment.uncommitted()
        if not sent:
            return
        if self._local is not None:
            self._local.commit(sent)
            self._local.save()
            self._assignment.committed(sent, {})
            return
        call = group_requests.commit_of_member(self._subscription.group, self._assignment.member_id, entries(sent))
        try:
            refused = await self._client.run(call)
        except MqprocError as error:
            self._assignment.not_committed(sent)
            if not isinstance(error, NotAMemberError):
                raise
        else:
            self._assignment.committed(sent, refused)

    # Messages

    def __aiter__(self) -> AsyncIterator[StoredMessage]:
        return self.messages()

    @continued  # async only
    async def messages(self, timeout: float | None = None) -> AsyncIterator[StoredMessage]:
        """Iterate over messages, in order within a queue, until none arrives for `timeout` seconds.

        Example:
            async for message in consumer.messages(timeout=1):
                print(message.body)
        """
        self._use(requests.unread_pull)
        self._leave_loops()
        member = self._member
        while (taken := await self._take(timeout)) is not None:
            cursor, piece = taken
            loop = self._assignment.start_loop(cursor)
            try:
                now = 0.0
                for message in piece.messages.take(len(piece.messages)):
                    if cursor.revoked or now > member.valid_until:
                        break
                    # Messages before it that the filter rejected are done.
                    cursor.done = loop.begin = offset = message.queue_offset
                    yield message
                    cursor.done = offset + 1
                    now = _clock()
                    if now >= self._commit_at:
                        self._tend_if_free()
                else:
                    cursor.done = piece.end
            finally:
                self._put_back(cursor, piece)

    @continued  # async only
    async def batches(
        self, columns: Sequence[str] | str | None = None, timeout: float | None = None
    ) -> AsyncIterator[pa.RecordBatch]:
        """Iterate over messages as Arrow record batches of one queue each.

        A batch is done when the next one is requested, the last one at the end of the consumer's block. Raises
        ConfigurationError without pyarrow.

        Example:
            async for batch in consumer.batches(["body"], timeout=1):
                print(batch.num_rows)
        """
        self._use(requests.arrow_parser(columns))
        self._leave_loops()
        while (taken := await self._take(timeout)) is not None:
            cursor, piece = taken
            self._assignment.start_loop(cursor, cursor.done, piece.end)
            try:
                yield piece.messages
                cursor.done = piece.end
            finally:
                self._put_back(cursor, piece)

    def _leave_loops(self) -> None:
        """Begin a new loop: the message that an earlier one was left with is done."""
        self._assignment.leave_loops()
        self._release()

    def _use(self, parse: Callable[[Any, memoryview], Any]) -> None:
        """Begin to receive objects or Arrow. Raises BadRequestError after the other kind."""
        if (parse is requests.unread_pull) != (self._parse is requests.unread_pull) and self._assignment.has_fetched():
            raise BadRequestError("a consumer gives either messages or Arrow batches")
        self._parse = parse

    async def _take(self, timeout: float | None) -> tuple[Cursor[Any], Piece[Any]] | None:
        """The next piece for a loop, None when none arrives in time."""
        deadline = None if timeout is None else moment_after("timeout", timeout)
        # sync: return self._fetcher.in_turn(functools.partial(self._taken, deadline), None)
        return await self._taken(deadline)  # async only

    async def _taken(self, deadline: float | None) -> tuple[Cursor[Any], Piece[Any]] | None:
        while True:
            self._tend()
            if self._is_valid() and (taken := self._assignment.take_piece()) is not None:
                return taken
            if not await self._wait(deadline):
                return None

    def _is_valid(self) -> bool:
        """Whether the queues are still assigned: a member without a heartbeat may have lost them."""
        return _clock() <= self._member.valid_until

    async def _wait(self, deadline: float | None) -> bool:
        """Wait for messages; False when the time is over."""
        left_s = LOOK_S if deadline is None else deadline - _clock()
        if left_s <= 0:
            return False
        self._commit_soon(idle=True)
        await self._fetcher.wait(min(left_s, LOOK_S))
        return True

    def _put_back(self, cursor: Cursor[Any], piece: Piece[Any]) -> None:
        """End the loop over a piece."""
        self._assignment.put_back(cursor, piece)
        # A generator that is left ends after the next step of its task, which may already wait for the rest.
        self._fetcher.wake()  # async only
        if cursor.revoked and not self._closed:  # sync: if cursor.revoked:
            self._release()

    def _tend_if_free(self) -> None:
        self._tend()  # sync: self._fetcher.in_turn(self._tend, None, 0)

    async def receive(
        self, max_messages: int = RECEIVE_MESSAGES, timeout: float = 0.0, *, ordered: bool = False
    ) -> list[StoredMessage]:
        """Receive up to so many messages within `timeout` seconds; `ack` or `nack` ends each.

        With `ordered` the next messages of a queue are received only when the earlier ones are done.
        Example: `messages = await consumer.receive(100, timeout=10)`
        """
        self._use(requests.unread_pull)
        most, exclusive = at_least_one("max_messages", max_messages), true_or_false("ordered", ordered)
        deadline = moment_after("timeout", timeout)
        # sync: # Another thread that has the turn waits as well, and receives the next messages.
        # sync: received = functools.partial(self._received, most, deadline, exclusive=exclusive)
        # sync: return self._fetcher.in_turn(received, [], max(TURN_S, deadline - _clock()))
        return await self._received(most, deadline, exclusive=exclusive)  # async only

    async def _received(self, most: int, deadline: float, *, exclusive: bool) -> list[StoredMessage]:
        while True:
            self._tend()
            found = self._assignment.hand_out(most, exclusive=exclusive) if self._is_valid() else []
            if found or not await self._wait(deadline):
                return found

    async def ack(self, *messages: StoredMessage) -> None:
        """Mark messages of `receive` as done. After `close` it is too late: they are redelivered.

        Example: `await consumer.ack(message)`
        """
        self._fetcher.check_owner()
        places = group_requests.places_of(messages)
        freed = self._assignment.ack(places)
        self._wake_waiting(places)
        if freed:
            self._release()
        if _clock() >= self._commit_at and not self._closed:
            self._commit_soon()  # sync: self._tend_if_free()

    def holds(self, message: StoredMessage) -> bool:
        """Whether a received message is to be handled: its queue is still assigned, and not reset.

        A caller that handles a queue in order checks this before each message, and gives the rest to `take_back`.
        Example: `consumer.holds(message)`
        """
        queue = message.stored_topic, message.queue_id
        return self._assignment.holds(queue, message.queue_offset) and self._is_valid()

    def take_back(self, messages: Sequence[StoredMessage]) -> None:
        """Redeliver messages of `receive` that are not handled, and those received after them.

        Example: `consumer.take_back([message])`
        """
        places = group_requests.places_of(messages)
        freed = self._assignment.take_back(places)
        self._wake_waiting(places)
        if freed and not self._closed:  # sync: if freed:
            self._release()

    def _wake_waiting(self, places: Sequence[tuple[Queue, int]]) -> None:
        """Wake another caller that receives in order and may wait for the messages after these."""
        if self._fetcher.is_waited_for and any(self._assignment.may_continue(queue) for queue, _ in places):
            self._fetcher.wake()

    async def nack(self, *messages: StoredMessage, delay_level: int = 0) -> None:
        """Have messages redelivered after the pause of level 1…18, or 0 for increasing pauses.

        Each call stores a copy, also of a message that is done already. After too many deliveries, or with a level
        below 0, they become dead letters of the group. Returns when the copies are stored; messages of `receive` are
        then done. Raises MessageNotFoundError for those that retention, damage or the deletion of their topic removed,
        which are not done until they are acknowledged, StoreBusyError when some could not be stored now,
        BadRequestError for a broadcast consumer. Example: `await consumer.nack(message, delay_level=5)`
        """
        self._fetcher.check_owner()
        if self._local is not None:
            raise BadRequestError("a broadcast consumer has no retry topic")
        nacking = Nacking(self._subscription.group, messages, delay_level)
        deadline = _clock() + self._client.timeout_s
        failures = 0
        while nacking.left:
            await self.ack(*nacking.answered(await self._client.run(nacking.call())))
            if nacking.is_busy:
                failures += 1
                pause_s = self._client.retry.pause_s(failures)
                if _clock() + pause_s >= deadline:
                    raise nacking.busy()
                await asyncio.sleep(pause_s)
        nacking.check_gone()

    async def run(
        self,
        handler: Callable[[StoredMessage], Awaitable[object]],
        *,
        workers: int = 1,
        ordered: bool = False,
        stop: asyncio.Event | None = None,
        pause_s: float = 1.0,
        signals: bool = False,
    ) -> None:
        """Call `handler` with each message until `stop` is set, in up to `workers` threads or tasks.

        A message is done when the handler returns. When it raises, the exception is logged and the message nacked. With
        `ordered`, where a queue's messages are handled one after the other, the message is tried again after `pause_s`
        before any later one, and becomes a dead letter after the group's number of retries. A broadcast consumer skips
        it. A message that the store cannot accept for a retry (`max_queues`, a full disk) is retried here every 5 s.

        When the run ends, by `stop` or by an error such as KeyboardInterrupt, running handlers finish and no other one
        is called; the remaining messages are redelivered. The end of the program stops a daemon thread; another thread
        that runs when the main thread ends continues with the messages one by one. With `signals`, in the main thread
        only, SIGTERM and SIGINT set `stop`, and a second one ends the process at once.
        Example: `await consumer.run(handle, workers=4, stop=stop)`
        """
        limit = await self._retries() if true_or_false("ordered", ordered) else None
        stop = stop or asyncio.Event()
        run = HandlerTasks(self, handler, workers, limit, stop, pause_s)
        ends = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)  # sync: ends = stop.set
        with stopping_signals(ends) if true_or_false("signals", signals) else contextlib.nullcontext():
            await run.run()

    async def _retries(self) -> int:
        if self.is_broadcast:
            return RETRY_MAX_TIMES
        return (await self._client.run(group_requests.info(self._subscription.group))).retry_max_times


class AsyncSimpleConsumer(OfGroup):
    """A simple consumer of a group, made by `AsyncClient.simple_consumer`.

    Tasks and threads may share it.

        consumer = client.simple_consumer("billing", "orders")
        for message in await consumer.receive(16, invisible_duration=30, timeout=10):
            handle(message)
            await consumer.ack(message)

    It has no state of its own: any simple consumer of the group, in any process, can acknowledge a received message.
    """

    def __init__(self, client: AsyncConnections, subscription: Subscription) -> None:
        self._client = client
        self._subscription = subscription
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
        the group's `retry_max_times`. A receive that is cancelled, or ended by an exception of a signal handler,
        hands back the messages that were on their way. An asynchronous one uses a connection of its own, which counts
        towards the store's `max_connections`.
        Example: `messages = await consumer.receive(16, invisible_duration=30, timeout=10)`
        """
        source = self._subscription, self._client.pull_bytes_max
        waiting = ReceiveWait(timeout, self._before_ms)
        while True:
            found = await self._client.run(receive_call(*source, max_messages, invisible_duration, waiting))
            self._before_ms = waiting.begun_ms
            if found or waiting.is_over():
                return found
            await asyncio.sleep(waiting.pause_s)

    async def ack(self, *messages: StoredMessage) -> int:
        """Acknowledge messages; returns how many were still this receiver's.

        The others were done or are redelivered. A message whose invisible time was nearly over may be done though it is
        not counted, when the role was killed meanwhile. Example: `await consumer.ack(message)`
        """
        calls = group_requests.acks(self._subscription.group, messages)
        return sum([await self._client.run(call) for call in calls])

    async def change_invisible_duration(self, message: StoredMessage, invisible_duration: float) -> StoredMessage:
        """Keep a received message invisible for so many seconds from now on.

        Returns it with its new handle, which acknowledges it. Raises BadRequestError when the message is no longer the
        receiver's. Example: `message = await consumer.change_invisible_duration(message, 120)`
        """
        call = group_requests.change_invisible(self._subscription.group, message, invisible_duration)
        return await self._client.run(call)
