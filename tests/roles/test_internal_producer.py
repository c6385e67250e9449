"""Appends of a role through a real writer: stored, refused, or the writer dies meanwhile."""

from __future__ import annotations

import itertools
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from mqproc.client import Client
from mqproc.errors import BadRequestError, DiskFullError, MqprocError, StoreBusyError
from mqproc.io.store_io import Clock, StoreIO
from mqproc.ipc.control import Control
from mqproc.layout.control import WRITER
from mqproc.layout.record import PROPERTIES_SIZE_MAX
from mqproc.roles import internal_producer as module
from mqproc.roles.internal_producer import (
    AppendOutcome,
    InternalProducer,
    NewMessage,
    Refused,
    ReliableAppend,
    Stored,
    Unknown,
)
from mqproc.topic_names import SCHEDULE_TOPIC
from tests.support.group import PATIENCE_S, Group, wait_until


class Rig:
    """A producer of this process in a group, with the outcomes that arrived."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.control = Control.open(StoreIO(), group.paths)
        self.appender = InternalProducer(group.paths.socket(WRITER), self.control.words, Clock())
        self.outcomes: list[tuple[Sequence[NewMessage], AppendOutcome]] = []

    def append(self, *messages: NewMessage) -> None:
        self.appender.append(messages, lambda rows, outcome: self.outcomes.append((rows, outcome)))

    def finish(self, timeout_s: float = 60.0) -> list[AppendOutcome]:
        """Return all outcomes, waiting as a role does: at the descriptor, or until the given time."""
        deadline = time.monotonic() + timeout_s
        while self.appender.in_flight:
            assert time.monotonic() < deadline, f"{self.appender.in_flight} frames have no outcome"
            if not self.appender.step():
                self.appender.wait(5.0)
        return [outcome for _rows, outcome in self.outcomes]

    def close(self) -> None:
        self.appender.close()
        self.control.close()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """One group for all; its writer dies less often than a group's restart limit."""
    store = tmp_path_factory.mktemp("appender") / "store"
    found = Group(store, auto_create_topic_enable="false", max_message_size=200_000).start()
    yield found
    found.close()


@pytest.fixture
def rig(group: Group) -> Iterator[Rig]:
    found = Rig(group)
    yield found
    found.close()


def queues(client: Client, *topics: str) -> list[int]:
    """How many queues each topic has."""
    found = {topic.topic: topic.queues for topic in client.topics()}
    return [found.get(topic, 0) for topic in topics]


def test_producer_stores_messages_of_any_topics_as_given(rig: Rig) -> None:
    born = bytes([10, 0, 0, 1]) + (5000).to_bytes(4, "big")
    rig.append(
        NewMessage("%RETRY%g", b"retried", b"a\x01b\x02", 0, 7, 0, 1234, born, 3, 99),
        NewMessage(SCHEDULE_TOPIC, b"parked", b"DELAY\x013\x02", 2, born_timestamp_ms=5),
        NewMessage("%RETRY%g", b"again", b"", 0, 8, 0, 1235, born, 3, 100),
        NewMessage("%RETRY%g", b"committed", b"", 0, 0, 8, 1235, born, 3, 101),
    )
    outcomes = rig.finish()
    assert [len(rows) for rows, _outcome in rig.outcomes] == [2, 1, 1]
    assert all(isinstance(outcome, Stored) for outcome in outcomes)
    rig.group.wait_dispatched()
    with rig.group.client() as client:
        assert queues(client, "%RETRY%g", SCHEDULE_TOPIC) == [1, 18]
        first, second, third = client.pull("%RETRY%g", 0, 0).messages
        assert (first.body, first.flag, first.born_timestamp_ms, first.reconsume_times) == (b"retried", 7, 1234, 3)
        assert (first.born_host, dict(first.properties)) == ("10.0.0.1:5000", {"a": "b"})
        assert [message.prepared_transaction_offset for message in (first, second, third)] == [99, 100, 101]
        assert (second.body, second.flag, third.body, third.sys_flag & 12) == (b"again", 8, b"committed", 8)
        assert [message.body for message in client.pull(SCHEDULE_TOPIC, 2, 0).messages] == [b"parked"]
    stored = outcomes[0]
    assert isinstance(stored, Stored)
    assert stored.physical_offsets.tolist() == [first.physical_offset, second.physical_offset]
    assert stored.queue_offsets.tolist() == [0, 1]


def test_producer_creates_a_missing_queue(rig: Rig) -> None:
    with rig.group.client() as client:
        client.create_topic("narrow", 2)
        rig.append(NewMessage("narrow", b"x", queue_id=5), NewMessage("fresh", b"y", queue_id=9))
        assert all(isinstance(outcome, Stored) for outcome in rig.finish())
        # Topics made or widened by a send are saved within a second.
        wait_until(lambda: queues(client, "narrow", "fresh") == [6, 10])


def test_producer_refused_frame_reports_why_and_others_continue(rig: Rig) -> None:
    rig.append(NewMessage("t", b"", properties=bytes(PROPERTIES_SIZE_MAX)), NewMessage("u", b"fits"))
    refused, stored = rig.finish()
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, BadRequestError)
    assert refused.error.code == "PROPERTIES_TOO_LARGE"
    assert not refused.error.retryable
    assert isinstance(stored, Stored)


def test_producer_limits_unanswered_frames(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BYTES_MAX", 10_000)
    for number in range(10):
        rig.append(NewMessage("t", bytes(1000), queue_id=number % 8))
    assert not rig.appender.has_room
    with pytest.raises(StoreBusyError):
        rig.append(NewMessage("t", b"one more"))
    assert len(rig.finish()) == 10
    assert rig.appender.has_room


def test_producer_descriptor_is_stable_and_signals_answers(rig: Rig) -> None:
    fd = rig.appender.fileno()
    with select.epoll() as outer:
        outer.register(fd, select.EPOLLIN)
        for round_ in range(2):
            rig.append(NewMessage("t", b"x"))
            while rig.appender.in_flight:
                assert outer.poll(PATIENCE_S), "an answer came and the descriptor was silent"
                rig.appender.step()
            if round_ == 0:
                os.kill(rig.group.pid(WRITER), signal.SIGKILL)
                assert outer.poll(PATIENCE_S), "the connection ended and the descriptor was silent"
                rig.appender.step()
    assert rig.appender.fileno() == fd
    assert [type(outcome) for _rows, outcome in rig.outcomes] == [Stored, Stored]


def test_producer_frames_wait_for_a_writer(rig: Rig) -> None:
    """Frames that no writer has taken go to its successor, once and in order."""
    pid = rig.group.pid(WRITER)
    rig.append(NewMessage("waiting", b"first", queue_id=0))
    rig.finish()
    os.kill(pid, signal.SIGSTOP)
    bodies = [b"%07d" % number + bytes(99_000) for number in range(60)]
    for body in bodies:
        rig.append(NewMessage("waiting", body, queue_id=0))
        rig.appender.step()
    os.kill(pid, signal.SIGKILL)
    outcomes = rig.finish()[1:]
    kinds = [type(outcome) for outcome in outcomes]
    assert set(kinds) == {Stored, Unknown}, "some frames had filled the socket, the others had to wait"
    assert kinds == sorted(kinds, key=lambda kind: kind is Stored), "accepted frames were sent first"
    rig.group.wait_dispatched()
    with rig.group.client() as client:
        found = [message.body for message in client.pull("waiting", 0, 1, max_bytes=64 << 20).messages]
    assert found == bodies[kinds.count(Unknown) :], "a stopped writer has read nothing"


def test_producer_unknown_outcome_names_the_log_range(rig: Rig) -> None:
    """The writer is killed during a stream; each frame is found where its outcome says."""
    numbers = itertools.count()
    for _ in range(2):
        stream_until_killed(rig, numbers)
    rig.group.wait_dispatched()
    places: dict[int, list[int]] = {}
    with rig.group.client() as client:
        offset = 0
        while messages := client.pull("killed", 0, offset, 4096).messages:
            offset = messages[-1].queue_offset + 1
            for message in messages:
                places.setdefault(message.prepared_transaction_offset, []).append(message.physical_offset)
    assert len(rig.outcomes) == next(numbers)
    unknown = 0
    for rows, outcome in rig.outcomes:
        found = places.get(rows[0].prepared_transaction_offset, [])
        if isinstance(outcome, Stored):
            assert found == outcome.physical_offsets.tolist()
        else:
            assert isinstance(outcome, Unknown)
            unknown += 1
            assert len(found) <= 1
            assert all(outcome.begin <= place < outcome.end for place in found)
    assert unknown


def stream_until_killed(rig: Rig, numbers: Iterator[int]) -> None:
    """Append frames, kill the writer while the last is unanswered, and collect all outcomes."""

    def append() -> None:
        number = next(numbers)
        rig.append(NewMessage("killed", b"%08d" % number, queue_id=0, prepared_transaction_offset=number))
        rig.appender.step()

    kill_at = time.monotonic() + 0.05
    while time.monotonic() < kill_at:
        if rig.appender.in_flight < 40:
            append()
        rig.appender.step()
    writer = rig.group.pid(WRITER)
    os.kill(writer, signal.SIGSTOP)
    append()
    os.kill(writer, signal.SIGKILL)
    while rig.appender.in_flight:
        if not rig.appender.step():
            rig.appender.wait(5.0)


def test_producer_predecessor_outcomes_are_settled_as_stored(group: Group, rig: Rig) -> None:
    """A role dies with a frame in a stopped writer: the successor waits until it is stored."""
    predecessor = Rig(group)
    predecessor.append(NewMessage("%RETRY%settle", b"first"))
    predecessor.finish()
    assert rig.appender.predecessor_done
    os.kill(group.pid(WRITER), signal.SIGSTOP)
    try:
        predecessor.append(NewMessage("%RETRY%settle", b"second"))
        predecessor.close()
        rig.appender.await_predecessor()
        for _ in range(3):
            rig.appender.step()
            rig.appender.wait(0.05)
        assert rig.appender.has_work
        assert not rig.appender.predecessor_done
        written = group.words()["written"]
    finally:
        os.kill(group.pid(WRITER), signal.SIGCONT)
    wait_until(lambda: (rig.appender.step(), rig.appender.predecessor_done)[1], what="an answer of the writer")
    assert group.words()["written"] > written
    assert not rig.appender.has_work


# ReliableAppend


class Frames:
    """A producer; the test decides the outcome of each frame."""

    def __init__(self) -> None:
        self.done: Callable[[Sequence[NewMessage], AppendOutcome], None] | None = None

    def append(
        self, _messages: Sequence[NewMessage], on_done: Callable[[Sequence[NewMessage], AppendOutcome], None]
    ) -> None:
        self.done = on_done


def test_reliable_append_reports_stored_before_refused() -> None:
    frames = Frames()
    appender: Any = frames
    writes = ReliableAppend(None, appender, 1 << 20)  # type: ignore[arg-type]
    calls: list[Sequence[NewMessage] | MqprocError] = []
    first, second = NewMessage("A", b"0"), NewMessage("B", b"1")
    writes.store([first, second], lambda _offset: calls.append([]), calls.append, calls.append)
    assert frames.done is not None
    frames.done([second], Stored(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int32), 0, b""))
    assert (calls, writes.under_way) == ([[second]], 1)
    refused = DiskFullError("no room")
    frames.done([first], Refused(refused))
    assert (calls, writes.under_way) == ([[second], refused], 0)
