"""Benchmarks that read loaded queues: pull, query, filter, consume."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from mqproc.bench.clients import NUMBERS_PER_PRODUCER, TIMEOUT_S, Messages, Recorder, Shape, Slot, key_of, topic_name
from mqproc.bench.clients import pull as pull_client
from mqproc.bench.runs import (
    LOADER,
    PERCENTILES,
    BenchGroup,
    BenchRun,
    Settings,
    load_batch,
    named_percentiles,
    percentile_text,
    run_cases,
)
from mqproc.client import Batch, Client, Consumer, ResetTo, requests
from mqproc.client.assignment import HOLD_S
from mqproc.errors import BadRequestError
from mqproc.layout.control import QUERY
from mqproc.types import Filter, SqlFilter, TagFilter

_WARM_QUERIES: Final = 200


def pull(bench: BenchGroup, settings: Settings, kinds: tuple[str, ...], columns: list[str] | None) -> dict[str, Any]:
    """Read the loaded queues from start to end repeatedly, as Arrow or as objects."""
    bench.prepare(settings.shape, settings.messages)
    cases = {kind: (pull_client, (bench.store, settings.shape, kind, columns)) for kind in kinds}
    return {"pull": run_cases(bench, settings, "pulled", cases)}


def query(bench: BenchGroup, settings: Settings) -> dict[str, Any]:
    """Send one request at a time: by key, by id, one message by offset, offset by time."""
    shape = settings.shape
    if not shape.keys:
        raise BadRequestError("bench query needs --keys of at least 1")
    bench.prepare(shape, settings.messages)
    numbers = np.random.default_rng(1).integers(0, settings.messages, 1 << 16).tolist()
    topics = [topic_name(index) for index in range(shape.topics)]
    frame = load_batch(shape)
    with Client(bench.store) as client:
        ends = {info.topic: max(1, info.max_offset) for info in client.queues()}
        known = [message.message_id for topic in topics[:8] for message in client.pull(topic, 0, 0, 256).messages]

        def topic_of(number: int) -> str:
            return topics[number % shape.topics]

        def by_key(number: int) -> Any:
            key = key_of(LOADER * NUMBERS_PER_PRODUCER + number)
            return client.by_key(topic_of(number // frame), key, max_messages=1)

        def pull_1(number: int) -> Any:
            topic = topic_of(number)
            return client.pull(topic, 0, number % ends[topic], 1).messages

        requests_by_name: dict[str, Callable[[int], Any]] = {
            "by_key": by_key,
            "get": lambda number: client.get(known[number % len(known)]),
            "pull_1": pull_1,
            "offset_at": lambda number: [client.offset_at(topic_of(number), 0, time.time() * 1000 - number % 1000)],
        }
        return {"query": {name: _time_query(name, ask, numbers, settings) for name, ask in requests_by_name.items()}}


def _time_query(name: str, ask: Callable[[int], Any], numbers: list[int], settings: Settings) -> dict[str, Any]:
    """Latencies of one kind of request after the warm-up."""
    latencies: list[int] = []
    missing = 0
    for number in numbers[:_WARM_QUERIES]:
        ask(number)
    deadline = time.monotonic() + settings.seconds
    for number in itertools.cycle(numbers):
        if time.monotonic() >= deadline:
            break
        started_ns = time.perf_counter_ns()
        found = ask(number)
        latencies.append(time.perf_counter_ns() - started_ns)
        missing += not found
    values = np.percentile(np.array(latencies) / 1000, PERCENTILES)
    settings.say(f"{name}: {len(latencies):,} requests, {percentile_text(values)}")
    return {"requests": len(latencies), "without_answer": missing, **named_percentiles(values, "latency_us_p")}


# Filters: searching queues for 1 message in 100

_FRAME_MESSAGES: Final = 1000
# Each tag belongs to the same number of messages of a frame.
_TAGS: Final = 100
_REGIONS: Final = ("north", "south", "east", "west")
_MATCHING_TAG: Final = "tag-7"
_MATCHING_PROPERTIES: Final = {"price": "15.25", "region": _REGIONS[0]}

FILTERS: Final[dict[str, Filter]] = {
    "tag": TagFilter(_MATCHING_TAG),
    "sql": SqlFilter("price BETWEEN 10.5 AND 19.5 AND region IN ('north', 'south')"),
}


def filters(bench: BenchGroup, settings: Settings, names: tuple[str, ...]) -> dict[str, Any]:
    """Search the loaded queues repeatedly with filters that 1 message in 100 matches."""
    _prepare_tagged(bench, settings)
    cases = {name: (search, (bench.store, settings.shape, name)) for name in names}
    return {"filter": run_cases(bench, settings, "looked through", cases)}


def _prepare_tagged(bench: BenchGroup, settings: Settings) -> None:
    """Load messages of all tags in turn, of which 1 in 100 has a price and a region that match.

    The last message of each queue matches all filters, so that a filtered read reaches the end without waiting.
    """
    shape = settings.shape
    maker = Messages(replace(shape, batch=_FRAME_MESSAGES), LOADER)
    tags = [f"tag-{number % _TAGS}" for number in range(_FRAME_MESSAGES)]

    def batches() -> Iterator[Batch]:
        for turn in range(-(-settings.messages // _FRAME_MESSAGES)):
            price = 15.25 if turn % 50 == 0 else 100.25 + turn
            properties = {"price": f"{price}", "region": _REGIONS[turn // 50 % len(_REGIONS)]}
            yield maker.frame(topic_name(turn % shape.topics), _FRAME_MESSAGES, tags, properties=properties)
        for number in range(shape.topics):
            queue_ids = range(shape.queues)
            yield maker.frame(
                topic_name(number), shape.queues, _MATCHING_TAG, queue_ids=queue_ids, properties=_MATCHING_PROPERTIES
            )

    bench.create_topics(shape.topics, shape.queues)
    bench.send(batches())
    bench.await_dispatch()


def search(store: Path, shape: Shape, name: str, slot: Slot) -> None:
    """Client: pull with a filter, queue after queue; counts every message that is searched."""
    with slot.record() as recorder, Client(store, timeout=TIMEOUT_S) as client:
        queues = deque((info.topic, info.queue_id) for info in client.queues() if info.max_offset > 0)
        offsets = dict.fromkeys(queues, 0)
        while not recorder.stopped:
            queue = queues[0]
            queues.rotate(-1)
            started_ns = time.monotonic_ns()
            found = client.pull(
                *queue, offsets[queue], shape.batch, max_bytes=requests.PULL_BYTES, filter=FILTERS[name]
            )
            searched = found.next_offset - offsets[queue]
            recorder.add(started_ns, searched, searched * shape.size)
            offsets[queue] = found.next_offset if found.next_offset < found.max_offset else 0


# Consumers of a group

KINDS: Final[dict[str, tuple[str, Filter | None]]] = {
    "objects": ("objects", None),
    "arrow": ("arrow", None),
    "tag": ("objects", FILTERS["tag"]),
    "sql": ("objects", FILTERS["sql"]),
}
"""The form that a consumer receives, and its filter, which 1 message in 100 matches."""
_MATCHING_ONE_IN: Final = 100
# A step ends after this time without messages, since a round's last step may be incomplete.
_WAIT_S: Final = 0.001
_POLL_S: Final = 0.05
_PULL_AGAIN_S: Final = HOLD_S / 2
IDLE_SETTINGS: Final = ("max_connections=8192",)
"""Each idle consumer has two connections."""
_IDLE_TOPIC: Final = "bench-idle"
_IDLE_MEMBERS: Final = 20


def consume(bench: BenchGroup, settings: Settings, kinds: tuple[str, ...], idle: int) -> dict[str, Any]:
    """Consume the loaded queues repeatedly as a group; then let `idle` consumers wait."""
    found: dict[str, Any] = {}
    if kinds:
        _prepare_tagged(bench, settings)
        cases = {kind: (consume_all, (bench.store, settings.shape, kind)) for kind in kinds}
        found = run_cases(bench, settings, "consumed", cases)
    if idle:
        found["idle"] = _idle(bench, settings, idle)
    return {"consume": found}


def consume_all(store: Path, shape: Shape, kind: str, slot: Slot) -> None:
    """Client: one group consumer; counts every message that its positions have passed."""
    form, filter = KINDS[kind]
    topics = [topic_name(number) for number in range(shape.topics)]
    # A step has the messages that one pull searches.
    step = shape.batch if filter is None else max(1, shape.batch // _MATCHING_ONE_IN)
    with slot.record() as recorder, Client(store, timeout=TIMEOUT_S) as client:
        total = sum(info.max_offset for topic in topics for info in client.queues(topic))
        group = f"bench-{kind}-{slot.index}"
        with client.consumer(group, topics, filter=filter, start="earliest", pull_messages=shape.batch) as consumer:
            while not recorder.stopped:
                steps = _batches(consumer) if form == "arrow" else _objects(consumer, step)
                _consume_to_end(consumer, steps, total, shape, recorder)
                consumer.seek(ResetTo(earliest=True))


def _consume_to_end(consumer: Consumer, steps: Iterator[None], total: int, shape: Shape, recorder: Recorder) -> None:
    passed = 0
    started_ns = time.monotonic_ns()
    while passed < total and not recorder.stopped:
        next(steps)
        at = sum(consumer.positions().values())
        recorder.add(started_ns, at - passed, (at - passed) * shape.size)
        passed, started_ns = at, time.monotonic_ns()


def _batches(consumer: Consumer) -> Iterator[None]:
    """Steps of one batch, or of none after the wait."""
    while True:
        for _ in consumer.batches(timeout=_WAIT_S):
            yield
        yield


def _objects(consumer: Consumer, step: int) -> Iterator[None]:
    """Steps of `step` messages, or fewer after the wait. Reads every body."""
    while True:
        messages = consumer.messages(timeout=_WAIT_S)
        while sum(len(message.body) for message in itertools.islice(messages, step)):
            yield
        yield


def _idle(bench: BenchGroup, settings: Settings, count: int) -> dict[str, Any]:
    """CPU of query and of one process with `count` idle consumers, as shares of a core."""
    with Client(bench.store, timeout=TIMEOUT_S) as client:
        client.create_topic(_IDLE_TOPIC, _IDLE_MEMBERS)
    with BenchRun(bench, [(wait_idle, (bench.store, count))], replace(settings, messages=0)) as run:
        result = run.measure("delivered")
    seconds = max(settings.seconds, 1e-9)
    shares = {name: round(used / seconds, 4) for name, used in result.cpu_seconds.items() if used}
    settings.say(f"idle: {count:,} consumers wait; query takes {100 * shares.get(QUERY, 0.0):.2f} % of a core")
    return {"consumers": count, "cores": shares}


def wait_idle(store: Path, count: int, slot: Slot) -> None:
    """Client: idle consumers, in groups of as many members as the topic has queues."""
    with slot.record() as recorder, Client(store, timeout=TIMEOUT_S) as client, ExitStack() as stack:
        consumers = [
            stack.enter_context(client.consumer(f"bench-idle-{slot.index}-{number // _IDLE_MEMBERS}", _IDLE_TOPIC))
            for number in range(count)
        ]
        pull_at = 0.0
        while not recorder.stopped:
            if time.monotonic() >= pull_at:
                for consumer in consumers:
                    consumer.receive()
                pull_at = time.monotonic() + _PULL_AGAIN_S
                recorder.set_running()
            time.sleep(_POLL_S)
