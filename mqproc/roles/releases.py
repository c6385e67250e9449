"""Parked messages on their way into the log, each of them stored exactly once while the log lives.

    start(messages) ──▶ appender ──Stored──▶ …all stored: on_done()
          ▲               │ Refused: the same frame again after a pause
          └───────────────┘ Unknown: the log tells which of them it has; the others again

A release is never given up: what cannot be stored now is tried until it can. What is refused for its own sake, as a
message of a topic that there is no room to make, would hold up the others: they are tried without its queue, and `park`
makes of it what waits once more (`parked_again.py`), which is stored in its place. Deliveries that a killed keeper had
made are known from the log (`known`), and are not made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import StoreBusyError
from mqproc.layout import control as words_of
from mqproc.names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.roles.appender import Appender, Outcome, Refused, Unknown
from mqproc.roles.log import get_logger
from mqproc.roles.loop import RoleContext
from mqproc.roles.message_columns import MessageColumns
from mqproc.roles.parked_again import is_of_message
from mqproc.store.delays.made_from import MadeFrom, marks_of

RETRY_NS: Final = 100_000_000
# The log tells again that deliveries are refused after this time.
TELL_AGAIN_NS: Final = 60_000_000_000
_NEVER_NS: Final = 1 << 62
_PARKED_IN: Final = (SCHEDULE_TOPIC, TIMER_TOPIC)
Park = Callable[[MessageColumns], MessageColumns]


@dataclass(slots=True, eq=False)
class _Release:
    begin: int
    left: int
    on_done: Callable[[], None]
    park: Park


class Releases:
    """All releases of the keeper, over one appender."""

    def __init__(self, context: RoleContext, made_from: MadeFrom) -> None:
        self._clock = context.clock
        self._words = context.control.words
        self._heart = context.heart
        self._log = get_logger()
        self._made_from = made_from
        self.appender = Appender(context.paths.socket("writer"), self._words, self._clock)
        self._awaited = self._words[words_of.WRITTEN] if context.incarnation == 1 else 0
        if context.incarnation > 1:
            self.appender.settle()
        self.known: set[int] = set()
        """Marks of deliveries that the log has from before this keeper."""
        self._open: list[_Release] = []
        self._refused: list[tuple[int, MessageColumns, _Release]] = []
        self._told_ns = -TELL_AGAIN_NS

    @property
    def settled(self) -> bool:
        """Whether the log has every delivery that a killed keeper had handed to the writer, so that it can be asked.

        At a group's start also whether the queues have all of the log, as who sets positions back to their ends takes
        for granted: a full disk may keep them from that for long.
        """
        return self.appender.settled and self._words[words_of.DISPATCHED] >= self._awaited

    @property
    def under_way(self) -> int:
        """Releases that are not done."""
        return len(self._open)

    @property
    def begin(self) -> int:
        """Every message of a release that is not done, if it is in the log, lies at or above this position."""
        return min((release.begin for release in self._open), default=self._words[words_of.WRITTEN])

    def start(self, messages: Sequence[MessageColumns], on_done: Callable[[], None], park: Park) -> None:
        """Release messages; `on_done` is called when all are stored, at once when none is left to be.

        `park` makes of those that are refused for their own sake the same messages, to wait once more.
        """
        begin = self._words[words_of.WRITTEN]
        if self.known:
            messages = [columns for each in messages if len(columns := each.chosen(self._not_made(each)))]
        if not messages:
            on_done()
            return
        release = _Release(begin, sum(map(len, messages)), on_done, park)
        self._open.append(release)
        for columns in messages:
            self._append(columns, release)

    def step(self) -> int:
        """Take outcomes, and try again what was refused; returns how much was done."""
        done = self.appender.step()
        if self._refused and self._refused[0][0] <= self._clock.monotonic_ns():
            refused, self._refused = self._refused, []
            for _due_ns, messages, release in refused:
                self._append(messages, release)
            done += 1
        return done

    @property
    def due_ns(self) -> int:
        """When `step` has something to do though the appender is silent."""
        return self._refused[0][0] if self._refused else _NEVER_NS

    def close(self) -> None:
        self.appender.close()

    def has_made(self, physical_offsets: NDArray[np.int64]) -> bool:
        """Whether the log has a delivery from before this keeper of what is parked at one of these places."""
        return bool(self.known) and not self.known.isdisjoint(marks_of(physical_offsets).tolist())

    def _not_made(self, messages: MessageColumns) -> NDArray[np.bool_]:
        """Which were not delivered before; a mark that was found is found once."""
        wanted = np.ones(len(messages), np.bool_)
        for place, mark in enumerate(messages.prepared_transaction_offsets.tolist()):
            if mark in self.known:
                self.known.discard(mark)
                wanted[place] = False
        return wanted

    def _append(self, messages: MessageColumns, release: _Release) -> None:
        try:
            self.appender.append_columns(messages, lambda frame, outcome: self._take(frame, outcome, release))
        except StoreBusyError:
            self._again(messages, release)

    def _take(self, frame: MessageColumns, outcome: Outcome, release: _Release) -> None:
        if isinstance(outcome, Refused):
            self._words.add(words_of.DELIVERIES_REFUSED, 1)
            self._tell(outcome)
            if is_of_message(outcome.error) and frame.topic not in _PARKED_IN:
                self._append_or_park(frame.halves(), release)
            else:
                self._again(frame, release)
            return
        stored = len(frame)
        if isinstance(outcome, Unknown):
            made = self._made_from.marks(outcome.begin, outcome.end)
            marks = frame.prepared_transaction_offsets.tolist()
            missing = frame.chosen(np.fromiter((mark not in made for mark in marks), np.bool_, len(frame)))
            stored -= len(missing)
            if len(missing):
                self._append(missing, release)
        if frame.topic not in _PARKED_IN:
            self._words.add(words_of.DELIVERED_MESSAGES, stored)
        release.left -= stored
        if release.left == 0:
            self._open.remove(release)
            release.on_done()

    def _append_or_park(self, parts: Sequence[MessageColumns], release: _Release) -> None:
        """Try fewer queues at a time: there may be no room for some of a topic's, which was made again with fewer. What
        is refused of one queue waits once more."""
        alone = len(parts) == 1
        for part in parts:
            self._append(release.park(part) if alone else part, release)

    def _again(self, messages: MessageColumns, release: _Release) -> None:
        self._refused.append((self._clock.monotonic_ns() + RETRY_NS, messages, release))

    def _tell(self, outcome: Refused) -> None:
        now_ns = self._clock.monotonic_ns()
        if now_ns >= self._told_ns + TELL_AGAIN_NS:
            self._told_ns = now_ns
            self._heart.failed()
            self._log.error("delivery is refused, and tried until it is not", error=str(outcome.error))
