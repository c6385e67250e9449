"""After lost answers: until the index knows of every message that the writer may have taken."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from mqproc.client import core
from mqproc.errors import (
    NotRunningError,
    RequestTimeoutError,
    SendOutcomeUnknownError,
    StoreBusyError,
)

if TYPE_CHECKING:
    from mqproc.client.sync import Client

UNSETTLED: Final = (SendOutcomeUnknownError, NotRunningError, RequestTimeoutError, StoreBusyError)
"""Errors after which it is not known which of the messages under way are stored."""

# Each answer is a step of the writer's, and each step reads every connection that has bytes.
DRAIN_PINGS: Final = 256
PATIENCE_S: Final = 60.0
_POLL_S: Final = 0.005


def settle(client: Client) -> None:
    """Return when the index holds all that anybody had sent before this call. Raises RequestTimeoutError.

    What a client that is dead or cut off left in a socket has been taken by then, or is lost.
    """
    for _ in range(DRAIN_PINGS):
        client.run(core.ping(core.WRITER))
    target = client.stats()["written"]
    deadline = time.monotonic() + PATIENCE_S
    while (dispatched := client.stats()["dispatched"]) < target:
        if time.monotonic() > deadline:
            raise RequestTimeoutError(f"dispatch has not caught up: {target - dispatched:,} bytes are left")
        time.sleep(_POLL_S)
