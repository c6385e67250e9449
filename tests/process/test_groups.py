"""The group requests of clients that say what no client of ours would: refused, and nothing is left of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc.errors import BadRequestError, InternalError, MqprocError
from mqproc.wire.group_operations import (
    AT_TIME,
    EARLIEST,
    GroupCommitRequest,
    GroupHeartbeatRequest,
    GroupInvisibleRequest,
    GroupJoinRequest,
    GroupReceiveRequest,
    GroupReleaseRequest,
    GroupResetRequest,
    GroupSettingsRequest,
)
from mqproc.wire.operations import Operation, Options
from tests.process.test_query import Caller, Group

HUGE = (1 << 64) - 1
QUEUES = 4


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path / "store")
    for frame in range(8):
        group.put("Orders", frame)
    group.dispatch()
    yield group
    group.close()


def join(caller: Caller, **more: object) -> list[tuple[str, int, int, int]]:
    request = GroupJoinRequest("billing", ["Orders"], start=EARLIEST, **more)  # type: ignore[arg-type]
    answer, _ = caller.call(Operation.GROUP_JOIN, request)
    return sorted(answer.queues)


def refusal(caller: Caller, operation: Operation, request: Options) -> str:
    """The code of what a request is refused with, "" when it is answered."""
    try:
        caller.call(operation, request)
    except MqprocError as error:
        return error.code
    return ""


@pytest.mark.parametrize("epoch", [-1, (1 << 63) - 3, (1 << 63) - 1, HUGE])
def test_an_epoch_that_was_never_given_is_refused_and_leaves_no_member(filled: Group, epoch: int) -> None:
    """A member that nobody hears from would keep its queues for ever, and no higher epoch could be given."""
    with pytest.raises(BadRequestError, match="epoch"):
        join(filled.connect(), member_id="ghost", holding=[("Orders", 0, epoch)])
    assert [queue_id for _, queue_id, _, _ in join(filled.connect())] == list(range(QUEUES))


@pytest.mark.parametrize(
    ("operation", "request_"),
    [
        (Operation.GROUP_JOIN, GroupJoinRequest("g", ["Orders"], session_timeout_ms=HUGE)),
        (Operation.GROUP_JOIN, GroupJoinRequest("g", ["Orders"], start=AT_TIME, start_ms=HUGE)),
        (Operation.GROUP_HEARTBEAT, GroupHeartbeatRequest("g", "nobody", HUGE)),
        (Operation.GROUP_RELEASE, GroupReleaseRequest("g", "nobody", HUGE)),
        (Operation.GROUP_COMMIT, GroupCommitRequest("g", [("Orders", HUGE, -1, 1), ("Orders", 0, -1, HUGE)])),
        (Operation.GROUP_RESET, GroupResetRequest("g", [("Orders", 0, HUGE)])),
        (Operation.GROUP_SETTINGS, GroupSettingsRequest("g", retry_max_times=HUGE)),
        (Operation.GROUP_SETTINGS, GroupSettingsRequest("g", retry_queue_nums=HUGE)),
        (Operation.GROUP_RECEIVE, GroupReceiveRequest("g", ["Orders"], max_messages=HUGE)),
        (Operation.GROUP_RECEIVE, GroupReceiveRequest("g", ["Orders"], invisible_ms=HUGE)),
        (Operation.GROUP_INVISIBLE, GroupInvisibleRequest("g", "Orders", f"0 0 1 0 0 mqproc 0 {'9' * 5000}", 1000)),
    ],
)
def test_numbers_of_any_size_do_no_harm(filled: Group, operation: Operation, request_: Options) -> None:
    assert refusal(filled.connect(), operation, request_) != InternalError.code
    assert len(join(filled.connect())) == QUEUES
