"""The benchmarks themselves: append, dispatch, pull, query, e2e. Each returns a document of figures."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from mqproc.bench.clients import produce, pull, send_with_time, wait_and_read
from mqproc.bench.figures import PERCENTILES
from mqproc.bench.load import NUMBERS_PER_PRODUCER, Messages, Shape, key_of, topic_name
from mqproc.bench.runs import Bench, Result, Run, Settings, Start
from mqproc.client import Batch, Client
from mqproc.errors import BadRequestError, NotRunningError
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.layout.control import DISPATCHER
from mqproc.layout.index_file import ITEM_SIZE
from mqproc.quantities import counted

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
    with Run(bench, starts, settings) as run:
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
    with Run(bench, starts, replace(settings, shape=shape, messages=0)) as run:
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
        with Run(bench, starts, replace(settings, messages=0)) as run:
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
