"""Messages that a run's handler failed for, and that the store has no room to deliver later: handled here once more."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from mqproc.errors import DiskFullError, TooManyQueuesError
from mqproc.message import StoredMessage

if TYPE_CHECKING:
    from mqproc.client.handling import Rest

NO_ROOM: Final = DiskFullError, TooManyQueuesError
"""What a nack is refused with until somebody makes room."""
AGAIN_S: Final = 5.0
ASIDE_MAX: Final = 1024
ASIDE_BYTES_MAX: Final = 64 << 20
_log = logging.getLogger("mqproc.consumer")


def tell_refused(message: StoredMessage, error: Exception) -> None:
    """Say why a message stays here."""
    told = "message %s of %s stays with its consumer, and is handled again in %g s: %s"
    _log.warning(told, message.message_id, message.topic, AGAIN_S, error)


class Aside:
    """Those of one run, in the order of their turns; they are not done. Workers put, who hands out takes."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        self._waiting: deque[tuple[float, StoredMessage]] = deque()
        self._others_first = False

    @property
    def is_full(self) -> bool:
        """Whether no more should be received: what is behind messages that are not done comes again, all of it."""
        waiting = tuple(self._waiting)
        return len(waiting) >= ASIDE_MAX or sum(len(message.body) for _, message in waiting) >= ASIDE_BYTES_MAX

    def put(self, message: StoredMessage, error: Exception) -> None:
        tell_refused(message, error)
        self._waiting.append((time.monotonic() + AGAIN_S, message))

    def due(self) -> StoredMessage | None:
        """The next one whose turn it is. Behind each others are received: many that fail again must not stop those."""
        others_first, self._others_first = self._others_first, False
        while not others_first and self.left_s(1.0) <= 0:
            _, message = self._waiting.popleft()
            if self._rest.is_held(message):
                self._others_first = True
                return message
            # Another member's now, or its queue was reset: it comes again there.
            self._rest.take_back(message)
        return None

    def left_s(self, at_most_s: float) -> float:
        """How long it is until the next one's turn."""
        return min(at_most_s, max(0.0, self._waiting[0][0] - time.monotonic())) if self._waiting else at_most_s

    def leave(self) -> None:
        """The run is over: they come again."""
        self._rest.leave([message for _, message in self._waiting])
