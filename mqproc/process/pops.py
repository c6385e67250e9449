"""Messages received one by one (`store/groups/README.md`, "Simple consumers"): check points, and what becomes of them.

    receive ──check point──▶ revive topic ──stored──▶ progress goes past the messages ──▶ answer
    ack     ──ack──────────▶ revive topic ──stored──▶ they are done                   ──▶ answer
    due     ──copies──▶ %RETRY%group_topic, or %DLQ%group ──stored──▶ ack ──▶ revive topic

The table of open check points is in memory; a successor reads it from the revive topic.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from mqproc.errors import (
    BadRequestError,
    GroupInUseError,
    MqprocError,
    PermissionDeniedError,
    StoreBusyError,
)
from mqproc.layout import control as words_of
from mqproc.layout.record_codec import decode_records
from mqproc.message import PullStatus, StoredMessage
from mqproc.names import REVIVE_QUEUES, REVIVE_TOPIC, check_topic
from mqproc.process.appender import Appender, NewMessage
from mqproc.process.group_retries import ORIGIN, copy_of, count_copies, identity
from mqproc.process.held_receives import HeldReceives
from mqproc.process.log import get_logger
from mqproc.process.writes import Writes
from mqproc.store.groups import check_points
from mqproc.store.groups.check_points import REVIVE_GROUP, Acknowledged, CheckPoint, Key, pop_retry_topic
from mqproc.store.groups.settings import dead_letter_topic
from mqproc.store.groups.unwritable import NO_ROOM
from mqproc.wire.group_operations import (
    EARLIEST,
    GroupAckAnswer,
    GroupAckRequest,
    GroupInvisibleAnswer,
    GroupInvisibleRequest,
    GroupReceiveAnswer,
    GroupReceiveRequest,
)
from mqproc.wire.operations import Operation

if TYPE_CHECKING:
    from mqproc.process.groups import Asked, Groups
    from mqproc.process.loop import RoleContext
    from mqproc.process.questions import Payload
    from mqproc.store.reads.reading import StoreReading
    from mqproc.wire.operations import Options

MESSAGES_MAX: Final = 1024
INVISIBLE_MS_MIN: Final = 1_000
INVISIBLE_MS_MAX: Final = 43_200_000
WAIT_MS_MAX: Final = 60_000
HELD_MAX: Final = 16_384
AGAIN_NS: Final = 200_000_000
LOOK_NS: Final = 1_000_000_000
COPY_SLACK_MS: Final = 2_000
"""Store times of copies may be so much before the moment they were due at."""
_READ_MESSAGES: Final = 1024
Place = tuple[str, str, int]
"""Group, topic, queue id."""


class Pops:
    """Simple consumers of one store."""

    def __init__(
        self,
        context: RoleContext,
        reading: StoreReading,
        groups: Groups,
        appender: Appender,
        answer: Callable[[Asked, Options, Payload], None],
        refuse: Callable[[Asked, MqprocError], None],
    ) -> None:
        self._clock = context.clock
        self._words = context.control.words
        self._max_bytes = context.options.max_pull_bytes
        self._log = get_logger()
        self._reading = reading
        self._groups = groups
        self._state = groups.state
        self._writes = Writes(reading, self._words, appender, self._max_bytes)
        self._answer = answer
        self._refuse = refuse
        self._open: dict[Key, CheckPoint] = {}
        self._due: list[tuple[int, int, CheckPoint]] = []
        self._busy: set[Place] = set()
        self._held = HeldReceives(self._give_later, lambda asked: answer(asked, GroupReceiveAnswer(0), ()), refuse)
        self._turn = 0
        self._look_ns = 0
        self._seen: tuple[int, int] = (-1, -1)
        self._changes = 0
        # The log may have check points that are not in their queues yet.
        self._read_from = -1
        self._reading_open: Iterator[None] | None = self._read_open()

    @property
    def durable(self) -> bool:
        """Whether every check point is on disk: progress that passes its messages must not be so before."""
        return self._writes.durable

    # The role's side

    def take(self, asked: Asked) -> None:
        """Answer a request or hold it. Raises what it is refused with."""
        self._state.progress.check_writable()
        if self._reading_open is not None:
            raise StoreBusyError("open check points are not read yet", hint_ms=20)
        if asked.operation == Operation.GROUP_RECEIVE:
            self._receive(asked, asked.options)
        elif asked.operation == Operation.GROUP_ACK:
            self._ack(asked, asked.options)
        else:
            self._change_invisible(asked, asked.options)

    def step(self, now_ns: int) -> int:
        """Let held receives have what came, and messages come again whose time is over."""
        if self._reading_open is not None:
            return self._read_on(self._reading_open)
        done = self._revive_due()
        seen = self._words[words_of.DISPATCHED], self._changes
        if len(self._held) and (seen != self._seen or self._held.due_ns <= now_ns):
            self._seen = seen
            done += self._held.look(now_ns)
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + LOOK_NS
            self._move_revive_progress()
        return done

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """How long `step` has nothing to do unless something comes."""
        if self._reading_open is not None:
            return min(at_most_s, 0.01)
        left_s = at_most_s
        if self._due:
            left_s = min(left_s, (self._due[0][0] - self._clock.time_ms()) / 1e3)
        return max(0.0, min(left_s, (self._held.due_ns - now_ns) / 1e9))

    def let_go(self) -> None:
        """Answer held receives: there is nothing."""
        self._held.let_go()

    # Receiving

    def _receive(self, asked: Asked, options: GroupReceiveRequest) -> None:
        settings = self._state.known(options.group)
        if not settings.consume_enable:
            raise PermissionDeniedError(f"group {options.group} may not consume: consumeEnable is false")
        if options.group in self._groups.members():
            raise GroupInUseError(f"group {options.group} has members, which have its queues")
        if not options.topics or not 1 <= options.max_messages <= MESSAGES_MAX:
            limit = f"from 1 to {MESSAGES_MAX:,} messages of one topic at least"
            raise BadRequestError(f"{options.max_messages:,} messages of {len(options.topics)} topics; {limit}")
        _check_invisible(options.invisible_ms)
        for topic in options.topics:
            check_topic(topic)
            self._state.begin(options.group, topic, options.start, options.start_ms)
        if self._give(asked, options):
            return
        if options.timeout_ms <= 0 or len(self._held) >= HELD_MAX:
            self._answer(asked, GroupReceiveAnswer(0), ())
            return
        wait_ns = min(options.timeout_ms, WAIT_MS_MAX) * 1_000_000
        self._held.hold(asked, self._clock.monotonic_ns() + wait_ns)

    def _give_later(self, asked: Asked) -> bool:
        """As `_give`, to a receive that is held; its topics may have come meanwhile."""
        for topic in asked.options.topics:
            self._state.begin(asked.options.group, topic, EARLIEST, 0)
        return self._give(asked, asked.options)

    def _give(self, asked: Asked, options: GroupReceiveRequest) -> bool:
        """Take messages of the first queue that has some, what comes again before what is new."""
        group = options.group
        for topics in ([pop_retry_topic(group, topic) for topic in options.topics], options.topics):
            queues = [(topic, queue_id) for topic in topics for queue_id in self._reading.queues.ids(topic)]
            self._turn += 1
            for number in range(len(queues)):
                topic, queue_id = queues[(self._turn + number) % len(queues)]
                if (group, topic, queue_id) not in self._busy and self._give_of(asked, options, topic, queue_id):
                    return True
        return False

    def _give_of(self, asked: Asked, options: GroupReceiveRequest, topic: str, queue_id: int) -> bool:
        group = options.group
        bounds = self._reading.queues.bounds(topic, queue_id)
        offset = self._state.progress.offset(group, topic, queue_id)
        if bounds is None:
            return False
        if offset is None:
            self._state.begin(group, topic, EARLIEST, 0)
            offset = bounds.min_offset
        while offset < bounds.max_offset:
            pulled = self._reading.pull(topic, queue_id, offset, options.max_messages, self._max_bytes)
            if pulled.status is PullStatus.FOUND:
                records = pulled.records.tobytes()
                offsets = tuple(message.queue_offset for message in decode_records(records))
                self._check_in(asked, options, topic, queue_id, offsets, records)
                return True
            if pulled.next_offset <= offset:
                return False
            offset = pulled.next_offset
            self._state.progress.set(group, topic, queue_id, offset)
        return False

    def _check_in(
        self,
        asked: Asked,
        options: GroupReceiveRequest,
        topic: str,
        queue_id: int,
        offsets: tuple[int, ...],
        records: bytes,
    ) -> None:
        """Store the check point; then the messages are this receiver's."""
        place = options.group, topic, queue_id
        revive_queue = self._turn % REVIVE_QUEUES
        found = CheckPoint(*place, offsets, self._clock.time_ms(), options.invisible_ms, revive_queue)
        self._busy.add(place)

        def stored(revive_offset: int) -> None:
            self._busy.discard(place)
            self._add(found, revive_offset)
            self._pass(found)
            self._answer(asked, GroupReceiveAnswer(len(offsets), found.handle()), (memoryview(records),))

        def refused(error: MqprocError) -> None:
            self._busy.discard(place)
            self._changes += 1
            self._refuse(asked, error)

        self._writes.store([_message_of(found)], stored, refused)

    def _add(self, found: CheckPoint, revive_offset: int) -> None:
        found.revive_offset = revive_offset
        found.open = set(found.offsets)
        self._open[found.key] = found
        self._expire_at(found, found.due_ms)

    def _expire_at(self, found: CheckPoint, due_ms: int) -> None:
        self._turn += 1
        heapq.heappush(self._due, (due_ms, self._turn, found))

    def _pass(self, found: CheckPoint) -> None:
        """Let progress pass a check point's messages, unless it was moved elsewhere meanwhile."""
        place = found.group, found.topic, found.queue_id
        offset = self._state.progress.offset(*place)
        if offset is not None and found.offsets[0] <= offset < found.next_offset:
            self._state.progress.set(*place, found.next_offset)

    # Done, or not yet

    def _ack(self, asked: Asked, options: GroupAckRequest) -> None:
        if not 1 <= len(options.messages) <= MESSAGES_MAX:
            raise BadRequestError(f"{len(options.messages):,} messages in one request; from 1 to {MESSAGES_MAX:,}")
        named = [check_points.key_of(options.group, topic, handle) for topic, handle in options.messages]
        by_key: dict[Key, list[int]] = {}
        for key, offset in named:
            if self._is_open(key, offset) and offset not in by_key.get(key, ()):
                by_key.setdefault(key, []).append(offset)
        acks = [(self._open[key], offsets) for key, offsets in by_key.items()]
        accepted = sum(len(offsets) for _, offsets in acks)
        if not acks:
            self._answer(asked, GroupAckAnswer(0), ())
            return

        def stored(_revive_offset: int) -> None:
            for found, offsets in acks:
                self._done(found, offsets)
            self._answer(asked, GroupAckAnswer(accepted), ())

        def refused(error: MqprocError) -> None:
            for found, offsets in acks:
                found.acking.difference_update(offsets)
            self._refuse(asked, error)

        for found, offsets in acks:
            found.acking.update(offsets)
        self._writes.store([_ack_of(found, offsets) for found, offsets in acks], stored, refused)

    def _is_open(self, key: Key, offset: int) -> bool:
        found = self._open.get(key)
        return found is not None and not found.reviving and offset in found.open and offset not in found.acking

    def _done(self, found: CheckPoint, offsets: Sequence[int]) -> None:
        found.open.difference_update(offsets)
        found.acking.difference_update(offsets)
        if not found.open:
            self._open.pop(found.key, None)

    def _change_invisible(self, asked: Asked, options: GroupInvisibleRequest) -> None:
        _check_invisible(options.invisible_ms)
        key, offset = check_points.key_of(options.group, options.topic, options.handle)
        if not self._is_open(key, offset):
            raise BadRequestError(f"{key[1]}/{key[2]} offset {offset:,}: acknowledged, or not this receiver's any more")
        old = self._open[key]
        # Another time than the old one's, or both would be the same check point.
        time_ms = max(self._clock.time_ms(), old.pop_time_ms + 1)
        place = old.group, old.topic, old.queue_id
        new = CheckPoint(*place, (offset,), time_ms, options.invisible_ms, old.revive_queue)

        def stored(revive_offset: int) -> None:
            self._add(new, revive_offset)
            self._done(old, [offset])
            self._answer(asked, GroupInvisibleAnswer(f"{new.handle()} {offset}"), ())

        def refused(error: MqprocError) -> None:
            old.acking.discard(offset)
            self._refuse(asked, error)

        old.acking.add(offset)
        self._writes.store([_message_of(new), _ack_of(old, [offset])], stored, refused)

    # Coming again

    def _revive_due(self) -> int:
        done = 0
        now_ms = self._clock.time_ms()
        while self._due and self._due[0][0] <= now_ms and self._writes.has_room:
            _, _, found = heapq.heappop(self._due)
            if self._open.get(found.key) is not found:
                continue
            undispatched = found.inherited and self._words[words_of.DISPATCHED] < self._writes.stored_end
            if found.acking or undispatched:
                self._expire_at(found, now_ms + AGAIN_NS // 1_000_000)
                continue
            self._revive(found)
            done += 1
        return done

    def _revive(self, found: CheckPoint) -> None:
        """Send what is not acknowledged again; when that is stored, the check point is closed."""
        found.reviving = True
        offsets = sorted(found.open)
        copies = [copy for offset in offsets if (copy := self._copy(found, offset)) is not None]
        if found.inherited and copies:
            made = {identity(message) for message in self._copies_since(found)}
            copies = [copy for copy in copies if identity(copy) not in made]

        def again(_error: MqprocError) -> None:
            # Some may be stored: `inherited` has the others found out.
            found.reviving, found.inherited = False, True
            self._expire_at(found, self._clock.time_ms() + AGAIN_NS // 1_000_000)

        def close(_revive_offset: int) -> None:
            self._done(found, offsets)
            self._changes += 1

        def acknowledge(_revive_offset: int = -1) -> None:
            count_copies(self._words, copies)
            self._writes.store([_ack_of(found, offsets)], close, again)

        if copies:
            self._writes.store(copies, acknowledge, again)
        else:
            acknowledge()

    def _copy(self, found: CheckPoint, offset: int) -> NewMessage | None:
        """The message as it comes again; None when it is gone, or its group is."""
        settings = self._state.settings.get(found.group)
        pulled = self._reading.pull(found.topic, found.queue_id, offset, 1, self._max_bytes)
        if settings is None or pulled.status is not PullStatus.FOUND:
            return None
        message = decode_records(pulled.records.tobytes())[0]
        if message.queue_offset != offset:
            return None
        origin = message.properties.get("RETRY_TOPIC", found.topic)
        own = {"RETRY_TOPIC": origin, ORIGIN: message.properties.get(ORIGIN, message.message_id), "WAIT": "false"}
        times = message.reconsume_times
        dead = times >= settings.retry_max_times
        topic = dead_letter_topic(found.group) if dead else pop_retry_topic(found.group, origin)
        return copy_of(message, topic, 0, own, times + 1)

    def _copies_since(self, found: CheckPoint) -> Iterator[StoredMessage]:
        origin = found.topic
        retry = origin if origin.startswith(pop_retry_topic(found.group, "")) else pop_retry_topic(found.group, origin)
        for topic in (retry, dead_letter_topic(found.group)):
            if self._reading.queues.ids(topic):
                begin = self._reading.offset_at(topic, 0, found.due_ms - COPY_SLACK_MS)
                yield from self._messages(topic, 0, begin)

    # The revive topic

    def _messages(self, topic: str, queue_id: int, offset: int) -> Iterator[StoredMessage]:
        """Messages of a queue from an offset to its end."""
        bounds = self._reading.queues.bounds(topic, queue_id)
        at = max(offset, bounds.min_offset) if bounds is not None else 0
        while bounds is not None and at < bounds.max_offset:
            pulled = self._reading.pull(topic, queue_id, at, _READ_MESSAGES, self._max_bytes)
            if pulled.status is PullStatus.FOUND:
                yield from decode_records(pulled.records.tobytes())
            if pulled.next_offset <= at:
                return
            at = pulled.next_offset

    def _read_on(self, reading: Iterator[None]) -> int:
        """A part of what is to be read; when nothing is left of it, requests are taken."""
        if self._read_from < 0 and self._writes.settled:
            self._read_from = self._words[words_of.WRITTEN]
        if not 0 <= self._read_from <= self._words[words_of.DISPATCHED] or not self._state.progress.writable:
            return 0
        for _part in reading:
            return 1
        self._reading_open = None
        return 1

    def _read_open(self) -> Iterator[None]:
        """Find out what is open from the revive topic, a bounded part a step."""
        newest: dict[tuple[str, str, int, int], CheckPoint] = {}
        for queue_id in self._reading.queues.ids(REVIVE_TOPIC):
            begin = self._state.progress.offset(REVIVE_GROUP, REVIVE_TOPIC, queue_id) or 0
            for number, message in enumerate(self._messages(REVIVE_TOPIC, queue_id, begin)):
                if number % _READ_MESSAGES == 0:
                    yield
                said = check_points.read(message)
                if isinstance(said, CheckPoint):
                    self._take_over(said, newest)
                elif isinstance(said, Acknowledged) and (found := self._open.get(said.key)) is not None:
                    self._done(found, said.offsets)
        for found in self._open.values():
            self._pass(found)
            self._expire_at(found, found.due_ms)
        if self._open:
            self._log.info("received messages are not acknowledged yet", check_points=len(self._open))

    def _take_over(self, said: CheckPoint, newest: dict[tuple[str, str, int, int], CheckPoint]) -> None:
        """A message is its newest check point's: the one before may not have got its acknowledgement."""
        self._open[said.key] = said
        for offset in said.offsets:
            place = said.group, said.topic, said.queue_id, offset
            before = newest.setdefault(place, said)
            if before.pop_time_ms < said.pop_time_ms:
                self._done(before, [offset])
                newest[place] = said
            elif before.pop_time_ms > said.pop_time_ms:
                self._done(said, [offset])

    def _move_revive_progress(self) -> None:
        """Let the next start begin to read at the first check point that is open."""
        if self._writes.under_way or not self._state.progress.writable:
            return
        first: dict[int, int] = {}
        for found in self._open.values():
            first[found.revive_queue] = min(first.get(found.revive_queue, found.revive_offset), found.revive_offset)
        for queue_id in self._reading.queues.ids(REVIVE_TOPIC):
            bounds = self._reading.queues.bounds(REVIVE_TOPIC, queue_id)
            offset = first.get(queue_id, bounds.max_offset if bounds is not None else 0)
            before = self._state.progress.offset(REVIVE_GROUP, REVIVE_TOPIC, queue_id)
            if offset > (before or 0):
                try:
                    self._state.progress.set(REVIVE_GROUP, REVIVE_TOPIC, queue_id, offset)
                except OSError as error:
                    if error.errno not in NO_ROOM:
                        raise
                    # The next start reads more than it needs to.
                    return


def _message_of(found: CheckPoint) -> NewMessage:
    return NewMessage(REVIVE_TOPIC, found.body(), found.properties(), found.revive_queue)


def _ack_of(found: CheckPoint, offsets: Sequence[int]) -> NewMessage:
    return NewMessage(REVIVE_TOPIC, found.ack_body(offsets), found.ack_properties(offsets), found.revive_queue)


def _check_invisible(invisible_ms: int) -> None:
    if not INVISIBLE_MS_MIN <= invisible_ms <= INVISIBLE_MS_MAX:
        limit = f"from {INVISIBLE_MS_MIN / 1e3:g} to {INVISIBLE_MS_MAX / 1e3:g} s"
        raise BadRequestError(f"an invisible duration of {invisible_ms / 1e3:g} s is out of range: {limit}")


POP_OPERATIONS = frozenset({Operation.GROUP_RECEIVE, Operation.GROUP_ACK, Operation.GROUP_INVISIBLE})
"""What `take` answers."""
