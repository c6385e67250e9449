"""Memory of the query role: nothing of past requests, clients and messages is kept."""

from __future__ import annotations

import gc
import itertools
import types
from collections import Counter
from typing import Any

import pytest

from mqproc.errors import MqprocError
from mqproc.roles.query import role as query
from mqproc.wire.operations import (
    ByKeyRequest,
    CountRequest,
    Empty,
    FrameOptions,
    GetRequest,
    GroupCommitRequest,
    GroupInvisibleRequest,
    GroupJoinRequest,
    GroupLeaveRequest,
    GroupNackRequest,
    GroupReceiveRequest,
    GroupRequest,
    GroupResetRequest,
    OffsetAtRequest,
    Operation,
    PullRequest,
    QueryMessageRequest,
    QueuesRequest,
    RangeRequest,
    ScanRequest,
    TransactionCheckRequest,
    TransactionEndRequest,
    TransactionPollRequest,
    TransactionsRequest,
)
from tests.roles.query.test_role import Group, filled, group

__all__ = ["filled", "group"]

ROUNDS = 12
SLACK = 200
"""Objects that a cache or a block of freed entries may have more or less of: far below one object a request."""
FOREVER = (1 << 63) - 1
ENDED_PID = 1 << 40
"""No process has this id."""
_SKIPPED = types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.CodeType


def requests_of(number: int) -> list[tuple[Operation, FrameOptions]]:
    """One request of each kind; names that a client may choose are different for each number."""
    name = f"unknown-{number}"
    return [
        (Operation.PING, Empty()),
        (Operation.PULL, PullRequest("Orders", number % 4, number, tags=["Tag1"])),
        (Operation.PULL, PullRequest("Orders", 0, 1 << 40, timeout_ms=1)),
        (Operation.PULL, PullRequest(name, number, 0, timeout_ms=1)),
        (Operation.GET, GetRequest(name)),
        (Operation.BY_KEY, ByKeyRequest("Orders", f"n{number}")),
        (Operation.BY_KEY, ByKeyRequest(name, name)),
        (Operation.RANGE, RangeRequest("Orders", 0, FOREVER, max_messages=10)),
        (Operation.COUNT, CountRequest("Orders", tags=["Tag2"])),
        (Operation.COUNT, CountRequest(name)),
        (Operation.OFFSET_AT, OffsetAtRequest("Orders", 0, number)),
        (Operation.QUEUES, QueuesRequest()),
        (Operation.TOPICS, Empty()),
        (Operation.QUERY_MESSAGE, QueryMessageRequest("Orders", "key-7", 32, 0, FOREVER)),
        (Operation.SCAN, ScanRequest("Orders", body_contains=name.encode())),
        (Operation.STATS, Empty()),
        (Operation.HEALTH, Empty()),
        (Operation.GROUPS, Empty()),
        (Operation.GROUP_INFO, GroupRequest(name)),
        (Operation.GROUP_JOIN, GroupJoinRequest("billing", ["Orders", name], f"member-{number}")),
        (Operation.GROUP_COMMIT, GroupCommitRequest("audit", [("Orders", 0, -1, number)])),
        (Operation.GROUP_LEAVE, GroupLeaveRequest("billing", f"member-{number}")),
        (Operation.GROUP_RESET, GroupResetRequest("audit", [("Orders", 0, 0)])),
        (Operation.GROUP_NACK, GroupNackRequest("audit", [(name, 0, 0)])),
        (Operation.GROUP_RECEIVE, GroupReceiveRequest("pop", ["Empty", name])),
        (Operation.GROUP_INVISIBLE, GroupInvisibleRequest("pop", "Orders", f"0 0 1 0 0 mqproc {number} 0", 5_000)),
        (Operation.TRANSACTION_END, TransactionEndRequest("pg", "Orders", name, number, commit=True)),
        (Operation.TRANSACTION_POLL, TransactionPollRequest(name, 1)),
        (Operation.TRANSACTIONS, TransactionsRequest(name)),
        (Operation.TRANSACTION_CHECK, TransactionCheckRequest([number])),
    ]


def objects_of(role: query.Query) -> Counter[str]:
    """Number of objects that the role keeps, by type."""
    seen: set[int] = set()
    found: Counter[str] = Counter()
    left: list[Any] = [role]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, _SKIPPED):
            continue
        seen.add(id(one))
        found[type(one).__name__] += 1
        left += gc.get_referents(one)
    return found


def run(group: Group, numbers: range) -> Counter[str]:
    """Send requests from new clients; returns the objects that the role keeps afterwards."""
    for number in numbers:
        caller = group.connect()
        for operation, options in requests_of(number):
            try:
                caller.call(operation, options)
            except MqprocError:
                continue
        caller.sock.close()
        group.put("Orders", 100 + number)
        group.dispatch()
        for _ in range(3):
            group.step()
    # Consumers whose process has ended are forgotten once a period.
    group.role._pops._period_ns = 0
    group.step()
    gc.collect()
    return objects_of(group.role)


def test_query_role_keeps_nothing_of_past_requests(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process that receives is another one, as with short-lived programs."""
    pids = itertools.count(ENDED_PID)
    monkeypatch.setattr("mqproc.roles.pop.receivers.peer_pid", lambda _sock: next(pids))
    monkeypatch.setattr("mqproc.roles.query.long_poll.IDLE_ROWS_MAX", 8)
    filled.store.engine.table.create_queue("Empty", 0)
    filled.role._group_state.ensure_group("audit")
    first = run(filled, range(ROUNDS))
    second = run(filled, range(ROUNDS, 4 * ROUNDS))
    assert second.total() < first.total() + SLACK, second - first
