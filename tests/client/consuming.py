"""Topics to consume, and the messages that consumers return, against a real group."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest

from mqproc import Client
from mqproc.client import requests as core
from tests.support.group import PATIENCE_S

QUIET_S = 1.0
"""When nothing has come for so long, on a busy machine too, nothing will."""


def fill(client: Client, topic: str, count: int, queues: int = 4) -> list[bytes]:
    """A topic with so many messages, round its queues."""
    client.create_topic(topic, queues)
    bodies = [b"%d" % number for number in range(count)]
    if bodies:
        client.send_batch(topic, bodies, queue_ids=[number % queues for number in range(count)])
    client.wait_dispatched()
    return bodies


@contextlib.contextmanager
def no_thread_starts() -> Iterator[None]:
    """As under a limit that leaves room for none."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


def hide_from_one_pull(monkeypatch: pytest.MonkeyPatch, topic: str) -> list[int]:
    """Make the topic's next pull name a missing queue, as when the topic is deleted and created.

    Returns the offsets that its pulls ask for.
    """
    asked: list[int] = []
    made = core.pull_request

    def pull_request(name: str, queue_id: int, offset: int, *others: Any) -> Any:
        if name != topic:
            return made(name, queue_id, offset, *others)
        asked.append(offset)
        # A pull of a missing queue waits when it asks from the beginning.
        return made(name, queue_id, offset, *others) if asked[1:] else made(f"Not{name}", queue_id, 1, *others)

    monkeypatch.setattr(core, "pull_request", pull_request)
    return asked


def all_of(consumer: Any, count: int) -> list[Any]:
    """Read `count` messages of a consumer, then check for a while that no more follow."""
    return _all(lambda timeout: consumer.messages(timeout=timeout), count, lambda message: 1)


def all_batches_of(consumer: Any, columns: list[str], rows: int) -> list[Any]:
    """The same in Arrow batches, of so many rows together."""
    return _all(lambda timeout: consumer.batches(columns, timeout=timeout), rows, lambda batch: batch.num_rows)


def _all(looped: Callable[[float], Iterator[Any]], count: int, counts: Callable[[Any], int]) -> list[Any]:
    found: list[Any] = []
    for each in looped(PATIENCE_S) if count else ():
        found.append(each)
        if sum(map(counts, found)) >= count:
            break
    return found + _without_last(found, list(looped(QUIET_S)))


async def all_of_async(consumer: Any, count: int) -> list[Any]:
    """`all_of` of a consumer of asyncio's client."""
    return await _all_async(lambda timeout: consumer.messages(timeout=timeout), count, lambda message: 1)


async def all_batches_of_async(consumer: Any, columns: list[str], rows: int) -> list[Any]:
    """`all_batches_of` of a consumer of asyncio's client."""
    return await _all_async(
        lambda timeout: consumer.batches(columns, timeout=timeout), rows, lambda batch: batch.num_rows
    )


async def _all_async(
    looped: Callable[[float], AsyncGenerator[Any]], count: int, counts: Callable[[Any], int]
) -> list[Any]:
    found: list[Any] = []
    if count:
        async with contextlib.aclosing(looped(PATIENCE_S)) as loop:
            async for each in loop:
                found.append(each)
                if sum(map(counts, found)) >= count:
                    break
    return found + _without_last(found, [each async for each in looped(QUIET_S)])


def _without_last(found: list[Any], more: list[Any]) -> list[Any]:
    """Drop the message at which the first loop was left: it is redelivered."""
    if found:
        more.remove(found[-1])
    return more


def bodies_of(messages: Any) -> list[bytes]:
    return sorted((message.body for message in messages), key=lambda body: int(body))


def offsets(client: Client, group: str, topic: str) -> list[int | None]:
    return [queue.offset for queue in client.groups.info(group).queues if queue.topic == topic]
