"""Benchmarks that send: append, e2e, dispatch, retention, delay."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mqproc.bench.clients import TIMEOUT_S, Messages, Recorder, Shape, Slot, produce, send_with_time, wait_and_read
from mqproc.bench.runs import (
    PERCENTILES,
    BenchGroup,
    BenchRun,
    Result,
    Settings,
    Start,
    named_percentiles,
    run_clients,
)
from mqproc.client import Batch, Client, Consumer
from mqproc.errors import NotRunningError, RequestTimeoutError
from mqproc.io.store_io import StoreIO
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.layout.control import DISPATCHER
from mqproc.layout.index_file import ITEM_SIZE
from mqproc.layout.properties import REAL_TOPIC, TIMER_DELIVER_MS
from mqproc.store.retention.plan import submit_request
from mqproc.store.settings import read_settings
from mqproc.topic_names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.types import StoredMessage
from mqproc.util.units import counted, delays_ms_of


def append(bench: BenchGroup, settings: Settings) -> dict[str, Any]:
    """Send as fast as possible or at a rate, while dispatch runs."""
    took_s = bench.create_topics(settings.shape.topics, settings.shape.queues)
    result = run_clients(bench, settings, "sent", (produce, (bench.store, settings.shape)))
    behind_at_end = bench.behind()
    caught_up_s = bench.await_dispatch()
    settings.say(result.figures.line("sent"))
    units = result.increase("dispatched_messages")
    entries = result.increase("dispatched_entries")
    written = result.increase("written") + UNIT_SIZE * units + ITEM_SIZE * entries
    return {
        "append": result.to_json(),
        "topics_created_seconds": round(took_s, 3),
        "dispatch_behind_bytes_at_end": behind_at_end,
        "dispatch_caught_up_seconds": round(caught_up_s, 4),
        "dispatched_per_second": round(units / result.seconds),
        "store_bytes_per_second": round(written / result.seconds),
    }


def e2e(bench: BenchGroup, settings: Settings, *, throughput: bool = True, latency: bool = True) -> dict[str, Any]:
    """Measure throughput with dispatch, then the latency from a send to a waiting consumer."""
    found: dict[str, Any] = {}
    if throughput:
        found |= append(bench, settings)
    if latency:
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

RETENTION_SETTINGS: Final = (
    # Nothing is deleted automatically, and anything can be deleted on request once it is written.
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


def retention(bench: BenchGroup, settings: Settings, fill_bytes: int) -> dict[str, Any]:
    """Compare single sends with single sends while all full segments are deleted."""
    shape = replace(settings.shape, batch=1, in_flight=1)
    single = replace(settings, shape=shape)
    bench.create_topics(shape.topics, shape.queues)
    bench.load(replace(shape, size=_FILL_BODY, keys=1), fill_bytes // _FILL_BODY)
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
        "deleted_segments": during.increase("retention_segments"),
        "deleted_bytes": during.increase("retention_bytes"),
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

TOPIC: Final = "bench-delay"
PROMISED_MS: Final = 50
"""The delay after the due time that no message should exceed."""
_WAIT_S: Final = 0.1
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


@dataclass(slots=True)
class _Arrivals:
    """Delivered messages: number, store timestamp in ms, arrival by both clocks in ns."""

    numbers: list[int] = field(default_factory=list)
    stored_ms: list[int] = field(default_factory=list)
    seen_ns: list[int] = field(default_factory=list)
    ended_ns: list[int] = field(default_factory=list)

    def add(self, message: StoredMessage) -> None:
        self.seen_ns.append(time.time_ns())
        self.ended_ns.append(time.monotonic_ns())
        self.numbers.append(int.from_bytes(message.body[:_NUMBER_BYTES], "little"))
        self.stored_ms.append(message.store_timestamp_ms)

    def rows(self, due_ms: dict[int, int]) -> NDArray[np.int64]:
        """int64[n, 4]: end ns, seen late ns, 1, stored late ms, of messages whose due time is known."""
        columns = zip(self.numbers, self.stored_ms, self.seen_ns, self.ended_ns, strict=True)
        rows = [
            (ended_ns, seen_ns - due_ms[number] * _NS_PER_MS, 1, stored_ms - due_ms[number])
            for number, stored_ms, seen_ns, ended_ns in columns
            if number in due_ms
        ]
        return np.array(rows, np.int64).reshape(-1, 4)


def delay(bench: BenchGroup, settings: Settings, level: int, ahead_s: float) -> dict[str, Any]:
    """Send delayed messages at a rate while one group consumer waits for those that become due."""
    delays_ms = delays_ms_of(read_settings(StoreIO(), bench.paths).message_delay_level)
    kind = DelayKind(level, delays_ms[min(level, len(delays_ms)) - 1] if level else round(ahead_s * 1000))
    shape = replace(settings.shape, size=max(_NUMBER_BYTES, settings.shape.size))
    with Client(bench.store) as client:
        client.create_topic(TOPIC, shape.queues)
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
        yield Batch(TOPIC, messages.bodies(shape.batch), delay_level=kind.level, deliver_at_ms=due_ms)
        messages.advance(shape.batch)
        sent_ns += round(1e9 * shape.batch / shape.rate)


def receive_due(store: Path, kind: DelayKind, slot: Slot) -> None:
    """Client: a group consumer, whose rows have a fourth column: ms stored late."""
    arrivals = _Arrivals()
    with slot.record(saves=False) as recorder, Client(store, timeout=TIMEOUT_S) as client:
        begin = _queue_end(client, kind)
        with client.consumer("bench-delay", TOPIC) as consumer:
            _receive(consumer, recorder, arrivals)
        np.save(slot.result, arrivals.rows(_due_times_ms(client, kind, begin)))


def _receive(consumer: Consumer, recorder: Recorder, arrivals: _Arrivals) -> None:
    while not recorder.stopped:
        for message in itertools.takewhile(lambda _: not recorder.stopped, consumer.messages(timeout=_WAIT_S)):
            arrivals.add(message)
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
            if record.properties.get(REAL_TOPIC) == TOPIC:
                number = int.from_bytes(record.body[:_NUMBER_BYTES], "little")
                default_ms = record.store_timestamp_ms + kind.delay_ms
                found[number] = int(record.properties.get(TIMER_DELIVER_MS, default_ms))
        offset = max(offset + 1, pulled.next_offset)
    return found
