"""Unique ids of messages (property UNIQ_KEY), in RocketMQ's layout.

    ┌────────┬────────────────┬────────┬─────────────────────────────────┬─────────┐
    │ IPv4 4 │ pid low 16 b 2 │ hash 4 │ ms since the month's start u32 4│ counter 2│  upper-case hex, 32 characters
    └────────┴────────────────┴────────┴─────────────────────────────────┴─────────┘
      ◀──────────────── prefix, 28 characters, one for a frame ─────────▶  one a message

The address is the loopback's, since clients are local; the hash is random for each process, where RocketMQ uses a class
loader's. One time has at most 65,536 counters, then the time is advanced, so no pair is repeated.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import Final

COUNTERS: Final = 1 << 16
PREFIX_CHARACTERS: Final = 28
ID_CHARACTERS: Final = 32
_ADDRESS: Final = bytes((127, 0, 0, 1))


def _month_bounds_ms(time_ms: int) -> tuple[int, int]:
    """First ms of the local month that holds `time_ms`, and of the next month."""
    now = time.localtime(time_ms / 1000)
    start = time.mktime((now.tm_year, now.tm_mon, 1, 0, 0, 0, 0, 0, -1))
    end = time.mktime((now.tm_year, now.tm_mon + 1, 1, 0, 0, 0, 0, 0, -1))
    return int(start) * 1000, int(end) * 1000


class UniqueIds:
    """Source of prefixes with runs of counters. Thread-safe; a forked child needs a new one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._head = (_ADDRESS + (os.getpid() & 0xFFFF).to_bytes(2, "big") + os.urandom(4)).hex().upper()
        self._counter = int.from_bytes(os.urandom(2), "big")
        self._time_ms = 0
        self._used = COUNTERS  # under _time_ms
        self._month_start_ms = 0
        self._month_end_ms = 0
        self._prefix = ""

    def reserve(self, count: int) -> tuple[str, int]:
        """Reserve `count` counters, at most 65,536: their prefix and the first one."""
        assert 0 < count <= COUNTERS
        now_ms = time.time_ns() // 1_000_000
        with self._lock:
            if now_ms > self._time_ms:
                self._set_time(now_ms)
            elif self._used + count > COUNTERS:
                self._set_time(self._time_ms + 1)
            self._used += count
            first = self._counter
            self._counter = (first + count) % COUNTERS
            return self._prefix, first

    def _set_time(self, time_ms: int) -> None:
        if time_ms >= self._month_end_ms or time_ms < self._month_start_ms:
            self._month_start_ms, self._month_end_ms = _month_bounds_ms(time_ms)
        self._time_ms = time_ms
        self._used = 0
        self._prefix = f"{self._head}{time_ms - self._month_start_ms:08X}"


def unique_id(prefix: str, counter: int) -> str:
    """Id of one message of a frame."""
    return f"{prefix}{counter % COUNTERS:04X}"


def unique_ids(prefix: str, counter: int, count: int) -> list[str]:
    """Ids of a frame's messages."""
    first = counter % COUNTERS
    numbers = itertools.chain(range(first, min(first + count, COUNTERS)), range(first + count - COUNTERS))
    return list(map(f"{prefix}%04X".__mod__, numbers))


# One source per process: two with the same process id could collide.
_process_ids = UniqueIds()


def _after_fork() -> None:
    global _process_ids
    _process_ids = UniqueIds()


os.register_at_fork(after_in_child=_after_fork)


def reserve(count: int) -> tuple[str, int]:
    """Reserve counters of this process: their prefix and the first of `count`."""
    return _process_ids.reserve(count)
