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

    @property
    def is_full(self) -> bool:
        """Whether no more should be received: what is behind messages that are not done comes again, all of it."""
        return len(self._waiting) >= ASIDE_MAX

    def put(self, message: StoredMessage, error: Exception) -> None:
        tell_refused(message, error)
        self._waiting.append((time.monotonic() + AGAIN_S, message))

    def due(self) -> StoredMessage | None:
        """The next one whose turn it is."""
        if not self._waiting or self._waiting[0][0] > time.monotonic():
            return None
        return self._waiting.popleft()[1]

    def leave(self) -> None:
        """The run is over: they come again."""
        self._rest.leave([message for _, message in self._waiting])
