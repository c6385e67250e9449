"""Transactions that are open: by queue offset, by place in the log, by id; and how far all are done.

half topic   ····│ done │ open │ done │ open │ not read yet …
             progress ──┘                    └── walked
marks        ····│ all below progress │ some not │ …
                 progress ────────────┘
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from typing import Final

from mqproc.store.schedule.delivery_marks import mark_of
from mqproc.store.transactions import HalfMessage, TransactionKey

COMPACT_MIN: Final = 4096
ENDED_MAX: Final = 65_536
"""Of so many transactions that ended it is known how."""


class OpenTransactions:
    """The open half messages of one store. `walked`: those below it were seen."""

    def __init__(self) -> None:
        self.walked = 0
        self._open: dict[int, HalfMessage] = {}
        self._by_place: dict[int, HalfMessage] = {}
        self._by_key: dict[TransactionKey, HalfMessage] = {}
        self._offsets: list[int] = []
        self._done_ahead: set[int] = set()
        self._marks: deque[tuple[int, int]] = deque()
        self._ended: OrderedDict[int, bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def all(self) -> list[HalfMessage]:
        """Every open one; one that a copy has taken the place of is among them until it is marked."""
        return list(self._open.values())

    def is_newest(self, half: HalfMessage) -> bool:
        """Whether it is open, and no copy of it is."""
        return self._by_place.get(half.physical_offset) is half

    def find(self, physical_offset: int, key: TransactionKey) -> HalfMessage | None:
        """The open one that lies, or lay before its checks, at a place; else the newest copy of that id."""
        found = self._by_place.get(physical_offset)
        if found is not None:
            return found if found.key == key else None
        found = self._by_key.get(key)
        # Other half messages may bear the same id: only a copy stands for what lay elsewhere.
        return found if found is not None and found.is_copy else None

    def was_seen(self, offset: int) -> bool:
        """Whether a half message that is not open is done: it was seen, or marked before it could be."""
        return offset < self.walked or offset in self._done_ahead

    def knows(self, offset: int) -> bool:
        """Whether a half message is open here already."""
        return offset in self._open

    def add(self, half: HalfMessage) -> HalfMessage | None:
        """An open half message. The one that it is a copy of, if that is open: it is done when it is marked."""
        old = self._copied_by(half)
        if old is not None:
            half.places = [*old.places, half.physical_offset]
        self._open[half.offset] = half
        heapq.heappush(self._offsets, half.offset)
        if len(self._offsets) > COMPACT_MIN and len(self._offsets) > 2 * len(self._open):
            self._offsets = sorted(self._open)
        for place in half.places:
            self._by_place[place] = half
        self._by_key[half.key] = half
        return old

    def _copied_by(self, half: HalfMessage) -> HalfMessage | None:
        if half.made_from:
            for place in (half.made_from, 0):
                found = self._by_place.get(place)
                if found is not None and mark_of(place) == half.made_from:
                    return found
        # RocketMQ's copies do not say what they were made from.
        found = self._by_key.get(half.key)
        return found if found is not None and found.checks < half.checks and found.offset < half.offset else None

    def done(self, offset: int) -> None:
        """A half message is marked, or about to be seen so."""
        half = self._open.pop(offset, None)
        if offset >= self.walked:
            self._done_ahead.add(offset)
        if half is None:
            return
        for place in half.places:
            if self._by_place.get(place) is half:
                del self._by_place[place]
        if self._by_key.get(half.key) is half:
            del self._by_key[half.key]

    def walk_past(self, offset: int) -> bool:
        """The walk has come to a half message: whether it is to be added."""
        self.walked = offset + 1
        if offset in self._done_ahead:
            self._done_ahead.discard(offset)
            return False
        return offset not in self._open

    def walk_to(self, offset: int) -> None:
        """The walk has come so far; what it did not find there is gone."""
        self.walked = max(self.walked, offset)
        if self._done_ahead:
            self._done_ahead = {each for each in self._done_ahead if each >= self.walked}

    # How transactions ended

    def ended(self, half: HalfMessage, *, committed: bool) -> None:
        """Remember how."""
        for place in half.places:
            self._ended[place] = committed
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def how_ended(self, physical_offset: int) -> bool | None:
        """Whether it was committed; None when that is not known any more."""
        return self._ended.get(physical_offset)

    # Progress

    def marked(self, mark_offset: int, offsets: list[int]) -> None:
        """A mark lies in its queue."""
        self._marks.append((mark_offset, max(offsets, default=-1)))

    def half_progress(self) -> int:
        """All half messages below it are done."""
        while self._offsets and self._offsets[0] not in self._open:
            heapq.heappop(self._offsets)
        return min(self._offsets[0], self.walked) if self._offsets else self.walked

    def mark_progress(self, half_progress: int) -> int | None:
        """All marks below it are of half messages below that progress; None when every known mark is."""
        while self._marks and self._marks[0][1] < half_progress:
            self._marks.popleft()
        return self._marks[0][0] if self._marks else None
