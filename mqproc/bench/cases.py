"""The benchmarks of a running group, by clients that send and clients that read."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mqproc.bench import clients
from mqproc.bench.clients import (
    NUMBERS_PER_PRODUCER,
    TIMEOUT_S,
    Messages,
    Recorder,
    Shape,
    Slot,
    key_of,
    produce,
    send_with_time,
    topic_name,
    wait_and_read,
)
from mqproc.bench.runs import (
    LOADER,
    PERCENTILES,
    BenchGroup,
    BenchRun,
    Result,
    Settings,
    Start,
    load_batch,
    named_percentiles,
    percentile_text,
    run_cases,
    run_clients,
)
from mqproc.client import Batch, Client, Consumer, ResetTo, requests
from mqproc.client.assignment import HOLD_S
from mqproc.errors import BadRequestError, NotRunningError, RequestTimeoutError
from mqproc.io.store_io import StoreIO
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.layout.control import DISPATCHER, QUERY
from mqproc.layout.index_file import ITEM_SIZE
from mqproc.layout.properties import REAL_TOPIC, TIMER_DELIVER_MS
from mqproc.store.access import read_settings
from mqproc.store.retention.plan import submit_request
from mqproc.topic_names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.types import Filter, SqlFilter, TagFilter
from mqproc.util.units import counted, delays_ms_of


def append(bench: BenchGroup, settings: Settings) -> dict[str, Any]:
    """Send as fast as possible or at a rate, while dispatch runs."""
    took_s = bench.create_topics(settings.shape.topics, settings.shape.queues)
    result = run_clients(bench, settings, "sent", (produce, (bench.store, settings.shape)))
    behind_at_end = bench.control.dispatch_behind_bytes
    caught_up_s = bench.await_dispatch()
    settings.say(result.figures.line("sent"))
    units = result.increases["dispatched_messages"]
    entries = result.increases["dispatched_entries"]
    written = result.increases["written"] + UNIT_SIZE * units + ITEM_SIZE * entries
    return {
        "append": result.to_json(),
        "topics_created_seconds": round(took_s, 3),
        "dispatch_behind_bytes_at_end": behind_at_end,
        "dispatch_caught_up_seconds": round(caught_up_s, 4),
        "dispatched_per_second": round(units / result.seconds),
        "store_bytes_per_second": round(written / result.seconds),
    }


def e2e(bench: BenchGroup, settings: Settings, part: str) -> dict[str, Any]:
    """Measure throughput with dispatch, then the latency from a send to a waiting consumer."""
    found: dict[str, Any] = {}
    if part != "latency":
        found |= append(bench, settings)
    if part != "throughput":
        found["to_waiting_consumer"] = _to_waiting_consumer(bench, settings)
    return found


def _to_waiting_consumer(bench: BenchGroup, settings: Settings) -> dict[str, Any]:
    topic = "bench-e2e"
    with Client(bench.store) as client:
        client.create_topic(topic, 1)
    shape = replace(settings.shape, size=max(8, settings.shape.size), batch=1, rate=settings.shape.rate or 1000.0)
    starts: list[Start] = [(wait_and_read, (bench.store, topic)), (send_with_time, (bench.store, shape, topic))]
    with BenchRun(bench, starts, replace(settings, shape=shape, messages=0)) as run:
        result = run.measure("delivered")
    delivered, sent = result.per_client
    settings.say("send to waiting consumer: " + delivered.line("delivered"))
    return {"delivered": delivered.to_json(), "sent": sent.to_json(), "cpu_us_per_message": result.cpu_us_per_message()}


def dispatch(bench: BenchGroup, settings: Settings) -> dict[str, Any]:
    """Freeze the dispatcher, fill the log, and time its catch-up; the best of three.

    The process stays warm, and the writer is idle meanwhile.
    """
    bench.prepare(settings.shape, min(100_000, settings.messages))
    rounds = [_catch_up(bench, settings) for _ in range(3)]
    best = max(rounds, key=lambda figures: float(figures["messages_per_second"]))
    settings.say(
        f"dispatch: {counted(best['messages'], 'record')} caught up in {best['seconds']:.3f} s, "
        f"{best['messages_per_second']:,} records/sec"
    )
    return {"dispatch": best, "rounds": rounds}


def _catch_up(bench: BenchGroup, settings: Settings) -> dict[str, Any]:
    bench.refresh()
    pid = bench.roles.get(DISPATCHER, 0)
    if not pid:
        raise NotRunningError("the group has no dispatcher")
    os.kill(pid, signal.SIGSTOP)
    try:
        bench.load(settings.shape, settings.messages)
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


# Retention: latency of single sends while full segments are deleted

_FILL_BODY: Final = 4096
_MARKS_S: Final = 120.0
_DELETION_S: Final = 600.0
_MARKS: Final = ("commitlog_mark", "cq_synced", "index_synced")


def retention(bench: BenchGroup, settings: Settings, fill: int) -> dict[str, Any]:
    """Compare single sends with single sends while all full segments are deleted."""
    shape = replace(settings.shape, batch=1, in_flight=1)
    single = replace(settings, shape=shape)
    bench.create_topics(shape.topics, shape.queues)
    bench.load(replace(shape, size=_FILL_BODY, keys=1), fill // _FILL_BODY)
    bench.await_dispatch()
    without = run_clients(bench, single, "sent", (produce, (bench.store, shape)))
    settings.say("without deletion: " + without.figures.line("sent"))
    _await_marks(bench)
    during = _send_while_deleting(bench, single)
    settings.say("with deletion: " + during.figures.line("sent"))
    ratios = [
        slow / max(fast, 1e-9)
        for slow, fast in zip(during.figures.percentiles_us, without.figures.percentiles_us, strict=True)
    ]
    return {
        "without_deletion": without.to_json(),
        "with_deletion": during.to_json(),
        "latency_ratios": named_percentiles(ratios),
        "deleted_segments": during.increases["retention_segments"],
        "deleted_bytes": during.increases["retention_bytes"],
    }


def _send_while_deleting(bench: BenchGroup, settings: Settings) -> Result:
    """Measure from the request for deletion until all space is freed."""
    answered = bench.words()["retention_answered"]

    def request() -> None:
        submit_request(StoreIO(), bench.paths, 0)

    def is_done() -> bool:
        words = bench.words()
        return words["retention_answered"] > answered and words["retention_pending_bytes"] == 0

    limits = replace(settings, seconds=_DELETION_S, messages=0)
    start: Start = (produce, (bench.store, settings.shape))
    return run_clients(bench, limits, "sent", start, at_begin=request, until=is_done)


def _await_marks(bench: BenchGroup) -> None:
    """Wait until the durable marks, which hold back deletion, have passed the log's end."""
    written = bench.words()["written"]
    deadline = time.monotonic() + _MARKS_S
    while min(bench.words()[mark] for mark in _MARKS) < written:
        if time.monotonic() > deadline:
            raise RequestTimeoutError(f"the durable marks have not reached {written:,} in {_MARKS_S:g} s")
        time.sleep(0.05)


# Delayed messages: how late they are delivered
#
#     send_delayed ──delayed──▶ keeper ──due──▶ log: stored late = store timestamp − due time
#                                               └──▶ receive_due: seen late = arrival − due time
#
# Sending continues while earlier messages become due, as in steady operation. Due times are read afterwards from the
# delayed records, so the figures do not depend on the clients.

_DELAY_TOPIC: Final = "bench-delay"
PROMISED_MS: Final = 50
"""The delay after the due time that no message should exceed."""
_ARRIVAL_WAIT_S: Final = 0.1
_NUMBER_BYTES: Final = 8
_NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class DelayKind:
    """A delay level, or (level 0) a delivery time `delay_ms` after the send."""

    level: int
    delay_ms: int

    @property
    def queue(self) -> tuple[str, int]:
        """Topic and queue id of the delayed records."""
        return (SCHEDULE_TOPIC, self.level - 1) if self.level else (TIMER_TOPIC, 0)


_Arrival = tuple[int, int, int, int]
"""A delivered message: number, store timestamp in ms, arrival by wall clock and monotonic clock in ns."""


def delay(bench: BenchGroup, settings: Settings, level: int, ahead: float) -> dict[str, Any]:
    """Send delayed messages at a rate while one group consumer waits for those that become due."""
    delays_ms = delays_ms_of(read_settings(StoreIO(), bench.paths).message_delay_level)
    kind = DelayKind(level, delays_ms[min(level, len(delays_ms)) - 1] if level else round(ahead * 1000))
    shape = replace(settings.shape, size=max(_NUMBER_BYTES, settings.shape.size))
    with Client(bench.store) as client:
        client.create_topic(_DELAY_TOPIC, shape.queues)
    each = replace(shape, rate=shape.rate / settings.producers)
    starts: list[Start] = [(receive_due, (bench.store, kind))]
    starts += [(send_delayed, (bench.store, each, kind))] * settings.producers
    with BenchRun(bench, starts, replace(settings, shape=shape, messages=0)) as run:
        begun_ns: list[int] = []
        result = run.measure("sent and seen", at_begin=lambda: begun_ns.append(time.monotonic_ns()))
        rows = np.load(run.results[0])
    measured = rows[(rows[:, 0] > begun_ns[0]) & (rows[:, 0] <= begun_ns[0] + round(result.seconds * 1e9))]
    stored, seen = _distribution(measured[:, 3]), _distribution(measured[:, 1] / _NS_PER_MS)
    rate = round(len(measured) / result.seconds)
    early = int((rows[:, 3] < 0).sum())
    settings.say(
        f"{len(measured):,} records due, {rate:,} a second; stored late {_distribution_text(stored)}; "
        f"seen late {_distribution_text(seen)}; {early:,} early"
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
            "cpu_percent": result.cpu_percent(),
        }
    }


def _distribution(late_ms: NDArray[Any]) -> dict[str, float]:
    if not len(late_ms):
        return {}
    return named_percentiles(np.percentile(late_ms, PERCENTILES)) | {"max": round(float(late_ms.max()), 2)}


def _distribution_text(late_ms: dict[str, float]) -> str:
    return ", ".join(f"{value:g} ms {name}" for name, value in late_ms.items())


def send_delayed(store: Path, shape: Shape, kind: DelayKind, slot: Slot) -> None:
    """Client: send frames of one due time each, at a fixed rate."""
    messages = Messages(shape, slot.index)
    started: deque[int] = deque()
    with slot.record() as recorder, Client(store, timeout=TIMEOUT_S) as client:
        frames = _delayed_frames(shape, messages, kind, recorder, started)
        for sent in client.send_batches(frames, in_flight=shape.in_flight):
            recorder.add(started.popleft(), len(sent), shape.size * shape.batch)


def _delayed_frames(
    shape: Shape, messages: Messages, kind: DelayKind, recorder: Recorder, started: deque[int]
) -> Iterator[Batch]:
    sent_ns = time.time_ns()
    while not recorder.stopped:
        time.sleep(max(0, sent_ns - time.time_ns()) / 1e9)
        started.append(time.monotonic_ns())
        due_ms = 0 if kind.level else sent_ns // _NS_PER_MS + kind.delay_ms
        yield Batch(_DELAY_TOPIC, messages.bodies(shape.batch), delay_level=kind.level, deliver_at_ms=due_ms)
        messages.advance(shape.batch)
        sent_ns += round(1e9 * shape.batch / shape.rate)


def receive_due(store: Path, kind: DelayKind, slot: Slot) -> None:
    """Client: a group consumer; saves int64[n, 4]: end ns, seen late ns, 1, stored late ms."""
    with slot.record(saves=False) as recorder, Client(store, timeout=TIMEOUT_S) as client:
        begin = _queue_end(client, kind)
        with client.consumer("bench-delay", _DELAY_TOPIC) as consumer:
            arrivals = list(_arrivals(consumer, recorder))
        due_ms = _due_times_ms(client, kind, begin)
        rows = [
            (ended_ns, seen_ns - due_ms[number] * _NS_PER_MS, 1, stored_ms - due_ms[number])
            for number, stored_ms, seen_ns, ended_ns in arrivals
            if number in due_ms
        ]
        np.save(slot.result, np.array(rows, np.int64).reshape(-1, 4))


def _arrivals(consumer: Consumer, recorder: Recorder) -> Iterator[_Arrival]:
    while not recorder.stopped:
        for message in itertools.takewhile(lambda _: not recorder.stopped, consumer.messages(timeout=_ARRIVAL_WAIT_S)):
            seen_ns, ended_ns = time.time_ns(), time.monotonic_ns()
            number = int.from_bytes(message.body[:_NUMBER_BYTES], "little")
            yield number, message.store_timestamp_ms, seen_ns, ended_ns
            recorder.set_running()


def _queue_end(client: Client, kind: DelayKind) -> int:
    """The end of the queue of delayed records; 0 when it does not exist yet."""
    ends = [info.max_offset for info in client.queues() if (info.topic, info.queue_id) == kind.queue]
    return ends[0] if ends else 0


def _due_times_ms(client: Client, kind: DelayKind, offset: int) -> dict[int, int]:
    """Due times by message number, of the delayed records from an offset on."""
    found: dict[int, int] = {}
    end = _queue_end(client, kind)
    while offset < end:
        pulled = client.pull(*kind.queue, offset, 4096)
        for record in pulled.messages:
            if record.properties.get(REAL_TOPIC) == _DELAY_TOPIC:
                number = int.from_bytes(record.body[:_NUMBER_BYTES], "little")
                default_ms = record.store_timestamp_ms + kind.delay_ms
                found[number] = int(record.properties.get(TIMER_DELIVER_MS, default_ms))
        offset = max(offset + 1, pulled.next_offset)
    return found


# Reading loaded queues

_WARM_QUERIES: Final = 200


def pull(bench: BenchGroup, settings: Settings, kinds: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    """Read the loaded queues from start to end repeatedly, as Arrow or as objects."""
    bench.prepare(settings.shape, settings.messages)
    arguments = bench.store, settings.shape
    cases = {kind: (clients.pull, (*arguments, kind, list(columns) or None)) for kind in kinds or ("arrow", "objects")}
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


def filters(bench: BenchGroup, settings: Settings, names: Sequence[str]) -> dict[str, Any]:
    """Search the loaded queues repeatedly with filters that 1 message in 100 matches."""
    _prepare_tagged(bench, settings)
    cases = {name: (search, (bench.store, settings.shape, name)) for name in names or FILTERS}
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
_IDLE_TOPIC: Final = "bench-idle"
_IDLE_MEMBERS: Final = 20


def consume(bench: BenchGroup, settings: Settings, kinds: Sequence[str], idle: int) -> dict[str, Any]:
    """Consume the loaded queues repeatedly as a group; then let `idle` consumers wait."""
    found: dict[str, Any] = {}
    # `none` leaves out all forms.
    if kinds := [kind for kind in kinds or KINDS if kind in KINDS]:
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


CASES: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    "append": append,
    "e2e": e2e,
    "delay": delay,
    "dispatch": dispatch,
    "retention": retention,
    "pull": pull,
    "consume": consume,
    "filter": filters,
    "query": query,
}
"""Benchmarks by command."""
