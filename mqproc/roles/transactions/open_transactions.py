"""Table of open transactions by queue offset, log position and id.

half topic   ····│ done │ open │ done │ open │ not read yet …
             offset ────┘                    └── scanned_to
op topic     ····│ all for half messages below the offset │ some above …
             offset ──────────────────────────────────────┘
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from mqproc.errors import (
    BadRequestError,
    StoreBusyError,
    TransactionEndedError,
    TransactionNotFoundError,
    TransactionOverdueError,
)
from mqproc.layout import control
from mqproc.layout.record_codec import decode_message_id, decode_record, decode_records
from mqproc.roles.role import RoleContext
from mqproc.roles.transactions.op_messages import is_committed
from mqproc.store.cooperative import Slices
from mqproc.store.read.queries import StoreQueries
from mqproc.store.schedule.delivery_marks import mark_of
from mqproc.store.transactions import QUEUE, HalfMessage, TransactionKey, parse_half
from mqproc.topic_names import HALF_TOPIC
from mqproc.wire.operations import TransactionEndRequest, TransactionsRequest

COMPACT_MIN: Final = 4096
ENDED_MAX: Final = 4096
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

    def at(self, physical_offset: int) -> HalfMessage | None:
        """The open half message at this position, or whose original is at this position."""
        return self._by_place.get(physical_offset)

    def is_newest(self, half: HalfMessage) -> bool:
        """Whether a half message is open and not replaced by a copy."""
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


# Lookup of half messages to commit or roll back, and of outcomes of ended transactions

IDS_PER_SLICE: Final = 128
HALVES_PER_SLICE: Final = 4096
COMMITTED_MAX: Final = 64
"""Messages with one unique id that are searched for the committed one."""


class TransactionSearch:
    """Searches the table of open transactions, then the log."""

    def __init__(
        self, context: RoleContext, reading: StoreQueries, table: OpenTransactions, add: Callable[[HalfMessage], None]
    ) -> None:
        """`add` is called with a half message that is not dispatched yet."""
        self._clock = context.clock
        self._words = context.control.words
        self._options = context.options
        self._reading = reading
        self._table = table
        self._add = add

    def find(self, options: TransactionEndRequest) -> Slices[HalfMessage | None]:
        """Half message of a commit or rollback; None when it has ended this way already.

        The slices raise TransactionNotFoundError, TransactionEndedError, TransactionOverdueError, BadRequestError,
        StoreBusyError, CorruptStoreError.
        """
        half = self._table.find(options.physical_offset, (options.group, options.topic, options.transaction_id))
        if half is None:
            half = self._half_at(options)
            if self._table.was_scanned(half.offset):
                yield from self._check_ended_so(options, half)
                return None
            self._add(half)
        if self._table.how_ended(half.physical_offset) is not None:
            yield from self._check_ended_so(options, half)  # Only its op message is missing.
            return None
        if not options.from_check:
            self._check_not_overdue(half)
        return half

    def open(self, options: TransactionsRequest) -> Slices[list[HalfMessage]]:
        """Open half messages for a list. A copy also matches the ids of its originals."""
        ids = {*options.ids}
        for number, each in enumerate(options.ids, 1):
            if number % IDS_PER_SLICE == 0:
                yield
            if (copy := self._copy_of(each)) is not None:
                ids.add(copy.message_id)
        found = []
        for number, half in enumerate(self._table.all(), 1):
            if number % HALVES_PER_SLICE == 0:
                yield
            if (
                self._table.is_newest(half)
                and self._table.how_ended(half.physical_offset) is None
                and (not options.group or half.group == options.group)
                and (not ids or half.transaction_id in ids or half.message_id in ids)
            ):
                found.append(half)
        return found

    def _copy_of(self, message_id: str) -> HalfMessage | None:
        """Open copy of the half message with this id; None if there is no such message."""
        try:
            _, place = decode_message_id(message_id)
        except BadRequestError:
            return None
        record = self._reading.record_at(place)
        message = None if record is None else decode_record(record.data)
        if message is None or message.topic != HALF_TOPIC:
            return None
        return self._table.find(place, parse_half(message).key)

    def _half_at(self, options: TransactionEndRequest) -> HalfMessage:
        place = options.physical_offset
        record = self._reading.record_at(place)
        if record is None and self._reading.records.visible().end <= place < self._words[control.WRITTEN]:
            raise StoreBusyError(f"the half message at {place:,} is not synced yet", hint_ms=5)
        message = None if record is None else decode_record(record.data)
        if message is None or message.topic != HALF_TOPIC:
            raise TransactionNotFoundError(f"no half message lies at {place:,} of the log")
        half = parse_half(message)
        if (half.transaction_id, half.topic) != (options.transaction_id, options.topic):
            raise TransactionNotFoundError(
                f"the half message at {place:,} is of transaction {half.transaction_id} of {half.topic},"
                f" not {options.transaction_id} of {options.topic}"
            )
        if half.group != options.group:
            raise BadRequestError(f"transaction {half.transaction_id} belongs to producer group {half.group!r}")
        return half

    def _check_ended_so(self, options: TransactionEndRequest, half: HalfMessage) -> Slices[None]:
        """Raise TransactionEndedError when a transaction has ended the other way."""
        committed = self._table.how_ended(options.physical_offset)
        if committed is None:
            committed = yield from self._was_committed(half)
            if not committed and self._copies_are_unread():
                raise StoreBusyError("too many open transactions, the outcome is not known yet", hint_ms=100)
        if committed != options.commit:
            how = "committed" if committed else "rolled back or discarded"
            raise TransactionEndedError(f"transaction {half.transaction_id} was {how} already")

    def _copies_are_unread(self) -> bool:
        bounds = self._reading.queues.bounds(HALF_TOPIC, QUEUE)
        return bounds is not None and self._table.scanned_to < bounds.max_offset

    def _was_committed(self, half: HalfMessage) -> Slices[bool]:
        """Whether the committed message exists, for transactions of earlier processes."""
        if not self._options.message_index_enable:
            raise TransactionEndedError(
                f"transaction {half.transaction_id} has ended; its outcome is unknown without the index"
            )
        batch = yield from self._reading.by_key(
            half.topic,
            half.transaction_id,
            unique=True,
            max_messages=COMMITTED_MAX,
            max_bytes=self._options.max_pull_bytes,
        )
        found = (message for part in batch.records for message in decode_records(part.tobytes()))
        return any(is_committed(message) and parse_half(message).group == half.group for message in found)

    def _check_not_overdue(self, half: HalfMessage) -> None:
        """Raise TransactionOverdueError after the immunity time, when only a check may decide."""
        limit_ms = half.immunity_ms(self._options.transaction_timeout)
        age_ms = self._clock.time_ms() - half.born_ms
        if half.immunity_s and age_ms > limit_ms:
            raise TransactionOverdueError(
                f"transaction {half.transaction_id} is {age_ms:,} ms old; after {limit_ms:,} ms its check decides"
            )
