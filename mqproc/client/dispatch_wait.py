"""Waiting until what is written can be read from its queues, without I/O: shared by the sync and the async client."""

from __future__ import annotations

import time
from collections.abc import Mapping

from mqproc.client.amounts import moment_after
from mqproc.errors import RequestTimeoutError


class DispatchWait:
    """Waiting until dispatch has passed what was written when the waiting began."""

    def __init__(self, timeout_s: float) -> None:
        self._target = -1
        self._timeout_s = timeout_s
        self._deadline = moment_after("timeout", timeout_s)

    def reached(self, words: Mapping[str, int]) -> bool:
        """Look at the control words. Raises RequestTimeoutError when the time is over."""
        if self._target < 0:
            self._target = words["written"]
        if words["dispatched"] >= self._target:
            return True
        if time.monotonic() > self._deadline:
            behind = self._target - words["dispatched"]
            raise RequestTimeoutError(f"dispatch is still {behind:,} bytes behind after {self._timeout_s:g} s")
        return False
