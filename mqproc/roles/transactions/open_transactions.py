"""Table of open transactions by queue offset, log position and id.

half topic   ····│ done │ open │ done │ open │ not read yet …
             offset ────┘                    └── scanned_to
op topic     ····│ all for half messages below the offset │ some above …
             offset ──────────────────────────────────────┘
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from typing import Final

from mqproc.store.schedule.delivery_marks import mark_of
from mqproc.store.transactions import HalfMessage, TransactionKey

COMPACT_MIN: Final = 4096
ENDED_MAX: Final = 65_536
"""Number of ended transactions whose outcome is remembered."""


class OpenTransactions:
    """Open half messages. Those below queue offset `scanned_to` have been read."""

    def __init__(self) -> None:
        self.scanned_to = 0
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
        """All open half messages, including those replaced by a copy and not marked yet."""
        return list(self._open.values())

    def is_newest(self, half: HalfMessage) -> bool:
        """Whether it is open and not replaced by a copy."""
        return self._by_place.get(half.physical_offset) is half

    def find(self, physical_offset: int, key: TransactionKey) -> HalfMessage | None:
        """Open half message at a position, also an original one; else the newest copy."""
        found = self._by_place.get(physical_offset)
        if found is not None:
            return found if found.key == key else None
        found = self._by_key.get(key)
        # Half messages may share an id: only a copy represents a record at another position.
        return found if found is not None and found.is_copy else None

    def was_scanned(self, offset: int) -> bool:
        """Whether a half message was read or marked; then it is done unless open."""
        return offset < self.scanned_to or offset in self._done_ahead

    def is_open(self, offset: int) -> bool:
        """Whether a half message is open."""
        return offset in self._open

    def add(self, half: HalfMessage) -> HalfMessage | None:
        """Add an open half message; returns the open one that it is a copy of, which must be marked."""
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
        # RocketMQ's copies have no mark of their origin.
        found = self._by_key.get(half.key)
        return found if found is not None and found.checks < half.checks and found.offset < half.offset else None

    def done(self, offset: int) -> None:
        """Close a half message that is marked, also before it was read."""
        half = self._open.pop(offset, None)
        if offset >= self.scanned_to:
            self._done_ahead.add(offset)
        if half is None:
            return
        for place in half.places:
            if self._by_place.get(place) is half:
                del self._by_place[place]
        if self._by_key.get(half.key) is half:
            del self._by_key[half.key]

    def scan_past(self, offset: int) -> bool:
        """Advance past a half message; returns whether it must be added."""
        self.scanned_to = offset + 1
        if offset in self._done_ahead:
            self._done_ahead.discard(offset)
            return False
        return offset not in self._open

    def scan_to(self, offset: int) -> None:
        """Advance to a queue offset; missing half messages are gone."""
        self.scanned_to = max(self.scanned_to, offset)
        if self._done_ahead:
            self._done_ahead = {each for each in self._done_ahead if each >= self.scanned_to}

    # Outcomes

    def ended(self, half: HalfMessage, *, committed: bool) -> None:
        """Remember the outcome of a transaction."""
        for place in half.places:
            self._ended[place] = committed
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def how_ended(self, physical_offset: int) -> bool | None:
        """Whether a transaction was committed; None if its outcome is not remembered."""
        return self._ended.get(physical_offset)

    # Offsets

    def marked(self, mark_offset: int, offsets: list[int]) -> None:
        """An op message is stored at a queue offset."""
        self._marks.append((mark_offset, max(offsets, default=-1)))

    def half_progress(self) -> int:
        """Queue offset below which all half messages are done."""
        while self._offsets and self._offsets[0] not in self._open:
            heapq.heappop(self._offsets)
        return min(self._offsets[0], self.scanned_to) if self._offsets else self.scanned_to

    def mark_progress(self, half_progress: int) -> int | None:
        """Offset below which op messages are of half messages below `half_progress`, else None."""
        while self._marks and self._marks[0][1] < half_progress:
            self._marks.popleft()
        return self._marks[0][0] if self._marks else None
