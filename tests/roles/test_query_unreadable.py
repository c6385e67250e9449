"""What the disk cannot read of a ConsumeQueue: query says so, leads nobody past it, and serves other queues."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.errors import CorruptStoreError
from mqproc.wire.operations import Operation
from mqproc.wire.operations.log import PullRequest
from tests.roles.test_query import Group
from tests.support.faulty_io import BadSectors


def test_pulls_end_at_units_that_cannot_be_read_and_are_told_the_file(tmp_path: Path) -> None:
    """Their messages are in the log: who went on behind them would miss them for good."""
    io = BadSectors()
    group = Group(tmp_path / "store", io)
    for frame in range(40):
        group.put("Orders", frame)
    group.dispatch()
    file = group.context.paths.queue("Orders", 1) / f"{0:020d}"
    io.lose(file, 0)
    caller = group.connect()
    for _ in range(2):
        with pytest.raises(CorruptStoreError, match=f"^{file}: a part cannot be read; no message is lost"):
            caller.call(Operation.PULL, PullRequest("Orders", 1, 10, max_messages=5))
    answer, _ = caller.call(Operation.PULL, PullRequest("Orders", 2, 10, max_messages=5))
    assert (answer.status, answer.count) == ("FOUND", 5)
    group.close()
