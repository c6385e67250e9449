"""Long polls: pulls that found nothing, held until their queue has more, their time is over, or their client is gone.

The bell only says "look": then each held queue's maximum offset is compared with the one last seen, in one array
operation, and only the pulls of queues that moved are tried again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mqproc.layout import queue_table as layout
from mqproc.store.pull import Pulled
from mqproc.store.queue_table import QueueTable
from mqproc.wire.operations import PullRequest
from mqproc.wire.server import Connection

NO_QUEUE = -1


@dataclass(slots=True, eq=False)
class HeldPull:
    """A held request. `offset` is where it goes on, `last` what it would be answered now."""

    connection: Connection
    request_id: int
    options: PullRequest
    offset: int
    deadline_ns: int
    last: Pulled
    released: bool = field(default=False)

    @property
    def queue(self) -> tuple[str, int]:
        return self.options.topic, self.options.queue_id


class HeldPulls:
    """All held pulls, by queue, by client and by deadline."""

    def __init__(self, table: QueueTable) -> None:
        self._table = table
        self._by_queue: dict[tuple[str, int], list[HeldPull]] = {}
        self._by_connection: dict[Connection, set[HeldPull]] = {}
        self._deadlines: list[tuple[int, int, HeldPull]] = []
        self._sequence = 0
        self._count = 0
        # What is compared: rows of the queues that exist, their places in the table's words, the maxima last seen.
        self._queues: list[tuple[str, int]] = []
        self._cells: NDArray[np.int64] = np.empty(0, np.int64)
        self._seen: NDArray[np.int64] = np.empty(0, np.int64)
        self._missing: list[tuple[str, int]] = []
        self._stale = False

    def __len__(self) -> int:
        return self._count

    def hold(self, pull: HeldPull) -> None:
        """Keep a pull. The caller looks at the queue once more afterwards (`moved`)."""
        pulls = self._by_queue.setdefault(pull.queue, [])
        self._stale |= not pulls
        pulls.append(pull)
        self._by_connection.setdefault(pull.connection, set()).add(pull)
        self._sequence += 1
        heapq.heappush(self._deadlines, (pull.deadline_ns, self._sequence, pull))
        self._count += 1

    def release(self, pull: HeldPull) -> None:
        """Forget a pull that is answered; its place in the heap goes when its time comes."""
        if pull.released:
            return
        pull.released = True
        self._count -= 1
        pulls = self._by_queue[pull.queue]
        pulls.remove(pull)
        if not pulls:
            del self._by_queue[pull.queue]
            self._stale = True
        of_connection = self._by_connection[pull.connection]
        of_connection.discard(pull)
        if not of_connection:
            del self._by_connection[pull.connection]
        if len(self._deadlines) > 2 * self._count + 64:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].released]
            heapq.heapify(self._deadlines)

    def drop(self, connection: Connection) -> None:
        """Forget the pulls of a client that is gone."""
        for pull in list(self._by_connection.get(connection, ())):
            self.release(pull)

    def moved(self) -> list[HeldPull]:
        """The pulls of queues whose maximum offset is another than at the last call, or that are new here."""
        if not self._by_queue:
            return []
        fresh: set[tuple[str, int]] = set()
        if self._stale or self._appeared():
            fresh = self._list_queues()
        maxima = self._table.cells[self._cells]
        changed = np.flatnonzero(maxima != self._seen).tolist()
        self._seen = maxima
        return [pull for queue in {*(self._queues[row] for row in changed), *fresh} for pull in self._of(queue)]

    def expired(self, now_ns: int) -> list[HeldPull]:
        """The pulls whose time is over."""
        found = []
        while self._deadlines and (self._deadlines[0][2].released or self._deadlines[0][0] <= now_ns):
            pull = heapq.heappop(self._deadlines)[2]
            if not pull.released:
                found.append(pull)
        return found

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """How long nothing expires."""
        if not self._deadlines:
            return at_most_s
        return min(at_most_s, max(0, self._deadlines[0][0] - now_ns) / 1e9)

    def all(self) -> list[HeldPull]:
        """Every held pull."""
        return [pull for pulls in self._by_queue.values() for pull in pulls]

    def _of(self, queue: tuple[str, int]) -> Iterable[HeldPull]:
        return tuple(self._by_queue.get(queue, ()))

    def _appeared(self) -> bool:
        return any(self._table.find(*queue) != NO_QUEUE for queue in self._missing)

    def _list_queues(self) -> set[tuple[str, int]]:
        """Make the arrays anew; the queues that were not compared before."""
        before = set(self._queues)
        numbers = {queue: self._table.find(*queue) for queue in self._by_queue}
        self._queues = [queue for queue, number in numbers.items() if number != NO_QUEUE]
        self._missing = [queue for queue, number in numbers.items() if number == NO_QUEUE]
        places = [layout.entry_word(numbers[queue], layout.MAX_OFFSET) for queue in self._queues]
        seen = dict(zip(before_places(self._cells), self._seen.tolist(), strict=True))
        self._cells = np.array(places, np.int64)
        # A queue that is new here is looked at once in any case: it may have moved before it was held.
        self._seen = np.array([seen.get(place, -1) for place in places], np.int64)
        self._stale = False
        return set(self._queues) - before


def before_places(cells: NDArray[np.int64]) -> list[int]:
    """Word indices as Python's ints."""
    places: list[int] = cells.tolist()
    return places
