"""Prepared answers: the next pull of a client that reads a queue in order, equal to a pull that is read when asked."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mqproc.errors import CorruptStoreError
from mqproc.layout import control as words_of
from mqproc.layout import queue_table
from mqproc.roles.query import long_poll as long_poll_module
from mqproc.wire.operations import Empty, Operation, PullRequest
from tests.roles.query.test_role import Caller, Group, filled, group
from tests.support.store_builders import MESSAGE_COUNT

__all__ = ["filled", "group"]

END = MESSAGE_COUNT // 4
SIZE = 20
OTHERS = PullRequest("Orders", 1, 1), PullRequest("Orders", 1, 2)
READS = PullRequest("Orders", 0, 0, max_messages=SIZE, object_bytes=1 << 20)


def at(offset: int, request: PullRequest = READS) -> PullRequest:
    return msgspec.structs.replace(request, offset=offset)


def reads_of(group: Group, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the offsets that are read from now on, in advance or for a request."""
    offsets: list[int] = []
    pull = group.role._reading.pull

    def read(topic: str, queue_id: int, offset: int, *others: Any, **options: Any) -> Any:
        offsets.append(offset)
        return pull(topic, queue_id, offset, *others, **options)

    monkeypatch.setattr(group.role._reading, "pull", read)
    return offsets


def counted(group: Group) -> list[int]:
    words, table = group.control.words, group.store.engine.table
    names = (words_of.PULLED_MESSAGES, words_of.PULLED_BYTES, words_of.PULLS, words_of.EMPTY_PULLS)
    delivered = table.column(queue_table.DELIVERED)
    return [*(words[name] for name in names), words[words_of.QUERY_REQUESTS], *map(int, delivered)]


def gained(group: Group, before: list[int]) -> list[int]:
    return [late - early for early, late in zip(before, counted(group), strict=True)]


def asked(group: Group, caller: Caller, request: PullRequest) -> tuple[Any, bytes, list[int]]:
    """The answer of a pull, and the growth of the counters."""
    before = counted(group)
    answer, payload = caller.call(Operation.PULL, request)
    return answer, payload, gained(group, before)


def read_two(group: Group, request: PullRequest = READS) -> tuple[Caller, PullRequest]:
    """A client that has made two pulls in order, and its third pull, which is prepared."""
    caller = group.connect()
    for _ in range(2):
        answer, _ = caller.call(Operation.PULL, request)
        request = at(answer.next_offset, request)
    group.step()
    expected = group.role._pulls._expected
    assert expected is not None
    assert expected.pulled is not None
    return caller, request


def is_prepared(group: Group) -> bool:
    expected = group.role._pulls._expected
    return expected is not None and expected.pulled is not None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tags": ["Tag1", "Tag3"]},
        {"sql": "TAGS <> 'Tag2'"},
        {"max_bytes": 1000},
        {"object_bytes": 10},
        {"timeout_ms": 10, "progress_ms": 0},
    ],
)
def test_prepared_answers_equal_those_of_another_client(
    filled: Group, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    # A filter on a busy machine would end some answers early.
    monkeypatch.setattr("mqproc.store.read.unit_walk.RUN_NS", 1 << 62)
    request = msgspec.structs.replace(READS, **changes)
    caller, pulls, prepared, count = filled.connect(), filled.role._pulls, 0, 1
    while count:
        prepared += is_prepared(filled)
        answered = asked(filled, caller, request)
        # Another client's pull would replace the expected one.
        with monkeypatch.context() as kept:
            kept.setattr(pulls, "_expected", None)
            kept.setattr(pulls, "_expect_next", lambda *_given, **_options: None)
            kept.setattr(pulls, "prepare", lambda: 0)
            assert asked(filled, filled.connect(), request) == answered
        count, request = answered[0].count, at(answered[0].next_offset, request)
    assert request.offset == END
    assert prepared >= 2
    assert not is_prepared(filled)


def test_prepared_third_pull_in_order_needs_no_read(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, caller = reads_of(filled, monkeypatch), filled.connect()
    caller.call(Operation.PULL, at(0))
    assert filled.step() == 0
    assert reads == [0]
    caller.call(Operation.PULL, at(SIZE))
    assert reads == [0, SIZE, 2 * SIZE]
    caller.ask(Operation.PULL, at(2 * SIZE))
    with monkeypatch.context() as without:
        without.setattr(filled.role._pulls, "prepare", lambda: 0)
        found = caller.answer()
    assert found is not None
    assert (found[1].status, found[1].next_offset, found[1].count) == ("FOUND", 3 * SIZE, SIZE)
    assert reads == [0, SIZE, 2 * SIZE]
    for _ in range(3):
        filled.step()
    assert reads == [0, SIZE, 2 * SIZE, 3 * SIZE]


def test_prepared_queue_is_read_once_to_its_end(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, caller, offset = reads_of(filled, monkeypatch), filled.connect(), 0
    while offset < END:
        offset = caller.call(Operation.PULL, at(offset))[0].next_offset
    assert reads == [*range(0, END, SIZE)]
    answer, _ = caller.call(Operation.PULL, at(END))
    assert answer.status == "OFFSET_OVERFLOW_ONE"
    assert filled.role._pulls._expected is None


def test_prepared_answer_counts_only_when_it_is_used(filled: Group) -> None:
    before = counted(filled)
    caller, request = read_two(filled)
    of_two = gained(filled, before)
    assert (of_two[0], of_two[2:6], sum(of_two[6:])) == (2 * SIZE, [2, 0, 2, 2 * SIZE], 0)
    _, records, of_records = asked(filled, filled.connect(), msgspec.structs.replace(request, object_bytes=0))
    assert of_records[1] == len(records)
    assert is_prepared(filled)
    assert asked(filled, caller, request)[2] == of_records
    filled.step()
    assert is_prepared(filled)
    before = counted(filled)
    caller.sock.close()
    filled.step()
    assert not is_prepared(filled)
    assert counted(filled) == before


@pytest.mark.parametrize(
    "changes",
    [{"offset": 2 * SIZE + 1}, {"queue_id": 1}, {"tags": ["Tag1"]}, {"max_messages": 7}, {"rocketmq_limits": True}],
)
def test_prepared_answer_is_not_that_of_another_pull(
    filled: Group, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    caller, request = read_two(filled)
    other = msgspec.structs.replace(request, **changes)
    monkeypatch.setattr(filled.role._pulls, "_answer_prepared", None)
    answer, payload = caller.call(Operation.PULL, other)
    assert (answer, payload) == filled.connect().call(Operation.PULL, other)
    assert answer.status == "FOUND"


def test_prepared_answer_is_not_that_of_another_client(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    caller, request = read_two(filled)
    reads = reads_of(filled, monkeypatch)
    filled.connect().call(Operation.PULL, request)
    assert reads == [2 * SIZE]
    assert not is_prepared(filled)
    caller.call(Operation.PULL, request)
    assert reads == [2 * SIZE] * 2


def test_prepared_answer_is_forgotten_by_a_held_pull(filled: Group) -> None:
    caller, request = read_two(filled)
    filled.connect().call(Operation.PULL, at(END))
    assert is_prepared(filled)
    caller.ask(Operation.PULL, msgspec.structs.replace(request, offset=END, timeout_ms=30_000))
    assert caller.answer() is None
    assert filled.role._pulls._expected is None


@pytest.mark.parametrize("created", [False, True])
def test_prepared_answer_of_a_deleted_queue_is_not_used(filled: Group, created: bool) -> None:
    caller, request = read_two(filled)
    table = filled.store.engine.table
    number = table.find("Orders", 0)
    table.delete_queue(number, filled.store.engine.written)
    if created:
        # The new queue begins below the old one's next offset here, so only its number differs.
        assert table.create_queue("Orders", 0) == number
        table.store(number, queue_table.FIRST_OFFSET, 0)
        table.store(number, queue_table.MIN_OFFSET, 0)
    answer, payload = caller.call(Operation.PULL, request)
    assert (answer, payload) == filled.connect().call(Operation.PULL, request)
    assert (answer.status, answer.count, payload) != ("FOUND", SIZE, b"")
    if not created:
        assert answer.status == "NO_MATCHED_LOGIC_QUEUE"


def test_prepared_answer_below_the_minimum_is_not_used(filled: Group) -> None:
    caller, request = read_two(filled)
    table = filled.store.engine.table
    table.raise_min_offset(table.find("Orders", 0), request.offset + 1)
    answer, payload = caller.call(Operation.PULL, request)
    assert (answer.status, answer.next_offset, payload) == ("OFFSET_TOO_SMALL", request.offset + 1, b"")


def test_prepared_answer_has_the_current_bounds(filled: Group) -> None:
    caller, request = read_two(filled)
    table = filled.store.engine.table
    table.raise_min_offset(table.find("Orders", 0), request.offset)
    filled.put("Orders", 40)
    filled.dispatch()
    answer, _ = caller.call(Operation.PULL, request)
    assert (answer.count, answer.min_offset, answer.max_offset) == (SIZE, request.offset, END + 7)


def test_prepared_end_of_a_queue_that_grows_is_read_again(filled: Group) -> None:
    caller, request = read_two(filled, at(END - 2 * SIZE - 5))
    assert END - request.offset == 5
    filled.put("Orders", 40)
    filled.dispatch()
    answer, _ = caller.call(Operation.PULL, request)
    assert (answer.count, answer.next_offset) == (12, END + 7)


def test_prepared_answer_is_freed_with_its_connection(filled: Group) -> None:
    caller, _ = read_two(filled)
    other = filled.connect()
    other.call(Operation.PULL, at(END))
    other.sock.close()
    filled.step()
    assert is_prepared(filled)
    caller.sock.close()
    filled.step()
    assert filled.role._pulls._expected is None


def test_prepared_answer_waits_for_a_client_that_reads(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, caller = reads_of(filled, monkeypatch), filled.connect()
    caller.call(Operation.PULL, at(0))
    (connection,) = filled.role._server.connections.values()
    prepare = filled.role._pulls.prepare

    def paused() -> int:
        connection.paused = True
        done = prepare()
        connection.paused = False
        return done

    with monkeypatch.context() as pausing:
        pausing.setattr(filled.role._pulls, "prepare", paused)
        caller.call(Operation.PULL, at(SIZE))
        assert filled.step() == 0
    assert reads == [0, SIZE]
    assert filled.step() == 1
    assert reads == [0, SIZE, 2 * SIZE]


def test_prepared_answer_to_a_leaving_client_is_freed(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    caller, request = read_two(filled)
    send, (connection,) = filled.role._pulls._send, filled.role._server.connections.values()

    def send_and_close(*given: Any) -> None:
        send(*given)
        connection.close()

    monkeypatch.setattr(filled.role._pulls, "_send", send_and_close)
    caller.ask(Operation.PULL, request)
    filled.step()
    assert filled.role._pulls._expected is None


def test_prepared_answer_is_read_after_other_requests(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqproc.roles.query.role.STEP_NS", 0)
    reads, caller = reads_of(filled, monkeypatch), filled.connect()
    caller.call(Operation.PULL, at(0))
    others = [filled.connect() for _ in range(2)]
    for other in others:
        other.call(Operation.PING, Empty())
    for each, request in zip((caller, *others), (at(SIZE), *OTHERS), strict=True):
        each.ask(Operation.PULL, request)
    while len(reads) < 5:
        filled.step()
    assert (reads[0], {*reads[1:4]}, reads[4]) == (0, {SIZE, 1, 2}, 2 * SIZE)


def test_prepared_large_answers_are_not_read_in_advance(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_poll_module, "PREPARED_BYTES_MAX", 100)
    reads, caller = reads_of(filled, monkeypatch), filled.connect()
    for offset in range(0, 4 * SIZE, SIZE):
        caller.call(Operation.PULL, at(offset))
    assert reads == [*range(0, 4 * SIZE, SIZE)]


def test_prepared_answer_that_is_too_large_is_discarded(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    filled.store.engine.append("Orders", [b"b" * 30_000], rotation=0, tags=["Tag0"])
    filled.dispatch()
    monkeypatch.setattr(long_poll_module, "PREPARED_BYTES_MAX", 20_000)
    reads, caller, start = reads_of(filled, monkeypatch), filled.connect(), END - 2 * SIZE
    for offset in (start, start + SIZE):
        caller.call(Operation.PULL, at(offset))
    assert reads == [start, start + SIZE, END]
    assert not is_prepared(filled)
    answer, _ = caller.call(Operation.PULL, at(END))
    assert (answer.status, answer.count) == ("FOUND", 1)
    assert reads == [start, start + SIZE, END, END]


def test_prepared_pull_that_fails_is_reported_by_the_pull(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = filled.connect()
    caller.call(Operation.PULL, at(0))
    pull, failing = filled.role._reading.pull, [2 * SIZE]

    def fail(topic: str, queue_id: int, offset: int, *others: Any, **options: Any) -> Any:
        if offset in failing:
            raise CorruptStoreError("short")
        return pull(topic, queue_id, offset, *others, **options)

    monkeypatch.setattr(filled.role._reading, "pull", fail)
    rejects = filled.control.words[words_of.QUERY_REJECTS]
    answer, _ = caller.call(Operation.PULL, at(SIZE))
    assert (answer.count, filled.control.words[words_of.QUERY_REJECTS]) == (SIZE, rejects)
    assert not is_prepared(filled)
    with pytest.raises(CorruptStoreError):
        caller.call(Operation.PULL, at(2 * SIZE))
    failing.clear()
    answer, _ = caller.call(Operation.PULL, at(2 * SIZE))
    assert (answer.status, answer.count) == ("FOUND", SIZE)
