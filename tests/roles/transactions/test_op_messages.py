"""Op messages: one at a time with all marks that are due, retried until it is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mqproc.errors import DiskFullError, MqprocError
from mqproc.roles.internal_producer import NewMessage
from mqproc.roles.transactions.op_messages import RETRY_NS, OpMessages
from mqproc.store.transactions import decode_op_body
from mqproc.topic_names import OP_HALF_TOPIC
from tests.support.fakes import ManualClock


class Written:
    """Pending messages; the test decides the outcome of each."""

    def __init__(self) -> None:
        self.messages: list[NewMessage] = []
        self.stored: list[Callable[[int], None]] = []
        self.refused: list[Callable[[MqprocError], None]] = []

    def store(
        self, messages: Sequence[NewMessage], stored: Callable[[int], None], refused: Callable[[MqprocError], None]
    ) -> None:
        self.messages += messages
        self.stored.append(stored)
        self.refused.append(refused)

    def offsets(self) -> list[list[int]]:
        return [decode_op_body(bytes(message.body)) for message in self.messages]


class Rig:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.written = Written()
        self.marked: list[tuple[int, list[int]]] = []
        self.marks = OpMessages(self.written, self.clock, lambda at, offsets: self.marked.append((at, offsets)))  # type: ignore[arg-type]

    def step(self) -> int:
        return self.marks.step(self.clock.monotonic_ns())


def test_op_messages_batches_all_due_marks() -> None:
    rig = Rig()
    done: list[str] = []
    rig.marks.add(3)
    rig.marks.add(7, lambda: done.append("rolled back"))
    assert rig.step() == 2
    rig.marks.add(9)
    assert rig.step() == 0, "one message is under way"
    assert (rig.marked, done) == ([], [])
    rig.written.stored[0](12)
    assert (rig.marked, done) == ([(12, [3, 7])], ["rolled back"])
    assert rig.step() == 1
    assert rig.written.offsets() == [[3, 7], [9]]
    message = rig.written.messages[0]
    assert (message.topic, message.queue_id, bytes(message.body)) == (OP_HALF_TOPIC, 0, b"3,7,")


def test_op_messages_without_space_are_retried_and_reported() -> None:
    rig = Rig()
    refused: list[MqprocError] = []
    rig.marks.add(1)
    rig.marks.add(2, None, refused.append)
    rig.step()
    rig.marks.add(3)
    rig.written.refused[0](DiskFullError("no room"))
    assert [error.code for error in refused] == ["DISK_FULL"]
    assert rig.step() == 0
    assert 0 < rig.marks.seconds_left(rig.clock.monotonic_ns(), 5.0) <= RETRY_NS / 1e9
    rig.clock.advance(RETRY_NS // 1_000_000)
    assert rig.step() == 2
    assert rig.written.offsets()[1] == [1, 3]
    rig.written.stored[1](0)
    assert rig.marked == [(0, [1, 3])]
    assert rig.marks.seconds_left(rig.clock.monotonic_ns(), 5.0) == 5.0
