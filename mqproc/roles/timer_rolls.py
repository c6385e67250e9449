"""The timer's messages that are parked again on their way, and what waits until the queue has them once more.

Any of them may cancel what is due more than a slot later, and a keeper that is late has both to do. All that are late
go at once: those that were not due by then wait until these are filed, so that there is an end to them.
"""

from __future__ import annotations

from typing import Final

from mqproc.roles.held_messages import Held, HeldMessages

_NEVER: Final = 1 << 62


class TimerRolls:
    """Those that one keeper holds, and has handed over."""

    def __init__(self, precision_ms: int) -> None:
        self._precision_ms = precision_ms
        self.held = HeldMessages()
        self.parked_to = 0
        """The log's end when some were last parked again: once it is dispatched, they can be filed."""
        self.back_from_ms = _NEVER
        """No slot before the one of this time gets any of those that are not filed again."""
        self._until_ms = _NEVER  # those that are due later wait for these
        self._end = _NEVER  # these lie below it in the queue, as far as is known
        self._handed_over = False

    @property
    def first_due_ms(self) -> int:
        """When the first may go, far in the future where none may."""
        first_ms = self.held.first_due_ms
        return first_ms if first_ms <= self._until_ms else _NEVER

    def first_to_go_ms(self, messages_ms: int, *, none_waits: bool) -> int:
        """When the first is due of these and of messages, whose first is due at `messages_ms`.

        What waits for the queue does not count, unless the queue is to be looked at: then `none_waits`.
        """
        if none_waits:
            return min(messages_ms, self.held.first_due_ms)
        return min(messages_ms if messages_ms <= self.delivered_until_ms else _NEVER, self.first_due_ms)

    @property
    def delivered_until_ms(self) -> int:
        """What is due later is not delivered: one that is held or on its way may cancel it."""
        return min(self.back_from_ms, self.held.first_due_ms + self._precision_ms)

    def take(self, until_ms: int, now_ms: int, messages_max: int, bytes_max: int) -> Held:
        """The next ones that are due by then, to be parked again."""
        batch = self.held.take(min(until_ms, self._until_ms), messages_max, bytes_max)
        self.back_from_ms = min(self.back_from_ms, int(batch.due_ms[0]) + self._precision_ms)
        self._until_ms = min(self._until_ms, now_ms)
        self._end = _NEVER
        self._handed_over = True
        return batch

    def are_parked(self, written: int) -> None:
        """What was taken is in the log, below `written`."""
        self.parked_to = written
        self._handed_over = False

    def look(self, dispatched: int, queue_end: int, filed_to: int) -> None:
        """The queue ended at `queue_end` when the log was dispatched so far, and is filed up to `filed_to`."""
        if not self._handed_over and dispatched >= self.parked_to:
            self._end = min(self._end, queue_end)
        if filed_to >= self._end:
            self.back_from_ms = self._until_ms = _NEVER
