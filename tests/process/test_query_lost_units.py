"""What the disk cannot read of a ConsumeQueue: query answers that it is damaged, tells it once, and serves the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc.layout import control as words_of
from mqproc.message import PullStatus
from mqproc.wire.operations import Operation, PullRequest
from tests.process.test_query import Group
from tests.store.bad_sectors import BadSectors


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    io = BadSectors()
    made = Group(tmp_path / "store", io)
    for frame in range(40):
        made.put("Orders", frame)
    made.dispatch()
    io.lose(made.context.paths.queue("Orders", 1) / f"{0:020d}", 0)
    yield made
    made.close()


def test_a_queue_that_cannot_be_read_is_damaged_and_told_once(group: Group) -> None:
    """Each pull was an InternalError, and nobody came behind the place."""
    caller, errors = group.connect(), words_of.role_word(words_of.QUERY, "errors")
    for _ in range(2):
        answer, payload = caller.call(Operation.PULL, PullRequest("Orders", 1, 10, max_messages=5))
        assert (answer.status, answer.count, payload) == (PullStatus.CORRUPT, 0, b"")
        assert answer.detail.endswith("a part of the queue's file cannot be read")
        assert answer.next_offset > 10
    assert group.control.words[errors] == 1
    answer, _ = caller.call(Operation.PULL, PullRequest("Orders", 2, 10, max_messages=5))
    assert (answer.status, answer.count) == (PullStatus.FOUND, 5)
    assert group.control.words[errors] == 1
