"""Arrow batches of a loop that is left are done when the consumer's block ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from mqproc import AsyncClient, Client
from tests.support.group import PATIENCE_S, Group, fill

MESSAGES, AT_ONCE = 50, 10


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(tmp_path_factory.mktemp("batches") / "store").start()
    yield group
    group.close()


@pytest.fixture
def client(shared: Group) -> Iterator[Client]:
    with shared.client() as client:
        yield client


def progress(client: Client, group: str) -> int | None:
    (queue,) = client.groups.info(group).queues
    return queue.offset


def bodies(batch: Any) -> list[int]:
    return [int(body) for body in batch["body"].to_pylist()]


def test_the_batch_that_a_loop_is_left_at_is_done(client: Client) -> None:
    fill(client, "Left", MESSAGES, queues=1)
    seen: list[int] = []
    while len(seen) < MESSAGES:
        with client.consumer("left", "Left", start="earliest", pull_messages=AT_ONCE) as consumer:
            for batch in consumer.batches(["body"], timeout=PATIENCE_S):
                seen += bodies(batch)
                break
        assert progress(client, "left") == len(seen)
    assert seen == list(range(MESSAGES))


def test_batch_of_failed_loop_is_redelivered(client: Client) -> None:
    fill(client, "Failing", MESSAGES, queues=1)

    def fail_at_the_third() -> None:
        with client.consumer("failing", "Failing", start="earliest", pull_messages=AT_ONCE) as consumer:
            for number, batch in enumerate(consumer.batches(["body"], timeout=PATIENCE_S)):
                if number == 2:
                    raise ZeroDivisionError(bodies(batch)[0])

    with pytest.raises(ZeroDivisionError) as failed:
        fail_at_the_third()
    assert progress(client, "failing") == failed.value.args[0] > 0


def test_batch_of_left_loop_is_done_when_next_begins(client: Client) -> None:
    fill(client, "Again", MESSAGES, queues=1)
    with client.consumer("again", "Again", start="earliest", pull_messages=AT_ONCE) as consumer:
        first = bodies(next(consumer.batches(["body"], timeout=PATIENCE_S)))
        second = bodies(next(consumer.batches(["body"], timeout=PATIENCE_S)))
    assert min(second) > max(first)
    assert progress(client, "again") == len(first) + len(second)


def test_async_batches_follow_the_same_rules(shared: Group, client: Client) -> None:
    fill(client, "Tasks", MESSAGES, queues=1)
    seen: list[int] = []

    async def take_one() -> None:
        async with AsyncClient(shared.store) as asynchronous:
            consumer = asynchronous.consumer("tasks", "Tasks", start="earliest", pull_messages=AT_ONCE)
            async with consumer as member:
                async for batch in member.batches(["body"], timeout=PATIENCE_S):
                    seen.extend(bodies(batch))
                    break

    while len(seen) < MESSAGES:
        asyncio.run(take_one())
        assert progress(client, "tasks") == len(seen)
    assert seen == list(range(MESSAGES))
