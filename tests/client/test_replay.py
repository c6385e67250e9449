"""Replays with one client: large messages, full properties, lost answers."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import pytest

from mqproc.client import requests
from mqproc.client._async.client import AsyncClient
from mqproc.client._sync.client import Client
from mqproc.client.dispatch_barrier import SystemClock
from mqproc.client.replay import REPLAYED, Replay, ReplayPosition, ReplaySource, frames_of
from mqproc.client.requests import Call
from mqproc.errors import BadRequestError, PropertiesTooLargeError, SendOutcomeUnknownError
from mqproc.layout.control import DISPATCHER
from mqproc.layout.record import PROPERTIES_SIZE_MAX
from mqproc.types import Message
from tests.support.group import Group


@pytest.fixture
def client(group: Group) -> Iterator[Client]:
    with group.client() as client:
        yield client


def test_frames_have_so_many_messages_and_bytes() -> None:
    frames = frames_of([1, 1, 1, 1 << 20, 1, 2 << 20, (1 << 20) - 1, 1, 1], 2, int)
    assert list(frames) == [[1, 1], [1], [1 << 20], [1], [2 << 20], [(1 << 20) - 1, 1], [1]]
    assert list(frames_of([], 2, int)) == []


def test_messages_that_no_frame_holds_together_are_sent_in_several(client: Client) -> None:
    """Of one queue with 67 MB in its next thousand messages none was ever sent."""
    client.create_topic("large", 1)
    for number in range(280):
        client.send("large", b"%03d" % number + bytes(250_000))
    client.wait_dispatched()
    assert client.replay("large", "large-again", name="again").sent == 280
    client.wait_dispatched()
    assert [bytes(message.body[:3]) for message in client.range("large-again")] == [b"%03d" % n for n in range(280)]
    assert client.replay("large", "large-again", name="again").found == 280


def _fullest(client: Client, topic: str) -> None:
    """Send the message that has as many bytes of properties as there may be."""
    for size in range(PROPERTIES_SIZE_MAX - 40, 0, -1):
        try:
            client.send(Message(topic, b"full", properties={"p": "v" * size}, queue_id=0))
        except BadRequestError:
            continue
        return


@pytest.mark.parametrize("count", [0, 1])
def test_a_copy_without_room_for_its_source_s_name_goes_without_it(client: Client, count: int) -> None:
    topic = f"full-{count}"
    client.create_topic(topic, 1)
    _fullest(client, topic)
    for _ in range(count):
        client.send(topic, b"other")
    client.wait_dispatched()
    sources = list(client.range(topic))
    assert client.replay(topic, f"{topic}-again").sent == count + 1
    client.wait_dispatched()
    copies = list(client.range(f"{topic}-again"))
    assert copies[0].properties["p"] == sources[0].properties["p"]
    assert REPLAYED not in copies[0].properties
    assert [copy.properties[REPLAYED] for copy in copies[1:]] == [source.message_id for source in sources[1:]]


def test_replay_copy_without_room_names_its_source(client: Client) -> None:
    client.send(Message("short", b"x", properties={"p": "v" * (PROPERTIES_SIZE_MAX - 34)}, unique_id="u", queue_id=0))
    client.wait_dispatched()
    (source,) = client.range("short")
    with pytest.raises(PropertiesTooLargeError, match=f"the copy of {source.message_id} has properties of 32,7"):
        client.replay("short", "short-again")


def test_replay_invalid_callback_sends_nothing(client: Client, group: Group) -> None:
    client.create_topic("untold", 1)
    client.send("untold", b"x")
    client.wait_dispatched()
    told: Any = 5
    with pytest.raises(BadRequestError, match="`told` must be a function of a ReplayProgress, not int"):
        client.replay("untold", "untold-again", told=told)

    async def program() -> None:
        async with AsyncClient(group.store) as client:
            await client.replay("untold", "untold-again", told=told)

    with pytest.raises(BadRequestError, match="`told` must be a function of a ReplayProgress, not int"):
        asyncio.run(program())
    assert "untold-again" not in {each.topic for each in client.topics()}
    position: Any = [0, 0]
    assert client.replay("untold", "untold-again", position=position).position == ReplayPosition(0, 1)


def test_replay_counts_stored_copies_once_after_lost_answer(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.create_topic("counted", 1)
    for _ in range(2):
        client.send_batch("counted", [b"x"] * 5)
        client.wait_dispatched()
        replay = Replay(client, ReplaySource("counted"), "counted-again", name="daily")
        real, lost = client.run_all, [1]

        def losing(calls: Iterable[Call[Any]], in_flight: int, lost: list[int] = lost, real: Any = real) -> Any:
            first = next(calls := iter(calls), None)
            if first is None:
                return iter(())
            if first.role == requests.WRITER and lost:
                lost.clear()
                raise SendOutcomeUnknownError("lost")
            return real(itertools.chain([first], calls), in_flight)

        with monkeypatch.context() as patch:
            patch.setattr(client, "run_all", losing)
            done = replay.run()
        assert not lost
        client.wait_dispatched()
    assert (done.sent, done.found) == (5, 5)


def test_replay_includes_messages_not_yet_dispatched(
    client: Client, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.send_batch("late", [b"first"] * 2)
    client.wait_dispatched()
    dispatcher = group.pid(DISPATCHER)
    os.kill(dispatcher, signal.SIGSTOP)
    client.send_batch("late", [b"second"] * 3)
    monkeypatch.setattr(SystemClock, "sleep", lambda clock, seconds: os.kill(dispatcher, signal.SIGCONT))
    assert client.replay("late", "later").sent == 5


def test_a_rate_may_be_so_low_that_the_next_message_is_never_sent(client: Client) -> None:
    client.send_batch("rare", [b"x"] * 2, queue_ids=[0, 0])
    client.wait_dispatched()
    # Not the module's own function: threads of libraries sleep too.
    with mock.patch("mqproc.client.replay.time", mock.Mock(wraps=time)) as clock:
        clock.sleep = mock.Mock()
        client.replay("rare", "rarer", rate=1e-320)
    assert clock.sleep.call_args_list == [mock.call(threading.TIMEOUT_MAX)]


def test_replay_key_and_name_may_be_none(client: Client) -> None:
    client.send("unnamed", b"x")
    client.wait_dispatched()
    assert client.replay("unnamed", "unnamed-again", key=None, name=None).sent == 1  # type: ignore[arg-type]
