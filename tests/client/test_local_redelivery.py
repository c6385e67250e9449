"""Handlers that fail for messages which the store has no room to deliver later."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from mqproc import AsyncClient, BadRequestError, Client, StoredMessage, TooManyQueuesError
from mqproc.client import local_redelivery
from mqproc.client._async import handling as aio_handling
from mqproc.client._sync import handling
from mqproc.client.local_redelivery import LocalRedelivery
from tests.support.group import PATIENCE_S, Group, fill, offsets, wait_until

FAILURES = 2
FAILURES_MAX = 10_000
"""A run in which the others have no turn ends then."""
FIRST = frozenset({b"0", b"1", b"2"})


class Failing:
    """Handler that fails for message 1 the first times, and for some until the others are done."""

    def __init__(self, count: int, stop: Callable[[], None], last: frozenset[bytes] = frozenset()) -> None:
        self._count = count
        self._stop = stop
        self._last = last
        self.failures = 0
        self.handled: list[bytes] = []

    def __call__(self, message: StoredMessage) -> None:
        others_wait = message.body in self._last and len(self.handled) < self._count - len(self._last)
        if others_wait or (message.body == b"1" and self.failures < FAILURES):
            self.failures += 1
            if self.failures > FAILURES_MAX:
                self._stop()
            raise ValueError("not yet")
        self.handled.append(message.body)
        if len(self.handled) == self._count:
            self._stop()


@pytest.fixture
def full(make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """A topic with ten messages, and no room for further queues."""
    for module in (local_redelivery, handling, aio_handling):
        monkeypatch.setattr(module, "AGAIN_S", 0.2)
    group = make_group(max_queues=64)
    with group.client() as client:
        fill(client, "Orders", 10, queues=1)
        client.groups.change("billing", retry_max_times=0)
        with contextlib.suppress(TooManyQueuesError):
            for number in range(64):
                client.create_topic(f"filler-{number}", 1)
    return group


def is_done(client: Client) -> bool:
    return offsets(client, "billing", "Orders") == [10]


@pytest.mark.parametrize("ordered", [False, True])
def test_message_without_room_to_nack_is_retried_locally(full: Group, ordered: bool) -> None:
    """With order, later messages of the queue wait for a failed one; without, they are handled."""
    stop = threading.Event()
    handler = Failing(10, stop.set, frozenset() if ordered else frozenset({b"1"}))
    with full.client() as client:
        with client.consumer("billing", "Orders", start="earliest") as consumer:
            consumer.run(handler, ordered=ordered, stop=stop, pause_s=0)
        bodies = [b"%d" % number for number in range(10)]
        assert handler.handled == (bodies if ordered else [bodies[0], *bodies[2:], bodies[1]])
        wait_until(lambda: is_done(client))


def test_local_retries_do_not_starve_other_messages(full: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed messages that are due do not starve new ones."""
    monkeypatch.setattr(local_redelivery, "AGAIN_S", 0.0)
    stop = threading.Event()
    handler = Failing(10, stop.set, FIRST)
    with full.client() as client, client.consumer("billing", "Orders", start="earliest") as consumer:
        consumer.run(handler, stop=stop)
    assert len(handler.handled) == 10


class Holder:
    """A consumer whose queue was reset or belongs to another member."""

    def __init__(self) -> None:
        self.taken_back: list[StoredMessage] = []

    def holds(self, message: StoredMessage) -> bool:
        return message.queue_id == 0

    def take_back(self, messages: Sequence[StoredMessage]) -> None:
        self.taken_back += messages


def test_local_retry_skips_messages_of_lost_queues(full: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is redelivered to the new member; holding it would delay the queue's release."""
    monkeypatch.setattr(local_redelivery, "AGAIN_S", 0.0)
    with full.client() as client:
        held = client.pull("Orders", 0, 0).messages[0]
    gone = msgspec.structs.replace(held, queue_id=1)
    holder = Holder()
    waiting = LocalRedelivery(local_redelivery.HandlerRun(holder, threading.Event(), in_order=False))
    for message in (gone, held):
        waiting.put(message, TooManyQueuesError(""))
    assert waiting.due() is held
    assert holder.taken_back == [gone]


def test_so_it_is_for_asyncio(full: Group) -> None:
    async def run() -> Failing:
        stop = asyncio.Event()
        handler = Failing(10, stop.set, FIRST)

        async def handle(message: StoredMessage) -> None:
            handler(message)

        async with (
            asyncio.timeout(PATIENCE_S),
            AsyncClient(full.store) as client,
            client.consumer("billing", "Orders", start="earliest") as consumer,
        ):
            await consumer.run(handle, stop=stop)
        return handler

    handler = asyncio.run(run())
    assert {*handler.handled[-3:]} == FIRST
    with full.client() as client:
        wait_until(lambda: is_done(client))


def test_local_retries_left_at_the_end_are_redelivered(full: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_redelivery, "AGAIN_S", 10 * PATIENCE_S)
    stop = threading.Event()
    handler = Failing(9, stop.set)
    with full.client() as client, client.consumer("billing", "Orders", start="earliest") as consumer:
        consumer.run(handler, stop=stop)
        assert b"1" not in handler.handled
        assert consumer.positions()["Orders", 0] == 1
        assert next(consumer.messages(timeout=PATIENCE_S)).body == b"1"


@pytest.mark.parametrize("bound", ["WAITING_MAX", "WAITING_BYTES_MAX"])
def test_a_run_with_too_many_aside_receives_no_more(full: Group, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    """Memory for failed messages is bounded, however many fail and however large they are."""
    monkeypatch.setattr(local_redelivery, bound, 1)
    stop = threading.Event()
    handler = Failing(10, stop.set)
    with full.client() as client, client.consumer("billing", "Orders", start="earliest") as consumer:
        consumer.run(handler, stop=stop)
    assert handler.handled.index(b"1") < 9


def test_a_run_that_receives_no_more_ends_with_its_consumer(full: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose buffer is full still notices that its consumer was closed."""
    monkeypatch.setattr(local_redelivery, "WAITING_MAX", 1)
    monkeypatch.setattr(local_redelivery, "AGAIN_S", 10 * PATIENCE_S)
    with full.client() as client, client.consumer("billing", "Orders", start="earliest") as consumer:
        closing: list[threading.Timer] = []

        def fail(message: StoredMessage) -> None:
            closing.append(threading.Timer(0.2, consumer.close))
            closing[-1].start()
            raise ValueError("not yet")

        stop = threading.Event()
        at_last = threading.Timer(PATIENCE_S, stop.set)
        at_last.start()
        with pytest.raises(BadRequestError, match="the consumer is closed"):
            consumer.run(fail, stop=stop)
        at_last.cancel()
        # One of them may still be leaving the group over a connection that remains open.
        for each in closing:
            each.join()
