"""The synchronous group consumer.

    membership thread ──assignment──▶ cursors ◀──pulls── fetcher ◀── the thread that iterates or receives
                                         └──positions──▶ commits ──▶ query role

The user's thread fetches and commits; the membership thread says that the consumer lives, however long a message takes.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mqproc.client import core, group_calls
from mqproc.client.amounts import at_least_one, moment_after, true_or_false
from mqproc.client.assignment import Assignment, Cursor, Loop, Piece, Queue, entries, pull_call
from mqproc.client.broadcast import Broadcast
from mqproc.client.driving import drive
from mqproc.client.fetching import Fetcher
from mqproc.client.group_steps import ResetTo, lag_behind, seek_targets
from mqproc.client.handling import Handling
from mqproc.client.membership import UNHEARD, Membership
from mqproc.client.nacking import Nacking
from mqproc.client.pace import AT_ONCE, COMMIT_S, LOOK_S, MOVED, RECEIVE_MESSAGES, TURN_S
from mqproc.client.retry import ConnectionLost
from mqproc.client.subscription import OfGroup, Subscription
from mqproc.errors import BadRequestError, FrameTooLargeError, MqprocError, RequestTimeoutError
from mqproc.layout.lazy_records import UnreadRecords
from mqproc.message import Filter, PullStatus, StoredMessage
from mqproc.store.groups.settings import RETRY_MAX_TIMES

if TYPE_CHECKING:
    import pyarrow as pa

    from mqproc.client.sync import Client
    from mqproc.wire.group_operations import GroupAssignment

_clock = time.monotonic


class Consumer(OfGroup):
    """A member of a consumer group, made by `Client.consumer`.

        with client.consumer("billing", "orders") as consumer:
            for message in consumer:
                handle(message)

    A message is done when the next one is asked for, or when the `with` block ends without an error; what is done is
    committed. `nack` sends one to be delivered again later. With `receive` messages are done by `ack`. All methods but
    `messages`, `batches` and `run` may be called by several threads, of the process that made it.
    """

    def __init__(
        self, client: Client, subscription: Subscription, filter: Filter | None, pull_messages: int, broadcast: str
    ) -> None:
        """`broadcast`: where this consumer keeps its own progress in every queue, "" for a member of the group."""
        self._client = client
        self._pid = os.getpid()
        self._subscription = subscription
        self._filter = filter
        self._pull_messages = at_least_one("pull_messages", pull_messages)
        self._assignment: Assignment[Any] = Assignment()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._fetcher = Fetcher(client, f"consumer of group {subscription.group}")
        self._parse: Callable[[Any, memoryview], Any] = core.unread_pull
        self._error: BaseException | None = None
        self._closed = False
        self._loops: dict[int, Loop] = {}
        self._commit_at = 0.0
        self._local: Broadcast | None = None
        self._member: Membership | Broadcast
        try:
            if broadcast:
                self._local = self._member = Broadcast(client, subscription, broadcast, self._assigned, self._end)
            else:
                self._member = Membership(client, subscription, self._holding, self._assigned, self._end)
            self._member.start()
        except BaseException:
            self._fetcher.close()
            raise

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            with self._lock:
                for loop in self._loops.values():
                    loop.leave()
        self.close()

    def close(self) -> None:
        """Commit what is done and leave the group."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return  # The member is what this process was forked from, and goes on.
        told = True
        try:
            self.commit()
        except UNHEARD:
            told = False
            raise
        finally:
            self._member.leave(told=told)
            self._fetcher.close()

    # What it works on

    @property
    def queues(self) -> list[tuple[str, int]]:
        """Topic and queue id of the queues that it has now."""
        with self._lock:
            return sorted(self._assignment.cursors)

    @property
    def member_id(self) -> str:
        """Its name in `mqproc group info`."""
        with self._lock:
            return self._assignment.member_id

    @property
    def is_broadcast(self) -> bool:
        """Whether it reads all queues, as no member of the group: nothing can come again to it alone."""
        return self._local is not None

    def positions(self) -> dict[tuple[str, int], int]:
        """By topic and queue id of the queues that it has now: everything below the offset is done."""
        with self._lock:
            return {queue: cursor.position for queue, cursor in self._assignment.cursors.items()}

    def lag(self) -> int:
        """How many messages the group has not consumed; a broadcast consumer has its own."""
        if self.is_broadcast:
            return drive(self._client.run, lag_behind(self.positions()))
        return self._client.run(group_calls.info(self._subscription.group)).lag

    def seek(self, to: ResetTo, topics: str | Sequence[str] = ()) -> None:
        """Go on from elsewhere in its queues, of all its topics or of these: `seek(ResetTo(time="2026-11-21T10:00"))`.

        Its group's progress moves there, durably. Returns when the next messages are those from there; for messages
        that it has in hands `ack` does nothing any more. Raises RequestTimeoutError when that takes too long.
        """
        self.check()
        with self._lock:
            positions = self._assignment.positions(self._subscription.among(topics))
            epochs = self._assignment.epochs(positions)
        targets = drive(self._client.run, seek_targets(positions, to))
        if self._local is not None:
            with self._lock:
                self._local.commit([self._assignment.go_to((topic, queue), at) for topic, queue, at in targets])
            return
        self._client.run(group_calls.reset(self._subscription.group, targets))
        with self._changed:
            moved = self._changed.wait_for(
                lambda: not epochs.items() & self._assignment.epochs(epochs).items(), self._client.timeout_s
            )
        if not moved:
            raise RequestTimeoutError("progress has moved, but the queues were not assigned anew in time")

    def _holding(self) -> list[tuple[str, int, int]]:
        with self._lock:
            return self._assignment.holding()

    def _assigned(self, answer: GroupAssignment) -> None:
        """From the membership thread: the queues are others now."""
        with self._lock:
            self._assignment.apply(answer)
            self._changed.notify_all()
        self._fetcher.wake()
        self._release()

    def _end(self, error: BaseException) -> None:
        self._error = error
        self._fetcher.wake()

    def _release(self) -> None:
        """Give queues back that were taken away, as soon as nobody has messages of them."""
        with self._lock:
            found = self._assignment.to_release()
            member_id = self._assignment.member_id
        if found is None or self._local is not None:
            return
        generation, cursors = found
        done = [(each, each.position) for each in cursors if each.position > each.committed and not each.lost]
        group = self._subscription.group
        try:
            if done:
                self._client.run(group_calls.commit_of_member(group, member_id, entries(done)))
            self._client.run(group_calls.release(group, member_id, generation))
        except MqprocError:
            # The membership thread learns the same and joins again; its next assignment is released anew.
            with self._lock:
                self._assignment.not_released()

    # Fetching and committing, in turns of the user's threads

    def _tend(self) -> None:
        """Take in what has come, ask for more, commit. What wakes it behind the first is left to a longer wait."""
        self.check()
        self._fetcher.wait(0.0)
        self._pull()
        self._commit_soon()

    def _check_process(self) -> None:
        """A forked process has the queues in memory and no membership: both would commit, and read one's answers."""
        if os.getpid() != self._pid:
            raise BadRequestError("this consumer is another process's, which this one was forked from: make one here")

    def check(self) -> None:
        """Raise what nothing comes any more after, as when it is closed."""
        self._check_process()
        if self._error is not None:
            raise self._error
        if self._closed:
            raise BadRequestError("the consumer is closed")

    def _pull(self) -> None:
        if not self._fetcher.usable:
            return
        with self._lock:
            cursors, pull_bytes = self._assignment.to_pull(_clock()), self._assignment.pull_bytes
            for cursor in cursors:
                cursor.pulling = True
        for cursor in cursors:
            most_bytes = min(pull_bytes, self._client.pull_bytes_max)
            call = pull_call(cursor, self._filter, self._pull_messages, most_bytes, self._parse)
            self._fetcher.start(call, functools.partial(self._pulled, cursor))

    def _pulled(self, cursor: Cursor[Any], found: Any, error: MqprocError | ConnectionLost | None) -> None:
        if error is not None:
            cursor.pulling = False
            if isinstance(error, BadRequestError | FrameTooLargeError):
                self._error = error
            return
        if found.status is PullStatus.NO_MATCHED_LOGIC_QUEUE:
            cursor.absent(_clock())
            return
        with self._lock:
            cursor.fetched(Piece(found.batch, found.next_offset), found.status in MOVED, _clock())

    def _commit_soon(self, *, idle: bool = False) -> None:
        """Send what is done on its way, at once when there is nothing else to do; the answer is taken later."""
        now = _clock()
        if (now < self._commit_at and not idle) or not self._fetcher.usable:
            return
        self._commit_at = now + COMMIT_S
        with self._lock:
            sent = self._assignment.to_commit()
            member_id = self._assignment.member_id
        if not sent:
            return
        if self._local is not None:
            self._local.commit(sent)
            self._committed(sent, {}, None)
            return
        call = group_calls.commit_of_member(self._subscription.group, member_id, entries(sent))
        self._fetcher.start(call, lambda refused, error: self._committed(sent, refused, error))

    def _committed(
        self,
        sent: Sequence[tuple[Cursor[Any], int]],
        refused: group_calls.Refusals | None,
        error: MqprocError | ConnectionLost | None,
    ) -> None:
        with self._lock:
            if error is None:
                self._assignment.committed(sent, refused or {})
            else:
                self._assignment.not_committed(sent)

    def commit(self) -> None:
        """Return when everything that is done is committed. What is not this consumer's any more is left out."""
        self._check_process()
        with self._lock:
            sent = self._assignment.uncommitted()
            member_id = self._assignment.member_id
        if not sent:
            return
        if self._local is not None:
            self._local.commit(sent)
            self._local.save()
            self._committed(sent, {}, None)
            return
        try:
            refused = self._client.run(group_calls.commit_of_member(self._subscription.group, member_id, entries(sent)))
        except MqprocError as error:
            self._committed(sent, None, error)
            if error.code != "NOT_A_MEMBER":
                raise
            return
        self._committed(sent, refused, None)

    # Messages

    def __iter__(self) -> Iterator[StoredMessage]:
        return self.messages()

    def messages(self, timeout: float | None = None) -> Iterator[StoredMessage]:
        """Messages one by one, those of a queue in order. Ends when none comes for `timeout` seconds; None: never."""
        self._use(core.unread_pull)
        while (taken := self._take(timeout)) is not None:
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
                            self._tend_if_free()
                    else:
                        continue
                    break
                else:
                    cursor.done = piece.end
            finally:
                self._put_back(cursor, piece)

    def batches(self, columns: Sequence[str] | None = None, timeout: float | None = None) -> Iterator[pa.RecordBatch]:
        """Messages as Arrow record batches of one queue each; a batch is done when the next one is asked for, the last
        one at the end of the consumer's block."""
        self._use(core.arrow_parser(columns))
        while (taken := self._take(timeout)) is not None:
            cursor, piece = taken
            self._loops[id(cursor)] = Loop(cursor, cursor.done, piece.end)
            try:
                yield piece.messages
                cursor.done = piece.end
            finally:
                self._put_back(cursor, piece)

    def _use(self, parse: Callable[[Any, memoryview], Any]) -> None:
        """Objects or Arrow: one consumer gives one of them."""
        with self._lock:
            fetched = any(cursor.pulling or cursor.pieces for cursor in self._assignment.cursors.values())
            if fetched and (parse is core.unread_pull) != (self._parse is core.unread_pull):
                raise BadRequestError("a consumer gives either messages or Arrow batches")
            self._parse = parse

    def _take(self, timeout: float | None) -> tuple[Cursor[Any], Piece[Any]] | None:
        """The next piece for a loop to go through, None when none comes in time."""
        deadline = None if timeout is None else moment_after("timeout", timeout)
        with self._fetcher.in_turn():
            while True:
                self._tend()
                with self._lock:
                    cursor = self._next_ready(exclusive=True)
                    if cursor is not None:
                        cursor.in_loop = True
                        return cursor, cursor.pieces.popleft()
                if not self._wait(deadline):
                    return None

    def _next_ready(self, *, exclusive: bool) -> Cursor[Any] | None:
        """A queue with messages to hand out. None while others may have got the queues because this one was silent."""
        if _clock() > self._member.valid_until:
            return None
        return self._assignment.next_ready(exclusive=exclusive)

    def _wait(self, deadline: float | None) -> bool:
        """Wait for something to come; False when the time is over."""
        left_s = LOOK_S if deadline is None else deadline - _clock()
        if left_s <= 0:
            return False
        self._commit_soon(idle=True)
        self._fetcher.wait(min(left_s, LOOK_S))
        return True

    def _put_back(self, cursor: Cursor[Any], piece: Piece[Any]) -> None:
        """A loop is through with a piece, or was left in the middle of it: then the rest comes again."""
        with self._lock:
            cursor.in_loop = False
            if cursor.done >= piece.end:
                self._loops.pop(id(cursor), None)
            elif not cursor.revoked:
                if isinstance(piece.messages, UnreadRecords):
                    piece.messages.put_back(cursor.done)
                cursor.pieces.appendleft(piece)
        if cursor.revoked:
            self._release()

    def _tend_if_free(self) -> None:
        with self._fetcher.in_turn(0) as is_free:
            if is_free:
                self._tend()

    def receive(
        self, max_messages: int = RECEIVE_MESSAGES, timeout: float = 0.0, *, ordered: bool = False
    ) -> list[StoredMessage]:
        """Up to so many messages; none when none comes within `timeout` seconds. Each is done by `ack` or `nack`.

        With `ordered` a queue's next messages come only when those before them are done.
        """
        self._use(core.unread_pull)
        most, exclusive = at_least_one("max_messages", max_messages), true_or_false("ordered", ordered)
        deadline = moment_after("timeout", timeout)
        with self._fetcher.in_turn(min(max(TURN_S, deadline - _clock()), threading.TIMEOUT_MAX)) as is_mine:
            if not is_mine:
                # Who has had it all the time waits too, and gets what comes.
                return []
            while True:
                self._tend()
                found: list[StoredMessage] = []
                with self._lock:
                    while len(found) < most and (cursor := self._next_ready(exclusive=exclusive)):
                        found += cursor.hand_out_of_first(most - len(found))
                if found or not self._wait(deadline):
                    return found

    def ack(self, *messages: StoredMessage) -> None:
        """Messages that `receive` gave are done. After `close` it is too late: they come again."""
        self._check_process()
        places = group_calls.places_of(messages)
        with self._lock:
            freed = sum(self._assignment.ack(queue, offset) for queue, offset in places)
        self._tell_who_waits(places)
        if freed:
            self._release()
        if _clock() >= self._commit_at and not self._closed:
            self._tend_if_free()

    def holds(self, message: StoredMessage) -> bool:
        """Whether a message that `receive` gave is still to be handled: not once its queue goes to another member, or
        was reset. Who handles a queue in order asks before each, and gives the rest back by `take_back`.
        """
        with self._lock:
            held = self._assignment.holds((message.topic, message.queue_id), message.queue_offset)
        return held and _clock() <= self._member.valid_until

    def take_back(self, messages: Sequence[StoredMessage]) -> None:
        """Messages that `receive` gave, and that nobody will handle, come again, and what was received behind them."""
        places = group_calls.places_of(messages)
        with self._lock:
            freed = sum(self._assignment.take_back(queue, offset) for queue, offset in places)
        self._tell_who_waits(places)
        if freed:
            self._release()

    def _tell_who_waits(self, places: Sequence[tuple[Queue, int]]) -> None:
        """Another thread that receives in order may wait for what is behind these."""
        if self._fetcher.turn.locked() and any(self._assignment.goes_on(queue) for queue, _ in places):
            self._fetcher.wake()

    def nack(self, *messages: StoredMessage, delay_level: int = 0) -> None:
        """Have messages delivered again later: by `delay_level` 1…18, or 0 for ever longer pauses.

        Each call makes a copy, also of a message that is done already. Too often, or with a level below 0, they go to
        the group's dead letters. Returns when their copies are stored; a message that `receive` gave is then done.
        Raises MessageNotFoundError for those that retention, damage or a deletion of their topic took meanwhile, which
        are not done until they are acknowledged, StoreBusyError when some could not be stored now.
        """
        self._check_process()
        if self._local is not None:
            raise BadRequestError("a broadcast consumer has no retry topic")
        nacking = Nacking(self._subscription.group, messages, delay_level)
        deadline = _clock() + self._client.timeout_s
        failures = 0
        while nacking.left:
            self.ack(*nacking.answered(self._client.run(nacking.call())))
            if nacking.is_busy:
                failures += 1
                pause_s = self._client.retry.pause_s(failures)
                if _clock() + pause_s >= deadline:
                    raise nacking.busy()
                time.sleep(pause_s)
        nacking.check_gone()

    def run(
        self,
        handler: Callable[[StoredMessage], object],
        *,
        workers: int = 1,
        ordered: bool = False,
        stop: threading.Event | None = None,
        pause_s: float = 1.0,
    ) -> None:
        """Call `handler` with each message until `stop` is set, in `workers` threads.

        A message is done when the handler returns. When it raises, that is logged, and the message is nacked; with
        `ordered`, where a queue's messages are handled one after the other, it is tried again after `pause_s` before
        any later one, and is a dead letter after the group's number of retries. A broadcast consumer passes it over.
        One that the store has no room to deliver later (`max_queues`, a full disk) is handled again here every 5 s.
        When it ends, by `stop` or by an error such as KeyboardInterrupt, handlers that run finish, and none is called
        any more: what they were not called with comes again. The program's end is a stop for a daemon thread; where
        another one runs when the main thread ends, it goes on with the messages one by one.
        """
        limit = self._retries() if true_or_false("ordered", ordered) else None
        Handling(self, handler, workers, limit, stop or threading.Event(), pause_s).run()

    def _retries(self) -> int:
        if self.is_broadcast:
            return RETRY_MAX_TIMES
        return self._client.run(group_calls.info(self._subscription.group)).retry_max_times
