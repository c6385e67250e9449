"""When and how much at once a consumer commits, pulls and hands out, the sync and the async one alike."""

from __future__ import annotations

from typing import Final

from mqproc.message import PullStatus

COMMIT_S: Final = 0.01
"""While messages take less than this, so much may be done again after a kill; else each is committed as it is done."""
HOLD_S: Final = 30.0
"""How long the server holds a pull of an empty queue."""
LOOK_S: Final = 1.0
TURN_S: Final = 0.05
"""A receive that shall not wait waits so long for another thread's, which may just be taking what is there."""
RECEIVE_MESSAGES: Final = 64
AT_ONCE: Final = 256
"""Messages that are made of a pull's records at once, just before a loop goes through them."""
MOVED: Final = frozenset({PullStatus.OFFSET_TOO_SMALL, PullStatus.OFFSET_OVERFLOW_BADLY})
