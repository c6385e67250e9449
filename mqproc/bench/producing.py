"""The benchmarks themselves: append, dispatch, pull, query, e2e. Each returns a document of figures."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mqproc.bench.clients import (
    NUMBERS_PER_PRODUCER,
    TIMEOUT_S,
    Messages,
    Recorder,
    Shape,
    counters_of,
    key_of,
    produce,
    pull,
    send_with_time,
    topic_name,
    wait_and_read,
)
from mqproc.bench.runs import PERCENTILES, Bench, BenchRun, Result, Settings, Start
from mqproc.client import Batch, Client, Consumer
from mqproc.errors import BadRequestError, NotRunningError, RequestTimeoutError
from mqproc.io.store_io import StoreIO
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.layout.control import DISPATCHER
from mqproc.layout.index_file import ITEM_SIZE
from mqproc.layout.properties import REAL_TOPIC, TIMER_DELIVER_MS
from mqproc.store.retention import request as retention_request
from mqproc.store.settings import read_settings
from mqproc.topic_names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.types import StoredMessage
from mqproc.util.units import counted, delays_ms_of

# Loads that are only read later are built in frames of this size, whatever is measured then.
LOAD_BATCH = 1000
LOAD_FRAME_BYTES = 256 << 10
_WARM_QUERIES = 200
# The producer number of loads; the measured producers begin at 0.
LOADER = 1000


def append(bench: Bench, settings: Settings) -> dict[str, Any]:
    """Producers send as fast as they can, or at a rate; dispatch runs beside."""
    took_s = bench.create_topics(settings.shape.topics, settings.shape.queues)
    result = _produce(bench, settings)
    lag_at_end = bench.behind()
    caught_up_s = bench.await_dispatch()
    settings.say(result.figures.line("sent"))
    return {
        "append": result.to_json(),
        "topics_created_seconds": round(took_s, 3),
        "dispatch_behind_bytes_at_end": lag_at_end,
        "dispatch_caught_up_seconds": round(caught_up_s, 4),
        "dispatched_per_second": _dispatched_rate(result),
        "store_bytes_per_second": _store_rate(result),
    }


def _produce(bench: Bench, settings: Settings) -> Result:
    starts = [(produce, (bench.store, settings.shape)) for _ in range(settings.producers)]
    with BenchRun(bench, starts, settings) as run:
        return run.measure("sent", settings.shape.size)


def _dispatched_rate(result: Result) -> int:
    done = result.words_after["dispatched_messages"] - result.words_before["dispatched_messages"]
    return round(done / max(result.figures.seconds, 1e-9))


def _store_rate(result: Result) -> int:
    """Bytes of log, units and index entries that were written in a second."""
    before, after = result.words_before, result.words_after
    units = after["dispatched_messages"] - before["dispatched_messages"]
    entries = after["dispatched_entries"] - before["dispatched_entries"]
    size = after["written"] - before["written"] + UNIT_SIZE * units + ITEM_SIZE * entries
    return round(size / max(result.figures.seconds, 1e-9))


def e2e(bench: Bench, settings: Settings, *, throughput: bool = True, latency: bool = True) -> dict[str, Any]:
    """Throughput with dispatch beside, then the way of a single message to a waiting consumer."""
    found: dict[str, Any] = {}
    if throughput:
        found |= append(bench, settings)
    if latency:
        found["to_waiting_consumer"] = _to_waiting_consumer(bench, settings)
    return found


def _to_waiting_consumer(bench: Bench, settings: Settings) -> dict[str, Any]:
    topic = "bench-e2e"
    with Client(bench.store) as client:
        client.create_topic(topic, 1)
    shape = replace(settings.shape, size=max(8, settings.shape.size), batch=1, rate=settings.shape.rate or 1000.0)
    starts: list[Start] = [(wait_and_read, (bench.store, topic)), (send_with_time, (bench.store, shape, topic))]
    with BenchRun(bench, starts, replace(settings, shape=shape, messages=0)) as run:
        result = run.measure("delivered", shape.size)
    delivered, sent = result.per_client
    settings.say("send to waiting consumer: " + delivered.line("delivered"))
    return {"delivered": delivered.to_json(), "sent": sent.to_json(), "cpu_us_per_message": result.cpu_us_per_message()}


def load(bench: Bench, shape: Shape, messages: int) -> float:
    """Store messages to be read later; returns the seconds it took. Their numbers count from the loader's first."""
    batch = max(1, min(LOAD_BATCH, LOAD_FRAME_BYTES // max(1, shape.size)))
    maker = Messages(replace(shape, batch=batch), LOADER)
    started = time.monotonic()

    def batches() -> Any:
        left, turn = messages, 0
        while left > 0:
            count = min(batch, left)
            bodies, keys = maker.bodies(count), maker.keys(count)
            maker.passed(count)
            yield Batch(topic_name(turn % shape.topics), bodies, keys=keys, tags="bench")
            left -= count
            turn += 1

    with Client(bench.store, timeout=60) as client:
        for _ in client.send_batches(batches(), in_flight=4):
            pass
    return time.monotonic() - started


def dispatch(bench: Bench, settings: Settings) -> dict[str, Any]:
    """Catch-up: the dispatcher is frozen (SIGSTOP) while the log is filled, then let go; the time to the end counts.

    The same warm process works on without a restart, and the writer is idle meanwhile. Repeated three times, the best
    counts; the first is a warm-up.
    """
    shape = settings.shape
    bench.create_topics(shape.topics, shape.queues)
    load(bench, shape, min(100_000, settings.messages))
    bench.await_dispatch()
    rates = [_catch_up(bench, settings) for _ in range(3)]
    best = max(rates, key=lambda rate: float(rate["messages_per_second"]))
    settings.say(
        f"dispatch: {counted(best['messages'], 'record')} caught up in {best['seconds']:.3f} s, "
        f"{best['messages_per_second']:,} records/sec"
    )
    return {"dispatch": best, "rounds": rates}


def _catch_up(bench: Bench, settings: Settings) -> dict[str, Any]:
    bench.refresh()
    pid = bench.roles.get(DISPATCHER, 0)
    if not pid:
        raise NotRunningError("the group has no dispatcher")
    os.kill(pid, signal.SIGSTOP)
    try:
        load(bench, settings.shape, settings.messages)
        before = bench.words()
    finally:
        started = time.monotonic()
        os.kill(pid, signal.SIGCONT)
    bench.await_dispatch()
    seconds = time.monotonic() - started
    after = bench.words()
    messages = after["dispatched_messages"] - before["dispatched_messages"]
    size = after["dispatched"] - before["dispatched"]
    return {
        "messages": messages,
        "log_bytes": size,
        "seconds": round(seconds, 4),
        "messages_per_second": round(messages / seconds),
        "log_bytes_per_second": round(size / seconds),
        "index_entries": after["dispatched_entries"] - before["dispatched_entries"],
    }


def pulls(bench: Bench, settings: Settings, kinds: tuple[str, ...], columns: list[str] | None) -> dict[str, Any]:
    """Consumers read the loaded queues from beginning to end, again and again."""
    shape = settings.shape
    bench.create_topics(shape.topics, shape.queues)
    load(bench, shape, settings.messages)
    bench.await_dispatch()
    found: dict[str, Any] = {}
    for kind in kinds:
        starts = [(pull, (bench.store, shape, kind, columns)) for _ in range(settings.producers)]
        with BenchRun(bench, starts, replace(settings, messages=0)) as run:
            result = run.measure("pulled", shape.size)
        settings.say(f"{kind}: " + result.figures.line("pulled"))
        found[kind] = result.to_json()
    return {"pull": found}


def queries(bench: Bench, settings: Settings) -> dict[str, Any]:
    """Single requests one after the other: by key, by id, one message by offset, offset by time."""
    shape = settings.shape
    if not shape.keys:
        raise BadRequestError("bench query needs --keys of at least 1")
    bench.create_topics(shape.topics, shape.queues)
    load(bench, shape, settings.messages)
    bench.await_dispatch()
    random = np.random.default_rng(1)
    numbers = random.integers(0, settings.messages, 1 << 16).tolist()
    with Client(bench.store) as client:
        topics = [topic_name(index) for index in range(shape.topics)]
        frame = max(1, min(LOAD_BATCH, LOAD_FRAME_BYTES // max(1, shape.size)))
        ends = {info.topic: info for info in client.queues()}
        ids = [client.pull(topic, 0, 0, 256).messages for topic in topics[:8]]
        known = [message.message_id for messages in ids for message in messages]
        asked: dict[str, Callable[[int], Any]] = {
            "by_key": lambda number: client.by_key(
                topics[number // frame % shape.topics], key_of(LOADER * NUMBERS_PER_PRODUCER + number), max_messages=1
            ),
            "get": lambda number: client.get(known[number % len(known)]),
            "pull_1": lambda number: (
                client.pull(
                    topics[number % shape.topics], 0, number % max(1, ends[topics[number % shape.topics]].max_offset), 1
                ).messages
            ),
            "offset_at": lambda number: [
                client.offset_at(topics[number % shape.topics], 0, time.time() * 1000 - number % 1000)
            ],
        }
        return {"query": {name: _time_queries(name, ask, numbers, settings) for name, ask in asked.items()}}


def _time_queries(name: str, ask: Callable[[int], Any], numbers: list[int], settings: Settings) -> dict[str, Any]:
    """Latencies of one kind for `seconds`, the warm-up left out."""
    latencies: list[int] = []
    missing = 0
    for number in numbers[:_WARM_QUERIES]:
        ask(number)
    deadline = time.monotonic() + settings.seconds
    turn = 0
    while time.monotonic() < deadline:
        number = numbers[turn % len(numbers)]
        turn += 1
        started_ns = time.perf_counter_ns()
        found = ask(number)
        latencies.append(time.perf_counter_ns() - started_ns)
        missing += not found
    values = np.percentile(np.array(latencies) / 1000, PERCENTILES)
    shown = ", ".join(f"{value:.1f} µs {p:g}th" for p, value in zip(PERCENTILES, values, strict=True))
    settings.say(f"{name}: {len(latencies):,} requests, {shown}")
    named = {f"latency_us_p{p:g}": round(float(value), 2) for p, value in zip(PERCENTILES, values, strict=True)}
    return {"requests": len(latencies), "without_answer": missing, **named}


# --- retention ---
# `mqproc bench retention`: what single sends pay while full segments are deleted beside them.


OWN_SETTINGS: Final = (
    # Nothing goes by itself, and what is asked for may go as soon as it is written.
    "delete_when=4",
    "file_reserved_time=1000",
    "clean_file_forcibly_enable=false",
    "disk_max_used_space_ratio=99",
    "flush_consume_queue_thorough_interval=1000",
    "flush_commit_log_thorough_interval=1000",
)
_FILL_BODY: Final = 4096
_MARKS_S: Final = 120.0
_DELETION_S: Final = 600.0
_MARKS: Final = ("commitlog_mark", "cq_synced", "index_synced")


def retention(bench: Bench, settings: Settings, fill_bytes: int) -> dict[str, Any]:
    """Fill the log, send single messages, then send again while all full segments go; compares the latencies."""
    shape = replace(settings.shape, batch=1, in_flight=1)
    bench.create_topics(shape.topics, shape.queues)
    load(bench, replace(shape, size=_FILL_BODY, keys=1), fill_bytes // _FILL_BODY)
    bench.await_dispatch()
    single = replace(settings, shape=shape)
    alone = _send(bench, single)
    settings.say("without deletion: " + alone.figures.line("sent"))
    _await_marks(bench)
    beside = _send_while_deleting(bench, single)
    settings.say("with deletion: " + beside.figures.line("sent"))
    before, after = beside.words_before, beside.words_after
    ratios = {
        f"p{percentile:g}": round(with_it / max(without, 1e-9), 2)
        for percentile, with_it, without in zip(
            (50, 95, 99, 99.9), beside.figures.percentiles_us, alone.figures.percentiles_us, strict=True
        )
    }
    return {
        "without_deletion": alone.to_json(),
        "with_deletion": beside.to_json(),
        "latency_ratios": ratios,
        "deleted_segments": after["retention_segments"] - before["retention_segments"],
        "deleted_bytes": after["retention_bytes"] - before["retention_bytes"],
    }


def _send(bench: Bench, settings: Settings) -> Result:
    starts = [(produce, (bench.store, settings.shape)) for _ in range(settings.producers)]
    with BenchRun(bench, starts, settings) as run:
        return run.measure("sent", settings.shape.size)


def _send_while_deleting(bench: Bench, settings: Settings) -> Result:
    """Measured from the request to the moment at which the last byte is free."""
    answered = bench.words()["retention_answered"]

    def ask() -> None:
        retention_request.ask(StoreIO(), bench.paths, 0)

    def is_done() -> bool:
        words = bench.words()
        return words["retention_answered"] > answered and words["retention_pending_bytes"] == 0

    starts = [(produce, (bench.store, settings.shape)) for _ in range(settings.producers)]
    with BenchRun(bench, starts, replace(settings, seconds=_DELETION_S, messages=0)) as run:
        return run.measure("sent", settings.shape.size, at_begin=ask, until=is_done)


def _await_marks(bench: Bench) -> None:
    """Until every mark has passed what is written now: else they would hold segments back."""
    written = bench.words()["written"]
    deadline = time.monotonic() + _MARKS_S
    while min(bench.words()[mark] for mark in _MARKS) < written:
        if time.monotonic() > deadline:
            raise RequestTimeoutError(f"the durable marks have not reached {written:,} in {_MARKS_S:g} s")
        time.sleep(0.05)


# --- delaying ---
# `mqproc bench delay`: how late messages come that wait for their time, as many due a second as `--rate` says.
#
#     send_ahead ──parked──▶ keeper ──due──▶ log: stored late = store timestamp − due time
#                                             └──▶ wait_for_due: seen late = this moment − due time
#
# Sends go on while what was sent before comes due, as on a store that does this all day. What a message was due at is
# read from its parked record when all is over, so the figures rest on what the store has and on no client's word.


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
    with BenchRun(bench, starts, replace(settings, shape=shape, messages=0)) as run:
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
