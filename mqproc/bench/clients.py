"""What runs in a benchmark's client processes: producers, pulling consumers, a waiting consumer.

Each is a function of picklable values, started by `spawn`: a client shares nothing with the group or with the parent
but its counters.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mqproc.bench.load import BLOCK_BYTES, TAG, Messages, Recorder, Shape, keys_of, paced, topic_name
from mqproc.client import Batch, Client, core, sending
from mqproc.client.connection import FRAME_BYTES_MAX
from mqproc.client.core import IN_FLIGHT
from mqproc.errors import MqprocError
from mqproc.message import Message

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
        self._pipeline = client.pipeline(core.WRITER)
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
        pipeline = client.pipeline(core.QUERY)
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
