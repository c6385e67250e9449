"""Nacks of messages that are missing: deleted, or not dispatched yet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc.client.group_requests import GONE, NOT_NOW
from mqproc.wire.operations import GroupNackRequest, Operation
from tests.roles.query.test_role import Caller, Group


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path / "store")
    made.role._groups.state.ensure_group("billing")
    yield made
    made.close()


def levels(caller: Caller, offset: int) -> list[int]:
    answer, _ = caller.call(Operation.GROUP_NACK, GroupNackRequest("billing", [("Orders", 0, offset)], 1, -1))
    return list(answer.levels)


def test_retry_damaged_record_counts_as_deleted(group: Group) -> None:
    engine = group.store.engine
    place = engine.append("Orders", [b"first", b"second"], time.time_ns() // 1_000_000, queues=1).tolist()[1]
    group.dispatch()
    with next(iter(engine.paths.commit_log.iterdir())).open("r+b") as segment:
        segment.seek(place + 4)
        segment.write(b"\0\0\0\0")
    assert levels(group.connect(), 1) == [GONE]


def test_retry_undispatched_record_is_not_deleted(group: Group) -> None:
    """After a start, queues may briefly lack records that the log has."""
    caller = group.connect()
    group.store.engine.append("Orders", [b"first"], time.time_ns() // 1_000_000, queues=1)
    assert levels(caller, 1) == [NOT_NOW]
    group.dispatch()
    assert levels(caller, 1) == [GONE]
