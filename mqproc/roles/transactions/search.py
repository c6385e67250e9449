"""Lookup of half messages to commit or roll back, and of outcomes of ended transactions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mqproc.errors import (
    BadRequestError,
    StoreBusyError,
    TransactionEndedError,
    TransactionNotFoundError,
    TransactionOverdueError,
)
from mqproc.layout import control
from mqproc.layout.record_codec import decode_message_id, decode_record, decode_records
from mqproc.roles.transactions.op_messages import is_committed
from mqproc.roles.transactions.open_transactions import OpenTransactions
from mqproc.store.cooperative import finish
from mqproc.store.transactions import QUEUE, HalfMessage, parse_half
from mqproc.topic_names import HALF_TOPIC
from mqproc.wire.operations.groups import TransactionEndRequest, TransactionsRequest

if TYPE_CHECKING:
    from mqproc.roles.role import RoleContext
    from mqproc.store.read.queries import StoreQueries

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

    def find(self, options: TransactionEndRequest) -> HalfMessage | None:
        """Half message of a commit or rollback; None when it has ended this way already.

        Raises TransactionNotFoundError, TransactionEndedError, TransactionOverdueError, BadRequestError,
        StoreBusyError, CorruptStoreError.
        """
        half = self._table.find(options.physical_offset, (options.group, options.topic, options.transaction_id))
        if half is None:
            half = self._half_at(options)
            if self._table.was_scanned(half.offset):
                self._check_ended_so(options, half)
                return None
            self._add(half)
        if self._table.how_ended(half.physical_offset) is not None:
            self._check_ended_so(options, half)  # Only its op message is missing.
            return None
        if not options.from_check:
            self._check_not_overdue(half)
        return half

    def open(self, options: TransactionsRequest) -> list[HalfMessage]:
        """Open half messages for a list. A copy also matches the ids of its originals."""
        wanted = {*options.ids}
        copies = (self._copy_of(each) for each in options.ids)
        wanted.update(half.message_id for half in copies if half is not None)
        return [
            half
            for half in self._table.all()
            if self._table.is_newest(half)
            and self._table.how_ended(half.physical_offset) is None
            and (not options.group or half.group == options.group)
            and (not wanted or half.transaction_id in wanted or half.message_id in wanted)
        ]

    def _copy_of(self, message_id: str) -> HalfMessage | None:
        """Open copy of the half message with this id; None if there is no such message."""
        try:
            _, place = decode_message_id(message_id)
        except BadRequestError:
            return None
        record = self._reading.record_at(place)
        message = None if record is None else decode_record(record.data, check_crc=False)
        if message is None or message.topic != HALF_TOPIC:
            return None
        return self._table.find(place, parse_half(message).key)

    def _half_at(self, options: TransactionEndRequest) -> HalfMessage:
        place = options.physical_offset
        record = self._reading.record_at(place)
        if record is None and self._reading.records.visible().end <= place < self._words[control.WRITTEN]:
            raise StoreBusyError(f"the half message at {place:,} is not synced yet", hint_ms=5)
        message = None if record is None else decode_record(record.data, check_crc=False)
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

    def _check_ended_so(self, options: TransactionEndRequest, half: HalfMessage) -> None:
        """Raise TransactionEndedError when a transaction has ended the other way."""
        committed = self._table.how_ended(options.physical_offset)
        if committed is None:
            committed = self._was_committed(half)
            if not committed and self._copies_are_unread():
                raise StoreBusyError("too many open transactions, the outcome is not known yet", hint_ms=100)
        if committed != options.commit:
            how = "committed" if committed else "rolled back or discarded"
            raise TransactionEndedError(f"transaction {half.transaction_id} was {how} already")

    def _copies_are_unread(self) -> bool:
        bounds = self._reading.queues.bounds(HALF_TOPIC, QUEUE)
        return bounds is not None and self._table.scanned_to < bounds.max_offset

    def _was_committed(self, half: HalfMessage) -> bool:
        """Whether the committed message exists, for transactions of earlier processes."""
        if not self._options.message_index_enable:
            raise TransactionEndedError(
                f"transaction {half.transaction_id} has ended; its outcome is unknown without the index"
            )
        batch = finish(
            self._reading.by_key(
                half.topic,
                half.transaction_id,
                unique=True,
                max_messages=COMMITTED_MAX,
                max_bytes=self._options.max_pull_bytes,
            )
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
