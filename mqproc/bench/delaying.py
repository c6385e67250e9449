"""`mqproc bench delay`: how late messages come that wait for their time, as many due a second as `--rate` says.

    send_ahead ──parked──▶ keeper ──due──▶ log: stored late = store timestamp − due time
                                            └──▶ wait_for_due: seen late = this moment − due time

Sends go on while what was sent before comes due, as on a store that does this all day. What a message was due at is
read from its parked record when all is over, so the figures rest on what the store has and on no client's word.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mqproc.bench.clients import TIMEOUT_S, counters_of
from mqproc.bench.figures import PERCENTILES
from mqproc.bench.load import Messages, Recorder, Shape
from mqproc.bench.runs import Bench, Run, Settings, Start
from mqproc.client import Batch, Client, Consumer
from mqproc.delay_levels import delays_ms_of
from mqproc.io import StoreIO
from mqproc.layout.properties import REAL_TOPIC, TIMER_DELIVER_MS
from mqproc.message import StoredMessage
from mqproc.names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.store.settings import read_settings

TOPIC: Final = "bench-delay"
PROMISED_MS: Final = 50
"""No message is to come later than that after its due time."""
_WAIT_S: Final = 0.1
_NUMBER_BYTES: Final = 8
_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Waiting:
    """What messages wait for: a level's delay, or with level 0 a time `delay_ms` after they are sent."""

    level: int
    delay_ms: int

    @property
    def parked_in(self) -> tuple[str, int]:
        """Topic and queue id."""
        return (SCHEDULE_TOPIC, self.level - 1) if self.level else (TIMER_TOPIC, 0)


@dataclass(slots=True)
class _Seen:
    """Delivered messages in the order they came: number, store timestamp in ms, moments of both clocks in ns."""

    numbers: list[int] = field(default_factory=list)
    stored_ms: list[int] = field(default_factory=list)
    seen_ns: list[int] = field(default_factory=list)
    ended_ns: list[int] = field(default_factory=list)

    def add(self, message: StoredMessage) -> None:
        self.seen_ns.append(time.time_ns())
        self.ended_ns.append(time.monotonic_ns())
        self.numbers.append(int.from_bytes(message.body[:_NUMBER_BYTES], "little"))
        self.stored_ms.append(message.store_timestamp_ms)


def delay(bench: Bench, settings: Settings, level: int, ahead_s: float) -> dict[str, Any]:
    """Producers send ahead, the keeper delivers, one group consumer waits."""
    delays_ms = delays_ms_of(read_settings(StoreIO(), bench.paths).message_delay_level)
    waiting = Waiting(level, delays_ms[min(level, len(delays_ms)) - 1] if level else round(ahead_s * 1000))
    shape = replace(settings.shape, size=max(_NUMBER_BYTES, settings.shape.size))
    with Client(bench.store) as client:
        client.create_topic(TOPIC, shape.queues)
    each = replace(shape, rate=shape.rate / settings.producers)
    starts: list[Start] = [(wait_for_due, (bench.store, waiting))]
    starts += [(send_ahead, (bench.store, each, waiting)) for _ in range(settings.producers)]
    with Run(bench, starts, replace(settings, shape=shape, messages=0)) as run:
        begun_ns: list[int] = []
        result = run.measure("sent and seen", shape.size, at_begin=lambda: begun_ns.append(time.monotonic_ns()))
        rows = np.load(run.results[0])
    seconds = max(result.figures.seconds, 1e-9)
    measured = rows[(rows[:, 0] > begun_ns[0]) & (rows[:, 0] <= begun_ns[0] + round(seconds * 1e9))]
    stored, seen = _distribution(measured[:, 3]), _distribution(measured[:, 1] / _MS)
    rate = round(len(measured) / seconds)
    early = int((rows[:, 3] < 0).sum())
    settings.say(
        f"{len(measured):,} records due, {rate:,} a second; stored late {_shown(stored)}; "
        f"seen late {_shown(seen)}; {early:,} early"
    )
    return {
        "delay": {
            "due": len(measured),
            "due_per_second": rate,
            "early": early,
            "stored_late_ms": stored,
            "seen_late_ms": seen,
            "later_than_promised": int((measured[:, 3] > PROMISED_MS).sum()),
            "errors": result.errors,
            "cpu_percent": {name: round(100 * used / seconds, 1) for name, used in result.cpu_seconds.items()},
        }
    }


def _distribution(late_ms: NDArray[Any]) -> dict[str, float]:
    if not len(late_ms):
        return {}
    values = np.percentile(late_ms, PERCENTILES)
    named = {f"p{percentile:g}": round(float(value), 2) for percentile, value in zip(PERCENTILES, values, strict=True)}
    return named | {"max": round(float(late_ms.max()), 2)}


def _shown(late_ms: dict[str, float]) -> str:
    return ", ".join(f"{value:g} ms {name}" for name, value in late_ms.items())


# Client processes


def send_ahead(store: Path, shape: Shape, waiting: Waiting, index: int, memory_name: str, result: Path) -> None:
    """Frames at a rate; a frame's messages wait for one time, and the times keep the rate whatever the sends do."""
    memory = SharedMemory(memory_name)
    recorder = Recorder(counters_of(memory, index))
    messages = Messages(shape, index)
    started: deque[int] = deque()
    with Client(store, timeout=TIMEOUT_S) as client:
        frames = _frames(shape, messages, waiting, recorder, started)
        for sent in client.send_batches(frames, in_flight=shape.in_flight):
            recorder.add(started.popleft(), len(sent), shape.size * shape.batch)
    recorder.save(result)
    del recorder, frames
    memory.close()


def _frames(
    shape: Shape, messages: Messages, waiting: Waiting, recorder: Recorder, started: deque[int]
) -> Iterator[Batch]:
    sent_ns = time.time_ns()
    while not recorder.stopped:
        time.sleep(max(0, sent_ns - time.time_ns()) / 1e9)
        started.append(time.monotonic_ns())
        due_ms = 0 if waiting.level else sent_ns // _MS + waiting.delay_ms
        yield Batch(TOPIC, messages.bodies(shape.batch), delay_level=waiting.level, deliver_at_ms=due_ms)
        messages.passed(shape.batch)
        sent_ns += round(1e9 * shape.batch / shape.rate)


def wait_for_due(store: Path, waiting: Waiting, index: int, memory_name: str, result: Path) -> None:
    """A group consumer that notes what comes. Its rows have a fourth column: how late it was stored, in ms."""
    memory = SharedMemory(memory_name)
    recorder = Recorder(counters_of(memory, index))
    seen = _Seen()
    with Client(store, timeout=TIMEOUT_S) as client:
        begin = _end_of(client, waiting)
        with client.consumer("bench-delay", TOPIC) as consumer:
            _watch(consumer, recorder, seen)
        np.save(result, _rows(seen, _due_ms(client, waiting, begin)))
    del recorder
    memory.close()


def _watch(consumer: Consumer, recorder: Recorder, seen: _Seen) -> None:
    while not recorder.stopped:
        for message in itertools.takewhile(lambda _: not recorder.stopped, consumer.messages(timeout=_WAIT_S)):
            seen.add(message)
            recorder.running()


def _end_of(client: Client, waiting: Waiting) -> int:
    """The end of the queue that messages wait in, 0 before the first one has come."""
    topic, queue_id = waiting.parked_in
    found = [info.max_offset for info in client.queues() if (info.topic, info.queue_id) == (topic, queue_id)]
    return found[0] if found else 0


def _due_ms(client: Client, waiting: Waiting, offset: int) -> dict[int, int]:
    """Due times in ms by message number, of what was parked from this offset on."""
    found: dict[int, int] = {}
    topic, queue_id = waiting.parked_in
    end = _end_of(client, waiting)
    while offset < end:
        pulled = client.pull(topic, queue_id, offset, 4096)
        for parked in pulled.messages:
            properties = parked.properties
            if properties.get(REAL_TOPIC) == TOPIC:
                due_ms = parked.store_timestamp_ms + waiting.delay_ms
                found[int.from_bytes(parked.body[:_NUMBER_BYTES], "little")] = int(
                    properties.get(TIMER_DELIVER_MS, due_ms)
                )
        offset = max(offset + 1, pulled.next_offset)
    return found


def _rows(seen: _Seen, due_ms: dict[int, int]) -> NDArray[np.int64]:
    """int64[n, 4]: ended ns, seen late ns, 1, stored late ms. Left out is what was parked before the waiter began."""
    rows = [
        (ended_ns, seen_ns - due_ms[number] * _MS, 1, stored_ms - due_ms[number])
        for number, stored_ms, seen_ns, ended_ns in zip(
            seen.numbers, seen.stored_ms, seen.seen_ns, seen.ended_ns, strict=True
        )
        if number in due_ms
    ]
    return np.array(rows, np.int64).reshape(-1, 4)
