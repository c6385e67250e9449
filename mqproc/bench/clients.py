"""What runs in a benchmark's client processes: producers, pulling consumers, a waiting consumer.

Each is a function of picklable values, started by `spawn`: a client shares nothing with the group or with the parent
but its counters.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mqproc.client import Batch, Client
from mqproc.client import requests as core
from mqproc.client import send_requests as sending
from mqproc.client.connection import FRAME_BYTES_MAX
from mqproc.client.requests import IN_FLIGHT
from mqproc.errors import MqprocError
from mqproc.types import Message

# --- load ---
# The load: messages whose bodies, keys and ids are fresh each time, and the processes that send and read them.
#
# A body is a slice of a block of random bytes at an offset that moves with every frame, with the message's number in its
# first eight bytes; a key is the number's sixteen hex digits. Both are made a frame at a time by numpy, so that a client
# measures the store and not itself; nothing is ever sent twice.


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


TIMEOUT_S = 60.0
_LONG_POLL_S = 1.0
_MADE_AT_ONCE = 256


def counters_of(memory: SharedMemory, index: int) -> NDArray[np.int64]:
    """One client's counters in the shared memory."""
    words = np.ndarray((memory.size // 8,), np.int64, memory.buf)
    return words[index * Recorder.WORDS : (index + 1) * Recorder.WORDS]


def produce(store: Path, shape: Shape, index: int, memory_name: str, result: Path) -> None:
    """Send until told to stop: frames with several in flight, or single messages."""
    memory = SharedMemory(memory_name)
    recorder = Recorder(counters_of(memory, index))
    messages = Messages(shape, index)
    with Client(store, timeout=TIMEOUT_S) as client:
        try:
            if shape.batch > 1:
                _send_frames(client, shape, messages, recorder, index)
            elif shape.in_flight > 1:
                _send_singles_in_flight(client, shape, messages, recorder)
            else:
                _send_singles(client, shape, messages, recorder)
        except MqprocError as error:
            recorder.failed()
            print(f"producer {index}: {error}", flush=True)
    recorder.save(result)
    del recorder
    memory.close()


class _Flights:
    """Frames under way, up to `most` of them: each is recorded when it is answered, also in a pause between two."""

    def __init__(self, client: Client, most: int, size: int, recorder: Recorder) -> None:
        self._pipeline = client.pipeline()
        self._most = most
        self._size = size
        self._recorder = recorder
        self._started: deque[int] = deque()

    def start(self, call: core.Call[Any], began_ns: int) -> None:
        self._started.append(began_ns)
        self._pipeline.start(call)

    def make_room(self) -> None:
        """Wait for an answer when there are as many as may be."""
        if len(self._pipeline) == self._most:
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
    flights = _Flights(client, shape.in_flight, shape.size, recorder)
    topic = index
    for began_ns in paced(shape.rate / shape.batch, recorder, flights.pause):
        # The clock starts before the frame is built: encoding it is a part of sending.
        bodies, keys = messages.bodies(shape.batch), messages.keys(shape.batch)
        messages.passed(shape.batch)
        batch = Batch(topic_name(topic % shape.topics), bodies, keys=keys, tags=TAG)
        for call in sending.send_batch(batch, FRAME_BYTES_MAX):
            flights.make_room()
            flights.start(call, began_ns)
        topic += 1
    flights.close()


def _singles(shape: Shape, messages: Messages, topics: Sequence[str], count: int) -> list[Message]:
    """Fresh messages for topics in turns, made at once: so that a client measures the store and not numpy."""
    size, first = shape.size, messages.number
    bodies = messages.bodies(count).tobytes()
    messages.passed(count)
    return [
        Message(topic, bodies[place * size : (place + 1) * size], TAG, keys_of(first + place, shape.keys))
        for place, topic in zip(range(count), itertools.cycle(topics), strict=False)
    ]


def _send_singles(client: Client, shape: Shape, messages: Messages, recorder: Recorder) -> None:
    topics = [topic_name(index) for index in range(shape.topics)]
    rounds = max(1, min(_MADE_AT_ONCE, BLOCK_BYTES // max(1, 2 * shape.size * shape.topics)))
    made: list[Message] = []
    for _ in paced(shape.rate, recorder):
        made = made or _singles(shape, messages, topics, rounds * shape.topics)[::-1]
        message = made.pop()
        started_ns = time.monotonic_ns()
        client.send(message)
        recorder.add(started_ns, 1, shape.size)


def _send_singles_in_flight(client: Client, shape: Shape, messages: Messages, recorder: Recorder) -> None:
    """Single messages in frames of one topic, as `send_many` cuts them; `in_flight` of them without an answer.

    Those that are being encoded count: the clock of a frame starts before its messages are made.
    """
    frames = min(IN_FLIGHT, shape.in_flight)
    count = shape.in_flight // frames
    flights = _Flights(client, frames, shape.size, recorder)
    for turn, began_ns in enumerate(paced(shape.rate / count, recorder, flights.pause)):
        topic = topic_name(turn % shape.topics)
        flights.start(sending.send_group(_singles(shape, messages, [topic], count)), began_ns)
        flights.make_room()
    flights.close()


def pull(
    store: Path, shape: Shape, kind: str, columns: list[str] | None, index: int, memory_name: str, result: Path
) -> None:
    """Read queues from their beginning again and again until told to stop; as Arrow or as objects."""
    memory = SharedMemory(memory_name)
    recorder = Recorder(counters_of(memory, index))
    with Client(store, timeout=TIMEOUT_S) as client:
        pipeline = client.pipeline()
        waiting: deque[tuple[int, tuple[str, int]]] = deque()
        queues = [(info.topic, info.queue_id) for info in client.queues() if info.max_offset > 0]
        offsets = dict.fromkeys(queues, 0)
        turns = deque(queues)

        def start() -> None:
            queue = turns.popleft()
            waiting.append((time.monotonic_ns(), queue))
            request = core.pull_request(*queue, offsets[queue], shape.batch, core.PULL_BYTES, "", 0.0, False)
            pipeline.start(core.pull(request) if kind == "objects" else _arrow_call(request, columns))

        for _ in range(min(shape.in_flight, len(queues))):
            start()
        while waiting:
            found = pipeline.finish()
            started_ns, queue = waiting.popleft()
            count = len(found.messages) if kind == "objects" else len(found)
            recorder.add(started_ns, count, count * shape.size)
            # At a queue's end it is read once more from its beginning.
            offsets[queue] = found.next_offset if found.next_offset < found.max_offset else 0
            turns.append(queue)
            if not recorder.stopped:
                start()
        pipeline.close()
    recorder.save(result)
    del recorder
    memory.close()


def _arrow_call(request: object, columns: list[str] | None) -> core.Call[object]:
    from mqproc.client.arrow import parser

    return core.pull_as(request, parser(columns))  # type: ignore[arg-type]


def wait_and_read(store: Path, topic: str, index: int, memory_name: str, result: Path) -> None:
    """A waiting consumer: how long after a message's sending (its body tells when) it was here."""
    memory = SharedMemory(memory_name)
    recorder = Recorder(counters_of(memory, index))
    with Client(store, timeout=TIMEOUT_S) as client:
        offset = client.max_offset(topic, 0)
        recorder.running()
        while not recorder.stopped:
            found = client.pull(topic, 0, offset, 64, timeout=_LONG_POLL_S)
            for message in found.messages:
                recorder.add(int.from_bytes(message.body[:8], "little"), 1, len(message.body))
            offset = max(offset, found.next_offset)
    recorder.save(result)
    del recorder
    memory.close()


def send_with_time(store: Path, shape: Shape, topic: str, index: int, memory_name: str, result: Path) -> None:
    """Single messages into one queue whose bodies begin with the moment of sending."""
    memory = SharedMemory(memory_name)
    recorder = Recorder(counters_of(memory, index))
    messages = Messages(shape, index)
    with Client(store, timeout=TIMEOUT_S) as client:
        for _ in paced(shape.rate, recorder):
            tail = messages.bodies(1).tobytes()[8:]
            messages.passed(1)
            started_ns = time.monotonic_ns()
            client.send(topic, started_ns.to_bytes(8, "little") + tail, tag=TAG, queue_id=0)
            recorder.add(started_ns, 1, shape.size)
    recorder.save(result)
    del recorder
    memory.close()
