"""Held pulls of a queue that gets one message: fewer steps, equal answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mqproc.errors import CorruptStoreError, InternalError
from mqproc.layout import control as words_of
from mqproc.layout import queue_table
from mqproc.layout.record_codec import decode_records
from mqproc.roles.query import long_poll as long_poll_module
from mqproc.wire.operations import Operation, PullRequest
from tests.roles.query.test_long_poll import Table, held
from tests.roles.query.test_role import Caller, Group, waiting
from tests.support.store_builders import MESSAGE_COUNT

END = MESSAGE_COUNT // 4
WAITS = PullRequest("Orders", 0, END, timeout_ms=30_000)
NEXT_FRAME = 40
"""Its first message is for queue 0, and has Tag0."""


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path / "store")
    for frame in range(NEXT_FRAME):
        made.put("Orders", frame)
    made.dispatch()
    yield made
    made.close()


def hold(group: Group, request: PullRequest = WAITS) -> Caller:
    """A client whose pull is held."""
    caller = group.connect()
    caller.ask(Operation.PULL, request)
    assert caller.answer() is None
    return caller


def ways(group: Group, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the path that pulls take from now on: "short" alone, or "long"."""
    taken: list[str] = []
    pulls = group.role._pulls
    short, long = pulls._single.pull, pulls._pull_from

    def try_short(*arguments: Any) -> Any:
        found = short(*arguments)
        if found is not None:
            taken.append("short")
        return found

    def go_long(*arguments: Any) -> Any:
        taken.append("long")
        return long(*arguments)

    monkeypatch.setattr(pulls._single, "pull", try_short)
    monkeypatch.setattr(pulls, "_pull_from", go_long)
    return taken


def counted(group: Group) -> list[int]:
    words, table = group.control.words, group.store.engine.table
    names = (words_of.PULLED_MESSAGES, words_of.PULLED_BYTES, words_of.PULLS, words_of.EMPTY_PULLS)
    delivered = table.column(queue_table.DELIVERED)[table.find("Orders", 0)]
    return [*(words[name] for name in names), words[words_of.QUERY_REQUESTS], int(delivered)]


def put(group: Group, frame: int = NEXT_FRAME, **changes: Any) -> None:
    group.put("Orders", frame, **changes)
    group.dispatch()


@pytest.mark.parametrize("size", [1, 100, 20_000])
@pytest.mark.parametrize("tags", [[], ["Tag0"], ["Tag3", "Tag0"]])
def test_single_pull_new_message_is_answered_in_fewer_steps(
    filled: Group, monkeypatch: pytest.MonkeyPatch, tags: list[str], size: int
) -> None:
    request = msgspec.structs.replace(WAITS, tags=tags)
    caller, taken = hold(filled, request), ways(filled, monkeypatch)
    before = counted(filled)
    changes = {"keys": ["k"], "tags": ["Tag0"]}
    filled.store.engine.append("Orders", [b"b" * size], rotation=0, **changes)
    filled.dispatch()
    found = caller.answer()
    assert found is not None
    assert (taken, waiting(filled)) == (["short"], 0)
    between = counted(filled)
    again, payload = caller.call(Operation.PULL, request)
    assert taken == ["short", "long"]
    assert found[1:] == (again, payload)
    assert (again.status, again.next_offset, again.count) == ("FOUND", END + 1, 1)
    assert [len(message.body) for message in decode_records(payload)] == [size]
    gained = [late - early for early, late in zip(before, between, strict=True)]
    assert gained == [1, len(payload), 1, 0, 1, 1]
    assert gained == [late - early for early, late in zip(between, counted(filled), strict=True)]


@pytest.mark.parametrize(
    ("changes", "count"), [({}, 5), ({"sql": "TAGS IS NOT NULL"}, 1), ({"rocketmq_limits": True}, 1)]
)
def test_single_pull_other_requests_use_the_general_path(
    filled: Group, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], count: int
) -> None:
    caller, taken = hold(filled, msgspec.structs.replace(WAITS, **changes)), ways(filled, monkeypatch)
    put(filled, count=count)
    found = caller.answer()
    assert found is not None
    assert (found[1].status, found[1].count, taken) == ("FOUND", -(-count // 4), ["long"])


def test_single_pull_unmatched_message_is_skipped(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    caller, taken = hold(filled, msgspec.structs.replace(WAITS, tags=["Tag1"])), ways(filled, monkeypatch)
    put(filled, count=1)
    assert caller.answer() is None
    put(filled, NEXT_FRAME, count=1, tags=["Tag1"])
    found = caller.answer()
    assert found is not None
    assert (found[1].next_offset, found[1].count, taken) == (END + 2, 1, ["long", "short"])


def test_single_pull_all_waiters_of_a_queue_get_the_message(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    callers, taken = [hold(filled) for _ in range(3)], ways(filled, monkeypatch)
    put(filled, count=1)
    found = [caller.answer() for caller in callers]
    assert [each and each[1].count for each in found] == [1, 1, 1]
    assert taken == ["short"] * 3
    assert waiting(filled) == 0


def test_single_pull_waiters_are_answered_before_other_work(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    caller, role = hold(filled), filled.role
    done: list[str] = []
    close_deleted, release, answer = role._reading.close_deleted, role._long_polls.release, role._pulls._answer
    monkeypatch.setattr(
        role._reading, "close_deleted", lambda *given: (done.append("close deleted"), close_deleted(*given))
    )
    monkeypatch.setattr(role._long_polls, "release", lambda pull: (done.append("release"), release(pull)))
    monkeypatch.setattr(role._pulls, "_answer", lambda *given: (done.append("answer"), answer(*given)))
    put(filled, count=1)
    filled.step()
    assert done == ["answer", "release", "close deleted"]
    assert caller.answer() is not None


@pytest.mark.parametrize(
    ("error", "refused"), [(CorruptStoreError("short"), CorruptStoreError), (RuntimeError("why"), InternalError)]
)
def test_single_pull_failure_refuses_and_drops_the_pull(
    filled: Group, monkeypatch: pytest.MonkeyPatch, error: Exception, refused: type[Exception]
) -> None:
    caller = hold(filled)

    def fail(_start: int) -> None:
        raise error

    before = counted(filled)
    with monkeypatch.context() as failing:
        failing.setattr(filled.role._reading.segments, "view", fail)
        put(filled, count=1)
        with pytest.raises(refused):
            caller.answer()
    gained = [late - early for early, late in zip(before, counted(filled), strict=True)]
    assert gained == [0, 0, 0, 0, 1, 0]
    assert (waiting(filled), len(filled.role._long_polls)) == (0, 0)
    answer, _ = caller.call(Operation.PULL, WAITS)
    assert answer.count == 1


@pytest.mark.parametrize("changes", [{}, {"sql": "TAGS IS NOT NULL"}])
def test_single_pull_unanswerable_is_refused_once(
    filled: Group, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    caller = hold(filled, msgspec.structs.replace(WAITS, **changes))

    def fail(*_given: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as failing:
        failing.setattr(filled.role._pulls, "_answer", fail)
        put(filled, count=1)
        with pytest.raises(InternalError):
            caller.answer()
    assert (waiting(filled), len(filled.role._long_polls)) == (0, 0)
    put(filled, count=1)
    assert caller.answer() is None


def test_single_pull_disconnected_client_is_dropped(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqproc.roles.query.role.STEP_NS", 60_000_000_000)  # One step serves both on a busy machine.
    caller, other = hold(filled), hold(filled)
    put(filled, count=1)
    caller.sock.close()
    filled.role._has_polled = True  # Only the answer can detect the disconnect.
    filled.step()
    assert len(filled.role._long_polls) == 0
    found = other.answer()
    assert found is not None
    assert found[1].count == 1


@pytest.mark.parametrize("few", [0, 3])
def test_single_pull_few_queues_equal_the_many_queue_path(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    monkeypatch.setattr(long_poll_module, "FEW_ROWS", few)
    table: Any = Table(2)
    holds = long_poll_module.LongPolls(table)
    pulls = [held(holds, queue_id) for queue_id in (0, 1, 2)]
    assert holds.moved() == pulls
    assert holds.moved() == []
    for queue_ids in ((1,), (0, 1), (0,)):
        for queue_id in queue_ids:
            table.put(queue_id)
        assert holds.moved() == [pulls[queue_id] for queue_id in queue_ids]
        assert holds.moved() == []
    holds.release(pulls[0])
    table.put(0)
    assert holds.moved() == []
    table.queues, table.changes = 1, (2, 1, 1)
    assert holds.moved() == [pulls[1]], "it is gone"
    assert holds.moved() == []
