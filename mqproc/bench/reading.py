"""`mqproc bench consume`: what one consumer process takes out of loaded queues, and what waiting consumers cost."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Final

from mqproc.bench.clients import TIMEOUT_S, Messages, Recorder, Shape, counters_of, topic_name
from mqproc.bench.producing import LOADER
from mqproc.bench.runs import Bench, BenchRun, Settings
from mqproc.client import Batch, Client, Consumer, ResetTo
from mqproc.client import requests as core
from mqproc.client.assignment import HOLD_S
from mqproc.layout.control import QUERY
from mqproc.types import Filter, SqlFilter, TagFilter

# --- filtering ---
# `mqproc bench filter`: how fast queues are searched for the few messages that match a filter.


_FRAME_MESSAGES: Final = 1000
# Of a frame's tags each is the tag of as many messages.
_TAGS: Final = 100
_REGIONS: Final = ("north", "south", "east", "west")
_PASSES_TAG: Final = "tag-7"
_PASSES_SQL: Final = {"price": "15.25", "region": _REGIONS[0]}

FILTERS: Final[dict[str, Filter]] = {
    "tag": TagFilter(_PASSES_TAG),
    "sql": SqlFilter("price BETWEEN 10.5 AND 19.5 AND region IN ('north', 'south')"),
}


def filters(bench: Bench, settings: Settings, names: tuple[str, ...]) -> dict[str, Any]:
    """Consumers look through the loaded queues again and again, with a filter that 1 message in 100 passes."""
    shape = settings.shape
    bench.create_topics(shape.topics, shape.queues)
    load_tagged(bench, shape, settings.messages)
    bench.await_dispatch()
    found: dict[str, Any] = {}
    for name in names:
        starts = [(seek, (bench.store, shape, name)) for _ in range(settings.producers)]
        with BenchRun(bench, starts, replace(settings, messages=0)) as run:
            result = run.measure("looked through", shape.size)
        settings.say(f"{name}: " + result.figures.line("looked through"))
        found[name] = result.to_json()
    return {"filter": found}


def load_tagged(bench: Bench, shape: Shape, messages: int) -> None:
    """Each frame's messages have every tag in turn; its price and region are 1 in 100 times in the filter's range.

    Each queue's last message passes all filters: who reads with one gets to the queue's end, and need not wait there.
    """
    maker = Messages(replace(shape, batch=_FRAME_MESSAGES), LOADER)
    tags = [f"tag-{number % _TAGS}" for number in range(_FRAME_MESSAGES)]

    def batches() -> Iterator[Batch]:
        for turn in range(-(-messages // _FRAME_MESSAGES)):
            price = 15.25 if turn % 50 == 0 else 100.25 + turn
            properties = {"price": f"{price}", "region": _REGIONS[turn // 50 % len(_REGIONS)]}
            bodies, keys = maker.bodies(_FRAME_MESSAGES), maker.keys(_FRAME_MESSAGES)
            maker.passed(_FRAME_MESSAGES)
            yield Batch(topic_name(turn % shape.topics), bodies, keys=keys, tags=tags, properties=properties)
        for number in range(shape.topics):
            bodies, keys = maker.bodies(shape.queues), maker.keys(shape.queues)
            maker.passed(shape.queues)
            yield Batch(
                topic_name(number), bodies, keys, _PASSES_TAG, queue_ids=range(shape.queues), properties=_PASSES_SQL
            )

    with Client(bench.store, timeout=TIMEOUT_S) as client:
        for _ in client.send_batches(batches(), in_flight=4):
            pass


def seek(store: Path, shape: Shape, name: str, index: int, memory_name: str, result: Path) -> None:
    """Pull with a filter, queue after queue; what counts is every message that was looked at."""
    memory = SharedMemory(memory_name)
    recorder = Recorder(counters_of(memory, index))
    with Client(store, timeout=TIMEOUT_S) as client:
        queues = deque((info.topic, info.queue_id) for info in client.queues() if info.max_offset > 0)
        offsets = dict.fromkeys(queues, 0)
        while not recorder.stopped:
            queue = queues[0]
            queues.rotate(-1)
            started_ns = time.monotonic_ns()
            found = client.pull(*queue, offsets[queue], shape.batch, max_bytes=core.PULL_BYTES, filter=FILTERS[name])
            looked_at = found.next_offset - offsets[queue]
            recorder.add(started_ns, looked_at, looked_at * shape.size)
            offsets[queue] = found.next_offset if found.next_offset < found.max_offset else 0
    recorder.save(result)
    del recorder
    memory.close()


KINDS: Final[dict[str, tuple[str, Filter | None]]] = {
    "objects": ("objects", None),
    "arrow": ("arrow", None),
    "tag": ("objects", FILTERS["tag"]),
    "sql": ("objects", FILTERS["sql"]),
}
"""What a consumer is given, and by which filter; a filter lets 1 message in 100 through."""
FILTER_PASSES_ONE_IN: Final = 100
# A step ends when nothing has come for so long: what is left of a round's last step does not come.
_WAIT_S: Final = 0.001
_LOOK_S: Final = 0.05
_PULL_AGAIN_S: Final = HOLD_S / 2
OWN_SETTINGS: Final = ("max_connections=8192",)
"""Each consumer has two connections."""
_IDLE_TOPIC: Final = "bench-idle"
_IDLE_MEMBERS: Final = 20


def consume(bench: Bench, settings: Settings, kinds: tuple[str, ...], idle: int) -> dict[str, Any]:
    """A group's consumers read the loaded queues to their end again and again; then many wait for nothing."""
    shape = settings.shape
    found: dict[str, Any] = {}
    if kinds:
        bench.create_topics(shape.topics, shape.queues)
        load_tagged(bench, shape, settings.messages)
        bench.await_dispatch()
    for kind in kinds:
        starts = [(take, (bench.store, shape, kind)) for _ in range(settings.producers)]
        with BenchRun(bench, starts, replace(settings, messages=0)) as run:
            result = run.measure("consumed", shape.size)
        settings.say(f"{kind}: " + result.figures.line("consumed"))
        found[kind] = result.to_json()
    if idle:
        found["idle"] = _idle(bench, settings, idle)
    return {"consume": found}


def take(store: Path, shape: Shape, kind: str, index: int, memory_name: str, result: Path) -> None:
    """One group consumer; what counts is every message that its group's progress has passed."""
    memory = SharedMemory(memory_name)
    recorder = Recorder(counters_of(memory, index))
    form, filter = KINDS[kind]
    topics = [topic_name(number) for number in range(shape.topics)]
    # A step is what one pull looks at.
    step = shape.batch if filter is None else max(1, shape.batch // FILTER_PASSES_ONE_IN)
    with Client(store, timeout=TIMEOUT_S) as client:
        everything = sum(info.max_offset for topic in topics for info in client.queues(topic))
        group = f"bench-{kind}-{index}"
        with client.consumer(group, topics, filter=filter, start="earliest", pull_messages=shape.batch) as consumer:
            while not recorder.stopped:
                steps = _batches(consumer) if form == "arrow" else _objects(consumer, step)
                _to_the_end(consumer, steps, everything, shape, recorder)
                consumer.seek(ResetTo(earliest=True))
    recorder.save(result)
    del recorder
    memory.close()


def _to_the_end(consumer: Consumer, steps: Iterator[None], everything: int, shape: Shape, recorder: Recorder) -> None:
    passed = 0
    started_ns = time.monotonic_ns()
    while passed < everything and not recorder.stopped:
        next(steps)
        at = sum(consumer.positions().values())
        recorder.add(started_ns, at - passed, (at - passed) * shape.size)
        passed, started_ns = at, time.monotonic_ns()


def _batches(consumer: Consumer) -> Iterator[None]:
    """A step is a batch, or that none came."""
    while True:
        for _ in consumer.batches(timeout=_WAIT_S):
            yield
        yield


def _objects(consumer: Consumer, step: int) -> Iterator[None]:
    """A step is so many messages, or that no more came. Every body is looked at."""
    while True:
        messages = consumer.messages(timeout=_WAIT_S)
        while sum(len(message.body) for message in itertools.islice(messages, step)):
            yield
        yield


# Waiting


def _idle(bench: Bench, settings: Settings, count: int) -> dict[str, Any]:
    """CPU of query and of one process with `count` consumers that wait, as shares of a core."""
    with Client(bench.store, timeout=TIMEOUT_S) as client:
        client.create_topic(_IDLE_TOPIC, _IDLE_MEMBERS)
    starts = [(wait, (bench.store, count))]
    with BenchRun(bench, starts, replace(settings, messages=0)) as run:
        result = run.measure("delivered", settings.shape.size)
    seconds = max(settings.seconds, 1e-9)
    shares = {name: round(used / seconds, 4) for name, used in result.cpu_seconds.items() if used}
    settings.say(f"idle: {count:,} consumers wait; query takes {100 * shares.get(QUERY, 0.0):.2f} % of a core")
    return {"consumers": count, "cores": shares}


def wait(store: Path, count: int, index: int, memory_name: str, result: Path) -> None:
    """Consumers of groups of so many as the topic has queues; the server holds their pulls all the time."""
    memory = SharedMemory(memory_name)
    recorder = Recorder(counters_of(memory, index))
    with Client(store, timeout=TIMEOUT_S) as client, ExitStack() as stack:
        consumers = [
            stack.enter_context(client.consumer(f"bench-idle-{index}-{number // _IDLE_MEMBERS}", _IDLE_TOPIC))
            for number in range(count)
        ]
        pull_at = 0.0
        while not recorder.stopped:
            if time.monotonic() >= pull_at:
                for consumer in consumers:
                    consumer.receive()
                pull_at = time.monotonic() + _PULL_AGAIN_S
                recorder.running()
            time.sleep(_LOOK_S)
    recorder.save(result)
    del recorder
    memory.close()
