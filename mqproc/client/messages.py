"""The messages of one answer, taken in steps."""

from __future__ import annotations

import bisect
import operator
from typing import Final

from mqproc.errors import ProtocolError
from mqproc.layout.record_codec import as_redelivered, current_kind, messages_as, messages_of
from mqproc.types import StoredMessage

_queue_offset: Final = operator.attrgetter("queue_offset")


class FetchedMessages:
    """Messages of one answer, decoded when the first one is wanted."""

    __slots__ = ("_are_retries", "_at", "_count", "_kind", "_messages", "_payload")

    def __init__(self, payload: memoryview, count: int, *, are_retries: bool = False) -> None:
        """`are_retries`: they are of a group's retry topic."""
        self._kind = current_kind()
        self._payload = bytes(payload)  # The client reads the next frame into the same memory.
        self._count = count
        self._are_retries = are_retries
        self._messages: list[StoredMessage] | None = None
        self._at = 0

    def __len__(self) -> int:
        """Number of remaining messages."""
        return self._count - self._at

    def _decoded(self) -> list[StoredMessage]:
        if self._messages is None:
            with messages_as(self._kind):
                messages = messages_of(self._payload)
            if len(messages) != self._count:
                raise ProtocolError(f"an answer of {self._count:,} messages has {len(messages):,}")
            self._messages = list(map(as_redelivered, messages)) if self._are_retries else messages
            self._payload = b""
        return self._messages

    @property
    def next_queue_offset(self) -> int:
        """Queue offset of the next message, which must exist."""
        return self._decoded()[self._at].queue_offset

    def take(self, most: int) -> list[StoredMessage]:
        """The next messages, at most `most`."""
        messages = self._decoded()
        begin, self._at = self._at, min(self._at + most, self._count)
        return messages[begin : self._at]

    def go_to(self, queue_offset: int) -> None:
        """Continue with the first message at or above a queue offset."""
        self._at = bisect.bisect_left(self._decoded(), queue_offset, key=_queue_offset)
