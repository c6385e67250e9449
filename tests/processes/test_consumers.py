"""Dying consumers and roles: queues are reassigned, no commit is lost, no message skipped."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc import Client
from mqproc.client._async.client import AsyncClient
from mqproc.client.requests import QUERY, ping
from mqproc.client.retry import NO_RETRY
from mqproc.errors import TooManyConnectionsError
from mqproc.layout import control as words_of
from tests.support.group import PATIENCE_S, Group, assert_below, wait_until

MEMBER = r"""
import sys

from mqproc.client import Client

store, name, seen_path, group, topic, session = sys.argv[1:]
with (
    Client(store) as client,
    open(seen_path, "a", buffering=1) as seen,
    client.consumer(group, topic, name=name, session_timeout=float(session)) as consumer,
):
    for message in consumer:
        seen.write(message.body.decode() + "\n")
"""
"""A consumer process. Arguments: store, name, file for consumed messages, group, topic, session timeout in seconds."""
SESSION_S = 2.0
CROWD = 8


class Process:
    """A consumer process that writes consumed messages to a file."""

    def __init__(self, group: Group, folder: Path, name: str, *arguments: str) -> None:
        self.seen_path = folder / f"{name}.seen"
        command = [sys.executable, "-c", MEMBER, str(group.store), name, str(self.seen_path), *arguments]
        self.process = subprocess.Popen(command)
        self.name = name

    def seen(self) -> list[str]:
        try:
            return self.seen_path.read_text().split()
        except FileNotFoundError:
            return []

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


def owners(client: Client, group: str) -> dict[str, int]:
    """Number of queues of each member, by name."""
    return {member.name: member.queues for member in client.groups.info(group).members}


def shares(members: int) -> list[int]:
    """64 queues, shared evenly."""
    return sorted(64 // members + (number < 64 % members) for number in range(members))


def shared(member: Process) -> set[str]:
    """Messages consumed by a member that were sent after all members had their queues."""
    return {body for body in member.seen() if "-" not in body}


def test_consumer_queues_of_ended_members_are_reassigned(group: Group, tmp_path: Path) -> None:
    with group.client() as client:
        client.create_topic("Fleet", 64)
        client.groups.change("fleet")
        members = [Process(group, tmp_path, f"m{number}", "fleet", "Fleet", f"{SESSION_S:g}") for number in range(8)]
        try:
            wait_until(lambda: sorted(owners(client, "fleet").values()) == [8] * 8, 60, "8 members with 8 queues each")
            active = list(members)
            rounds = itertools.count()

            def takes_over_s(sign: signal.Signals) -> float:
                """Seconds until the others have consumed a message of each queue of the signalled member."""
                active.pop(0).kill(sign)
                begin = time.monotonic()
                number = next(rounds)
                bodies = [f"{number}-{queue_id}" for queue_id in range(64)]
                client.send_batch("Fleet", [body.encode() for body in bodies], queue_ids=list(range(64)))
                wait_until(lambda: {body for each in active for body in each.seen()} >= set(bodies), what="delivered")
                took_s = time.monotonic() - begin
                wait_until(lambda: sorted(owners(client, "fleet").values()) == shares(len(active)), what="taken over")
                return took_s

            assert_below(1.0, lambda: takes_over_s(signal.SIGKILL), rounds=3)
            alive = list(active)
            assert_below(SESSION_S + 1.0, lambda: takes_over_s(signal.SIGSTOP), rounds=3)
            stopped = [member for member in alive if member not in active]
            client.send_batch("Fleet", [b"%d" % n for n in range(640)], queue_ids=[n % 64 for n in range(640)])
            wait_until(lambda: len(set().union(*map(shared, active))) == 640, what="all consumed by the others")
            wait_until(lambda: client.groups.info("fleet").lag == 0, what="all committed by the others")
            # A stopped member continues, does not undo the others' commits, and gets its share again.
            for member in stopped:
                member.kill(signal.SIGCONT)
            together = len(active) + len(stopped)
            wait_until(lambda: len(owners(client, "fleet")) == together, what=f"{together} members again")
            wait_until(lambda: client.groups.info("fleet").lag == 0, what="nothing left")
            assert not set().union(*map(shared, stopped))
        finally:
            for member in members:
                member.close()


def test_consumer_survives_killed_query_without_lost_commit(make_group: Callable[..., Group], tmp_path: Path) -> None:
    group = make_group()
    with group.client() as client:
        client.create_topic("Kept", 4)
        client.send_batch("Kept", [b"%d" % n for n in range(1000)], queue_ids=[n % 4 for n in range(1000)])
        client.wait_dispatched()
        with client.consumer("kept", "Kept", start="earliest", pull_messages=50) as consumer:
            found = []
            for message in consumer.messages(timeout=PATIENCE_S):
                found.append(message.body)
                if len(found) in (200, 500):
                    consumer.commit()
                    before = client.groups.info("kept").lag
                    os.kill(group.pid(words_of.QUERY), signal.SIGKILL)
                    assert client.groups.info("kept").lag <= before
                if len(found) == 1000:
                    break
            assert sorted(found, key=int) == [b"%d" % n for n in range(1000)]
            assert len(consumer.queues) == 4
        assert client.groups.info("kept").lag == 0
    group.kill()
    group.start()
    with group.client() as client:
        assert client.groups.info("kept").lag == 0
    assert group.stop() == 0
    text = group.paths.consumer_offsets.read_text()
    assert '"Kept@kept":{0:250,1:250,2:250,3:250' in text


def test_consumer_without_free_connection_warns_and_recovers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two consumers need a connection each in addition to the client's heartbeat connection.

    Here only one of them gets one.
    """
    full = Group(tmp_path / "full", max_connections=CROWD).start()
    with full.client() as client, contextlib.ExitStack() as crowd:
        client.create_topic("orders", 1)
        client.send("orders", b"waits")
        client.wait_dispatched()
        consumers = [
            crowd.enter_context(client.consumer(f"group-{number}", "orders", start="earliest")) for number in range(2)
        ]
        others = [crowd.enter_context(full.client(retry=NO_RETRY)) for _ in range(CROWD)]
        refused = [each for each in others if is_refused(each)]
        assert refused
        # One of them uses the client's spare connection.
        assert len(wait_until(lambda: consumers[0].receive(timeout=0.1), what="a message")) == 1
        wait_until(lambda: not consumers[1].receive(timeout=0.1) and caplog.messages, what="a word in the log")
        assert caplog.messages[0].startswith("fetching by consumer of group group-1 has failed for")
        assert "max_connections allows no more" in caplog.messages[0]
        for each in others:
            each.close()
        assert len(wait_until(lambda: consumers[1].receive(timeout=0.1), what="a message")) == 1
    assert "works again" in caplog.messages[-1]
    full.close()


def is_refused(client: Client) -> bool:
    try:
        client.run(ping(QUERY))
    except TooManyConnectionsError:
        return True
    return False


def test_async_consumer_warns_when_group_is_down(
    group: Group, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def program() -> None:
        async with asyncio.timeout(PATIENCE_S), AsyncClient(group.store) as client:
            await client.create_topic("news", 1)
            async with client.consumer(
                "readers", "news", broadcast=True, offsets_path=tmp_path / "offsets.json"
            ) as consumer:
                assert await consumer.receive(timeout=0.1) == []
                assert group.stop() == 0
                while not caplog.messages:
                    assert await consumer.receive(timeout=0.1) == []
        assert caplog.messages[0].startswith("fetching by consumer of group readers has failed for")

    asyncio.run(program())
