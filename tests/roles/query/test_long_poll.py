"""When held pulls are answered: deadlines, and reports of skipped offsets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mqproc.layout import queue_table as layout
from mqproc.roles.query.long_poll import HeldPull, LongPolls
from mqproc.types import PullStatus
from mqproc.wire.operations import Operation, PullRequest
from tests.roles.query.test_role import Group, waiting
from tests.support.store_builders import MESSAGE_COUNT


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path / "store")
    for frame in range(40):
        made.put("Orders", frame)
    made.dispatch()
    yield made
    made.close()


def test_query_idle_without_waiters_sleeps(filled: Group) -> None:
    """The deadline of a pull that is answered must not wake the role."""
    caller = filled.connect()
    caller.ask(Operation.PULL, PullRequest("Orders", 0, MESSAGE_COUNT // 4, timeout_ms=10_000))
    caller.ask(Operation.PULL, PullRequest("Orders", 1, MESSAGE_COUNT // 4, timeout_ms=30_000))
    assert caller.answer() is None
    assert waiting(filled) == 2
    caller.sock.close()
    filled.step()
    assert waiting(filled) == 0
    later_ns = time.monotonic_ns() + 60_000_000_000
    assert filled.role._long_polls.seconds_left(later_ns, 9.0) == 9.0


def test_long_poll_covers_every_queue_of_a_store(filled: Group) -> None:
    """A pull that is answered at once instead of held would be repeated without end."""
    caller, count = filled.connect(), 17_000
    assert filled.context.options.max_queues > count
    for number in range(count):
        caller.ask(Operation.PULL, PullRequest("Orders", number % 4, MESSAGE_COUNT // 4, timeout_ms=30_000))
        if number % 100 == 0:
            filled.step()
    assert caller.answer() is None
    while filled.step():
        pass
    assert len(filled.role._long_polls) == count


def test_query_checks_its_bell_before_sleeping(filled: Group) -> None:
    """Records since the last step rang no sleeping role; all else has a deadline or a socket."""

    def has_nothing_to_do() -> bool:
        while filled.step():
            pass
        return not filled.role.has_news()

    assert has_nothing_to_do()
    filled.put("Orders", 40)
    assert not filled.role.has_news(), "it cannot be pulled yet"
    filled.dispatch()
    assert filled.role.has_news()
    assert has_nothing_to_do()
    filled.store.engine.table.create_queue("Another", 0)
    assert filled.role.has_news(), "pulls may wait for it"
    assert has_nothing_to_do()


def test_long_poll_can_report_skipped_offset_at_once(filled: Group) -> None:
    caller, end = filled.connect(), MESSAGE_COUNT // 4
    telling = PullRequest("Orders", 0, 0, tags=["new"], timeout_ms=30_000, progress_ms=0)
    answer, _ = caller.call(Operation.PULL, telling)
    assert (answer.status, answer.next_offset, answer.count) == (PullStatus.NO_MATCHED_MESSAGE, end, 0)
    caller.ask(Operation.PULL, msgspec.structs.replace(telling, offset=end))
    assert caller.answer() is None, "there is nothing to report"
    assert waiting(filled) == 1
    filled.put("Orders", 40)
    filled.dispatch()
    found = caller.answer()
    assert found is not None
    assert (found[1].next_offset, found[1].count, waiting(filled)) == (end + 7, 0, 0)


@pytest.mark.parametrize("passed_before", [True, False])
def test_long_poll_reports_skipped_offset_at_its_interval(filled: Group, passed_before: bool) -> None:
    caller, end = filled.connect(), MESSAGE_COUNT // 4
    progress_s = 2.0  # More than it takes, on a busy machine too, to see that nothing is reported yet.
    request = PullRequest("Orders", 0, 0 if passed_before else end, tags=["new"], timeout_ms=30_000, progress_ms=2000)
    begun = time.monotonic()
    caller.ask(Operation.PULL, request)
    assert caller.answer() is None
    assert (filled.role._long_polls.seconds_left(time.monotonic_ns(), 9.0) == 9.0) is not passed_before
    frame = 40
    while (found := caller.answer()) is None:
        assert time.monotonic() < begun + 15, "long before its time is over"
        if frame < 45:  # Whatever comes meanwhile that does not match.
            filled.put("Orders", frame)
            filled.dispatch()
            frame += 1
    assert time.monotonic() - begun >= progress_s
    assert (found[1].count, waiting(filled)) == (0, 0)
    assert found[1].next_offset == filled.role._view.queues.bounds("Orders", 0).max_offset
    assert filled.role._long_polls.seconds_left(time.monotonic_ns(), 9.0) == 9.0


def test_long_poll_match_is_answered_before_the_report_is_due(filled: Group) -> None:
    caller = filled.connect()
    caller.ask(Operation.PULL, PullRequest("Orders", 0, 0, tags=["new"], timeout_ms=30_000, progress_ms=20_000))
    assert caller.answer() is None
    filled.put("Orders", 40, tags=["new"] * 25)
    filled.dispatch()
    found = caller.answer()
    assert found is not None
    assert (found[1].status, found[1].count) == ("FOUND", 7)


class Table:
    """As many queues of topic Orders as it has numbers; counts lookups of a queue."""

    def __init__(self, queues: int) -> None:
        self.cells = np.zeros(layout.entry_word(queues, 0), np.int64)
        self.changes = (queues, queues, 0)
        self.queues = queues
        self.looked_up = 0

    def find(self, _topic: str, queue_id: int) -> int:
        self.looked_up += 1
        return queue_id if queue_id < self.queues else -1

    def put(self, queue_id: int) -> None:
        self.cells[layout.entry_word(queue_id, layout.MAX_OFFSET)] += 1


def held(holds: LongPolls, queue_id: int) -> HeldPull:
    connection: Any = queue_id % 3
    last: Any = None
    pull = HeldPull(connection, queue_id, PullRequest("Orders", queue_id, 0), 0, 1 << 60, last)
    holds.hold(pull)
    return pull


def test_long_polls_of_many_queues_look_up_each_once() -> None:
    """A consumer of 20,000 queues caused lookups of them all for each queue it waited at."""
    count = 500
    table: Any = Table(count)
    holds = LongPolls(table)
    pulls = []
    for queue_id in range(count):
        pulls.append(held(holds, queue_id))
        assert holds.queues_changed
        assert holds.moved() == [pulls[-1]], "each is looked at once more when it is held"
        assert not holds.queues_changed
    assert table.looked_up <= 2 * count
    assert holds.moved() == []
    for queue_id in (3, count - 1):
        table.put(queue_id)
    assert holds.moved() == [pulls[3], pulls[count - 1]]
    holds.release(pulls[3])
    assert not holds.queues_changed, "its row stays"
    again = held(holds, 3)
    table.put(3)
    assert holds.moved() == [again]


def test_long_poll_missing_queue_is_found_when_created() -> None:
    table: Any = Table(2)
    holds = LongPolls(table)
    pulls = [held(holds, queue_id) for queue_id in (0, 2)]
    assert holds.moved() == pulls
    late = held(holds, 3)
    assert holds.moved() == [late]
    assert holds.moved() == []
    table.cells = np.zeros(layout.entry_word(4, 0), np.int64)
    table.queues, table.changes = 4, (4, 4, 0)
    assert holds.queues_changed
    assert holds.moved() == [pulls[1], late]
    table.put(3)
    assert holds.moved() == [late]
