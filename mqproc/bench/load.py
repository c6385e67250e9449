"""The load: messages whose bodies, keys and ids are fresh each time, and the processes that send and read them.

A body is a slice of a block of random bytes at an offset that moves with every frame, with the message's number in its
first eight bytes; a key is the number's sixteen hex digits. Both are made a frame at a time by numpy, so that a client
measures the store and not itself; nothing is ever sent twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Small enough to stay in the cache of one processor: a client measures the store and not its own bodies.
BLOCK_BYTES = 512 << 10
TAG = "bench"
KEY_CHARACTERS = 16
# Numbers of different producers never meet.
NUMBERS_PER_PRODUCER = 1 << 48
# Four hex digits of every 16-bit number, as the last four bytes of a word.
_HEX4 = np.frombuffer("".join(f"{number:04x}" for number in range(1 << 16)).encode(), np.uint32).astype(np.uint64) << 32
# Keys are made for several frames at once: of a few microseconds most are the calls' own.
_KEYS_AT_ONCE = 16_384
# An odd step, so that slices do not repeat before the block's every byte has been a beginning.
_STEP = 4099


@dataclass(frozen=True, slots=True)
class Shape:
    """What is sent: `keys` a message has (0 or more), `batch` messages a frame."""

    size: int
    batch: int
    topics: int
    queues: int
    keys: int
    in_flight: int
    rate: float = 0.0


def topic_name(index: int) -> str:
    return f"bench-{index}"


def key_of(number: int, which: int = 0) -> str:
    """A message's key by its number."""
    return f"{number + which * (NUMBERS_PER_PRODUCER >> 1):016x}"


def keys_of(number: int, count: int) -> tuple[str, ...]:
    """A message's keys by its number."""
    return (key_of(number),) if count == 1 else tuple(key_of(number, which) for which in range(count))


class Messages:
    """Makes fresh messages of one producer."""

    def __init__(self, shape: Shape, producer: int) -> None:
        self._shape = shape
        self._random = np.random.default_rng(producer)
        self._block = self._block_of(max(BLOCK_BYTES, 2 * shape.size * shape.batch))
        self.number = producer * NUMBERS_PER_PRODUCER
        self._frame = 0
        self._keys: Any = []
        self._keys_from = 0

    def _block_of(self, length: int) -> NDArray[np.uint8]:
        return self._random.integers(0, 256, length, np.uint8)

    def bodies(self, count: int) -> NDArray[np.uint8]:
        """uint8[count, size]: a copy, whose first eight bytes are the number."""
        size = self._shape.size
        if len(self._block) < 2 * count * size:  # Else slices of it would have few beginnings.
            self._block = self._block_of(2 * count * size)
        room = len(self._block) - count * size
        start = (self._frame * _STEP) % (room + 1)
        self._frame += 1
        rows = self._block[start : start + count * size].reshape(count, size).copy()
        numbers = np.arange(self.number, self.number + count, dtype=np.uint64)
        if size and size % 8 == 0:
            rows.view(np.uint64)[:, 0] = numbers
        else:
            width = min(8, size)
            rows[:, :width] = numbers.view(np.uint8).reshape(count, 8)[:, :width]
        return rows

    def keys(self, count: int) -> Any:
        """Each message's key, or a list of keys for more than one; None without."""
        wanted = self._shape.keys
        if wanted == 0:
            return None
        if wanted > 1:
            return [[key_of(number, which) for which in range(wanted)] for number in self._numbers(count)]
        first = self.number - self._keys_from
        if not 0 <= first <= len(self._keys) - count:
            first, self._keys_from = 0, self.number
            self._keys = _key_column(self.number, max(count, _KEYS_AT_ONCE))
        return self._keys[first : first + count]

    def _numbers(self, count: int) -> range:
        return range(self.number, self.number + count)

    def passed(self, count: int) -> None:
        """`count` messages have been made."""
        self.number += count


def _key_column(first: int, count: int) -> Any:
    """Keys as an Arrow array, straight from digits; a list where there is no pyarrow."""
    try:
        import pyarrow
    except ImportError:
        return [key_of(number) for number in range(first, first + count)]
    offsets = np.arange(0, (count + 1) * KEY_CHARACTERS, KEY_CHARACTERS, dtype=np.int32)
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(_key_digits(first, count))]
    return pyarrow.Array.from_buffers(pyarrow.string(), count, buffers)


def _key_digits(first: int, count: int) -> NDArray[np.uint64]:
    """uint64[count, 2]: the digits of numbers that follow each other, which differ in the last four but seldom."""
    rows = np.empty((count, 2), np.uint64)
    done = 0
    while done < count:
        high, low = divmod(first + done, len(_HEX4))
        run = min(count - done, len(_HEX4) - low)
        digits = f"{high:012x}".encode()
        rows[done : done + run, 0] = np.frombuffer(digits, np.uint64, 1)
        rows[done : done + run, 1] = _HEX4[low : low + run] | np.uint64(int.from_bytes(digits[8:], "little"))
        done += run
    return rows


class Recorder:
    """Latencies with the moment at which each ended, and counters that the parent watches.

    `counters` is a shared int64 array: messages, bytes, errors, state.
    """

    MESSAGES, BYTES, ERRORS, STATE = range(4)
    WORDS = 8
    IDLE, RUNNING, STOP, DONE = range(4)

    def __init__(self, counters: NDArray[np.int64]) -> None:
        self._counters = counters
        self._ended: list[int] = []
        self._latencies: list[int] = []
        self._counts: list[int] = []

    @property
    def stopped(self) -> bool:
        return bool(self._counters[self.STATE] == self.STOP)

    def running(self) -> None:
        """Ready to be measured: everything is loaded and connected."""
        if self._counters[self.STATE] == self.IDLE:
            self._counters[self.STATE] = self.RUNNING

    def add(self, started_ns: int, count: int, size: int) -> None:
        """A request of `count` messages, `size` bytes, has ended now. The first one says that this client runs."""
        now_ns = time.monotonic_ns()
        if not self._ended:
            self.running()
        self._ended.append(now_ns)
        self._latencies.append(now_ns - started_ns)
        self._counts.append(count)
        self._counters[self.MESSAGES] += count
        self._counters[self.BYTES] += size

    def failed(self) -> None:
        self._counters[self.ERRORS] += 1

    def save(self, path: Path) -> None:
        """int64[n, 3]: ended, latency in ns, messages."""
        rows = np.array([self._ended, self._latencies, self._counts], np.int64).T
        np.save(path, rows)
        self._counters[self.STATE] = self.DONE


def paced(rate: float, recorder: Recorder, pause: Callable[[float], None] = time.sleep) -> Iterator[int]:
    """Moments to begin at, in ns: at once, or `rate` a second. Ends when the recorder is stopped.

    What comes late is not measured from when it should have begun, but the gaps are kept. `pause` passes so many
    seconds: who has frames under way takes their answers meanwhile.
    """
    if not rate:
        while not recorder.stopped:
            yield time.monotonic_ns()
        return
    gap_ns = round(1e9 / rate)
    due_ns = time.monotonic_ns()
    while not recorder.stopped:
        pause_ns = due_ns - time.monotonic_ns()
        if pause_ns > 0:
            pause(pause_ns / 1e9)
        else:
            due_ns = time.monotonic_ns()
        due_ns += gap_ns
        yield time.monotonic_ns()
