"""Pop consumption by simple consumers: receive, acknowledge, change the invisible time.

    receive ──check point──▶ revive topic ──stored──▶ offset passes the messages ──▶ answer
    ack     ──ack──────────▶ revive topic ──stored──▶ messages are done          ──▶ answer
    due     ──copies──▶ %RETRY%group_topic, or %DLQ%group ──stored──▶ ack ──▶ revive topic

The table of open check points is in memory; a successor reads it from the revive topic.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from mqproc.errors import BadRequestError, GroupInUseError, GroupNotFoundError, MqprocError, StoreBusyError
from mqproc.io.store_io import Clock
from mqproc.layout import control
from mqproc.layout import queue_table as layout
from mqproc.layout.record_codec import decode_records
from mqproc.roles.groups.coordinator import TOPICS_OF_A_MEMBER_MAX, GroupCoordinator
from mqproc.roles.internal_producer import InternalProducer, NewMessage, ReliableAppend, count_copies
from mqproc.roles.pop.revive import RETRY_MS, Place, PopCopies, PopMigration, ReviveOffsets, stored_offsets
from mqproc.roles.request_limits import COMPACT_MIN, PendingRequest
from mqproc.roles.role import RoleContext
from mqproc.roles.role_log import get_logger
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.cooperative import Slices
from mqproc.store.offsets import pop_receipts as check_points
from mqproc.store.offsets.pop_receipts import (
    NEVER,
    Key,
    OpenCheckPoints,
    PopCheckPoint,
    revive_start_offsets,
)
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.unit_walk import compile_filter
from mqproc.store.schedule.timer_store import read_timer_check
from mqproc.topic_names import (
    RETRY_PREFIX,
    REVIVE_GROUP,
    REVIVE_QUEUES,
    REVIVE_TOPIC,
    check_retry_topic,
    check_topic,
    filter_text,
    pop_retry_topic,
    retries_of_group,
    retries_of_topic,
    retry_topic,
)
from mqproc.types import PullStatus
from mqproc.wire.address import peer_pid
from mqproc.wire.operations import (
    EARLIEST,
    RECEIVE_MS_MAX,
    GroupAckAnswer,
    GroupAckRequest,
    GroupInvisibleAnswer,
    GroupInvisibleRequest,
    GroupReceiveAnswer,
    GroupReceiveRequest,
    Operation,
)

_NEVER_NS: Final = 1 << 62
MESSAGES_MAX: Final = 1024
INVISIBLE_MS_MIN: Final = 1_000
INVISIBLE_MS_MAX: Final = 43_200_000
HELD_MAX: Final = 16_384
PERIOD_NS: Final = 1_000_000_000
EMPTY_PULLS_MAX: Final = 8
"""Number of pulls without match per receive and step; it continues in the next step."""
STEP_NS: Final = 5_000_000
POP_OPERATIONS = frozenset({Operation.GROUP_ACK, Operation.GROUP_INVISIBLE, Operation.GROUP_DELETE})
"""Operations of `handle`."""


@dataclass(slots=True)
class PopLongPolls:
    """Held receives, oldest first."""

    clock: Clock
    deliver: Callable[[PendingRequest], bool]
    """Answers a receive if there are messages."""
    answer_nothing: Callable[[PendingRequest], None]
    refuse: Callable[[PendingRequest, Exception], None]
    """Refuses a receive for an error of `deliver`."""
    due_ns: int = _NEVER_NS
    """Earliest timeout."""
    skipped: int = 0
    """Number of receives that the last retry had no time for; the next one starts with them."""
    _held: list[tuple[PendingRequest, int]] = field(default_factory=list)
    """Receives, and the monotonic ns at which they time out."""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request: PendingRequest, deadline_ns: int) -> None:
        self._held.append((request, deadline_ns))
        self.due_ns = min(self.due_ns, deadline_ns)

    def retry(self, now_ns: int, end_ns: int) -> int:
        """Retry held receives until `end_ns`, answer timeouts; returns the number answered.

        When a receive finds nothing, others of its group with the same topics and filter are skipped.
        """
        held, self._held = self._held, []
        empty: set[tuple[str, ...]] = set()
        self.skipped = 0
        for place, (request, deadline_ns) in enumerate(held):
            if place and self.clock.monotonic_ns() >= end_ns:
                self.skipped = len(held) - place
                self._held = held[place:] + self._held
                break
            if request.connection.closed or self._is_answered(request, empty):
                continue
            if deadline_ns <= now_ns:
                self.answer_nothing(request)
            else:
                self._held.append((request, deadline_ns))
        self.due_ns = min((deadline_ns for _, deadline_ns in self._held), default=_NEVER_NS)
        return len(held) - len(self._held)

    def release_all(self) -> None:
        """Answer all without messages."""
        held, self._held, self.due_ns = self._held, [], _NEVER_NS
        for request, _ in held:
            self.answer_nothing(request)

    def _is_answered(self, request: PendingRequest, empty: set[tuple[str, ...]]) -> bool:
        options = request.options
        selection = options.group, *options.topics, "", *options.tags, options.sql
        if selection in empty:
            return False
        try:
            if self.deliver(request):
                return True
        except Exception as error:
            self.refuse(request, error)
            return True
        empty.add(selection)
        return False


class PopReceivers:
    """Serves the simple consumers of a store."""

    def __init__(
        self,
        context: RoleContext,
        reading: StoreQueries,
        groups: GroupCoordinator,
        producer: InternalProducer,
        table: QueueTable,
        refuse: Callable[[PendingRequest, Exception], None],
    ) -> None:
        """`refuse` refuses a held request for any error, from the except block."""
        self._clock, self._io, self._paths = context.clock, context.io, context.paths
        self._broker = context.options.broker_name
        self._words = context.control.words
        self._max_bytes = context.options.max_pull_bytes
        self._log = get_logger()
        self._reading = reading
        self._groups = groups
        self._state = groups.state
        self._state.is_closing = lambda group: any(found.dropped for found in self._points_of(group))
        self._writes = ReliableAppend(reading, producer, self._max_bytes)
        self._table = table
        self._open = OpenCheckPoints()
        self._copies = PopCopies(reading, groups.state, self._max_bytes)
        self._revive_offsets = ReviveOffsets(context, reading, groups.state.progress, self._writes, self._open)
        self._migration = PopMigration(context.io, reading, groups.state, self._copies, self._writes)
        self._due: list[tuple[int, int, PopCheckPoint]] = []
        self._busy: dict[Place, list[PopCheckPoint]] = {}
        """Queues with check points that are being stored."""
        self._long_polls = PopLongPolls(
            self._clock,
            self._deliver_held,
            lambda request: request.answer(GroupReceiveAnswer(0)),
            refuse,
        )
        self._turn = 0
        self._random = random.Random(0)
        self._period_ns = 0
        self._seen: tuple[int, int] = (-1, -1)
        self._changes = 0
        """Number of events, other than dispatch, after which a held receive may find messages."""
        self._empty_pulls_left = 0
        # End of the log at the start: its check points must be dispatched before they are read.
        self._read_from = -1
        self._groups_before = {*self._state.settings.names(), *self._state.progress.groups()}
        self._starting: Iterator[None] | None = self._read_open()

    # Called by the role

    def handle(self, request: PendingRequest) -> None:
        """Answer a request or hold it. Raises the error that refuses it."""
        self._check_started()
        if request.operation == Operation.GROUP_ACK:
            self._ack(request, request.options)
        elif request.operation == Operation.GROUP_DELETE:
            points = self._points_of(request.options.group)
            if any(found.reviving and not found.dropped for found in points):
                raise StoreBusyError(f"messages of group {request.options.group} are being redelivered", hint_ms=20)
            self._groups.handle(request)
            self._drop(points)
        else:
            self._change_invisible(request, request.options)

    def step(self, now_ns: int) -> int:
        """Serve held receives, redeliver messages whose invisible time is over."""
        if self._starting is not None:
            return self._continue_start(self._starting)
        done = self._revive_due()
        if len(self._long_polls):
            done += self._retry_held(now_ns)
        if now_ns >= self._period_ns:
            self._period_ns = now_ns + PERIOD_NS
            self._publish_received_from()
            self._revive_offsets.move()
            self._groups.filters.forget_ended()
        if self._migration.is_due(now_ns):
            done += self._migration.move(now_ns, self._groups.members(), self._busy)
        return done

    def _retry_held(self, now_ns: int) -> int:
        seen = self._words[control.DISPATCHED], self._changes + self._state.changes
        if seen == self._seen and now_ns < self._long_polls.due_ns:
            return 0
        self._seen = seen
        done = self._long_polls.retry(now_ns, now_ns + STEP_NS)
        self._changes += self._long_polls.skipped
        return done + (self._changes + self._state.changes != seen[1])

    @property
    def waiting(self) -> int:
        return len(self._long_polls)

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """Time until `step` has work, `at_most_s` at most."""
        if self._starting is not None:
            return min(at_most_s, 0.01)
        left_s = at_most_s
        if self._due:
            left_s = min(left_s, (self._due[0][0] - now_ns) / 1e9)
        return max(0.0, min(left_s, (self._long_polls.due_ns - now_ns) / 1e9))

    def on_stop(self) -> None:
        """Answer held receives without messages; move the revive offsets for the next start."""
        self._long_polls.release_all()
        if self._starting is None:
            self._revive_offsets.move()

    # Receiving

    def receive(self, request: PendingRequest) -> Slices[None]:
        """Answer a receive or hold it, in slices. They raise the error that refuses it."""
        options: GroupReceiveRequest = request.options
        self._check_started()
        self._state.ensure_group(options.group)
        self._check_may_consume(options.group)
        filter = filter_text(options.tags, options.sql)
        if not options.change_filter:
            self._groups.filters.check(options.group, options.topics, filter)
        _check_receive(options)
        yield from self._state.start_offsets(options.group, options.topics, options.start, options.start_ms)
        # Members, or consumers with another filter, may have come meanwhile.
        self._check_may_consume(options.group)
        if not options.change_filter:
            self._groups.filters.check(options.group, options.topics, filter)
        pid, wait_ms = peer_pid(request.connection.sock), max(0, options.timeout_ms) + options.invisible_ms
        for topic in options.topics:
            self._groups.filters.received(options.group, topic, filter, pid, wait_ms * 1_000_000)
        if self._deliver(request, options):
            return
        if options.timeout_ms <= 0 or len(self._long_polls) >= HELD_MAX:
            request.answer(GroupReceiveAnswer(0))
            return
        wait_ns = min(options.timeout_ms, RECEIVE_MS_MAX) * 1_000_000
        self._long_polls.hold(request, self._clock.monotonic_ns() + wait_ns)

    def _check_started(self) -> None:
        """Raise StoreBusyError until open check points are read, OSError without room for offsets."""
        self._state.progress.check_writable()
        if self._starting is not None:
            raise StoreBusyError("open check points are not read yet", hint_ms=20)

    def _check_may_consume(self, group: str) -> None:
        self._state.check_may_consume(group)
        if group in self._groups.members():
            raise GroupInUseError(f"group {group} has members, which have its queues")

    def _deliver_held(self, request: PendingRequest) -> bool:
        """Retry a held receive; meanwhile its topics may exist, and the group may have members."""
        if self._state.settings.get(request.options.group) is None:
            # Creating the group again would deliver everything from the beginning.
            raise GroupNotFoundError(f"group {request.options.group} was deleted")
        self._check_may_consume(request.options.group)
        filter = filter_text(request.options.tags, request.options.sql)
        self._groups.filters.check(request.options.group, request.options.topics, filter)
        for topic in request.options.topics:
            self._state.init_offsets(request.options.group, topic, EARLIEST)
        return self._deliver(request, request.options)

    def _deliver(self, request: PendingRequest, options: GroupReceiveRequest) -> bool:
        """Deliver messages of the first queue that has any, retries before new messages."""
        group = options.group
        self._empty_pulls_left = EMPTY_PULLS_MAX
        for topics in (self._retry_topics(options), options.topics):
            queues = [(topic, queue_id) for topic in topics for queue_id in self._state.consumed.ids(topic)]
            # At random: with a shared rotation a receiver might hit the same queue each time.
            first = self._random.randrange(max(1, len(queues)))
            for topic, queue_id in queues[first:] + queues[:first]:
                if self._may_have(group, topic, queue_id) and self._deliver_from(request, options, topic, queue_id):
                    return True
        return False

    def _may_have(self, group: str, topic: str, queue_id: int) -> bool:
        """Whether a queue may have messages for a group; quick, since there may be thousands."""
        if (group, topic, queue_id) in self._busy:
            return False
        bounds = self._table.bounds(topic, queue_id)
        offset = self._state.progress.offset(group, topic, queue_id)
        return bounds is not None and (offset is None or offset < bounds[2])

    def _retry_topics(self, options: GroupReceiveRequest) -> list[str]:
        """Retry topics of a receive: of simple consumers, and of members.

        The latter only if the group has offsets there, since its name may equal a retry topic of another group.
        """
        found = [pop_retry_topic(options.group, topic) for topic in options.topics]
        progress, own = self._state.progress, retry_topic(options.group)
        if any(progress.offset(options.group, own, queue_id) is not None for queue_id in self._reading.queues.ids(own)):
            found.append(own)
        return found

    def _deliver_from(self, request: PendingRequest, options: GroupReceiveRequest, topic: str, queue_id: int) -> bool:
        group = options.group
        bounds = self._reading.queues.bounds(topic, queue_id)
        offset = self._state.progress.offset(group, topic, queue_id)
        if bounds is None:
            return False
        if offset is None:
            self._state.init_offsets(group, topic, EARLIEST)
            offset = self._state.progress.offset(group, topic, queue_id)
            assert offset is not None
        tags, sql = self._selection(options, topic)
        max_bytes = min(options.max_bytes, self._max_bytes)
        while offset < bounds.max_offset:
            if self._empty_pulls_left <= 0:
                self._changes += 1
                return False
            pulled = self._reading.pull(topic, queue_id, offset, options.max_messages, max_bytes, tags, sql=sql)
            if pulled.status is PullStatus.FOUND:
                self._store_check_point(request, options, (group, topic, queue_id), offset, pulled.records.tobytes())
                return True
            if pulled.next_offset <= offset:
                return False
            self._empty_pulls_left -= 1
            offset = pulled.next_offset
            self._state.progress.set(group, topic, queue_id, offset)
        return False

    def _selection(self, options: GroupReceiveRequest, topic: str) -> tuple[list[str], str]:
        """The filter for a topic; retries have passed the receive's before."""
        if topic == retry_topic(options.group):
            return [], retries_of_group(options.group)
        of = next((each for each in options.topics if topic == pop_retry_topic(options.group, each)), "")
        if of and topic not in options.topics:
            return [], retries_of_topic(options.group, of)
        return ([], "") if topic.startswith(RETRY_PREFIX) else (options.tags, options.sql)

    def _store_check_point(
        self, request: PendingRequest, options: GroupReceiveRequest, place: Place, offset: int, records: bytes
    ) -> None:
        """Store the check point of pulled messages, then answer with them."""
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
                self._register(found, revive_offset)
                self._pass(found)
            if points[0].dropped:
                self._drop(points)
                request.refuse(GroupNotFoundError(f"group {place[0]} was deleted"))
                return
            self._count_delivered(place[1], place[2], len(messages), len(records))
            # Other receives may wait for this queue.
            self._changes += 1
            if request.connection.closed:  # The receiver has left meanwhile without the messages.
                for found in points:
                    self._expire_in(found, 0)
                return
            handles = [found.handle() for found in points]
            request.answer(GroupReceiveAnswer(len(messages), handles), (memoryview(records),))

        def refused(error: MqprocError) -> None:
            del self._busy[place]
            self._changes += 1
            request.refuse(error)

        self._writes.store([_message_of(found) for found in points], stored, refused)

    def _count_delivered(self, topic: str, queue_id: int, messages: int, size: int) -> None:
        """Count an answer in the control file, and for its topic in the queue table."""
        self._words.add(control.PULLED_MESSAGES, messages)
        self._words.add(control.PULLED_BYTES, size)
        number = self._table.entry(topic, queue_id)
        if number >= 0:
            self._table.words.add(layout.entry_word(number, layout.DELIVERED), messages)

    def _register(self, found: PopCheckPoint, revive_offset: int) -> None:
        found.revive_offset = revive_offset
        found.open = set(found.offsets)
        self._open.add(found)
        # Before the offset passes its messages, since retention checks the offset first.
        self._words[control.RECEIVED_FROM] = min(self._words[control.RECEIVED_FROM], found.physical_offset)
        self._expire_in(found, found.remaining_ms(self._clock.time_ms()))

    def _expire_in(self, found: PopCheckPoint, remaining_ms: int) -> None:
        """Redeliver after this time, also when the clock is set meanwhile."""
        self._turn += 1
        due_ns = self._clock.monotonic_ns() + remaining_ms * 1_000_000
        heapq.heappush(self._due, (due_ns, self._turn, found))
        if len(self._due) > 2 * len(self._open) + COMPACT_MIN:
            # Acknowledged check points would stay until they are due, which may be hours.
            self._due = [entry for entry in self._due if self._open.get(entry[2].key) is entry[2]]
            heapq.heapify(self._due)

    def _points_of(self, group: str) -> list[PopCheckPoint]:
        """Check points of a group, open or being stored."""
        storing = [found for points in self._busy.values() for found in points]
        return [found for found in (*storing, *self._open) if found.group == group]

    def _drop(self, points: Iterable[PopCheckPoint]) -> None:
        """Close check points of a deleted group, or a new group of its name would get the messages."""
        for found in points:
            found.dropped = True
            self._expire_in(found, 0)

    def _pass(self, found: PopCheckPoint) -> None:
        """Advance the offset past a check point's messages, unless it was moved elsewhere."""
        place = found.group, found.topic, found.queue_id
        offset = self._state.progress.offset(*place)
        if offset is not None and found.start <= offset < found.next_offset:
            self._state.progress.set(*place, found.next_offset)

    # Acknowledging

    def _ack(self, request: PendingRequest, options: GroupAckRequest) -> None:
        if not 1 <= len(options.messages) <= MESSAGES_MAX:
            raise BadRequestError(f"{len(options.messages):,} messages in one request; from 1 to {MESSAGES_MAX:,}")
        named = [check_points.parse_handle(options.group, topic, handle) for topic, handle in options.messages]
        by_key: dict[Key, list[int]] = {}
        for key, offset in named:
            if self._is_open(key, offset) and offset not in by_key.get(key, ()):
                by_key.setdefault(key, []).append(offset)
        acks = [(found, offsets) for key, offsets in by_key.items() if (found := self._open.get(key)) is not None]
        # Acks that a killed predecessor has stored count too: clients without answer repeat them.
        before = sum(self._open.was_acknowledged(*each) for each in set(named))
        accepted = before + sum(len(offsets) for _, offsets in acks)
        if not acks:
            request.answer(GroupAckAnswer(accepted))
            return

        def stored(_revive_offset: int) -> None:
            self._io.crash_point("pop.acknowledged")
            for found, offsets in acks:
                self._open.done(found, offsets)
            request.answer(GroupAckAnswer(accepted))

        def refused(error: MqprocError) -> None:
            for found, offsets in acks:
                found.acking.difference_update(offsets)
            request.refuse(error)

        for found, offsets in acks:
            found.acking.update(offsets)
        self._writes.store([self._ack_of(found, offsets) for found, offsets in acks], stored, refused)

    def _is_open(self, key: Key, offset: int) -> bool:
        found = self._open.get(key)
        if found is None or found.reviving or found.dropped:
            return False
        return offset in found.open and offset not in found.acking and not self._copies.has(found, offset)

    def _change_invisible(self, request: PendingRequest, options: GroupInvisibleRequest) -> None:
        if options.invisible_ms:  # 0: handed back at once.
            _check_invisible(options.invisible_ms)
        key, offset = check_points.parse_handle(options.group, options.topic, options.handle)
        old = self._open.get(key)
        if old is None or not self._is_open(key, offset):
            raise BadRequestError(
                f"{key[1]}/{key[2]} offset {offset:,}: acknowledged or no longer held by this receiver"
            )
        # A later time than the old one, or both would have the same key.
        time_ms = max(self._clock.time_ms(), old.pop_time_ms + 1)
        place = old.group, old.topic, old.queue_id
        new = PopCheckPoint(*place, offset, (offset,), time_ms, options.invisible_ms, old.revive_queue, self._broker)
        new.physical_offset, new.log_begin = old.physical_offset, self._words[control.WRITTEN]

        def stored(revive_offset: int) -> None:
            self._io.crash_point("pop.renewed")
            self._register(new, revive_offset)
            self._open.done(old, [offset])
            if old.dropped:
                self._drop([new])
                request.refuse(GroupNotFoundError(f"group {old.group} was deleted"))
                return
            request.answer(GroupInvisibleAnswer(f"{new.handle()} {offset}"))

        def refused(error: MqprocError) -> None:
            old.acking.discard(offset)
            request.refuse(error)

        old.acking.add(offset)
        self._writes.store([_message_of(new), self._ack_of(old, [offset])], stored, refused)

    def _ack_of(self, found: PopCheckPoint, offsets: Sequence[int]) -> NewMessage:
        properties = found.ack_properties(offsets, self._clock.time_ms())
        return NewMessage(REVIVE_TOPIC, found.ack_body(offsets), properties, found.revive_queue)

    # Redelivery

    def _revive_due(self) -> int:
        """Redeliver messages whose invisible time is over, within the time of a step."""
        done = 0
        now_ns = self._clock.monotonic_ns()
        while self._due and self._due[0][0] <= now_ns and self._writes.has_room:
            if done and self._clock.monotonic_ns() >= now_ns + STEP_NS:
                break
            _, _, found = heapq.heappop(self._due)
            if self._open.get(found.key) is not found:
                continue
            if found.acking:
                self._expire_in(found, RETRY_MS)
                continue
            self._revive(found)
            done += 1
        return done

    def _revive(self, found: PopCheckPoint) -> None:
        """Store copies of unacknowledged messages, then close the check point."""
        found.reviving = True
        offsets = sorted(found.open)
        copies = self._copies.missing(found, offsets)

        def copied(some: Sequence[NewMessage]) -> None:
            found.copied |= stored_offsets(copies, some)
            count_copies(self._words, some)

        def again(error: MqprocError) -> None:
            found.reviving = False
            self._expire_in(found, self._copies.retry_delay_ms(found, error))

        def close(_revive_offset: int) -> None:
            self._io.crash_point("pop.revived")
            if not found.dropped:
                self._state.count_lost(found.group, found.topic, found.queue_id, found.open - found.copied)
            self._open.done(found, offsets)
            self._changes += 1

        def acknowledge(_revive_offset: int = -1) -> None:
            if copies:
                self._io.crash_point("pop.copied")
            self._writes.store([self._ack_of(found, offsets)], close, again)

        if not copies:
            acknowledge()
        elif self._copies.init_offsets(found.group, copies.values()):
            self._writes.store([*copies.values()], acknowledge, again, copied)
        else:
            again(StoreBusyError("no room for offsets in the retry topic"))

    # Start: reading the revive topic

    def _continue_start(self, reading: Iterator[None]) -> int:
        """Read the next part; requests are accepted once everything is read."""
        if self._read_from < 0 and self._writes.predecessor_done:
            self._read_from = self._words[control.WRITTEN]
        if not 0 <= self._read_from <= self._words[control.DISPATCHED] or not self._state.progress.writable:
            return 0
        for _part in reading:
            return 1
        self._starting = None
        return 1

    def _read_open(self) -> Slices[None]:
        """Read open check points from the revive topic, a bounded part per step."""
        begins = revive_start_offsets(self._state.progress.of(REVIVE_GROUP))
        yield from self._open.read(self._reading, begins, read_timer_check(self._io, self._paths).read_ms)
        self._publish_received_from()
        topics = sorted({topic for found in self._open for topic in found.retry_targets})
        # A killed predecessor may have stored some of the copies.
        yield from self._copies.find(topics, min((found.log_begin for found in self._open), default=NEVER))
        # In queue order, since a power loss may have moved an offset back past several. A later reset takes precedence.
        for found in sorted(self._open, key=lambda found: found.key):
            if found.log_begin >= self._state.progress.reset_at:
                self._pass(found)
            self._expire_in(found, found.remaining_ms(self._clock.time_ms()))
        # Groups that a killed predecessor has deleted.
        self._drop(found for found in self._open if found.group not in self._groups_before)
        if len(self._open):
            self._log.info("open check points", check_points=len(self._open))

    def _publish_received_from(self) -> None:
        self._words[control.RECEIVED_FROM] = min(self._open.log_begin, self._words[control.WRITTEN])


def _message_of(found: PopCheckPoint) -> NewMessage:
    return NewMessage(REVIVE_TOPIC, found.body(), found.properties(), found.revive_queue)


def _check_receive(options: GroupReceiveRequest) -> None:
    """Raise BadRequestError, BadTopicError or FilterSyntaxError for an invalid receive."""
    topics = len(options.topics)
    if not 1 <= topics <= TOPICS_OF_A_MEMBER_MAX or not 1 <= options.max_messages <= MESSAGES_MAX:
        limit = f"from 1 to {MESSAGES_MAX:,} messages of 1 to {TOPICS_OF_A_MEMBER_MAX:,} topics"
        raise BadRequestError(f"{options.max_messages:,} messages of {topics:,} topics; {limit}")
    _check_invisible(options.invisible_ms)
    for topic in options.topics:
        check_topic(topic)
        check_retry_topic(pop_retry_topic(options.group, topic))
    compile_filter(options.topics[0], tuple(options.tags), options.sql)


def _check_invisible(invisible_ms: int) -> None:
    if not INVISIBLE_MS_MIN <= invisible_ms <= INVISIBLE_MS_MAX:
        limit = f"from {INVISIBLE_MS_MIN / 1e3:g} to {INVISIBLE_MS_MAX / 1e3:g} s"
        raise BadRequestError(f"an invisible duration of {invisible_ms / 1e3:g} s is out of range: {limit}")
