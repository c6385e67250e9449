"""A signal handler that raises at any moment leaves no lock taken and a usable client."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import pytest

from mqproc.client import ResetTo, requests
from mqproc.client._sync.background import Background, Condition
from mqproc.client._sync.client import Client
from mqproc.client._sync.consumer import Consumer
from mqproc.client._sync.producer import Producer
from mqproc.errors import MqprocError
from mqproc.types import Message, StoredMessage
from tests.client.memory_roles import MemoryRoles
from tests.support.group import PATIENCE_S, Group, wait_until

# An interrupt can come before a new socket or file has an owner that closes it: Python closes it, and warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*unclosed file:ResourceWarning"),
]

INTERRUPTS = 150
LONGEST_S = 0.004
"""Random time from one interrupt to the next, in which a call is repeated."""


IGNORED_S = 0.2
"""Time to the next interrupt: Python ignores one in a finalizer."""


class Interrupted(BaseException):
    """Raised by the handler."""


@contextmanager
def interrupts() -> Iterator[Callable[[float], None]]:
    """A function that sets the time to the next interrupt; 0 for none."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, IGNORED_S)
        raise Interrupted

    # Python reports an interrupt in a finalizer instead of raising it. pytest's hook fails the test for
    # such a report, or if the hook itself is interrupted.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


def interrupt_often(call: Callable[[], object], times: int = INTERRUPTS) -> None:
    """Repeat a call until it was interrupted so often, each time at a random moment."""
    choose, count = random.Random(1), 0
    with interrupts() as interrupt_in:
        while count < times:
            try:
                interrupt_in(choose.uniform(1e-6, LONGEST_S))
                while True:
                    with suppress(MqprocError, TimeoutError):
                        call()
            except Interrupted:
                interrupt_in(0)
                count += 1


def interrupt_once(call: Callable[[], object], longest_s: float) -> None:
    """Make a call that is interrupted at a random moment, unless it takes less."""
    with interrupts() as interrupt_in:
        try:
            interrupt_in(random.uniform(1e-6, longest_s))
            call()
            interrupt_in(0)
        except Interrupted:
            interrupt_in(0)


def threads(name: str) -> list[threading.Thread]:
    """Live threads whose names begin with `name`."""
    return [each for each in threading.enumerate() if each.name.startswith(name) and each.is_alive()]


def in_time(work: Callable[[], object]) -> None:
    """Do work in another thread, which a lock that is taken for ever would stop."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "a lock is taken"


PRODUCER_CALLS: dict[str, Callable[[Producer], object]] = {
    "send": lambda producer: producer.send("t", b"x"),
    "send and wait": lambda producer: producer.send("t", b"x").result(0.002),
    "exception": lambda producer: producer.send("t", b"x").exception(0.002),
    "cancel": lambda producer: producer.send("t", b"x").cancel(),
    "on_done": lambda producer: producer.send("t", b"x").add_done_callback(lambda _: None),
    "full buffer": lambda producer: producer.send("t", bytes(6000), timeout=0.002),
    "flush": lambda producer: (producer.send("t", b"x"), producer.flush(0.002)),
}


@pytest.mark.parametrize("name", PRODUCER_CALLS)
def test_producer_interrupted_anywhere_continues(client: Client, roles: MemoryRoles, name: str) -> None:
    producer = client.producer(linger_ms=0.2, max_buffered_bytes=8000)
    interrupt_often(lambda: PRODUCER_CALLS[name](producer))
    in_time(lambda: producer.send("t", b"from another thread", timeout=PATIENCE_S).result(PATIENCE_S))
    producer.flush(PATIENCE_S)
    stored = len(roles.messages)
    producer.send("t", b"last").result(PATIENCE_S)
    assert len(roles.messages) == stored + 1
    producer.close(PATIENCE_S)


def sent_by(frame: FrameType | None) -> Producer | None:
    """The producer that a thread runs."""
    while frame is not None and frame.f_code.co_qualname != "Producer._send_all":
        frame = frame.f_back
    return frame.f_locals["self"] if frame is not None else None


def test_producer_interrupted_start_has_one_thread(client: Client) -> None:
    """A second thread would send later messages of a key before earlier ones."""
    producers = [client.producer(linger_ms=0) for _ in range(INTERRUPTS)]
    waiting = iter(producers)
    with suppress(StopIteration):
        interrupt_often(lambda: next(waiting).send("t", b"x").result(PATIENCE_S))
    for producer in producers:
        producer.send("t", b"x").result(PATIENCE_S)
    running = Counter(map(sent_by, list(sys._current_frames().values())))
    assert [running[producer] for producer in producers] == [1] * len(producers)
    for producer in producers:
        producer.close(PATIENCE_S)


def test_producer_interrupted_close_is_completed_by_next(client: Client, roles: MemoryRoles) -> None:
    for _ in range(50):
        producer = client.producer(linger_ms=1000)
        producer.send("t", b"x")
        interrupt_once(functools.partial(producer.close, PATIENCE_S), 0.001)
        producer.close(PATIENCE_S)
    assert len(roles.messages) == 50


def test_client_interrupted_anywhere_answers_rightly(client: Client, roles: MemoryRoles) -> None:
    """An answer, or the rest of a request, must not be taken for the next one's."""
    numbers = itertools.count()

    def send_and_read() -> None:
        body = b"%d" % next(numbers)
        client.send_oneway("t", bytes(100_000))
        sent = client.send("t", body)
        assert client.get(sent.message_id).body == body

    interrupt_often(send_and_read)
    send_and_read()


def test_condition_interrupted_anywhere_is_free() -> None:
    changed = Condition()

    def wait() -> None:
        with changed:
            changed.wait_for(lambda: False, 0.001)

    def notify() -> None:
        with changed:
            changed.notify_all()

    for call in (wait, notify):
        interrupt_often(call, 400)
        in_time(notify)
    assert not changed._waiters, "none is kept of those that were interrupted"


def test_background_interrupted_stop_is_completed_by_next() -> None:
    def begin() -> Background:
        background = Background("test", lambda: background.pause(PATIENCE_S))
        background.start()
        return background

    for _ in range(50):
        background = begin()
        interrupt_once(background.stop, 0.0005)
        in_time(background.stop)


# Consumers

MESSAGES, MANY = 60, 8000


@pytest.fixture
def filled(shared: Group) -> Iterator[tuple[Client, str]]:
    requests.arrow_parser(["body"])  # Imports pyarrow: Python itself does not survive an interrupted import.
    with shared.client() as client:
        topic = f"interrupted-{time.monotonic_ns()}"
        client.create_topic(topic, queues=4)
        client.send_many(Message(topic, b"%d" % number) for number in range(MESSAGES))
        client.wait_dispatched(PATIENCE_S)
        yield client, topic


def iterate(consumer: Consumer, seen: set[bytes]) -> None:
    for message in consumer.messages(timeout=0.01):
        seen.add(message.body)


def receive(consumer: Consumer, seen: set[bytes]) -> None:
    messages = consumer.receive(4, timeout=0.01)
    seen.update(message.body for message in messages)
    consumer.ack(*messages)


def read_batches(consumer: Consumer, seen: set[bytes]) -> None:
    for batch in consumer.batches(["body"], timeout=0.01):
        seen.update(batch["body"].to_pylist())


@pytest.mark.parametrize("step", [iterate, receive, read_batches])
def test_consumer_interrupted_anywhere_loses_nothing(
    filled: tuple[Client, str], step: Callable[[Consumer, set[bytes]], None]
) -> None:
    client, topic = filled
    seen: set[bytes] = set()
    with client.consumer("interrupted", topic, start="earliest") as consumer:
        interrupt_often(lambda: step(consumer, seen))
        for body in (b"last-%d" % number for number in range(4)):
            client.send(topic, body)
        client.wait_dispatched(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while consumer.lag() and time.monotonic() < deadline:
            step(consumer, seen)
            consumer.commit()
        in_time(lambda: step(consumer, seen))
        assert not consumer.lag()
        assert b"last-3" in seen


@pytest.mark.parametrize("call", ["commit", "seek", "take_back", "nack"])
def test_consumer_interrupted_call_takes_no_lock(filled: tuple[Client, str], call: str) -> None:
    client, topic = filled
    with client.consumer(f"calls-{call}", topic, start="earliest") as consumer:
        calls: dict[str, Callable[[], object]] = {
            "commit": consumer.commit,
            "seek": lambda: consumer.seek(ResetTo(earliest=True)),
            "take_back": lambda: consumer.take_back(consumer.receive(4, timeout=0.01)),
            "nack": lambda: consumer.nack(*consumer.receive(1, timeout=0.01), delay_level=1),
        }
        interrupt_often(calls[call], 50)
        in_time(lambda: consumer.receive(1))
        in_time(consumer.commit)


@pytest.mark.parametrize("ordered", [False, True])
def test_run_interrupted_anywhere_handles_every_message(filled: tuple[Client, str], ordered: bool) -> None:
    client, topic = filled
    group, handled, stop = f"running-{ordered}", set[bytes](), threading.Event()
    client.send_many(Message(topic, b"%d" % number) for number in range(MESSAGES, MANY))

    def handle(message: StoredMessage) -> None:
        handled.add(message.body)
        if len(handled) == MANY:
            stop.set()

    with client.consumer(group, topic, start="earliest") as consumer:
        interrupt_often(lambda: consumer.run(handle, workers=3, ordered=ordered))
        wait_until(lambda: not threads("mqproc-handler"))
        handled.clear()
        stop.clear()
        consumer.seek(ResetTo(earliest=True))
        in_time(lambda: consumer.run(handle, workers=3, ordered=ordered, stop=stop))
        in_time(consumer.commit)
    assert len(handled) == MANY


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("broadcast", [False, True])
def test_consumer_interrupted_join_leaves_nothing(filled: tuple[Client, str], tmp_path: Path, broadcast: bool) -> None:
    client, topic = filled
    group = f"joining-{broadcast}"
    path = tmp_path / "progress.json" if broadcast else None
    client.consumer(group, topic, broadcast=broadcast, offsets_path=path).close()
    before, consumers = descriptors(), list[Consumer]()
    for _ in range(100):
        interrupt_once(
            lambda: consumers.append(client.consumer(group, topic, broadcast=broadcast, offsets_path=path)), 0.003
        )
        while consumers:
            consumers.pop().close()
    wait_until(lambda: not [each for each in client.groups.all() if each.group == group and each.members])
    wait_until(lambda: not threads("mqproc-consumer") + threads("mqproc-broadcast"))
    with client.consumer(group, topic, broadcast=broadcast, offsets_path=path) as consumer:
        assert len(consumer.queues) == 4
    client.close()
    gc.collect()
    assert descriptors() <= before


@pytest.mark.parametrize("call", ["commit", "iterate", "receive", "seek", "lag"])
def test_broadcast_consumer_interrupted_call_takes_no_lock(
    filled: tuple[Client, str], tmp_path: Path, call: str
) -> None:
    client, topic = filled
    path = tmp_path / "progress.json"
    with client.consumer("casting", topic, start="earliest", broadcast=True, offsets_path=path) as consumer:
        calls: dict[str, Callable[[], object]] = {
            "commit": lambda: (receive(consumer, set()), consumer.commit()),
            "iterate": lambda: iterate(consumer, set()),
            "receive": lambda: receive(consumer, set()),
            "seek": lambda: consumer.seek(ResetTo(earliest=True)),
            "lag": lambda: (consumer.lag(), consumer.positions(), consumer.queues),
        }
        interrupt_often(calls[call], 50)
        in_time(lambda: receive(consumer, set()))
        in_time(consumer.commit)


def test_transaction_producer_interrupted_close_is_completed_by_next(filled: tuple[Client, str]) -> None:
    client, _ = filled
    for _ in range(40):
        producer = client.transaction_producer("closing", lambda message: None)
        interrupt_once(producer.close, 0.002)
        in_time(producer.close)
    assert not threads("mqproc-transactions")


def test_consumer_interrupted_close_is_completed_by_next(filled: tuple[Client, str]) -> None:
    client, topic = filled
    group = "closing"
    with client.consumer(group, topic, start="earliest") as consumer:
        pass
    before = descriptors()
    for _ in range(40):
        consumer = client.consumer(group, topic)
        interrupt_once(consumer.close, 0.003)
        consumer.close()
        consumer.close()
    wait_until(lambda: not client.groups.info(group).members)
    assert not threads("mqproc-consumer")
    client.close()
    assert descriptors() <= before
