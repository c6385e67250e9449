"""The group consumer for asyncio: the `Assignment` of the synchronous one, with tasks for pulls and commits."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from mqproc.client import core, group_calls
from mqproc.client.aio_broadcast import AsyncBroadcast
from mqproc.client.aio_handling import AsyncHandling
from mqproc.client.aio_membership import AsyncMembership
from mqproc.client.amounts import at_least_one, moment_after, true_or_false
from mqproc.client.assignment import Assignment, Cursor, Loop, Piece, Queue, entries, pull_call
from mqproc.client.driving import drive_async
from mqproc.client.group_steps import ResetTo, lag_behind, seek_targets
from mqproc.client.membership import UNHEARD
from mqproc.client.nacking import Nacking
from mqproc.client.outage import Outage
from mqproc.client.pace import AT_ONCE, COMMIT_S, LOOK_S, MOVED, RECEIVE_MESSAGES
from mqproc.client.subscription import OfGroup, Subscription
from mqproc.errors import BadRequestError, FrameTooLargeError, MqprocError, NotAMemberError, RequestTimeoutError
from mqproc.layout.lazy_records import UnreadRecords
from mqproc.message import Filter, PullStatus, StoredMessage
from mqproc.store.groups.settings import RETRY_MAX_TIMES

if TYPE_CHECKING:
    import pyarrow as pa

    from mqproc.client.aio import AsyncClient
    from mqproc.wire.group_operations import GroupAssignment

SEEK_LOOK_S: Final = 0.001
_clock = time.monotonic


class AsyncConsumer(OfGroup):
    """A member of a consumer group, made by `AsyncClient.consumer`.

        async with client.consumer("billing", "orders") as consumer:
            async for message in consumer:
                await handle(message)

    As `Consumer`; it belongs to the event loop that it was made in, where all its tasks run.
    """

    def __init__(
        self, client: AsyncClient, subscription: Subscription, filter: Filter | None, pull_messages: int, broadcast: str
    ) -> None:
        """`broadcast`: where this consumer keeps its own progress in every queue, "" for a member of the group."""
        self._client = client
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._subscription = subscription
        self._filter = filter
        self._pull_messages = at_least_one("pull_messages", pull_messages)
        self._assignment: Assignment[Any] = Assignment()
        self._parse: Callable[[Any, memoryview], Any] = core.unread_pull
        self._outage = Outage("mqproc.consumer", f"fetching by consumer of group {subscription.group}", client.retry)
        self._error: BaseException | None = None
        self._closed = False
        self._loops: dict[int, Loop] = {}
        self._commit_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._local: AsyncBroadcast | None = None
        self._member: AsyncMembership | AsyncBroadcast
        if broadcast:
            self._local = self._member = AsyncBroadcast(client, subscription, broadcast, self._assigned, self._end)
        else:
            self._member = AsyncMembership(client, subscription, self._assignment.holding, self._assigned, self._end)

    async def start(self) -> None:
        """Join the group. Raises what the join was refused with."""
        await self._member.start()

    async def __aenter__(self) -> AsyncConsumer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            for loop in self._loops.values():
                loop.leave()
        await self.close()

    async def close(self) -> None:
        """Commit what is done and leave the group."""
        if self._closed or os.getpid() != self._pid:
            return  # The member is what a forked process was forked from, and goes on.
        self._check_loop()
        self._closed = True
        told = True
        try:
            await self.commit()
        except UNHEARD:
            told = False
            raise
        finally:
            for task in list(self._tasks):
                task.cancel()
            try:
                await asyncio.gather(*self._tasks, return_exceptions=True)
            finally:
                # Whatever cancels the caller meanwhile: a membership that nobody ends keeps its queues for ever.
                await self._member.leave(told=told)

    @property
    def queues(self) -> list[tuple[str, int]]:
        """Topic and queue id of the queues that it has now."""
        return sorted(self._assignment.cursors)

    @property
    def member_id(self) -> str:
        """Its name in `mqproc group info`."""
        return self._assignment.member_id

    @property
    def is_broadcast(self) -> bool:
        """Whether it reads all queues, as no member of the group."""
        return self._local is not None

    def positions(self) -> dict[tuple[str, int], int]:
        """By topic and queue id of the queues that it has now: everything below the offset is done."""
        return {queue: cursor.position for queue, cursor in self._assignment.cursors.items()}

    async def lag(self) -> int:
        """How many messages the group has not consumed; a broadcast consumer has its own."""
        if self.is_broadcast:
            return await drive_async(self._client.run, lag_behind(self.positions()))
        return (await self._client.run(group_calls.info(self._subscription.group))).lag

    async def seek(self, to: ResetTo, topics: str | Sequence[str] = ()) -> None:
        """Go on from elsewhere in its queues; see `Consumer.seek`."""
        self._check_loop()
        positions = self._assignment.positions(self._subscription.among(topics))
        epochs = self._assignment.epochs(positions)
        targets = await drive_async(self._client.run, seek_targets(positions, to))
        if self._local is not None:
            self._local.commit([self._assignment.go_to((topic, queue), at) for topic, queue, at in targets])
            return
        await self._client.run(group_calls.reset(self._subscription.group, targets))
        deadline = _clock() + self._client.timeout_s
        while epochs.items() & self._assignment.epochs(epochs).items():
            if _clock() >= deadline:
                raise RequestTimeoutError("progress has moved, but the queues were not assigned anew in time")
            await asyncio.sleep(SEEK_LOOK_S)

    def _assigned(self, answer: GroupAssignment) -> None:
        self._assignment.apply(answer)
        self._changed.set()
        self._release()

    def _end(self, error: BaseException) -> None:
        self._error = error
        self._changed.set()

    def _check_loop(self) -> None:
        """Another loop, as a forked process has it, has the queues in memory and no membership: who lives on would
        handle the same messages, and where the loop has ended nothing more would ever come."""
        if self._loop is not asyncio.get_running_loop():
            raise BadRequestError("this consumer belongs to another event loop: make one in each")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _release(self) -> None:
        """Give queues back that were taken away, as soon as nobody has messages of them."""
        found = self._assignment.to_release()
        if found is not None and self._local is None:
            self._spawn(self._give_back(*found))

    async def _give_back(self, generation: int, cursors: Sequence[Cursor[Any]]) -> None:
        group, member_id = self._subscription.group, self._assignment.member_id
        done = [(each, each.position) for each in cursors if each.position > each.committed and not each.lost]
        try:
            if done:
                await self._client.run(group_calls.commit_of_member(group, member_id, entries(done)))
            await self._client.run(group_calls.release(group, member_id, generation))
        except MqprocError:
            self._assignment.not_released()

    # Fetching and committing

    def check(self) -> None:
        """Raise what nothing comes any more after, as when it is closed."""
        self._check_loop()
        if self._error is not None:
            raise self._error
        if self._closed:
            raise BadRequestError("the consumer is closed")

    def _tend(self) -> None:
        """Ask for more, commit."""
        self.check()
        pull_bytes = min(self._assignment.pull_bytes, self._client.pull_bytes_max)
        for cursor in self._assignment.to_pull(_clock()):
            cursor.pulling = True
            self._spawn(self._pull(cursor, pull_bytes))
        self._commit_soon()

    async def _pull(self, cursor: Cursor[Any], pull_bytes: int) -> None:
        call = pull_call(cursor, self._filter, self._pull_messages, pull_bytes, self._parse)
        try:
            found = await self._client.run(call, self._outage.failed)
        except (BadRequestError, FrameTooLargeError) as error:
            self._error = error
        except MqprocError as error:
            await asyncio.sleep(self._client.retry.pause_s(0, error.hint_ms))
            cursor.pulling = False
        else:
            self._outage.over()
            if found.status is PullStatus.NO_MATCHED_LOGIC_QUEUE:
                cursor.absent(_clock())
            else:
                cursor.fetched(Piece(found.batch, found.next_offset), found.status in MOVED, _clock())
        self._changed.set()

    def _commit_soon(self, *, idle: bool = False) -> None:
        """Send what is done on its way, at once when there is nothing else to do."""
        now = _clock()
        if now < self._commit_at and not idle:
            return
        self._commit_at = now + COMMIT_S
        sent = self._assignment.to_commit()
        if not sent:
            return
        if self._local is not None:
            self._local.commit(sent)
            self._assignment.committed(sent, {})
        else:
            self._spawn(self._commit(sent))

    async def _commit(self, sent: Sequence[tuple[Cursor[Any], int]]) -> None:
        call = group_calls.commit_of_member(self._subscription.group, self._assignment.member_id, entries(sent))
        try:
            refused = await self._client.run(call)
        except MqprocError:
            # It is told again with what is done next.
            self._assignment.not_committed(sent)
        else:
            self._assignment.committed(sent, refused)

    async def commit(self) -> None:
        """Return when everything that is done is committed. What is not this consumer's any more is left out."""
        self._check_loop()
        sent = self._assignment.uncommitted()
        if not sent:
            return
        if self._local is not None:
            self._local.commit(sent)
            self._local.save()
            self._assignment.committed(sent, {})
            return
        call = group_calls.commit_of_member(self._subscription.group, self._assignment.member_id, entries(sent))
        try:
            refused = await self._client.run(call)
        except NotAMemberError:
            self._assignment.not_committed(sent)
        else:
            self._assignment.committed(sent, refused)

    # Messages

    def __aiter__(self) -> AsyncIterator[StoredMessage]:
        return self.messages()

    async def messages(self, timeout: float | None = None) -> AsyncIterator[StoredMessage]:
        """Messages one by one, those of a queue in order. Ends when none comes for `timeout` seconds; None: never."""
        self._use(core.unread_pull)
        while (taken := await self._take(timeout)) is not None:
            cursor, piece = taken
            loop = self._loops[id(cursor)] = Loop(cursor)
            try:
                now = 0.0
                while messages := piece.messages.take(AT_ONCE):
                    for message in messages:
                        if cursor.revoked or now > self._member.valid_until:
                            break
                        # What the filter has passed over before it is done.
                        cursor.done = loop.begin = message.queue_offset
                        yield message
                        cursor.done = message.queue_offset + 1
                        now = _clock()
                        if now >= self._commit_at:
                            self._tend()
                    else:
                        continue
                    break
                else:
                    cursor.done = piece.end
            finally:
                self._put_back(cursor, piece)

    async def batches(
        self, columns: Sequence[str] | None = None, timeout: float | None = None
    ) -> AsyncIterator[pa.RecordBatch]:
        """Messages as Arrow record batches of one queue each; a batch is done when the next one is asked for, the last
        one at the end of the consumer's block."""
        self._use(core.arrow_parser(columns))
        while (taken := await self._take(timeout)) is not None:
            cursor, piece = taken
            self._loops[id(cursor)] = Loop(cursor, cursor.done, piece.end)
            try:
                yield piece.messages
                cursor.done = piece.end
            finally:
                self._put_back(cursor, piece)

    def _use(self, parse: Callable[[Any, memoryview], Any]) -> None:
        fetched = any(cursor.pulling or cursor.pieces for cursor in self._assignment.cursors.values())
        if fetched and (parse is core.unread_pull) != (self._parse is core.unread_pull):
            raise BadRequestError("a consumer gives either messages or Arrow batches")
        self._parse = parse

    async def _take(self, timeout: float | None) -> tuple[Cursor[Any], Piece[Any]] | None:
        deadline = None if timeout is None else moment_after("timeout", timeout)
        while True:
            self._changed.clear()
            self._tend()
            cursor = self._next_ready(exclusive=True)
            if cursor is not None:
                cursor.in_loop = True
                return cursor, cursor.pieces.popleft()
            if not await self._wait(deadline):
                return None

    def _next_ready(self, *, exclusive: bool) -> Cursor[Any] | None:
        """A queue with messages to hand out. None while others may have got the queues because this one was silent."""
        if _clock() > self._member.valid_until:
            return None
        return self._assignment.next_ready(exclusive=exclusive)

    async def _wait(self, deadline: float | None) -> bool:
        left_s = LOOK_S if deadline is None else deadline - _clock()
        if left_s <= 0:
            return False
        self._commit_soon(idle=True)
        try:
            async with asyncio.timeout(min(left_s, LOOK_S)):
                await self._changed.wait()
        except TimeoutError:
            return True
        return True

    def _put_back(self, cursor: Cursor[Any], piece: Piece[Any]) -> None:
        """A loop is through with a piece, or was left in the middle of it: then the rest comes again."""
        cursor.in_loop = False
        if cursor.done >= piece.end:
            self._loops.pop(id(cursor), None)
        elif not cursor.revoked:
            if isinstance(piece.messages, UnreadRecords):
                piece.messages.put_back(cursor.done)
            cursor.pieces.appendleft(piece)
        # A loop that is left ends behind what its task does next, which may be to wait for the rest.
        self._changed.set()
        if cursor.revoked and not self._closed:
            self._release()

    async def receive(
        self, max_messages: int = RECEIVE_MESSAGES, timeout: float = 0.0, *, ordered: bool = False
    ) -> list[StoredMessage]:
        """Up to so many messages; see `Consumer.receive`."""
        self._use(core.unread_pull)
        most, exclusive = at_least_one("max_messages", max_messages), true_or_false("ordered", ordered)
        deadline = moment_after("timeout", timeout)
        while True:
            self._changed.clear()
            self._tend()
            found: list[StoredMessage] = []
            while len(found) < most and (cursor := self._next_ready(exclusive=exclusive)):
                found += cursor.hand_out_of_first(most - len(found))
            if found or not await self._wait(deadline):
                return found

    async def ack(self, *messages: StoredMessage) -> None:
        """Messages that `receive` gave are done. After `close` it is too late: they come again."""
        self._check_loop()
        places = group_calls.places_of(messages)
        freed = sum(self._assignment.ack(queue, offset) for queue, offset in places)
        self._tell_who_waits(places)
        if freed:
            self._release()
        if not self._closed:
            self._commit_soon()

    def holds(self, message: StoredMessage) -> bool:
        """Whether a message that `receive` gave is still to be handled; see `Consumer.holds`."""
        held = self._assignment.holds((message.topic, message.queue_id), message.queue_offset)
        return held and _clock() <= self._member.valid_until

    def take_back(self, messages: Sequence[StoredMessage]) -> None:
        """Messages that nobody will handle come again; see `Consumer.take_back`."""
        places = group_calls.places_of(messages)
        freed = sum(self._assignment.take_back(queue, offset) for queue, offset in places)
        self._tell_who_waits(places)
        if freed and not self._closed:
            self._release()

    def _tell_who_waits(self, places: Sequence[tuple[Queue, int]]) -> None:
        """Another task that receives in order may wait for what is behind these."""
        if any(self._assignment.goes_on(queue) for queue, _ in places):
            self._changed.set()

    async def nack(self, *messages: StoredMessage, delay_level: int = 0) -> None:
        """Have messages delivered again later; see `Consumer.nack`."""
        self._check_loop()
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
    ) -> None:
        """Await `handler` for each message until `stop` is set, `workers` at once; see `Consumer.run`."""
        limit = await self._retries() if true_or_false("ordered", ordered) else None
        await AsyncHandling(self, handler, workers, limit, stop or asyncio.Event(), pause_s).run()

    async def _retries(self) -> int:
        if self.is_broadcast:
            return RETRY_MAX_TIMES
        return (await self._client.run(group_calls.info(self._subscription.group))).retry_max_times


class JoiningConsumer:
    """A consumer that has not joined its group yet: `async with` joins, and leaves at the end; `await` joins."""

    def __init__(self, join: Callable[[], Coroutine[Any, Any, AsyncConsumer]]) -> None:
        self._join = join
        self._consumer: AsyncConsumer | None = None

    def __await__(self) -> Generator[Any, None, AsyncConsumer]:
        return self._join().__await__()

    # Type checkers know what it has; others are told what is missing.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            how = "`async with client.consumer(…) as consumer`, or await it"
            raise AttributeError(f"{name}: this consumer has not joined its group yet: {how}")

    async def __aenter__(self) -> AsyncConsumer:
        self._consumer = await self._join()
        return self._consumer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._consumer is not None
        await self._consumer.__aexit__(kind, error, traceback)
