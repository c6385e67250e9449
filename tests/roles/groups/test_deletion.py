"""Deletion of a group whose simple consumers hold messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc.errors import GroupNotFoundError, StoreBusyError
from mqproc.roles.internal_producer import NewMessage
from mqproc.roles.pop.receivers import PopReceivers
from mqproc.roles.query.role import Query
from mqproc.store.offsets.pop_receipts import PopCheckPoint
from mqproc.topic_names import REVIVE_QUEUES, REVIVE_TOPIC
from mqproc.wire.operations import (
    EARLIEST,
    FrameOptions,
    GroupInvisibleRequest,
    GroupJoinRequest,
    GroupReceiveRequest,
    GroupRequest,
    GroupSettingsRequest,
    Operation,
)
from tests.roles.pop.test_receivers import SOON_S, held_back, is_read, received
from tests.roles.query.test_role import Caller, Group
from tests.support.group import wait_until


def beside_another(group: Group) -> tuple[PopReceivers, Caller, Caller]:
    """The role's half, which has read the open receipts, and two clients."""
    receiver, other = group.connect(), group.connect()
    while not is_read(other):
        pass
    return group.role._pops, receiver, other


def test_deleted_group_closes_its_messages_and_sends_them_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a recreated group nor a restarted role may redeliver the messages."""
    group = Group(tmp_path / "store")
    now_ms = time.time_ns() // 1_000_000
    group.store.engine.append("Orders", [b"0", b"1"], now_ms, queues=1)
    bodies = [PopCheckPoint(name, "Orders", 0, 0, (0, 1), now_ms, 600_000, 0, "mqproc").body() for name in ("g", "h")]
    group.store.engine.append(REVIVE_TOPIC, bodies, now_ms, queues=REVIVE_QUEUES, fixed_queue=0, tags=["ck"] * 2)
    group.dispatch()
    sent: list[tuple[str, list[bytes]]] = []
    try:
        group.role._pops._state.ensure_group("g")
        group.role.close()
        group.role = Query(group.context)
        pops = group.role._pops

        def store(messages: list[NewMessage], stored: Callable[[int], None], _last_refused: object) -> None:
            sent.append((messages[0].topic, [bytes(message.body) for message in messages]))
            stored(0)

        monkeypatch.setattr(pops._writes, "store", store)
        caller = group.connect()
        while not is_read(caller):
            pass
        for name in ("h", "g"):
            if name == "g":
                caller.call(Operation.GROUP_DELETE, GroupRequest("g"))
            pops._state.ensure_group(name)
            wait_until(lambda name=name: group.step() >= 0 and name not in [each.group for each in pops._open])
        assert [topic for topic, _ in sent] == [REVIVE_TOPIC] * 2
        assert [body.split(b',"t"')[0] for _, (body,) in sent] == [
            b'{"aol":[0,1],"so":0,"c":"h"',
            b'{"aol":[0,1],"so":0,"c":"g"',
        ]
    finally:
        group.close()


def test_receive_during_group_deletion_is_refused_as_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(tmp_path / "store")
    group.store.engine.append("Orders", [b"0"], time.time_ns() // 1_000_000, queues=1)
    group.dispatch()
    stored = held_back(group, monkeypatch)
    try:
        pops, receiver, other = beside_another(group)
        receiver.ask(Operation.GROUP_RECEIVE, GroupReceiveRequest("g", ["Orders"], start=EARLIEST))
        wait_until(lambda: receiver.answer() is None and stored)
        other.call(Operation.GROUP_DELETE, GroupRequest("g"))
        stored.pop()(0)
        with pytest.raises(GroupNotFoundError, match="group g was deleted"):
            wait_until(receiver.answer, SOON_S, "a refusal")
        wait_until(lambda: group.step() >= 0 and stored)
        stored.pop()(0)
        assert len(pops._open) == 0
    finally:
        group.close()


def test_message_with_pending_timeout_change_is_closed_on_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new receipt follows the deletion, so a recreated group could redeliver the message."""
    group = Group(tmp_path / "store")
    stored = held_back(group, monkeypatch)
    try:
        pops, receiver, other = beside_another(group)
        pops._state.ensure_group("g")
        pops._register(found := received(0, time.time_ns() // 1_000_000, 600_000), 0)
        receiver.ask(Operation.GROUP_INVISIBLE, GroupInvisibleRequest("g", "Orders", f"{found.handle()} 0", 600_000))
        wait_until(lambda: receiver.answer() is None and stored)
        other.call(Operation.GROUP_DELETE, GroupRequest("g"))
        stored.pop()(1)
        with pytest.raises(GroupNotFoundError, match="group g was deleted"):
            wait_until(receiver.answer, SOON_S, "a refusal")
        wait_until(lambda: group.step() >= 0 and stored, SOON_S, "an acknowledgement")
        stored.pop()(2)
        assert len(pops._open) == 0
    finally:
        group.close()


def test_deleted_group_can_be_recreated_once_its_messages_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role killed before that attributed the messages to the new group and redelivered them."""
    group = Group(tmp_path / "store")
    group.store.engine.append("Orders", [b"0"], time.time_ns() // 1_000_000, queues=1)
    group.dispatch()
    stored = held_back(group, monkeypatch)
    try:
        pops, receiver, other = beside_another(group)
        pops._state.ensure_group("g")
        made: list[tuple[Operation, FrameOptions]] = [
            (Operation.GROUP_JOIN, GroupJoinRequest("g", ["Orders"], "one", start=EARLIEST)),
            (Operation.GROUP_RECEIVE, GroupReceiveRequest("g", ["Orders"])),
            (Operation.GROUP_SETTINGS, GroupSettingsRequest("g", retry_max_times=3)),
        ]
        receiver.ask(Operation.GROUP_RECEIVE, GroupReceiveRequest("g", ["Orders"], start=EARLIEST))
        wait_until(lambda: receiver.answer() is None and stored)
        other.call(Operation.GROUP_DELETE, GroupRequest("g"))
        for state in ("being received", "not closed"):
            for operation, options in made:
                with pytest.raises(StoreBusyError, match="deleted group g are not closed"):
                    other.call(operation, options)
            assert pops._state.settings.get("g") is None, state
            stored.pop()(0)
            if state == "being received":
                with pytest.raises(GroupNotFoundError, match="group g was deleted"):
                    wait_until(receiver.answer, SOON_S, "a refusal")
                wait_until(lambda: group.step() >= 0 and stored, SOON_S, "an acknowledgement")
        other.call(*made[2])
        assert pops._state.settings.of("g").retry_max_times == 3
    finally:
        group.close()


def test_recreated_group_starts_after_earlier_redeliveries(tmp_path: Path) -> None:
    """A receive recreates the group at once, while the deleting client still deletes its topics."""
    group = Group(tmp_path / "store")
    retry, now_ms = "%RETRY%g_Orders", time.time_ns() // 1_000_000
    group.store.engine.append(retry, [b"0", b"1"], now_ms, queues=1)
    group.dispatch()
    try:
        pops, state = group.role._pops, group.role._pops._state
        caller = group.connect()
        while not is_read(caller):
            pass
        state.ensure_group("g")
        state.init_offsets("g", retry, EARLIEST)
        pops._register(found := received(0, now_ms, 600_000), 0)
        found.reviving = True
        with pytest.raises(StoreBusyError, match="being redelivered"):
            caller.call(Operation.GROUP_DELETE, GroupRequest("g"))
        found.reviving = False
        caller.call(Operation.GROUP_DELETE, GroupRequest("g"))
        pops._open.done(found, [0])
        # A receive looks there without a start position.
        answer, _ = caller.call(Operation.GROUP_RECEIVE, GroupReceiveRequest("g", ["Orders"], start=EARLIEST))
        assert answer.count == 0
        for name in ("g", "h"):
            state.init_offsets(name, retry, EARLIEST)
        assert [state.progress.offset(name, retry, 0) for name in ("g", "h")] == [2, 0]
        # The next deletion drops the cached entries of topics that were deleted meanwhile.
        assert list(state._deleted_ends) == [("g", retry, 0)]
        table = group.store.engine.table
        table.delete_queue(table.find(retry, 0), 0)
        caller.call(Operation.GROUP_DELETE, GroupRequest("h"))
        assert not state._deleted_ends
    finally:
        group.close()
