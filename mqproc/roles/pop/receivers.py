"""Messages received one by one (`store/groups/README.md`, "Simple consumers"): check points, and what becomes of them.

    receive ──check point──▶ revive topic ──stored──▶ progress goes past the messages ──▶ answer
    ack     ──ack──────────▶ revive topic ──stored──▶ they are done                   ──▶ answer
    due     ──copies──▶ %RETRY%group_topic, or %DLQ%group ──stored──▶ ack ──▶ revive topic

The table of open check points is in memory; a successor reads it from the revive topic.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from mqproc.errors import BadRequestError, GroupInUseError, GroupNotFoundError, MqprocError, StoreBusyError
from mqproc.ipc.words import Words
from mqproc.layout import control
from mqproc.layout import queue_table as layout
from mqproc.layout.record_codec import decode_records
from mqproc.roles.internal_producer import InternalProducer, NewMessage, ReliableAppend, count_copies
from mqproc.roles.pop.long_poll import PopLongPolls
from mqproc.roles.pop.migration import Place, PopMigration
from mqproc.roles.pop.revive import AGAIN_MS, PopCopies, ReviveOffsets
from mqproc.roles.role_log import get_logger
from mqproc.roles.timer_queue import COMPACT_MIN
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.cooperative import Slices
from mqproc.store.offsets import pop_receipts as check_points
from mqproc.store.offsets.pop_receipts import (
    NEVER,
    Key,
    OpenCheckPoints,
    PopCheckPoint,
    pop_retry_topic,
    revive_start_offsets,
)
from mqproc.store.read.filter_program import compile_filter
from mqproc.store.schedule.timer_store import read_timer_check
from mqproc.topic_names import RETRY_PREFIX, REVIVE_GROUP, REVIVE_QUEUES, REVIVE_TOPIC, check_topic, retry_topic
from mqproc.types import PullStatus
from mqproc.wire.operations import Operation
from mqproc.wire.operations.groups import EARLIEST
from mqproc.wire.operations.pop import (
    RECEIVE_MS_MAX,
    GroupAckAnswer,
    GroupAckRequest,
    GroupInvisibleAnswer,
    GroupInvisibleRequest,
    GroupReceiveAnswer,
    GroupReceiveRequest,
)

if TYPE_CHECKING:
    from mqproc.roles.groups.coordinator import GroupCoordinator
    from mqproc.roles.request_limits import Payload, PendingRequest
    from mqproc.roles.role import RoleContext
    from mqproc.store.read.queries import StoreQueries
    from mqproc.wire.codec import FrameOptions

# --- delivered ---
# What pulls and receives have handed out: in all in the control file, by topic in the queue table.


class DeliveryCounters:
    """Counts answers with messages, once for each answer."""

    def __init__(self, words: Words, table: QueueTable) -> None:
        self._words = words
        self._table = table

    def count(self, topic: str, queue_id: int, messages: int, size: int) -> None:
        """So many messages of a queue go out, in `size` bytes."""
        self._words.add(control.PULLED_MESSAGES, messages)
        self._words.add(control.PULLED_BYTES, size)
        number = self._table.entry(topic, queue_id)
        if number >= 0:
            self._table.words.add(layout.entry_word(number, layout.DELIVERED), messages)


MESSAGES_MAX: Final = 1024
INVISIBLE_MS_MIN: Final = 1_000
INVISIBLE_MS_MAX: Final = 43_200_000
HELD_MAX: Final = 16_384
LOOK_NS: Final = 1_000_000_000
EMPTY_PULLS_MAX: Final = 8
"""A receive looks so many times at what its filter lets none pass of, and goes on in the next step."""
STEP_NS: Final = 5_000_000


class PopReceivers:
    """Simple consumers of one store."""

    def __init__(
        self,
        context: RoleContext,
        reading: StoreQueries,
        groups: GroupCoordinator,
        producer: InternalProducer,
        table: QueueTable,
        answer: Callable[[PendingRequest, FrameOptions, Payload], None],
        refuse: Callable[[PendingRequest, MqprocError], None],
    ) -> None:
        self._clock, self._io, self._paths = context.clock, context.io, context.paths
        self._broker = context.options.broker_name
        self._words = context.control.words
        self._max_bytes = context.options.max_pull_bytes
        self._log = get_logger()
        self._reading = reading
        self._groups = groups
        self._state = groups.state
        self._state.is_closing = lambda group: any(found.dropped for found in self._of(group))
        self._writes = ReliableAppend(reading, producer, self._max_bytes)
        self._delivered = DeliveryCounters(context.control.words, table)
        self._answer = answer
        self._refuse = refuse
        self._open = OpenCheckPoints()
        self._copies = PopCopies(reading, groups.state, self._max_bytes)
        self._revive_progress = ReviveOffsets(context, reading, groups.state.progress, self._writes, self._open)
        self._moves = PopMigration(context.io, reading, groups.state, self._copies, self._writes, self._max_bytes)
        self._due: list[tuple[int, int, PopCheckPoint]] = []
        self._busy: dict[Place, list[PopCheckPoint]] = {}
        """Where messages are just being given, and their check points."""
        self._held = PopLongPolls(
            self._clock, self._give_later, lambda request: answer(request, GroupReceiveAnswer(0), ()), refuse
        )
        self._turn = 0
        self._lots = random.Random(0)
        self._look_ns = 0
        self._seen: tuple[int, int] = (-1, -1)
        self._changes = 0
        """Counts what dispatch does not show and may let a held receive have messages."""
        self._empty_pulls_left = 0
        # The log may have check points that are not in their queues yet.
        self._read_from = -1
        self._groups_before = {*self._state.settings.names(), *self._state.progress.groups()}
        self._reading_open: Iterator[None] | None = self._read_open()

    # The role's side

    def take(self, request: PendingRequest) -> None:
        """Answer a request or hold it. Raises what it is refused with."""
        self._state.progress.check_writable()
        if self._reading_open is not None:
            raise StoreBusyError("open check points are not read yet", hint_ms=20)
        if request.operation == Operation.GROUP_RECEIVE:
            self._receive(request, request.options)
        elif request.operation == Operation.GROUP_ACK:
            self._ack(request, request.options)
        elif request.operation == Operation.GROUP_DELETE:
            its = self._of(request.options.group)
            if any(found.reviving and not found.dropped for found in its):
                raise StoreBusyError(f"messages of group {request.options.group} are being sent again", hint_ms=20)
            self._groups.take(request)
            self._drop(its)
        else:
            self._change_invisible(request, request.options)

    def step(self, now_ns: int) -> int:
        """Let held receives have what came, and messages come again whose time is over."""
        if self._reading_open is not None:
            return self._read_on(self._reading_open)
        done = self._revive_due()
        if len(self._held):
            done += self._look_at_held(now_ns)
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + LOOK_NS
            self._tell_received_from()
            self._revive_progress.move()
        if self._moves.is_due(now_ns):
            done += self._moves.move(now_ns, self._groups.members(), self._busy)
        return done

    def _look_at_held(self, now_ns: int) -> int:
        seen = self._words[control.DISPATCHED], self._changes + self._state.changes
        if seen == self._seen and now_ns < self._held.due_ns:
            return 0
        self._seen = seen
        done = self._held.look(now_ns, now_ns + STEP_NS)
        self._changes += self._held.untried
        return done + (self._changes + self._state.changes != seen[1])

    @property
    def waiting(self) -> int:
        """Receives that are held until something is dispatched."""
        return len(self._held)

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """How long `step` has nothing to do unless something comes."""
        if self._reading_open is not None:
            return min(at_most_s, 0.01)
        left_s = at_most_s
        if self._due:
            left_s = min(left_s, (self._due[0][0] - self._clock.time_ms()) / 1e3)
        return max(0.0, min(left_s, (self._held.due_ns - now_ns) / 1e9))

    def let_go(self) -> None:
        """Answer held receives: there is nothing. The next start, or RocketMQ, begins at what is open now."""
        self._held.let_go()
        if self._reading_open is None:
            self._revive_progress.move()

    # Receiving

    def _receive(self, request: PendingRequest, options: GroupReceiveRequest) -> None:
        self._state.known(options.group)
        self._check_may_consume(options.group)
        if not options.topics or not 1 <= options.max_messages <= MESSAGES_MAX:
            limit = f"from 1 to {MESSAGES_MAX:,} messages of one topic at least"
            raise BadRequestError(f"{options.max_messages:,} messages of {len(options.topics)} topics; {limit}")
        _check_invisible(options.invisible_ms)
        for topic in options.topics:
            check_topic(topic)
            compile_filter(topic, tuple(options.tags), options.sql)
            self._state.begin(options.group, topic, options.start, options.start_ms)
        if self._give(request, options):
            return
        if options.timeout_ms <= 0 or len(self._held) >= HELD_MAX:
            self._answer(request, GroupReceiveAnswer(0), ())
            return
        wait_ns = min(options.timeout_ms, RECEIVE_MS_MAX) * 1_000_000
        self._held.hold(request, self._clock.monotonic_ns() + wait_ns)

    def _check_may_consume(self, group: str) -> None:
        self._state.check_may_consume(group)
        if group in self._groups.members():
            raise GroupInUseError(f"group {group} has members, which have its queues")

    def _give_later(self, request: PendingRequest) -> bool:
        """As `_give`, to a receive that is held; its topics may have come meanwhile, and members too."""
        if self._state.settings.get(request.options.group) is None:
            # Begun anew, for who waits, it would read everything that there is.
            raise GroupNotFoundError(f"group {request.options.group} was deleted")
        self._check_may_consume(request.options.group)
        for topic in request.options.topics:
            self._state.begin(request.options.group, topic, EARLIEST, 0)
        return self._give(request, request.options)

    def _give(self, request: PendingRequest, options: GroupReceiveRequest) -> bool:
        """Take messages of the first queue that has some, what comes again before what is new."""
        group = options.group
        self._empty_pulls_left = EMPTY_PULLS_MAX
        for topics in (self._retry_topics(options), options.topics):
            queues = [(topic, queue_id) for topic in topics for queue_id in self._reading.queues.ids(topic)]
            # By lot: in a round that others take steps of, one may come to the same queue each time.
            first = self._lots.randrange(max(1, len(queues)))
            for topic, queue_id in queues[first:] + queues[:first]:
                if (group, topic, queue_id) not in self._busy and self._give_of(request, options, topic, queue_id):
                    return True
        return False

    def _retry_topics(self, options: GroupReceiveRequest) -> list[str]:
        """Where messages come again: those that simple consumers had, and what members nacked or was resent.

        The latter only where the group has progress: what has its name may be where another group's come again.
        """
        found = [pop_retry_topic(options.group, topic) for topic in options.topics]
        progress, own = self._state.progress, retry_topic(options.group)
        if any(progress.offset(options.group, own, queue_id) is not None for queue_id in self._reading.queues.ids(own)):
            found.append(own)
        return found

    def _give_of(self, request: PendingRequest, options: GroupReceiveRequest, topic: str, queue_id: int) -> bool:
        group = options.group
        bounds = self._reading.queues.bounds(topic, queue_id)
        offset = self._state.progress.offset(group, topic, queue_id)
        if bounds is None:
            return False
        if offset is None:
            self._state.begin(group, topic, EARLIEST, 0)
            offset = self._state.progress.offset(group, topic, queue_id)
            assert offset is not None
        # What comes again has passed the filter before.
        tags, sql = ([], "") if topic.startswith(RETRY_PREFIX) else (options.tags, options.sql)
        most_bytes = min(options.max_bytes, self._max_bytes)
        while offset < bounds.max_offset:
            if self._empty_pulls_left <= 0:
                self._changes += 1
                return False
            pulled = self._reading.pull(topic, queue_id, offset, options.max_messages, most_bytes, tags, sql=sql)
            if pulled.status is PullStatus.FOUND:
                self._check_in(request, options, (group, topic, queue_id), offset, pulled.records.tobytes())
                return True
            if pulled.next_offset <= offset:
                return False
            self._empty_pulls_left -= 1
            offset = pulled.next_offset
            self._state.progress.set(group, topic, queue_id, offset)
        return False

    def _check_in(
        self, request: PendingRequest, options: GroupReceiveRequest, place: Place, offset: int, records: bytes
    ) -> None:
        """Store the check point of what was found from an offset on; then the messages are this receiver's."""
        messages = decode_records(records)
        if offset < (first := messages[0].queue_offset):
            self._state.progress.set(*place, first)
        points = check_points.check_points_of_receive(
            place, messages, self._clock.time_ms(), options.invisible_ms, self._turn % REVIVE_QUEUES, self._broker
        )
        for found in points:
            found.log_begin = self._words[control.WRITTEN]
        self._busy[place] = points

        def stored(revive_offset: int) -> None:
            self._io.crash_point("pop.checked_in")
            del self._busy[place]
            for found in points:
                self._add(found, revive_offset)
                self._pass(found)
            if points[0].dropped:
                self._drop(points)
                self._refuse(request, GroupNotFoundError(f"group {place[0]} was deleted"))
                return
            self._delivered.count(place[1], place[2], len(messages), len(records))
            # Others may wait for this queue; dispatch may have gone past the check point before.
            self._changes += 1
            handles = [found.handle() for found in points]
            self._answer(request, GroupReceiveAnswer(len(messages), handles), (memoryview(records),))

        def refused(error: MqprocError) -> None:
            del self._busy[place]
            self._changes += 1
            self._refuse(request, error)

        self._writes.store([_message_of(found) for found in points], stored, refused)

    def _add(self, found: PopCheckPoint, revive_offset: int) -> None:
        found.revive_offset = revive_offset
        found.open = set(found.offsets)
        self._open.add(found)
        # Before progress passes its messages: retention looks at that first.
        self._words[control.RECEIVED_FROM] = min(self._words[control.RECEIVED_FROM], found.physical_offset)
        self._expire_at(found, found.due_ms)

    def _expire_at(self, found: PopCheckPoint, due_ms: int) -> None:
        self._turn += 1
        heapq.heappush(self._due, (due_ms, self._turn, found))
        if len(self._due) > 2 * len(self._open) + COMPACT_MIN:
            # What is acknowledged would stay until its time is over, which may be hours.
            self._due = [entry for entry in self._due if self._open.get(entry[2].key) is entry[2]]
            heapq.heapify(self._due)

    def _of(self, group: str) -> list[PopCheckPoint]:
        """What a group's simple consumers have, or are just getting."""
        getting = [found for points in self._busy.values() for found in points]
        return [found for found in (*getting, *self._open) if found.group == group]

    def _drop(self, points: Iterable[PopCheckPoint]) -> None:
        """Close what a deleted group had: one that is made again by its name would get it."""
        for found in points:
            found.dropped = True
            self._expire_at(found, 0)

    def _pass(self, found: PopCheckPoint) -> None:
        """Let progress pass a check point's messages, unless it was moved elsewhere meanwhile."""
        place = found.group, found.topic, found.queue_id
        offset = self._state.progress.offset(*place)
        if offset is not None and found.start <= offset < found.next_offset:
            self._state.progress.set(*place, found.next_offset)

    # Done, or not yet

    def _ack(self, request: PendingRequest, options: GroupAckRequest) -> None:
        if not 1 <= len(options.messages) <= MESSAGES_MAX:
            raise BadRequestError(f"{len(options.messages):,} messages in one request; from 1 to {MESSAGES_MAX:,}")
        named = [check_points.parse_handle(options.group, topic, handle) for topic, handle in options.messages]
        by_key: dict[Key, list[int]] = {}
        for key, offset in named:
            if self._is_open(key, offset) and offset not in by_key.get(key, ()):
                by_key.setdefault(key, []).append(offset)
        acks = [(found, offsets) for key, offsets in by_key.items() if (found := self._open.get(key)) is not None]
        # What a killed predecessor has stored counts too: who was not told asks again.
        before = sum(self._open.was_acknowledged(*each) for each in set(named))
        accepted = before + sum(len(offsets) for _, offsets in acks)
        if not acks:
            self._answer(request, GroupAckAnswer(accepted), ())
            return

        def stored(_revive_offset: int) -> None:
            self._io.crash_point("pop.acknowledged")
            for found, offsets in acks:
                self._open.done(found, offsets)
            self._answer(request, GroupAckAnswer(accepted), ())

        def refused(error: MqprocError) -> None:
            for found, offsets in acks:
                found.acking.difference_update(offsets)
            self._refuse(request, error)

        for found, offsets in acks:
            found.acking.update(offsets)
        self._writes.store([self._ack_of(found, offsets) for found, offsets in acks], stored, refused)

    def _is_open(self, key: Key, offset: int) -> bool:
        found = self._open.get(key)
        if found is None or found.reviving or found.dropped:
            return False
        return offset in found.open and offset not in found.acking and not self._copies.has(found, offset)

    def _change_invisible(self, request: PendingRequest, options: GroupInvisibleRequest) -> None:
        _check_invisible(options.invisible_ms)
        key, offset = check_points.parse_handle(options.group, options.topic, options.handle)
        old = self._open.get(key)
        if old is None or not self._is_open(key, offset):
            raise BadRequestError(f"{key[1]}/{key[2]} offset {offset:,}: acknowledged, or not this receiver's any more")
        # Another time than the old one's, or both would be the same check point.
        time_ms = max(self._clock.time_ms(), old.pop_time_ms + 1)
        place = old.group, old.topic, old.queue_id
        new = PopCheckPoint(*place, offset, (offset,), time_ms, options.invisible_ms, old.revive_queue, self._broker)
        new.physical_offset, new.log_begin = old.physical_offset, self._words[control.WRITTEN]

        def stored(revive_offset: int) -> None:
            self._io.crash_point("pop.renewed")
            self._add(new, revive_offset)
            self._open.done(old, [offset])
            if old.dropped:
                self._drop([new])
                self._refuse(request, GroupNotFoundError(f"group {old.group} was deleted"))
                return
            self._answer(request, GroupInvisibleAnswer(f"{new.handle()} {offset}"), ())

        def refused(error: MqprocError) -> None:
            old.acking.discard(offset)
            self._refuse(request, error)

        old.acking.add(offset)
        self._writes.store([_message_of(new), self._ack_of(old, [offset])], stored, refused)

    def _ack_of(self, found: PopCheckPoint, offsets: Sequence[int]) -> NewMessage:
        properties = found.ack_properties(offsets, self._clock.time_ms())
        return NewMessage(REVIVE_TOPIC, found.ack_body(offsets), properties, found.revive_queue)

    # Coming again

    def _revive_due(self) -> int:
        """Let messages come again whose time is over, as far as a step's time goes: it may be over for many at once."""
        done = 0
        now_ms, end_ns = self._clock.time_ms(), self._clock.monotonic_ns() + STEP_NS
        while self._due and self._due[0][0] <= now_ms and self._writes.has_room:
            if done and self._clock.monotonic_ns() >= end_ns:
                break
            _, _, found = heapq.heappop(self._due)
            if self._open.get(found.key) is not found:
                continue
            if found.acking:
                self._expire_at(found, now_ms + AGAIN_MS)
                continue
            self._revive(found)
            done += 1
        return done

    def _revive(self, found: PopCheckPoint) -> None:
        """Send what is not acknowledged again; when that is stored, the check point is closed."""
        found.reviving = True
        offsets = sorted(found.open)
        copies = self._copies.missing(found, offsets)

        def copied(some: Sequence[NewMessage]) -> None:
            told = set(map(id, some))
            found.copied |= {offset for offset, copy in copies.items() if id(copy) in told}
            count_copies(self._words, some)

        def again(error: MqprocError) -> None:
            found.reviving = False
            self._expire_at(found, self._clock.time_ms() + self._copies.pause_ms(found, error))

        def close(_revive_offset: int) -> None:
            self._io.crash_point("pop.revived")
            if not found.dropped:
                self._state.went(found.group, found.topic, found.queue_id, found.open - found.copied)
            self._open.done(found, offsets)
            self._changes += 1

        def acknowledge(_revive_offset: int = -1) -> None:
            if copies:
                self._io.crash_point("pop.copied")
            self._writes.store([self._ack_of(found, offsets)], close, again)

        if not copies:
            acknowledge()
        elif self._copies.begin_progress(found.group, copies.values()):
            self._writes.store([*copies.values()], acknowledge, again, copied)
        else:
            again(StoreBusyError("no room for progress in the retry topic"))

    # The revive topic

    def _read_on(self, reading: Iterator[None]) -> int:
        """A part of what is to be read; when nothing is left of it, requests are taken."""
        if self._read_from < 0 and self._writes.predecessor_done:
            self._read_from = self._words[control.WRITTEN]
        if not 0 <= self._read_from <= self._words[control.DISPATCHED] or not self._state.progress.writable:
            return 0
        for _part in reading:
            return 1
        self._reading_open = None
        return 1

    def _read_open(self) -> Slices[None]:
        """Find out what is open from the revive topic, a bounded part a step."""
        begins = revive_start_offsets(self._state.progress.of(REVIVE_GROUP))
        yield from self._open.read(self._reading, begins, read_timer_check(self._io, self._paths).read_ms)
        self._tell_received_from()
        topics = sorted({topic for found in self._open for topic in found.retry_targets})
        # A killed predecessor may have begun to send messages again.
        yield from self._copies.find(topics, min((found.log_begin for found in self._open), default=NEVER))
        # In the order of their queues: a loss of power may have taken progress back past several. A reset holds.
        for found in sorted(self._open, key=lambda found: found.key):
            if found.log_begin >= self._state.progress.reset_at:
                self._pass(found)
            self._expire_at(found, found.due_ms)
        # A killed predecessor may have deleted groups.
        self._drop(found for found in self._open if found.group not in self._groups_before)
        if len(self._open):
            self._log.info("received messages are not acknowledged yet", check_points=len(self._open))

    def _tell_received_from(self) -> None:
        self._words[control.RECEIVED_FROM] = min(self._open.log_begin, self._words[control.WRITTEN])


def _message_of(found: PopCheckPoint) -> NewMessage:
    return NewMessage(REVIVE_TOPIC, found.body(), found.properties(), found.revive_queue)


def _check_invisible(invisible_ms: int) -> None:
    if not INVISIBLE_MS_MIN <= invisible_ms <= INVISIBLE_MS_MAX:
        limit = f"from {INVISIBLE_MS_MIN / 1e3:g} to {INVISIBLE_MS_MAX / 1e3:g} s"
        raise BadRequestError(f"an invisible duration of {invisible_ms / 1e3:g} s is out of range: {limit}")


POP_OPERATIONS = frozenset(
    {Operation.GROUP_RECEIVE, Operation.GROUP_ACK, Operation.GROUP_INVISIBLE, Operation.GROUP_DELETE}
)
"""What `take` answers."""
