"""Queues of one consumer: messages fetched, handed out, done and committed.

No I/O, no waiting.

    fetched pieces ──hand out──▶ handed out ──done, nacked──▶ position ──▶ committed

A queue's position is the offset of its first message that is not done: everything below it may be committed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import msgspec

from mqproc.client import requests
from mqproc.client.messages import FetchedMessages
from mqproc.errors import MqprocError, NotAMemberError
from mqproc.filters.selection import chosen
from mqproc.topic_names import RETRY_PREFIX
from mqproc.types import Filter, PullStatus, StoredMessage
from mqproc.wire.operations import Assigned, GroupAssignment

Queue = tuple[str, int]

COMMIT_S: Final = 0.01
"""Interval of commits: a killed consumer repeats at most the messages of this interval, or one message that takes
longer."""
HOLD_S: Final = 30.0
"""How long the server holds a pull of an empty queue."""
LOOK_S: Final = 1.0
"""Longest wait of a consumer's loop before it checks its state again."""
TURN_S: Final = 0.05
"""How long a receive without a timeout waits for another thread's receive, which may be taking the messages now."""
RECEIVE_MESSAGES: Final = 64
MOVED: Final = frozenset({PullStatus.OFFSET_TOO_SMALL, PullStatus.OFFSET_OVERFLOW_BADLY})

BUFFER_BYTES: Final = 64 << 20
PULL_BYTES_MAX: Final = 8 << 20
PULL_BYTES_MIN: Final = 64 << 10
PROGRESS_S: Final = 1.0
"""Shortest interval at which a queue's pulls report progress through messages that do not match."""
ABSENT_S: Final = 0.2
"""Pause before a missing queue is pulled again."""
NOTHING: Final = -1
"""Committed offset of a queue whose progress must be sent again, whatever it is."""
HANDED_MIN: Final = 4096
"""How many offsets of finished messages may remain after an unfinished one before they are compacted."""
PIECES_AHEAD: Final = 2
"""A queue is pulled while it has fewer pieces than this."""


M = TypeVar("M", bound=Sized)


@dataclass(slots=True)
class Piece(Generic[M]):
    """Messages of one pull, undecoded or an Arrow batch. `end` is the queue offset after them."""

    messages: M
    end: int


@dataclass(slots=True, eq=False)
class Cursor(Generic[M]):
    """One assigned queue, from one assignment until it is taken away."""

    topic: str
    queue_id: int
    epoch: int
    next_offset: int
    """Offset of the next pull."""
    done: int = field(init=False)
    """All messages below it were handed out and, except for those in `_handed`, are done."""
    committed: int = field(init=False)
    committing: int = field(init=False)
    """Offset of the commit in flight."""
    pieces: deque[Piece[M]] = field(default_factory=deque)
    pulling: bool = False
    pull_at: float = 0.0
    """Time of the earliest next pull."""
    progress_at: float = 0.0
    """Time from which a pull may report progress without a match."""
    in_loop: bool = False
    """A loop iterates over a piece and advances `done` itself."""
    revoked: bool = False
    """The queue belongs to another consumer, or will as soon as this one has released it."""
    lost: bool = False
    """The queue belongs to another consumer already: nothing can be committed."""
    _handed: deque[int] = field(default_factory=deque)
    _open: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.done = self.committed = self.committing = self.next_offset

    @property
    def queue(self) -> Queue:
        return self.topic, self.queue_id

    @property
    def in_progress(self) -> bool:
        """Whether messages of the queue are handed out and not done."""
        return self.in_loop or bool(self._handed)

    @property
    def position(self) -> int:
        """Offset below which all messages are done."""
        return min(self.done, self._handed[0]) if self._handed else self.done

    def progress_s(self, now: float) -> float:
        """Seconds after which a pull that starts now reports its progress without a match."""
        return max(0.0, self.progress_at - now)

    def absent(self, now: float) -> None:
        """Record that a pull found no such queue: it is pulled again until the server revokes it.

        The server does not revoke it when the topic was recreated meanwhile; the queue then continues at later offsets.
        """
        self.pulling = False
        self.pull_at = now + ABSENT_S

    def fetched(self, piece: Piece[M], moved: bool, now: float) -> None:
        """Accept a pull's answer. `moved`: the queue does not have the offset of the request."""
        self.pulling = False
        self.next_offset = piece.end
        if not len(piece.messages):
            self.progress_at = now + PROGRESS_S
        if not self.revoked:
            self._keep(piece, moved)
        if moved and not self.in_progress and piece.end < self.done:
            self.done = piece.end
            # The committed offset is beyond the queue's end: a broadcast consumer would stay there.
            self.committed = self.committing = NOTHING

    def _keep(self, piece: Piece[M], moved: bool) -> None:
        """Append a piece; merge empty pieces, which would use up the places of others."""
        last = self.pieces[-1] if self.pieces else None
        if last is None or moved or (len(last.messages) and len(piece.messages)) or piece.end < last.end:
            self.pieces.append(piece)
        elif len(piece.messages):
            self.pieces[-1] = piece
        else:
            last.end = piece.end

    def skip_empty(self) -> None:
        """Skip pieces of which the filter matched no message."""
        while self.pieces and not len(self.pieces[0].messages):
            if self.in_loop or (self.in_progress and self.pieces[0].end < self.done):
                return
            self.done = self.pieces.popleft().end

    def skip_done(self) -> None:
        """Skip the finished part of the first piece."""
        if self.pieces and self.pieces[0].end <= self.done:
            self.pieces.popleft()
        elif self.pieces and isinstance(fetched := self.pieces[0].messages, FetchedMessages):
            fetched.go_to(self.done)

    def hand_out(self, offsets: Iterable[int], end: int) -> None:
        """Record messages that are handed out and acknowledged one by one."""
        handed = list(offsets)
        self._handed.extend(handed)
        self._open.update(handed)
        self.done = end

    def hand_out_of_first(self: Cursor[FetchedMessages], most: int) -> list[StoredMessage]:
        """Hand out up to `most` messages of the first piece, each to be acknowledged."""
        piece = self.pieces[0]
        messages, end = piece.messages.take(most), piece.end
        if len(piece.messages):
            end = piece.messages.next_queue_offset
        else:
            self.pieces.popleft()
        self.hand_out((message.queue_offset for message in messages), end)
        return messages

    def ack(self, offset: int) -> bool:
        """Mark a handed-out message as done; False when it was not handed out."""
        if offset not in self._open:
            return False
        self._open.discard(offset)
        while self._handed and self._handed[0] not in self._open:
            self._handed.popleft()
        if len(self._handed) > 2 * len(self._open) + HANDED_MIN:
            # One message that is unfinished for hours would keep all later offsets.
            self._handed = deque(each for each in self._handed if each in self._open)
        return True

    def is_handed_out(self, offset: int) -> bool:
        """Whether a message is handed out and not acknowledged."""
        return offset in self._open

    def discard_handed_out(self) -> None:
        """Forget handed-out messages: they are not done, nor is any later message."""
        self.done = self.position
        self._handed.clear()
        self._open.clear()

    def restarted(self) -> Cursor[M]:
        """A cursor of the same queue that starts at the position, in place of this one."""
        other = Cursor[M](self.topic, self.queue_id, self.epoch, self.position)
        other.committed = other.committing = self.committed
        return other

    def revoke(self) -> None:
        """Hand out no more messages of this queue."""
        self.revoked = True
        self.pieces.clear()


@dataclass(slots=True)
class Loop:
    """An iteration over a piece; its body has a message, or a batch up to `end`."""

    cursor: Cursor[Any]
    begin: int = -1
    end: int = 0

    def leave(self) -> None:
        """Mark the messages of the body as done."""
        if self.begin == self.cursor.done:
            self.cursor.done = self.end or self.begin + 1
            if not self.cursor.in_loop:
                self.cursor.skip_done()


class Assignment(Generic[M]):
    """All queues of one consumer.

    Thread-safe by a lock of its own, which costs an event loop next to nothing.
    """

    def __init__(self) -> None:
        self.member_id = ""
        self.generation = -1
        self.cursors: dict[Queue, Cursor[M]] = {}
        self._leaving: list[Cursor[M]] = []
        self._released = -1
        self._turns: deque[Queue] = deque()
        self._loops: dict[int, Loop] = {}
        self._lock = threading.RLock()

    # Assignments

    def apply(self, answer: GroupAssignment) -> None:
        """Apply the server's assignment. Queues that it does not contain are given up."""
        with self._lock:
            self.member_id = answer.member_id
            if not answer.changed:
                return
            if answer.generation < self.generation:
                self._released = -1  # The server has restarted its count.
            self.generation = answer.generation
            assigned = {(topic, queue_id): (epoch, offset) for topic, queue_id, epoch, offset in answer.queues}
            for queue, cursor in list(self.cursors.items()):
                if assigned.get(queue, (None, 0))[0] != cursor.epoch:
                    self._give_up(cursor, lost=queue in assigned)
            new = {queue: Cursor[M](*queue, *begin) for queue, begin in assigned.items() if queue not in self.cursors}
            for cursor in self._leaving:
                # A queue that is assigned under a new epoch was lost meanwhile.
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
        """Queues with their epochs, for joining again."""
        with self._lock:
            return [(each.topic, each.queue_id, each.epoch) for each in self.cursors.values() if not each.lost]

    def to_release(self) -> tuple[int, list[Cursor[M]]] | None:
        """The generation to release, with the cursors to commit before, if any.

        Nothing is released while messages of a given-up queue are in progress, unless that queue is lost.
        """
        with self._lock:
            if self._released >= self.generation or any(each.in_progress and not each.lost for each in self._leaving):
                return None
            leaving, self._leaving = self._leaving, []
            self._released = self.generation
            return self.generation, leaving

    def not_released(self) -> None:
        """Record that the server may not have received the release: it is sent again."""
        with self._lock:
            self._released = -1

    def queues(self) -> list[Queue]:
        """The assigned queues, sorted."""
        with self._lock:
            return sorted(self.cursors)

    def positions(self) -> dict[Queue, int]:
        """Position of each assigned queue."""
        with self._lock:
            return {queue: cursor.position for queue, cursor in self.cursors.items()}

    def seekable(self, topics: Sequence[str] = ()) -> tuple[dict[Queue, int], dict[Queue, int]]:
        """Positions and epochs of the topics' queues; by default of all except retry queues."""
        with self._lock:
            positions = {
                queue: cursor.position
                for queue, cursor in self.cursors.items()
                if (queue[0] in topics if topics else not queue[0].startswith(RETRY_PREFIX))
            }
            return positions, self.epochs(positions)

    def epochs(self, queues: Iterable[Queue]) -> dict[Queue, int]:
        """Epochs of the given queues; queues that are not assigned are left out."""
        with self._lock:
            return {queue: self.cursors[queue].epoch for queue in queues if queue in self.cursors}

    def go_to(self, queue: Queue, offset: int) -> tuple[Cursor[M], int]:
        """Restart a queue at an offset; messages handed out before no longer count."""
        with self._lock:
            found = self.cursors[queue]
            cursor = Cursor[M](*queue, found.epoch, offset)
            self._leaving.append(found)
            self._replace(found, cursor)
            return cursor, offset

    def _replace(self, cursor: Cursor[M], other: Cursor[M]) -> None:
        """Replace a cursor without a call, so that no signal handler can raise in between."""
        queue = cursor.queue
        self.cursors[queue] = other
        cursor.lost = cursor.revoked = True
        cursor.pieces.clear()

    def begin_again(self) -> None:
        """Restart each queue at its position: messages handed out and not done are handed out again."""
        with self._lock:
            for cursor in list(self.cursors.values()):
                self._replace(cursor, cursor.restarted())
            self._turns = deque(self.cursors)
            self._released = -1

    def ack(self, places: Iterable[tuple[Queue, int]]) -> bool:
        """Mark handed-out messages as done; True when that may have freed a queue."""
        freed = False
        with self._lock:
            for queue, offset in places:
                found = self.cursors.get(queue)
                if found is None or not found.ack(offset):
                    freed |= any(cursor.queue == queue and cursor.ack(offset) for cursor in self._leaving)
        return freed

    def may_continue(self, queue: Queue) -> bool:
        """Whether messages of a queue may be handed out or pulled, with no message in progress."""
        found = self.cursors.get(queue)
        return found is not None and not found.in_progress and (bool(found.pieces) or not found.pulling)

    def holds(self, queue: Queue, offset: int) -> bool:
        """Whether a handed-out message belongs to a queue that this consumer keeps."""
        with self._lock:
            found = self.cursors.get(queue)
            return found is not None and found.is_handed_out(offset)

    def take_back(self, places: Iterable[tuple[Queue, int]]) -> bool:
        """Redeliver handed-out and all later messages; whether that may have freed a queue."""
        freed = False
        with self._lock:
            for queue, offset in places:
                found = self.cursors.get(queue)
                if found is not None and found.is_handed_out(offset):
                    self._replace(found, found.restarted())
                    continue
                for cursor in self._leaving:
                    if cursor.queue == queue and cursor.is_handed_out(offset):
                        cursor.discard_handed_out()
                        freed = True
        return freed

    # Fetching and handing out

    @property
    def pull_bytes(self) -> int:
        """Size limit of one pull, such that the pulls of all queues fit the buffer."""
        return max(PULL_BYTES_MIN, min(PULL_BYTES_MAX, BUFFER_BYTES // max(1, len(self.cursors))))

    def start_pulls(self, now: float) -> list[Cursor[M]]:
        """Mark as pulling, and return, the cursors that have few pieces left and no pull in flight."""
        with self._lock:
            found = [
                cursor
                for cursor in self.cursors.values()
                if not (cursor.pulling or cursor.lost) and len(cursor.pieces) < PIECES_AHEAD and now >= cursor.pull_at
            ]
            for cursor in found:
                cursor.pulling = True
        return found

    def fetched(self, cursor: Cursor[M], piece: Piece[M], moved: bool, now: float) -> None:
        """Accept a pull's answer; see `Cursor.fetched`."""
        with self._lock:
            cursor.fetched(piece, moved, now)

    def has_fetched(self) -> bool:
        """Whether messages have been fetched or are being fetched."""
        with self._lock:
            return any(cursor.pulling or cursor.pieces for cursor in self.cursors.values())

    def next_ready(self, *, exclusive: bool) -> Cursor[M] | None:
        """The next cursor, in turn, with messages to hand out.

        `exclusive`: skip queues with messages in progress.
        """
        for _ in range(len(self._turns)):
            queue = self._turns.popleft()
            cursor = self.cursors.get(queue)
            if cursor is None:
                continue
            self._turns.append(queue)
            cursor.skip_empty()
            there = cursor.pieces and len(cursor.pieces[0].messages)
            if there and not cursor.in_loop and not (exclusive and cursor.in_progress):
                return cursor
        return None

    def hand_out(self: Assignment[FetchedMessages], most: int, *, exclusive: bool) -> list[StoredMessage]:
        """Hand out up to `most` messages, each to be acknowledged."""
        found: list[StoredMessage] = []
        with self._lock:
            while len(found) < most and (cursor := self.next_ready(exclusive=exclusive)):
                found += cursor.hand_out_of_first(most - len(found))
        return found

    def take_piece(self) -> tuple[Cursor[M], Piece[M]] | None:
        """The next piece, for a loop that iterates over it."""
        with self._lock:
            cursor = self.next_ready(exclusive=True)
            if cursor is None:
                return None
            cursor.in_loop = True
            return cursor, cursor.pieces.popleft()

    def start_loop(self, cursor: Cursor[M], begin: int = -1, end: int = 0) -> Loop:
        """Record a loop over a piece of a cursor."""
        loop = self._loops[id(cursor)] = Loop(cursor, begin, end)
        return loop

    def leave_loops(self) -> None:
        """Mark the messages in the bodies of all loops as done, and end loops that are not over."""
        with self._lock:
            for loop in self._loops.values():
                loop.leave()
            for cursor in list(self.cursors.values()):
                if cursor.in_loop:
                    self._replace(cursor, cursor.restarted())
                cursor.in_loop = False
            for cursor in self._leaving:
                cursor.in_loop = False
            self._loops.clear()

    def put_back(self, cursor: Cursor[M], piece: Piece[M]) -> None:
        """End a loop. When it was left in the middle of the piece, the rest is handed out again."""
        with self._lock:
            if cursor.done >= piece.end:
                self._loops.pop(id(cursor), None)
            elif not cursor.revoked:
                if isinstance(piece.messages, FetchedMessages):
                    piece.messages.go_to(cursor.done)
                cursor.pieces.appendleft(piece)
            cursor.in_loop = False  # Last: a loop that begins before this starts at the position.

    # Committing

    def uncommitted(self) -> list[tuple[Cursor[M], int]]:
        """Positions that the server may not know."""
        with self._lock:
            cursors = (*self.cursors.values(), *self._leaving)
            return [(each, each.position) for each in cursors if each.position > each.committed and not each.lost]

    def to_commit(self) -> list[tuple[Cursor[M], int]]:
        """Positions that the server does not know and that are not in flight."""
        found = []
        with self._lock:
            for cursor in (*self.cursors.values(), *self._leaving):
                position = cursor.position
                if position > cursor.committing and not cursor.lost:
                    cursor.committing = position
                    found.append((cursor, position))
        return found

    def committed(self, sent: Sequence[tuple[Cursor[M], int]], refused: dict[Queue, MqprocError]) -> None:
        """Apply the server's answer to a commit."""
        with self._lock:
            for cursor, position in sent:
                error = refused.get(cursor.queue)
                if isinstance(error, NotAMemberError):
                    cursor.lost = True
                    cursor.revoke()
                else:
                    # A stale position has been passed already.
                    cursor.committed = max(cursor.committed, position)

    def not_committed(self, sent: Sequence[tuple[Cursor[M], int]]) -> None:
        """Record that the server may not have received a commit: it is sent again."""
        with self._lock:
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
    object_bytes: int,
) -> requests.Call[Any]:
    """A pull of a queue's next messages; `object_bytes` as in `requests.pull`."""
    place = cursor.topic, cursor.queue_id, cursor.next_offset
    selection, progress_s = chosen("", filter), cursor.progress_s(time.monotonic())
    request = requests.pull_request(*place, messages, pull_bytes, selection, HOLD_S, progress_s)
    return requests.pull_as(msgspec.structs.replace(request, object_bytes=object_bytes), parse)
