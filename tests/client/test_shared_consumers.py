"""One consumer where several threads or forked processes have it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc import (
    AsyncClient,
    AsyncConsumer,
    BadRequestError,
    Client,
    GroupInUseError,
    MessageNotFoundError,
    PermissionDeniedError,
    ResetTo,
    StoredMessage,
)
from mqproc.client.broadcast_progress import load_offsets
from mqproc.ipc import control_words
from mqproc.paths import StorePaths
from tests.client.test_shared_clients import FORKS, in_fork, run_apart
from tests.support.group import PATIENCE_S, Group, all_of, all_of_async, bodies_of, fill, offsets, wait_until


@pytest.fixture
def client(shared: Group) -> Iterator[Client]:
    with shared.client() as client:
        yield client


def test_a_receive_waits_for_another_threads_no_longer_than_it_shall(client: Client) -> None:
    fill(client, "Turns", 0, queues=1)
    with client.consumer("turns", "Turns", start="earliest") as consumer:
        first: list[bytes] = []
        long = threading.Thread(target=lambda: first.extend(bodies_of(consumer.receive(timeout=PATIENCE_S))))
        long.start()
        wait_until(lambda: consumer._fetcher.is_waited_for, what="the other thread's wait")
        began_s = time.monotonic()
        assert consumer.receive() == []
        assert consumer.receive(timeout=0.1) == []
        assert time.monotonic() - began_s < PATIENCE_S / 2
        client.send("Turns", b"0")
        long.join()
        assert first == [b"0"]
        client.send("Turns", b"1")
        assert bodies_of(consumer.receive(timeout=PATIENCE_S)) == [b"1"]


def test_a_consumer_shows_its_group_and_topics(client: Client) -> None:
    """It was an object at an address."""

    async def shown() -> list[str]:
        async with AsyncClient(client.store, timeout=PATIENCE_S) as ours, ours.consumer("shown", ["Shown"]) as consumer:
            return [repr(consumer), repr(ours.simple_consumer("simple", "Shown"))]

    fill(client, "Shown", 0, queues=1)
    with client.consumer("shown", "Shown") as consumer:
        assert repr(consumer) == "Consumer('shown', ['Shown'])"
    assert repr(client.simple_consumer("simple", ("Shown", "Other"))) == "SimpleConsumer('simple', ['Shown', 'Other'])"
    assert asyncio.run(shown()) == ["AsyncConsumer('shown', ['Shown'])", "AsyncSimpleConsumer('simple', ['Shown'])"]


@pytest.mark.parametrize("acknowledges", [True, False])
def test_ordered_receive_in_thread_gets_next_message_at_once(
    client: Client, monkeypatch: pytest.MonkeyPatch, acknowledges: bool
) -> None:
    monkeypatch.setattr("mqproc.client._sync.consumer.LOOK_S", PATIENCE_S)
    topic = f"Next{acknowledges}"
    fill(client, topic, 2, queues=1)
    with client.consumer("next", topic, start="earliest") as consumer:
        (first,) = consumer.receive(1, timeout=PATIENCE_S)
        found: list[bytes] = []
        other = threading.Thread(target=lambda: found.extend(bodies_of(consumer.receive(1, PATIENCE_S, ordered=True))))
        other.start()
        wait_until(lambda: consumer._fetcher.is_waited_for, what="the other thread's wait")
        began_s = time.monotonic()
        consumer.ack(first) if acknowledges else consumer.take_back([first])
        other.join()
        assert found == [b"1" if acknowledges else b"0"]
        assert time.monotonic() - began_s < PATIENCE_S / 2


def test_receive_notified_during_its_turn_checks_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its pulls, which find nothing to ask for, and its wait."""
    monkeypatch.setattr("mqproc.client._sync.consumer.LOOK_S", PATIENCE_S)
    fill(client, "Amid", 1, queues=1)
    with client.consumer("amid", "Amid", start="earliest") as consumer:
        once = consumer.receive(1, timeout=PATIENCE_S)
        monkeypatch.setattr(consumer, "_commit_soon", lambda **_: once and consumer.take_back([once.pop()]))
        began_s = time.monotonic()
        assert bodies_of(consumer.receive(1, PATIENCE_S, ordered=True)) == [b"0"]
        assert time.monotonic() - began_s < PATIENCE_S / 2


def test_a_signal_handler_closes_the_consumer_that_it_interrupts(client: Client) -> None:
    fill(client, "Interrupted", 1, queues=1)
    consumer = client.consumer("interrupted", "Interrupted", start="earliest")

    def interrupt() -> None:
        wait_until(lambda: consumer._fetcher.is_waited_for and 1 in consumer.positions().values())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: consumer.close())
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(BadRequestError, match="the consumer is closed"):
            list(consumer)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert offsets(client, "interrupted", "Interrupted") == [1]
    assert client.groups.info("interrupted").members == ()
    assert consumer._fetcher._bell < 0


@FORKS
def test_a_consumer_is_its_processes_and_no_forks(client: Client) -> None:
    """A forked process ends the block too; its parent stays a member with its messages."""
    sent = fill(client, "Forked", 8, queues=1)
    with client.consumer("forked", "Forked", start="earliest") as consumer:
        messages = consumer.receive(4, timeout=PATIENCE_S)
        generation = client.groups.info("forked").generation

        def child() -> None:
            attempts = (
                lambda: consumer.receive(1),
                lambda: next(iter(consumer)),
                lambda: consumer.ack(*messages),
                lambda: consumer.nack(*messages),
                consumer.commit,
            )
            for attempt in attempts:
                with pytest.raises(BadRequestError, match="another process's"):
                    attempt()
            consumer.__exit__(None, None, None)

        assert in_fork(child) == 0
        info = client.groups.info("forked")
        assert (info.generation, [member.member_id for member in info.members]) == (generation, [consumer.member_id])
        consumer.ack(*messages)
        assert bodies_of(all_of(consumer, 4)) == sent[4:]
    assert offsets(client, "forked", "Forked") == [8]


@FORKS
def test_a_consumer_of_asyncio_is_its_loops_and_no_forks(shared: Group, client: Client) -> None:
    """An asynchronous consumer refuses calls of other event loops and forked processes."""
    sent = fill(client, "Looped", 8, queues=1)

    async def refused(consumer: AsyncConsumer, messages: list[StoredMessage]) -> None:
        attempts = (
            consumer.receive(1),
            anext(consumer.messages()),
            consumer.ack(*messages),
            consumer.nack(*messages),
            consumer.seek(ResetTo(latest=True)),
            consumer.commit(),
        )
        for attempt in attempts:
            with pytest.raises(BadRequestError, match="belongs to another event loop"):
                await attempt

    async def program() -> None:
        async def forked() -> None:
            await refused(consumer, messages)
            await consumer.close()

        async with (
            asyncio.timeout(PATIENCE_S),
            AsyncClient(shared.store) as made,
            made.consumer("looped", "Looped", start="earliest") as consumer,
        ):
            messages = await consumer.receive(4, timeout=PATIENCE_S)
            generation = client.groups.info("looped").generation
            steps = forked()
            assert in_fork(lambda: run_apart(steps)) == 0
            steps.close()
            await asyncio.to_thread(asyncio.run, refused(consumer, messages))
            assert client.groups.info("looped").generation == generation
            await consumer.ack(*messages)
            assert bodies_of(await all_of_async(consumer, 4)) == sent[4:]

    asyncio.run(program())
    assert offsets(client, "looped", "Looped") == [8]


@FORKS
def test_a_fork_neither_holds_nor_changes_a_broadcast_consumers_file(client: Client, tmp_path: Path) -> None:
    sent = fill(client, "ForkedCast", 8, queues=1)
    path = tmp_path / "own.json"
    ends, end = os.pipe()
    with client.consumer("cast", "ForkedCast", start="earliest", broadcast=True, offsets_path=path) as consumer:
        consumer.ack(*consumer.receive(2, timeout=PATIENCE_S))
        pid = os.fork()
        if pid == 0:
            os.close(end)  # However the test ends, that end is closed then.
            os.read(ends, 1)
            consumer.close()
            os._exit(0)
        assert bodies_of(all_of(consumer, 6)) == sent[2:]
    try:
        with client.consumer("cast", "ForkedCast", broadcast=True, offsets_path=path) as consumer:
            os.close(end)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert load_offsets(path) == {"ForkedCast": {0: 8}}
            with pytest.raises(GroupInUseError):
                client.consumer("cast", "ForkedCast", broadcast=True, offsets_path=path)
            assert consumer.receive() == []
    finally:
        os.close(ends)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_members_of_group_without_permission_get_nothing(client: Client) -> None:
    """Messages in hand are finished first; a waiting receive raises."""
    sent = fill(client, "Paused", 8, queues=2)
    with client.consumer("paused", "Paused", start="earliest") as consumer:
        messages = consumer.receive(4, timeout=PATIENCE_S)
        client.groups.change("paused", enabled=False)
        wait_until(lambda: consumer.queues == [])
        consumer.ack(*messages)
        wait_until(lambda: sum(offsets(client, "paused", "Paused")) == len(messages))
        assert consumer.receive(4, timeout=0.2) == []
        assert len(client.groups.info("paused").members) == 1
        client.groups.change("paused", enabled=True)
        others = all_of(consumer, 8 - len(messages))
        assert sorted(bodies_of([*messages, *others]), key=int) == sent
    simple, told = client.simple_consumer("paused", "Paused"), []

    def receive() -> None:
        with pytest.raises(PermissionDeniedError, match="may not consume"):
            simple.receive(timeout=PATIENCE_S)
        told.append(True)

    waiting = threading.Thread(target=receive)
    waiting.start()
    wait_until(lambda: control_words.read_words(StorePaths(client.store))["waiting_pulls"] == 1)
    client.groups.change("paused", enabled=False)
    client.send("Paused", b"8")
    waiting.join()
    assert told


def test_nack_of_deleted_topic_names_probable_cause(client: Client) -> None:
    fill(client, "Deleted", 1, queues=1)
    with client.consumer("deleted", "Deleted", start="earliest") as consumer:
        messages = consumer.receive(1, PATIENCE_S)
        client.delete_topic("Deleted")
        with pytest.raises(MessageNotFoundError, match=r"retention, damage or the deletion of a topic took it$"):
            consumer.nack(*messages)
