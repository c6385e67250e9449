"""Client processes of a benchmark: fresh messages, recorded latencies, sends and reads.

Each function takes picklable values and runs in a spawned process, which shares only its counters with the parent.

A body is a slice of random bytes, at an offset that moves with every frame, with the message's number in its first
eight bytes; a key is the number in 16 hex digits. numpy makes both a frame at a time, so that a client measures the
store rather than itself. No message is sent twice.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mqproc.client import Batch, Client, requests, send_requests
from mqproc.client.connection import FRAME_BYTES_MAX
from mqproc.errors import MqprocError
from mqproc.types import Message

TIMEOUT_S = 60.0
# Small enough for a processor's cache.
BLOCK_BYTES = 512 << 10
TAG = "bench"
KEY_CHARACTERS = 16
# Each producer has its own range of numbers.
NUMBERS_PER_PRODUCER = 1 << 48
_LONG_POLL_S = 1.0
_SINGLES_AT_ONCE = 256
# The four hex digits of every 16-bit number, in the last four bytes of a word.
_HEX4 = np.frombuffer("".join(f"{number:04x}" for number in range(1 << 16)).encode(), np.uint32).astype(np.uint64) << 32
# Keys are made for several frames at once, since calls dominate for one frame.
_KEYS_AT_ONCE = 16_384
# An odd step, so that slices start at every byte of the block before they repeat.
_STEP = 4099


@dataclass(frozen=True, slots=True)
class Shape:
    """The load: body size, messages per frame, topics, queues, keys, frames in flight."""

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
    """A key of the message with a number."""
    return f"{number + which * (NUMBERS_PER_PRODUCER >> 1):016x}"


class Messages:
    """Makes fresh messages of one producer."""

    def __init__(self, shape: Shape, producer: int) -> None:
        self._shape = shape
        self._random = np.random.default_rng(producer)
        self._block = np.zeros(0, np.uint8)
        self.number = producer * NUMBERS_PER_PRODUCER
        self._frame = 0
        self._keys: Any = []
        self._keys_from = 0

    def bodies(self, count: int) -> NDArray[np.uint8]:
        """uint8[count, size]: a copy, whose first eight bytes are the number."""
        size = self._shape.size
        if len(self._block) < max(BLOCK_BYTES, 2 * count * size):  # Otherwise few slices would differ.
            self._block = self._random.integers(0, 256, max(BLOCK_BYTES, 2 * count * size), np.uint8)
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
        """The key of each message, or a list of keys when there are several; None without keys."""
        keys = self._shape.keys
        if keys == 0:
            return None
        if keys > 1:
            numbers = range(self.number, self.number + count)
            return [[key_of(number, which) for which in range(keys)] for number in numbers]
        first = self.number - self._keys_from
        if not 0 <= first <= len(self._keys) - count:
            first, self._keys_from = 0, self.number
            self._keys = _key_column(self.number, max(count, _KEYS_AT_ONCE))
        return self._keys[first : first + count]

    def advance(self, count: int) -> None:
        """Continue after `count` messages."""
        self.number += count

    def frame(self, topic: str, count: int, tags: str | Sequence[str] = TAG, **fields: Any) -> Batch:
        """The next `count` messages as a batch."""
        bodies, keys = self.bodies(count), self.keys(count)
        self.advance(count)
        return Batch(topic, bodies, keys=keys, tags=tags, **fields)

    def singles(self, topics: Sequence[str], count: int) -> list[Message]:
        """The next `count` messages for topics in turn, made at once to save calls."""
        size, first, keys = self._shape.size, self.number, self._shape.keys
        bodies = self.bodies(count).tobytes()
        self.advance(count)
        return [
            Message(
                topic,
                bodies[place * size : (place + 1) * size],
                TAG,
                tuple(key_of(first + place, which) for which in range(keys)),
            )
            for place, topic in zip(range(count), itertools.cycle(topics), strict=False)
        ]


def _key_column(first: int, count: int) -> Any:
    """Keys as an Arrow array made from digits; a list when pyarrow is missing."""
    try:
        import pyarrow
    except ImportError:
        return [key_of(number) for number in range(first, first + count)]
    offsets = np.arange(0, (count + 1) * KEY_CHARACTERS, KEY_CHARACTERS, dtype=np.int32)
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(_key_digits(first, count))]
    return pyarrow.Array.from_buffers(pyarrow.string(), count, buffers)


def _key_digits(first: int, count: int) -> NDArray[np.uint64]:
    """uint64[count, 2]: digits of consecutive numbers, which mostly differ in the last four."""
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
    """Latencies with the time at which each request ended, and counters that the parent reads.

    `counters` is a shared int64 array: messages, bytes, errors, state.
    """

    MESSAGES, BYTES, ERRORS, STATE = range(4)
    WORDS = 8
    IDLE, RUNNING, STOP, DONE = range(4)

    def __init__(self, counters: NDArray[np.int64]) -> None:
        self._counters = counters
        self._rows: list[tuple[int, int, int]] = []

    @property
    def stopped(self) -> bool:
        return bool(self._counters[self.STATE] == self.STOP)

    def set_running(self) -> None:
        """Report that the client is loaded and connected."""
        if self._counters[self.STATE] == self.IDLE:
            self._counters[self.STATE] = self.RUNNING

    def add(self, started_ns: int, count: int, size: int) -> None:
        """Record a request of `count` messages and `size` bytes that ends now."""
        now_ns = time.monotonic_ns()
        if not self._rows:
            self.set_running()
        self._rows.append((now_ns, now_ns - started_ns, count))
        self._counters[self.MESSAGES] += count
        self._counters[self.BYTES] += size

    def add_error(self) -> None:
        self._counters[self.ERRORS] += 1

    def rows(self) -> NDArray[np.int64]:
        """int64[n, 3]: end time in ns, latency in ns, messages."""
        return np.array(self._rows, np.int64).reshape(-1, 3)

    def close(self) -> None:
        """Release the shared counters."""
        self._counters[self.STATE] = self.DONE
        self._counters = np.zeros(self.WORDS, np.int64)


@dataclass(frozen=True, slots=True)
class Slot:
    """A client process's place in a run: its number, the shared counters and its result file."""

    index: int
    memory_name: str
    result: Path

    @contextmanager
    def record(self, *, saves: bool = True) -> Iterator[Recorder]:
        """A recorder, whose rows are saved at the end unless the client saves its own."""
        memory = SharedMemory(self.memory_name)
        words = np.ndarray((memory.size // 8,), np.int64, memory.buf)
        recorder = Recorder(words[self.index * Recorder.WORDS : (self.index + 1) * Recorder.WORDS])
        del words
        yield recorder
        if saves:
            np.save(self.result, recorder.rows())
        recorder.close()
        memory.close()


def paced(rate: float, recorder: Recorder, pause: Callable[[float], None] = time.sleep) -> Iterator[int]:
    """Start times in ns, back to back or `rate` a second, until the recorder is stopped.

    A late start moves the following starts: gaps stay, and latencies do not include the delay. `pause` waits for some
    seconds; clients with frames in flight receive answers meanwhile.
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


# Producers


def produce(store: Path, shape: Shape, slot: Slot) -> None:
    """Send until stopped: frames with several in flight, or single messages."""
    messages = Messages(shape, slot.index)
    with slot.record() as recorder, Client(store, timeout=TIMEOUT_S) as client:
        try:
            if shape.batch > 1:
                _send_frames(client, shape, messages, recorder, slot.index)
            elif shape.in_flight > 1:
                _send_singles_in_flight(client, shape, messages, recorder)
            else:
                _send_singles(client, shape, messages, recorder)
        except MqprocError as error:
            recorder.add_error()
            print(f"producer {slot.index}: {error}", flush=True)


class _FramesInFlight:
    """Keep at most `limit` frames in flight; record each when it is answered, in pauses too."""

    def __init__(self, client: Client, limit: int, size: int, recorder: Recorder) -> None:
        self._pipeline = client.pipeline()
        self._limit = limit
        self._size = size
        self._recorder = recorder
        self._started: deque[int] = deque()

    def start(self, call: requests.Call[Any], began_ns: int) -> None:
        self._started.append(began_ns)
        self._pipeline.start(call)

    def make_room(self) -> None:
        """Wait for an answer when the limit is reached."""
        if len(self._pipeline) == self._limit:
            self._finish()

    def pause(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while len(self._pipeline) and self._pipeline.answered_by(end_s):
            self._finish()
        time.sleep(max(0.0, end_s - time.monotonic()))

    def _finish(self) -> None:
        messages = len(self._pipeline.finish())
        self._recorder.add(self._started.popleft(), messages, messages * self._size)

    def close(self) -> None:
        while len(self._pipeline):
            self._finish()
        self._pipeline.close()


def _send_frames(client: Client, shape: Shape, messages: Messages, recorder: Recorder, index: int) -> None:
    frames = _FramesInFlight(client, shape.in_flight, shape.size, recorder)
    # A frame's time includes its encoding, which is a part of sending.
    for turn, began_ns in enumerate(paced(shape.rate / shape.batch, recorder, frames.pause), index):
        batch = messages.frame(topic_name(turn % shape.topics), shape.batch)
        for call in send_requests.send_batch(batch, FRAME_BYTES_MAX):
            frames.make_room()
            frames.start(call, began_ns)
    frames.close()


def _send_singles(client: Client, shape: Shape, messages: Messages, recorder: Recorder) -> None:
    topics = [topic_name(index) for index in range(shape.topics)]
    rounds = max(1, min(_SINGLES_AT_ONCE, BLOCK_BYTES // max(1, 2 * shape.size * shape.topics)))
    made: list[Message] = []
    for _ in paced(shape.rate, recorder):
        made = made or messages.singles(topics, rounds * shape.topics)[::-1]
        message = made.pop()
        started_ns = time.monotonic_ns()
        client.send(message)
        recorder.add(started_ns, 1, shape.size)


def _send_singles_in_flight(client: Client, shape: Shape, messages: Messages, recorder: Recorder) -> None:
    """Send single messages in frames of one topic, with `in_flight` of them unanswered.

    A frame's time includes making its messages, which count as in flight meanwhile.
    """
    limit = min(requests.IN_FLIGHT, shape.in_flight)
    count = shape.in_flight // limit
    frames = _FramesInFlight(client, limit, shape.size, recorder)
    for turn, began_ns in enumerate(paced(shape.rate / count, recorder, frames.pause)):
        topic = topic_name(turn % shape.topics)
        frames.start(send_requests.send_group(messages.singles([topic], count)), began_ns)
        frames.make_room()
    frames.close()


def send_with_time(store: Path, shape: Shape, topic: str, slot: Slot) -> None:
    """Send single messages to one queue, with the time of sending in their first eight bytes."""
    messages = Messages(shape, slot.index)
    with slot.record() as recorder, Client(store, timeout=TIMEOUT_S) as client:
        for _ in paced(shape.rate, recorder):
            tail = messages.bodies(1).tobytes()[8:]
            messages.advance(1)
            started_ns = time.monotonic_ns()
            client.send(topic, started_ns.to_bytes(8, "little") + tail, tag=TAG, queue_id=0)
            recorder.add(started_ns, 1, shape.size)


# Consumers


def pull(store: Path, shape: Shape, kind: str, columns: list[str] | None, slot: Slot) -> None:
    """Read queues from their start repeatedly until stopped, as Arrow or as objects."""
    with slot.record() as recorder, Client(store, timeout=TIMEOUT_S) as client:
        pipeline = client.pipeline()
        waiting: deque[tuple[int, tuple[str, int]]] = deque()
        queues = [(info.topic, info.queue_id) for info in client.queues() if info.max_offset > 0]
        offsets = dict.fromkeys(queues, 0)
        turns = deque(queues)

        def start() -> None:
            queue = turns.popleft()
            waiting.append((time.monotonic_ns(), queue))
            request = requests.pull_request(*queue, offsets[queue], shape.batch, requests.PULL_BYTES)
            pipeline.start(
                requests.pull(request, client.pull_bytes_max) if kind == "objects" else _arrow_call(request, columns)
            )

        for _ in range(min(shape.in_flight, len(queues))):
            start()
        while waiting:
            found = pipeline.finish()
            started_ns, queue = waiting.popleft()
            count = len(found.messages) if kind == "objects" else len(found)
            recorder.add(started_ns, count, count * shape.size)
            offsets[queue] = found.next_offset if found.next_offset < found.max_offset else 0
            turns.append(queue)
            if not recorder.stopped:
                start()
        pipeline.close()


def _arrow_call(request: object, columns: list[str] | None) -> requests.Call[object]:
    from mqproc.client.arrow import parser

    return requests.pull_as(request, parser(columns, requests.status_of))  # type: ignore[arg-type]


def wait_and_read(store: Path, topic: str, slot: Slot) -> None:
    """Wait for messages; a latency is from the time in a message's body to its arrival."""
    with slot.record() as recorder, Client(store, timeout=TIMEOUT_S) as client:
        offset = client.max_offset(topic, 0)
        recorder.set_running()
        while not recorder.stopped:
            found = client.pull(topic, 0, offset, 64, timeout=_LONG_POLL_S)
            for message in found.messages:
                recorder.add(int.from_bytes(message.body[:8], "little"), 1, len(message.body))
            offset = max(offset, found.next_offset)
