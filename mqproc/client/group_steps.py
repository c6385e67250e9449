"""What takes several requests about groups, as generators of calls: the sync and the async client run them alike.

def steps() -> Steps[T]:
    value = yield call
    return …
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from mqproc.client import core, group_calls
from mqproc.client.amounts import each_of, true_or_false, whole_number
from mqproc.client.assignment import Queue
from mqproc.client.core import Call, Time
from mqproc.errors import BadRequestError, GroupNotFoundError, NoSuchQueueError, TopicNotFoundError
from mqproc.groups import GroupInfo
from mqproc.message import QueueInfo
from mqproc.names import RETRY_PREFIX

T = TypeVar("T")
Steps = Generator[Call[Any], Any, T]


@dataclass(frozen=True, slots=True)
class ResetTo:
    """Where progress shall go: exactly one of them. `shift` is relative to where it is.

    What lies outside a queue is cut to its begin or its end.
    """

    earliest: bool = False
    latest: bool = False
    offset: int | None = None
    time: Time = None
    shift: int | None = None


def check_reset(to: Any) -> None:
    """Raises BadRequestError."""
    if not isinstance(to, ResetTo):
        raise BadRequestError(f"to = {to!r} is no ResetTo, such as ResetTo(earliest=True)")
    ends = [true_or_false("earliest", to.earliest), true_or_false("latest", to.latest)]
    given = [*ends, to.offset is not None, to.time is not None, to.shift is not None]
    if sum(given) != 1:
        raise BadRequestError("a reset goes to exactly one of earliest, latest, an offset, a time, or by a shift")
    for name, value in (("offset", to.offset), ("shift", to.shift)):
        if value is not None:
            whole_number(name, value)


@dataclass(frozen=True, slots=True)
class Move:
    """A queue whose progress would move from `before` (None: it has none) to `after`."""

    topic: str
    queue_id: int
    before: int | None
    after: int

    @property
    def messages(self) -> int:
        """How many messages are consumed again (above 0) or skipped (below 0)."""
        return 0 if self.before is None else self.before - self.after


def plan_reset(
    group: str, to: ResetTo, topics: tuple[str, ...] = (), queues: tuple[int, ...] = ()
) -> Steps[list[Move]]:
    """What a reset would move: of the topics that are named, or of all that the group has progress in.

    What waits in retry topics is the group's own, and has other offsets: it stays, unless all is to be skipped.

    Raises TopicNotFoundError, GroupNotFoundError, NoSuchQueueError for queue ids that none of the topics has.
    """
    check_reset(to)
    known: dict[tuple[str, int], int | None] = {}
    try:
        info: GroupInfo = yield group_calls.info(group)
        known = {(queue.topic, queue.queue_id): queue.offset for queue in info.queues}
    except GroupNotFoundError:
        if not topics:
            raise
    moves = []
    missing = set(queues)
    for topic in topics or sorted({topic for topic, _ in known if to.latest or not topic.startswith(RETRY_PREFIX)}):
        found: list[QueueInfo] = yield core.queues(topic)
        if not found and topics:
            raise TopicNotFoundError(f"no topic {topic!r}")
        missing -= {queue.queue_id for queue in found}
        for queue in found:
            if queues and queue.queue_id not in queues:
                continue
            before = known.get((topic, queue.queue_id))
            after = yield from _target(queue, to, before)
            if before != after:
                moves.append(Move(topic, queue.queue_id, before, after))
    if missing:
        raise NoSuchQueueError(f"no topic of the reset has a queue {', '.join(map(str, sorted(missing)))}")
    return moves


def _target(queue: QueueInfo, to: ResetTo, before: int | None) -> Steps[int]:
    if to.earliest:
        return queue.min_offset
    if to.latest:
        return queue.max_offset
    if to.offset is not None:
        wanted = to.offset
    elif to.shift is not None:
        wanted = (queue.max_offset if before is None else before) + to.shift
    else:
        wanted = yield core.offset_at(queue.topic, queue.queue_id, to.time, False)
    return min(max(wanted, queue.min_offset), queue.max_offset)


def seek_targets(positions: dict[Queue, int], to: ResetTo) -> Steps[list[tuple[str, int, int]]]:
    """Where a consumer that stands at `positions` goes on in each queue, also where that is where it stands."""
    check_reset(to)
    targets = []
    for topic in sorted({topic for topic, _ in positions}):
        found: list[QueueInfo] = yield core.queues(topic)
        for queue in found:
            before = positions.get((topic, queue.queue_id))
            if before is not None:
                targets.append((topic, queue.queue_id, (yield from _target(queue, to, before))))
    return targets


def lag_behind(positions: dict[Queue, int]) -> Steps[int]:
    """How many messages a consumer that stands at `positions` has not consumed."""
    lag = 0
    for topic in sorted({topic for topic, _ in positions}):
        found: list[QueueInfo] = yield core.queues(topic)
        for queue in found:
            at = positions.get((topic, queue.queue_id), queue.max_offset)
            lag += queue.max_offset - min(max(at, queue.min_offset), queue.max_offset)
    return lag


def execute(group: str, moves: Iterable[Any]) -> Steps[None]:
    """Do what was planned: all of it, or nothing. Raises BadRequestError for what is no plan."""
    targets = []
    for number, move in enumerate(each_of("moves", moves)):
        if not isinstance(move, Move):
            raise BadRequestError(f"item {number} of moves is no Move: {repr(move)[:64]}; give what plan_reset gives")
        targets.append((move.topic, move.queue_id, move.after))
    if targets:
        yield group_calls.reset(group, targets)


def delete(group: str) -> Steps[None]:
    """Delete a group, and then the topics where messages came again to it alone; its dead letters stay.

    Raises GroupNotFoundError when there is none, behind the topics: a deletion before may have ended, or its answer may
    have been lost, before it came to them.
    """
    missing: GroupNotFoundError | None = None
    try:
        yield group_calls.delete(group)
    except GroupNotFoundError as error:
        missing = error
    # In this order: the names of all groups that any of the topics can be another's are known.
    topics = yield core.topics()
    summaries = yield group_calls.groups()
    others = [other.group for other in summaries if other.group != group]
    for topic in topics:
        if _is_retry_topic_of(topic.topic, group) and not any(_is_retry_topic_of(topic.topic, name) for name in others):
            with contextlib.suppress(TopicNotFoundError):
                yield core.delete_topic(topic.topic)
    if missing is not None:
        raise missing


def _is_retry_topic_of(topic: str, group: str) -> bool:
    """Whether messages of a group may come again there, by the names."""
    own = RETRY_PREFIX + group
    return topic == own or topic.startswith(f"{own}_")


def check_read(info: GroupInfo, topics: tuple[str, ...]) -> None:
    """Raise TopicNotFoundError for a topic that a group has nothing to do with: a mistyped one would pass unseen."""
    for topic in topics:
        if all(queue.topic != topic for queue in info.queues):
            raise TopicNotFoundError(f"group {info.group} has no progress in topic {topic!r}")


def plan_clone(source: str, target: str, topics: tuple[str, ...] = ()) -> Steps[list[Move]]:
    """What giving `target` the progress of `source` would move. Retry topics are each group's own.

    Raises GroupNotFoundError, TopicNotFoundError for one that `source` has no progress in.
    """
    info: GroupInfo = yield group_calls.info(source)
    check_read(info, topics)
    before: dict[tuple[str, int], int | None] = {}
    try:
        other: GroupInfo = yield group_calls.info(target)
        before = {(queue.topic, queue.queue_id): queue.offset for queue in other.queues}
    except GroupNotFoundError:
        pass  # It is made by getting progress.
    moves = []
    for queue in info.queues:
        if queue.offset is None or queue.is_retry or (topics and queue.topic not in topics):
            continue
        after = min(max(queue.offset, queue.min_offset), queue.max_offset)
        at = before.get((queue.topic, queue.queue_id))
        if at != after:
            moves.append(Move(queue.topic, queue.queue_id, at, after))
    return moves
