"""What a consumer works on: queues with what is fetched of them, handed out, done and committed. No I/O, no waiting.

    fetched pieces ──hand out──▶ in hands ──done, nacked──▶ position ──▶ committed

A queue's position is where the messages that are not done begin: it is what may be committed, in order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from mqproc.client import core
from mqproc.client.pace import HOLD_S
from mqproc.errors import MqprocError, NotAMemberError
from mqproc.layout.lazy_records import UnreadRecords
from mqproc.message import Filter, StoredMessage
from mqproc.names import RETRY_PREFIX
from mqproc.wire.group_operations import Assigned, GroupAssignment

Queue = tuple[str, int]
BUFFER_BYTES: Final = 64 << 20
PULL_BYTES_MAX: Final = 8 << 20
PULL_BYTES_MIN: Final = 64 << 10

PROGRESS_S: Final = 1.0
"""A queue's pulls tell no sooner than this again how far they have come through messages that do not match."""

ABSENT_S: Final = 0.2
"""After how long a queue is asked for again that was not there."""

NOTHING: Final = -1
"""What has been committed of a queue whose progress has to be told again, wherever it is."""

HANDED_MIN: Final = 4096
"""So many offsets of messages that are done may stay behind one that is not."""

PIECES_AHEAD: Final = 2
"""A queue is pulled from while it has fewer pieces than this."""


class Sized(Protocol):
    """Messages of one pull: records not read yet, or an Arrow batch."""

    def __len__(self) -> int:
        """How many."""
        ...


M = TypeVar("M", bound=Sized)


@dataclass(slots=True)
class Piece(Generic[M]):
    """One pull's messages. `end` is the queue offset behind them."""

    messages: M
    end: int


class Cursor(Generic[M]):
    """One queue in the consumer's hands, from one assignment on until it is taken away."""

    __slots__ = (
        "_handed",
        "_open",
        "committed",
        "committing",
        "done",
        "epoch",
        "in_loop",
        "lost",
        "next_offset",
        "pieces",
        "progress_at",
        "pull_at",
        "pulling",
        "queue_id",
        "revoked",
        "topic",
    )

    def __init__(self, topic: str, queue_id: int, epoch: int, offset: int) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.epoch = epoch
        self.next_offset = offset
        """Where the next pull begins."""
        self.done = offset
        """Everything below it was handed out and, but for what `_handed` has, is done."""
        self.committed = offset
        self.committing = offset
        """What is on its way to the server."""
        self.pieces: deque[Piece[M]] = deque()
        self.pulling = False
        self.pull_at = 0.0
        """Before it no pull begins."""
        self.progress_at = 0.0
        """When a pull may tell again that it has passed messages which do not match."""
        self.in_loop = False
        """A loop is going through a piece and moves `done` by itself."""
        self.revoked = False
        """The queue is another's, or will be as soon as this consumer has released it."""
        self.lost = False
        """It is another's already: nothing can be committed."""
        self._handed: deque[int] = deque()
        self._open: set[int] = set()

    @property
    def queue(self) -> Queue:
        return self.topic, self.queue_id

    @property
    def in_hands(self) -> bool:
        """Whether somebody has messages of the queue that are not done."""
        return self.in_loop or bool(self._handed)

    @property
    def position(self) -> int:
        """Everything below it is done."""
        return min(self.done, self._handed[0]) if self._handed else self.done

    def progress_s(self, now: float) -> float:
        """After how many seconds a pull that begins now shall tell how far it has come without a match."""
        return max(0.0, self.progress_at - now)

    def absent(self, now: float) -> None:
        """A pull has found no such queue: it is asked for again until the server takes it away.

        It never does when the topic was made again before anybody looked: then the queue goes on, at later offsets.
        """
        self.pulling = False
        self.pull_at = now + ABSENT_S

    def fetched(self, piece: Piece[M], moved: bool, now: float) -> None:
        """Take a pull's answer. `moved`: the queue does not have the offset that was asked for."""
        self.pulling = False
        self.next_offset = piece.end
        if not len(piece.messages):
            self.progress_at = now + PROGRESS_S
        if not self.revoked:
            self._keep(piece, moved)
        if moved and not self.in_hands and piece.end < self.done:
            self.done = piece.end
            # What was committed lies beyond the queue's end: a consumer that keeps its own progress would stay there.
            self.committed = self.committing = NOTHING

    def _keep(self, piece: Piece[M], moved: bool) -> None:
        """However many answers come without messages: they take no places of those that have some."""
        last = self.pieces[-1] if self.pieces else None
        if last is None or moved or (len(last.messages) and len(piece.messages)) or piece.end < last.end:
            self.pieces.append(piece)
        elif len(piece.messages):
            self.pieces[-1] = piece
        else:
            last.end = piece.end

    def take_empty(self) -> None:
        """Pass over pieces without messages: filters let nothing of them through."""
        while self.pieces and not len(self.pieces[0].messages):
            if self.in_loop or (self.in_hands and self.pieces[0].end < self.done):
                return
            self.done = self.pieces.popleft().end

    def hand_out(self, offsets: Iterable[int], end: int) -> None:
        """Messages go to somebody who acknowledges each."""
        handed = list(offsets)
        self._handed.extend(handed)
        self._open.update(handed)
        self.done = end

    def hand_out_of_first(self: Cursor[UnreadRecords], most: int) -> list[StoredMessage]:
        """Up to `most` messages of the first piece, each to be acknowledged."""
        piece = self.pieces[0]
        messages, end = piece.messages.take(most), piece.end
        if len(piece.messages):
            end = piece.messages.next_queue_offset
        else:
            self.pieces.popleft()
        self.hand_out((message.queue_offset for message in messages), end)
        return messages

    def ack(self, offset: int) -> bool:
        """A message that was handed out is done; whether it was in anybody's hands."""
        if offset not in self._open:
            return False
        self._open.discard(offset)
        while self._handed and self._handed[0] not in self._open:
            self._handed.popleft()
        if len(self._handed) > 2 * len(self._open) + HANDED_MIN:
            # Behind one that is not done for hours all others would stay.
            self._handed = deque(each for each in self._handed if each in self._open)
        return True

    def has_out(self, offset: int) -> bool:
        """Whether a message is in somebody's hands who was to acknowledge it."""
        return offset in self._open

    def let_go(self) -> None:
        """Nobody handles what is in hands: it is not done, and everything behind it neither."""
        self.done = self.position
        self._handed.clear()
        self._open.clear()

    def anew(self) -> Cursor[M]:
        """The same queue, from what is not done on. What was handed out or fetched before does not count any more."""
        other = Cursor[M](self.topic, self.queue_id, self.epoch, self.position)
        other.committed = other.committing = self.committed
        self.lost = True
        self.revoke()
        return other

    def revoke(self) -> None:
        """No more of this queue is handed out."""
        self.revoked = True
        self.pieces.clear()


class Loop:
    """A loop through a piece, and what its body has: the message at `begin`, or the batch from there to `end`."""

    __slots__ = ("begin", "cursor", "end")

    def __init__(self, cursor: Cursor[Any], begin: int = -1, end: int = 0) -> None:
        self.cursor = cursor
        self.begin = begin
        self.end = end

    def leave(self) -> None:
        """What its body has is done."""
        if self.begin == self.cursor.done:
            self.cursor.done = self.end or self.begin + 1


class Assignment(Generic[M]):
    """All queues of one consumer. Not thread-safe: its owner has a lock."""

    def __init__(self) -> None:
        self.member_id = ""
        self.generation = -1
        self.heartbeat_s = 1.0
        self.cursors: dict[Queue, Cursor[M]] = {}
        self._leaving: list[Cursor[M]] = []
        self._released = -1
        self._turns: deque[Queue] = deque()

    # Assignments

    def apply(self, answer: GroupAssignment) -> None:
        """Take over what the server says. Queues that are not there any more are given up."""
        self.member_id = answer.member_id
        if answer.heartbeat_ms:
            self.heartbeat_s = answer.heartbeat_ms / 1000
        if not answer.changed:
            return
        if answer.generation < self.generation:
            self._released = -1  # The server counts anew.
        self.generation = answer.generation
        wanted = {(topic, queue_id): (epoch, offset) for topic, queue_id, epoch, offset in answer.queues}
        for queue, cursor in list(self.cursors.items()):
            if wanted.get(queue, (None, 0))[0] != cursor.epoch:
                self._give_up(cursor, lost=queue in wanted)
        new = {queue: Cursor[M](*queue, *begin) for queue, begin in wanted.items() if queue not in self.cursors}
        for cursor in self._leaving:
            # It was taken in the end, or it would not have been given anew.
            cursor.lost = cursor.lost or cursor.queue in new
        self.cursors |= new
        turns = set(self._turns)
        self._turns.extend(queue for queue in new if queue not in turns)

    def _give_up(self, cursor: Cursor[M], *, lost: bool) -> None:
        del self.cursors[cursor.queue]
        cursor.lost = cursor.lost or lost
        cursor.revoke()
        self._leaving.append(cursor)

    def holding(self) -> list[tuple[str, int, int]]:
        """Queues with epochs, to join again with."""
        return [(cursor.topic, cursor.queue_id, cursor.epoch) for cursor in self.cursors.values() if not cursor.lost]

    def to_release(self) -> tuple[int, list[Cursor[M]]] | None:
        """The generation to release, with the cursors whose positions are to be committed before; None for nothing.

        Nothing while somebody has messages of a queue that was given up; of one that is lost they count for nothing.
        """
        if self._released >= self.generation or any(each.in_hands and not each.lost for each in self._leaving):
            return None
        leaving, self._leaving = self._leaving, []
        self._released = self.generation
        return self.generation, leaving

    def not_released(self) -> None:
        """The server has not heard of it: it is told again."""
        self._released = -1

    def forget(self) -> None:
        """Nothing is assigned any more."""
        for cursor in list(self.cursors.values()):
            self._give_up(cursor, lost=True)
        self.generation = -1

    def positions(self, topics: Sequence[str] = ()) -> dict[Queue, int]:
        """Where it stands, of all its queues but those of the retry topic, or of those of some topics."""
        return {
            queue: cursor.position
            for queue, cursor in self.cursors.items()
            if (queue[0] in topics if topics else not queue[0].startswith(RETRY_PREFIX))
        }

    def epochs(self, queues: Iterable[Queue]) -> dict[Queue, int]:
        """The epochs of those of some queues that it has."""
        return {queue: self.cursors[queue].epoch for queue in queues if queue in self.cursors}

    def go_to(self, queue: Queue, offset: int) -> tuple[Cursor[M], int]:
        """Begin anew in a queue, without the server; what was handed out of it before does not count any more."""
        epoch = self.cursors[queue].epoch
        self._give_up(self.cursors[queue], lost=True)
        cursor = self.cursors[queue] = Cursor(*queue, epoch, offset)
        return cursor, offset

    def ack(self, queue: Queue, offset: int) -> bool:
        """A message that was handed out is done; whether that may have freed a queue that is to be given back."""
        found = self.cursors.get(queue)
        if found is not None and found.ack(offset):
            return False
        return any(cursor.queue == queue and cursor.ack(offset) for cursor in self._leaving)

    def goes_on(self, queue: Queue) -> bool:
        """Whether more of a queue may be handed out, or asked for, now that nothing of it is in hands."""
        found = self.cursors.get(queue)
        return found is not None and not found.in_hands and (bool(found.pieces) or not found.pulling)

    def holds(self, queue: Queue, offset: int) -> bool:
        """Whether a message that was handed out is of a queue that this consumer goes on with."""
        found = self.cursors.get(queue)
        return found is not None and found.has_out(offset)

    def take_back(self, queue: Queue, offset: int) -> bool:
        """A message that was handed out comes again, with those behind it; whether that may have freed a queue."""
        found = self.cursors.get(queue)
        if found is not None and found.has_out(offset):
            self.cursors[queue] = found.anew()
            return False
        freed = [cursor for cursor in self._leaving if cursor.queue == queue and cursor.has_out(offset)]
        for cursor in freed:
            cursor.let_go()
        return bool(freed)

    # Fetching and handing out

    @property
    def pull_bytes(self) -> int:
        """How much one pull may bring, so that all of them fit the buffer."""
        return max(PULL_BYTES_MIN, min(PULL_BYTES_MAX, BUFFER_BYTES // max(1, len(self.cursors))))

    def to_pull(self, now: float) -> list[Cursor[M]]:
        """Cursors that have little left and nothing on its way."""
        return [
            cursor
            for cursor in self.cursors.values()
            if not cursor.pulling and len(cursor.pieces) < PIECES_AHEAD and not cursor.lost and now >= cursor.pull_at
        ]

    def next_ready(self, *, exclusive: bool) -> Cursor[M] | None:
        """The next cursor, in turn, that has messages to hand out. `exclusive`: none of it may be in hands."""
        for _ in range(len(self._turns)):
            queue = self._turns.popleft()
            cursor = self.cursors.get(queue)
            if cursor is None:
                continue
            self._turns.append(queue)
            cursor.take_empty()
            there = cursor.pieces and len(cursor.pieces[0].messages)
            if there and not cursor.in_loop and not (exclusive and cursor.in_hands):
                return cursor
        return None

    # Committing

    def uncommitted(self) -> list[tuple[Cursor[M], int]]:
        """Positions that the server does not surely know."""
        cursors = (*self.cursors.values(), *self._leaving)
        return [(each, each.position) for each in cursors if each.position > each.committed and not each.lost]

    def to_commit(self) -> list[tuple[Cursor[M], int]]:
        """Positions that the server does not know and that are not on their way."""
        found = []
        for cursor in (*self.cursors.values(), *self._leaving):
            position = cursor.position
            if position > cursor.committing and not cursor.lost:
                cursor.committing = position
                found.append((cursor, position))
        return found

    def committed(self, sent: Sequence[tuple[Cursor[M], int]], refused: dict[Queue, MqprocError]) -> None:
        """The server's answer to a commit."""
        for cursor, position in sent:
            error = refused.get(cursor.queue)
            if isinstance(error, NotAMemberError):
                cursor.lost = True
                cursor.revoke()
            else:
                # One that was stale has been passed already.
                cursor.committed = max(cursor.committed, position)

    def not_committed(self, sent: Sequence[tuple[Cursor[M], int]]) -> None:
        """Nobody knows whether the server has got it: it is told again."""
        for cursor, _ in sent:
            cursor.committing = cursor.committed


def entries(sent: Sequence[tuple[Cursor[Any], int]]) -> list[Assigned]:
    """The rows of a commit request."""
    return [(cursor.topic, cursor.queue_id, cursor.epoch, position) for cursor, position in sent]


def pull_call(
    cursor: Cursor[Any],
    filter: Filter | None,
    messages: int,
    pull_bytes: int,
    parse: Callable[[Any, memoryview], Any],
) -> core.Call[Any]:
    """A pull of what comes next in a queue. What comes again has passed the filter before."""
    passed = None if cursor.topic.startswith(RETRY_PREFIX) else filter
    place = cursor.topic, cursor.queue_id, cursor.next_offset
    progress_s = cursor.progress_s(time.monotonic())
    request = core.pull_request(*place, messages, pull_bytes, "", HOLD_S, False, passed, progress_s)
    return core.pull_as(request, parse)
