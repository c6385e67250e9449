"""Reading your own writes: reads wait for dispatch up to the client's last send, and cost nothing after it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from mqproc import AsyncClient, Client, Message
from mqproc.client.own_writes import DispatchPosition, OwnWrites
from mqproc.errors import RequestTimeoutError
from mqproc.ipc.control_words import log_positions
from tests.client.conftest import steps_of
from tests.client.memory_roles import MemoryRoles
from tests.support.group import Group

ROUNDS = 200


def test_every_kind_of_read_finds_own_messages(shared: Group) -> None:
    with Client(shared.store) as client:
        for number in range(ROUNDS):
            sent = client.send("own", b"x", keys=f"k{number}", queue_id=0)
            kind = number % 7
            if kind == 0:
                assert len(client.pull("own", 0, sent.queue_offset).messages) == 1
            elif kind == 1:
                assert len(client.by_key("own", f"k{number}")) == 1
            elif kind == 2:
                assert client.count("own") == number + 1
            elif kind == 3:
                assert client.max_offset("own", 0) == number + 1
            elif kind == 4:
                assert next(each for each in client.topics() if each.topic == "own").message_count == number + 1
            elif kind == 5:
                assert client.get(sent.unique_id, "own").queue_offset == sent.queue_offset
            else:
                assert sum(1 for _ in client.range("own")) == number + 1
        assert client.read("own").to_arrow().num_rows == ROUNDS
        client.send_batch("own", [b"y"] * 1000, queue_id=1)
        assert client.count("own") == ROUNDS + 1000
        with client.producer() as producer:
            producer.send("own", b"z")
        assert client.count("own") == ROUNDS + 1001
        client.send_many(Message("own", b"m") for _ in range(10))
        assert client.count("own") == ROUNDS + 1011


def test_async_client_finds_own_messages(shared: Group) -> None:
    async def go() -> None:
        async with AsyncClient(shared.store) as client:
            for number in range(ROUNDS):
                sent = await client.send("async-own", b"x")
                if number % 2:
                    assert (await client.get(sent.unique_id, "async-own")).message_id == sent.message_id
                else:
                    assert await client.count("async-own") == number + 1

    asyncio.run(go())


def test_read_waits_no_longer_than_its_timeout(group: Group) -> None:
    with Client(group.store, timeout=0.5) as client, Client(group.store, read_your_writes=False) as other:
        client.send("orders", b"first")
        assert client.count("orders") == 1
        dispatcher = group.pid("dispatcher")
        os.kill(dispatcher, signal.SIGSTOP)
        try:
            second = client.send("orders", b"second")
            assert client.get(second.message_id).body == b"second"  # From the log, without a wait.
            began = time.monotonic()
            with pytest.raises(
                RequestTimeoutError, match=r"has not reached this client's last send in 0\.5 s: .* bytes"
            ):
                client.count("orders")
            assert 0.4 < time.monotonic() - began < 10
            other.send("orders", b"third")
            assert other.count("orders") == 1
        finally:
            os.kill(dispatcher, signal.SIGCONT)


def test_reads_after_dispatch_check_nothing(shared: Group) -> None:
    with Client(shared.store) as client:
        client.send("checked", b"x")
        assert client.count("checked") == 1
        _, steps = steps_of(lambda: client.count("checked"))
        assert "positions" not in steps
        assert "_await_own_writes" not in steps


def test_without_a_control_file_the_group_is_asked(roles: MemoryRoles) -> None:
    with Client(roles.store) as client:
        client.send("orders", b"x")
        assert client.count("orders") == 1
        assert OwnWrites(roles.store / "mqproc" / "writer.sock").positions() is None


def test_client_without_a_control_file_asks_ever_less_often(group: Group, tmp_path: Path) -> None:
    """As a client of another user, which reaches the sockets only."""
    reached = tmp_path / "reached" / "mqproc"
    reached.mkdir(parents=True)
    for role in ("writer", "query"):
        (reached / f"{role}.sock").symlink_to(group.paths.socket(role))
    assert OwnWrites(reached / "writer.sock").positions() is None
    (group.paths.consume_queue / "blocked").write_bytes(b"a file where the topic's folder is to be")

    def with_client() -> None:
        with Client(reached.parent, timeout=1) as client:
            client.send("blocked", b"x")
            client.count("blocked")

    async def with_async_client() -> None:
        async with AsyncClient(reached.parent, timeout=1) as client:
            await client.send("blocked", b"x")
            await client.count("blocked")

    for waiting in (with_client, lambda: asyncio.run(with_async_client())):
        before = group.words()["query_requests"]
        with pytest.raises(RequestTimeoutError, match="has not reached this client's last send"):
            waiting()
        # Pauses of 1, 2, 4, 8, 16, 32 ms, then 50 ms until the end of 1 s; without growth a thousand fit.
        assert 2 <= group.words()["query_requests"] - before <= 30


def test_log_that_ends_before_own_writes_counts_as_passed(shared: Group) -> None:
    own = OwnWrites(shared.paths.socket("writer"))
    assert own.positions() == DispatchPosition(*log_positions(shared.paths))
    own.last = 1000
    assert not own.passed(DispatchPosition(2000, 1000))
    assert own.passed(DispatchPosition(2000, 1001))
    own.last = 3000
    assert own.passed(DispatchPosition(2000, 2000))
    assert own.last < own.dispatched
