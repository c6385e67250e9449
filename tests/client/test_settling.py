"""After lost answers one waits for dispatch: as long as one was told to, and with a word about what keeps it."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from mqproc.client.core import Call
from mqproc.client.settling import Patience, settle
from mqproc.errors import RequestTimeoutError
from mqproc.shm.clock import Clock
from mqproc.wire.operations import Operation


class FakeClock(Clock):
    """Goes on by sleeping alone."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


class Store:
    """Answers as a store whose dispatch stands still up to a time."""

    def __init__(self, clock: FakeClock, number: int, until_s: float = 1e9) -> None:
        self.clock = clock
        self.number = number
        self.until_ns = int(until_s * 1e9)

    def run(self, call: Call[Any]) -> Any:
        if call.operation != Operation.STATS:
            return None
        stands = self.clock.now_ns < self.until_ns
        number = self.number if stands else 0
        return {"written": 5000, "dispatched": 1000 if stands else 5000, "dispatch_errno": number}


def test_what_holds_dispatch_up_is_told_at_once_and_at_the_end() -> None:
    clock, notes = FakeClock(), list[str]()
    patience = Patience(clock, 1, 3, notes.append)
    with pytest.raises(
        RequestTimeoutError, match=r"not caught up in 3 s: 4,000 bytes are left; dispatch waits: No space"
    ):
        settle(Store(clock, errno.ENOSPC), patience)
    assert 3e9 < clock.now_ns < 3.1e9
    assert notes == [f"dispatch waits: No space left on device (errno {errno.ENOSPC}); this waits 3 s for it"]


def test_dispatch_that_says_nothing_is_looked_after_by_status() -> None:
    clock = FakeClock()
    with pytest.raises(
        RequestTimeoutError, match="in 60 s: 4,000 bytes are left; it is slow or stands still: mqproc st"
    ):
        settle(Store(clock, 0), Patience(clock, 1))


def test_one_goes_on_as_soon_as_dispatch_does() -> None:
    clock, notes = FakeClock(), list[str]()
    settle(Store(clock, errno.ENOSPC, until_s=2), Patience(clock, 1, 3, notes.append))
    assert 2e9 <= clock.now_ns < 2.1e9
    assert len(notes) == 1
