"""Marks on their way: one message at a time says which half messages are done, all that are due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mqproc.errors import MqprocError
from mqproc.ipc.clock import Clock
from mqproc.names import OP_HALF_TOPIC
from mqproc.roles.appender import NewMessage
from mqproc.roles.writes import Writes
from mqproc.store.transactions.halves import MARK_PROPERTIES, QUEUE, encode_marks

AGAIN_NS: Final = 100_000_000


@dataclass(slots=True, eq=False)
class _Mark:
    offset: int
    marked: Callable[[], None] | None
    refused: Callable[[MqprocError], None] | None


class Marks:
    """The marks of one role. `on_marked` gets the queue offset of the message and the half messages that it names."""

    def __init__(self, writes: Writes, clock: Clock, on_marked: Callable[[int, list[int]], None]) -> None:
        self._writes = writes
        self._clock = clock
        self._on_marked = on_marked
        self._due: list[_Mark] = []
        self._under_way = False
        self._again_ns = 0

    def add(
        self,
        offset: int,
        marked: Callable[[], None] | None = None,
        refused: Callable[[MqprocError], None] | None = None,
    ) -> None:
        """Mark a half message with the next message. One without `refused` is tried until it is stored."""
        self._due.append(_Mark(offset, marked, refused))

    def step(self, now_ns: int) -> int:
        """Send what is due, unless a message is under way; returns how many marks."""
        if not self._due or self._under_way or now_ns < self._again_ns:
            return 0
        marks, self._due = self._due, []
        self._under_way = True
        offsets = [mark.offset for mark in marks]
        message = NewMessage(
            OP_HALF_TOPIC, encode_marks(offsets), MARK_PROPERTIES, QUEUE, born_timestamp_ms=self._clock.time_ms()
        )

        def stored(mark_offset: int) -> None:
            self._under_way = False
            self._on_marked(mark_offset, offsets)
            for mark in marks:
                if mark.marked is not None:
                    mark.marked()

        def refused(error: MqprocError) -> None:
            self._under_way = False
            self._again_ns = self._clock.monotonic_ns() + AGAIN_NS
            self._due = [mark for mark in marks if mark.refused is None] + self._due
            for mark in marks:
                if mark.refused is not None:
                    mark.refused(error)

        self._writes.store([message], stored, refused)
        return len(marks)

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """How long `step` has nothing to do unless a message is stored."""
        if not self._due or self._under_way:
            return at_most_s
        return min(at_most_s, max(0, self._again_ns - now_ns) / 1e9)
