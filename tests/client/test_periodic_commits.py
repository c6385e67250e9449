"""Finished messages are committed while the next is handled, as by RocketMQ every 5 s."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc import AsyncClient, Client, StoredMessage
from tests.support.group import PATIENCE_S, Group, fill, offsets, wait_until

DONE = 10


@pytest.fixture
def client(shared: Group, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Consumers do not commit themselves before they wait or close."""
    for side in ("_sync", "_async"):
        monkeypatch.setattr(f"mqproc.client.{side}.consumer.COMMIT_S", 3600.0)
    with shared.client() as client:
        yield client


@pytest.mark.parametrize("session_s", [10.0, 300.0])
def test_handler_at_work_does_not_delay_commits(client: Client, session_s: float) -> None:
    topic = f"Run{session_s:g}"
    fill(client, topic, DONE + 1, queues=1)
    reached, stop, seen = threading.Event(), threading.Event(), []

    def handle(message: StoredMessage) -> None:
        seen.append(message.body)
        if len(seen) > DONE:
            reached.set()
            stop.wait(PATIENCE_S)

    with client.consumer(topic, topic, start="earliest", session_timeout=session_s) as consumer:
        run = threading.Thread(target=lambda: consumer.run(handle, stop=stop))
        run.start()
        try:
            assert reached.wait(PATIENCE_S)
            wait_until(lambda: offsets(client, topic, topic) == [DONE], what="commit of the finished messages")
        finally:
            stop.set()
            run.join()


def test_loop_body_at_work_does_not_delay_commits(client: Client) -> None:
    fill(client, "Body", DONE + 1, queues=1)
    with client.consumer("body", "Body", start="earliest") as consumer:
        for message in consumer.messages(timeout=PATIENCE_S):
            if message.queue_offset == DONE:
                wait_until(lambda: offsets(client, "body", "Body") == [DONE], what="commit of the finished messages")
                break


def test_broadcast_body_at_work_does_not_delay_its_progress(client: Client, tmp_path: Path) -> None:
    fill(client, "Cast", DONE + 1, queues=1)
    path = tmp_path / "offsets.json"
    options = {"broadcast": True, "offsets_path": path}
    with client.consumer("cast", "Cast", start="earliest", **options) as consumer:  # type: ignore[arg-type]
        for message in consumer.messages(timeout=PATIENCE_S):
            if message.queue_offset == DONE:
                wait_until(lambda: json.loads(path.read_bytes()) == {"Cast": {"0": DONE}}, what="its saved progress")
                break


def test_async_loop_body_at_work_does_not_delay_commits(client: Client, shared: Group) -> None:
    fill(client, "AioBody", DONE + 1, queues=1)

    async def program() -> None:
        async with (
            AsyncClient(shared.store, timeout=PATIENCE_S) as own,
            own.consumer("aio-body", "AioBody", start="earliest") as consumer,
        ):
            async for message in consumer.messages(timeout=PATIENCE_S):
                if message.queue_offset == DONE:
                    async with asyncio.timeout(PATIENCE_S):
                        while (await own.groups.info("aio-body")).lag > 1:
                            await asyncio.sleep(0.05)
                    break

    asyncio.run(program())
