"""Handlers that fail for messages which the store has no room to deliver later."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from mqproc import AsyncClient, Client, StoredMessage, TooManyQueuesError
from mqproc.client import aio_handling, aside, handling
from tests.client.consuming import fill, offsets
from tests.conftest import PATIENCE_S, Group, wait_until

FAILURES = 2


class Failing:
    """Fails for message 1 the first times; done when all are handled."""

    def __init__(self, count: int, stop: Callable[[], None]) -> None:
        self._count = count
        self._stop = stop
        self.failures = 0
        self.handled: list[bytes] = []

    def __call__(self, message: StoredMessage) -> None:
        if message.body == b"1" and self.failures < FAILURES:
            self.failures += 1
            raise ValueError("not yet")
        self.handled.append(message.body)
        if len(self.handled) == self._count:
            self._stop()


@pytest.fixture
def full(make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """A topic with ten messages, and no room for further queues."""
    for module in (aside, handling, aio_handling):
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
def test_a_message_that_finds_no_room_is_handled_again_here(full: Group, ordered: bool) -> None:
    """The first one that failed ended the run; in order those behind it wait, else they are handled meanwhile."""
    stop = threading.Event()
    handler = Failing(10, stop.set)
    with full.client() as client:
        with client.consumer("billing", "Orders", start="earliest") as consumer:
            consumer.run(handler, ordered=ordered, stop=stop, pause_s=0)
        assert handler.failures == FAILURES
        bodies = [b"%d" % number for number in range(10)]
        assert handler.handled == (bodies if ordered else [bodies[0], *bodies[2:], bodies[1]])
        wait_until(lambda: is_done(client))


def test_so_it_is_for_asyncio(full: Group) -> None:
    async def run() -> Failing:
        stop = asyncio.Event()
        handler = Failing(10, stop.set)

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
    assert (handler.failures, handler.handled[-1]) == (FAILURES, b"1")
    with full.client() as client:
        wait_until(lambda: is_done(client))


def test_what_waits_for_its_turn_at_the_end_of_a_run_comes_again(full: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "AGAIN_S", 10 * PATIENCE_S)
    stop = threading.Event()
    handler = Failing(9, stop.set)
    with full.client() as client, client.consumer("billing", "Orders", start="earliest") as consumer:
        consumer.run(handler, stop=stop)
        assert b"1" not in handler.handled
        assert consumer.positions()["Orders", 0] == 1
        assert next(consumer.messages(timeout=PATIENCE_S)).body == b"1"


def test_a_run_with_too_many_aside_receives_no_more(full: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many fail, what is held in memory is bounded."""
    monkeypatch.setattr(aside, "ASIDE_MAX", 1)
    stop = threading.Event()
    handler = Failing(10, stop.set)
    with full.client() as client, client.consumer("billing", "Orders", start="earliest") as consumer:
        consumer.run(handler, stop=stop)
    assert handler.handled.index(b"1") < 9
