"""Expensive requests are answered in slices, between which other clients are served."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from mqproc.roles.transactions.coordinator import TransactionCoordinator
from mqproc.wire.operations import (
    AT_TIME,
    ByKeyRequest,
    CountRequest,
    Empty,
    FrameOptions,
    GetRequest,
    GroupCommitRequest,
    GroupJoinRequest,
    GroupNackRequest,
    GroupReceiveRequest,
    GroupRequest,
    GroupResetRequest,
    Operation,
    QueryMessageRequest,
    QueuesRequest,
    RangeRequest,
    TransactionCheckRequest,
    TransactionsRequest,
)
from tests.roles.query.test_role import PATIENCE_S, Caller, Group, filled, group
from tests.roles.transactions.test_open_transactions import half
from tests.support.store_builders import FIRST_MS, MESSAGE_COUNT

__all__ = ["filled", "group"]

MANY = 64
TOPICS = [f"topic-{number:02}" for number in range(MANY)]
PLACES = [("Orders", number % 4, 0) for number in range(MANY)]
FOREVER = (1 << 63) - 1


def prepare(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many topics, groups and transactions; slices of one item; steps of one slice."""
    for topic in TOPICS:
        group.store.put(topic, 0, 1, queues=1)
    group.dispatch()
    transactions: TransactionCoordinator = group.role._transactions
    while transactions._start is not None:
        group.step()
    monkeypatch.setattr(transactions, "_check_due", lambda: 0)
    for number in range(MANY):
        transactions._table.add(half(number))
    for topic in TOPICS:
        group.role._group_state.ensure_group(f"group-of-{topic}")
        group.role._group_state.progress.set("billing", topic, 0, 0)
    group.role._group_state.ensure_group("billing")
    for name in (
        *("query.role.STEP_NS", "query.reads.QUEUES_PER_SLICE", "query.reads.SLICE_BYTES"),
        *("query.reads.ROWS_PER_SLICE", "query.reads.PARTS_MAX"),
        *("groups.state.QUEUES_PER_SLICE", "groups.coordinator.COMMITS_PER_SLICE", "groups.retries.MESSAGES_PER_SLICE"),
        *("transactions.coordinator.ROWS_PER_SLICE", "transactions.open_transactions.HALVES_PER_SLICE"),
    ):
        monkeypatch.setattr(f"mqproc.roles.{name}", 0 if name.endswith("NS") else 1)
    for name in ("read.unit_walk.RUN_NS", "read.unit_walk.FIRST_CHUNK_UNITS", "read.unit_walk.CHUNK_UNITS_MAX"):
        monkeypatch.setattr(f"mqproc.store.{name}", 0 if name.endswith("NS") else 1)
    for name in ("index.lookup.ITEMS_PER_SLICE", "index.lookup.FILES_PER_SLICE", "read.queries.FILES_PER_SLICE"):
        monkeypatch.setattr(f"mqproc.store.{name}", 1)


def is_answered(caller: Caller) -> bool:
    """Whether an answer has arrived, without another step of the role."""
    try:
        return bool(caller.sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def joined(answer: Any) -> object:
    return sorted({topic for topic, *_ in answer.queues})


REQUESTS: dict[str, tuple[Operation, FrameOptions, Callable[[Any], object], object]] = {
    "count": (
        *(Operation.COUNT, CountRequest("Orders", tags=["Tag3"]), lambda answer: answer.count),
        MESSAGE_COUNT // 5,
    ),
    "count by time": (
        *(Operation.COUNT, CountRequest("Orders", FIRST_MS, FOREVER, born_time=True), lambda answer: answer.count),
        MESSAGE_COUNT,
    ),
    "range": (
        Operation.RANGE,
        RangeRequest("Orders", FIRST_MS, FIRST_MS + 1, sql="TAGS = 'Tag3'", born_time=True),
        lambda answer: answer.complete,
        True,
    ),
    "key": (
        *(Operation.BY_KEY, ByKeyRequest("Orders", "key-7"), lambda answer: answer.count),
        MESSAGE_COUNT // 100,
    ),
    "query message": (
        Operation.QUERY_MESSAGE,
        QueryMessageRequest("Orders", "key-7", 64, 0, FOREVER),
        lambda answer: len(answer.physical_offsets),
        MESSAGE_COUNT // 100,
    ),
    "unique id": (Operation.GET, GetRequest("absent"), str, "no message has the id 'absent'"),
    "topics": (Operation.TOPICS, Empty(), lambda answer: len(answer.topics), MANY + 1),
    "queues": (Operation.QUEUES, QueuesRequest(), lambda answer: len(answer.queues), MANY + 4),
    "groups": (Operation.GROUPS, Empty(), lambda answer: len(answer.groups), MANY + 1),
    "group info": (
        *(Operation.GROUP_INFO, GroupRequest("billing"), lambda answer: [row[0] for row in answer.queues]),
        TOPICS,
    ),
    "join": (
        Operation.GROUP_JOIN,
        GroupJoinRequest("billing", TOPICS, session_timeout_ms=300_000),
        joined,
        TOPICS,
    ),
    "join at a time": (
        Operation.GROUP_JOIN,
        GroupJoinRequest("other", TOPICS, start=AT_TIME, start_ms=FIRST_MS, session_timeout_ms=300_000),
        joined,
        TOPICS,
    ),
    "receive": (Operation.GROUP_RECEIVE, GroupReceiveRequest("other", TOPICS), lambda answer: answer.count, 0),
    "commit": (
        Operation.GROUP_COMMIT,
        GroupCommitRequest("billing", [(topic, queue_id, -1, 0) for topic, queue_id, _ in PLACES]),
        lambda answer: answer.refused,
        [],
    ),
    "reset": (Operation.GROUP_RESET, GroupResetRequest("billing", PLACES), lambda answer: answer, Empty()),
    "nack": (
        *(Operation.GROUP_NACK, GroupNackRequest("billing", [("none", 0, 0)] * MANY), lambda answer: answer.levels),
        [-1] * MANY,
    ),
    "transactions": (Operation.TRANSACTIONS, TransactionsRequest(), lambda answer: answer.open, MANY),
    "transaction check": (
        Operation.TRANSACTION_CHECK,
        TransactionCheckRequest([100 * number for number in range(MANY)]),
        lambda answer: answer.checked,
        MANY,
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_expensive_request_lets_others_be_served(filled: Group, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    operation, options, result_of, expected = REQUESTS[name]
    prepare(filled, monkeypatch)
    caller, other = filled.connect(), filled.connect()
    caller.ask(operation, options)
    filled.step()
    other.ask(Operation.PING, Empty())
    assert other.answer() is not None
    assert not is_answered(caller), "all of it was done in a few steps"
    deadline = time.monotonic() + PATIENCE_S
    try:
        while (answer := caller.answer()) is None:
            assert time.monotonic() < deadline
        found = result_of(answer[1])
    except Exception as error:
        found = str(error)
    assert found == expected
