"""Messages that a role adds and must be sure of: told when all are in the log, whatever becomes of the writer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mqproc.errors import MqprocError, StoreBusyError
from mqproc.message import StoredMessage
from mqproc.roles.appender import Appender, NewMessage, Outcome, Refused, Stored
from mqproc.roles.group_retries import identity, records_in
from mqproc.store.reads.log_scan import Conditions

if TYPE_CHECKING:
    from mqproc.store.reads.reading import StoreReading


@dataclass(slots=True, eq=False)
class _Writing:
    """Messages on their way into the log. `head_offset`: the queue offset of the first of them."""

    head: NewMessage
    left: int
    stored: Callable[[int], None]
    refused: Callable[[MqprocError], None]
    part: Callable[[Sequence[NewMessage]], None]
    head_offset: int = -1
    error: MqprocError | None = None


def _untold(_some: Sequence[NewMessage]) -> None:
    """For who need not know of a part."""


class Writes:
    """All of one role, over one appender. `under_way`: how many are not settled."""

    def __init__(self, reading: StoreReading, appender: Appender, max_bytes: int) -> None:
        self._reading = reading
        self._appender = appender
        self._max_bytes = max_bytes
        self.under_way = 0

    @property
    def has_room(self) -> bool:
        return self._appender.has_room

    @property
    def settled(self) -> bool:
        """Whether what a killed predecessor had handed to the writer is in the log, or never will be."""
        return self._appender.settled

    def store(
        self,
        messages: Sequence[NewMessage],
        stored: Callable[[int], None],
        refused: Callable[[MqprocError], None],
        part: Callable[[Sequence[NewMessage]], None] = _untold,
    ) -> None:
        """Store messages; `stored` gets the queue offset of the first when all are, `refused` why some are not.

        `part` gets, before either, those that are stored, some at a time.
        """
        writing = _Writing(messages[0], len(messages), stored, refused, part)
        self.under_way += 1
        self._append(writing, messages)

    def _append(self, writing: _Writing, messages: Sequence[NewMessage]) -> None:
        try:
            self._appender.append(messages, lambda some, outcome: self._written(writing, some, outcome))
        except StoreBusyError as error:
            writing.error = error
            self._settle(writing, len(messages))

    def _written(self, writing: _Writing, some: Sequence[NewMessage], outcome: Outcome) -> None:
        missing: Sequence[NewMessage] = ()
        if isinstance(outcome, Stored):
            writing.part(some)
            if some[0] is writing.head:
                writing.head_offset = int(outcome.queue_offsets[0])
        elif isinstance(outcome, Refused):
            writing.error = outcome.error
        else:
            of_topic = Conditions(some[0].topic)
            found = records_in(self._reading, of_topic, outcome.begin, outcome.end, self._max_bytes)
            known = {_content(message): message.queue_offset for message in found}
            missing = [message for message in some if _content(message) not in known]
            if some[0] is writing.head:
                writing.head_offset = known.get(_content(some[0]), -1)
            writing.part([message for message in some if _content(message) in known])
        self._settle(writing, len(some) - len(missing))
        if missing:
            self._append(writing, missing)

    def _settle(self, writing: _Writing, count: int) -> None:
        writing.left -= count
        if writing.left:
            return
        self.under_way -= 1
        if writing.error is None:
            writing.stored(writing.head_offset)
        else:
            writing.refused(writing.error)


def _content(message: NewMessage | StoredMessage) -> tuple[object, ...]:
    return bytes(message.body), message.queue_id, message.prepared_transaction_offset, *identity(message)
