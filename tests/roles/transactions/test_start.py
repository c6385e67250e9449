"""Start of the coordinator: open transactions, replaced copies and missing marks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mqproc.layout import properties
from mqproc.layout.record import SYS_FLAG_COMMIT
from mqproc.roles.transactions.coordinator import OVERLAP_MARKS, TransactionStart
from mqproc.roles.transactions.open_transactions import OpenTransactions
from mqproc.store.cooperative import finish
from mqproc.store.schedule.delivery_marks import mark_of
from mqproc.store.transactions import encode_op_body
from mqproc.topic_names import HALF_TOPIC, OP_HALF_TOPIC
from tests.support.store_builders import LiveStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LiveStore]:
    found = LiveStore(tmp_path)
    yield found
    found.close()


def put(store: LiveStore, topic: str, body: bytes, pairs: Mapping[str, str], **changes: int) -> int:
    """A message of the topic's first queue; its physical offset."""
    parts = (properties.encode(pairs).encode(), b"", b"", b"")
    result = store.append(topic, [body], parts=parts, fixed_queue=0, **changes)
    return int(result.physical_offsets[0])


def put_half(store: LiveStore, name: str, made_from: int = 0, **pairs: str) -> int:
    own = {"PGROUP": "g", "REAL_TOPIC": "T", "REAL_QID": "0", "__transactionId__": name}
    return put(store, HALF_TOPIC, name.encode(), own | pairs, prepared_transaction_offset=made_from)


def put_mark(store: LiveStore, *offsets: int) -> int:
    return put(store, OP_HALF_TOPIC, encode_op_body(offsets), {"TAGS": "d"})


def commit(store: LiveStore, half_at: int) -> None:
    put(store, "T", b"", {}, prepared_transaction_offset=mark_of(half_at), sys_flag=SYS_FLAG_COMMIT)


def started(store: LiveStore, max_open: int = 1000, progress: tuple[int, int] = (0, 0)) -> TransactionStart:
    store.dispatch()
    start = TransactionStart(store.reading, OpenTransactions(), max_open)
    finish(start.read(*progress, store.engine.appender.end))
    return start


def names(halves: list) -> list[str]:
    return sorted(half.transaction_id for half in halves)


def newest(start: TransactionStart) -> list[str]:
    table = start.table
    return names([half for half in table.all() if table.is_newest(half)])


def test_start_empty_log_has_no_open_transactions(store: LiveStore) -> None:
    put(store, "T", b"plain", {})
    start = started(store)
    assert (len(start.table), start.old, start.derived) == (0, [], [])


def test_start_finds_half_messages_without_mark(store: LiveStore) -> None:
    places = [put_half(store, name) for name in ("first", "marked", "copied", "open")]
    assert places[0] == 0, "the log's first record is named by 1"
    commit(store, places[0])
    put_mark(store, 1)
    put_half(store, "copied", made_from=places[2], TRANSACTION_CHECK_TIMES="1")
    put(store, HALF_TOPIC, b"", {"PGROUP": "g"})  # It does not say where it goes.
    start = started(store)
    assert names(start.derived) == ["first"]
    assert [(half.transaction_id, half.offset) for half in start.old] == [("copied", 2)]
    assert newest(start) == ["copied", "first", "open"]
    assert start.table.scanned_to == 6
    assert start.table.half_progress() == 0


def test_start_reads_from_the_committed_offset(store: LiveStore) -> None:
    for number in range(6):
        put_half(store, str(number))
    put_mark(store, 0, 1, 2)
    put_mark(store, 4)
    start = started(store, progress=(3, 1))
    assert newest(start) == ["3", "5"]
    # The newest marks are always read; none of them is needed below the offset.
    assert start.table.mark_progress(3) == 1


def test_start_rocketmq_copy_before_first_check_is_marked_by_it(store: LiveStore) -> None:
    put_half(store, "first")
    put_mark(store, 0)
    put_half(store, "first", TRAN_PREPARED_QUEUE_OFFSET="0")
    put_half(store, "other", TRAN_PREPARED_QUEUE_OFFSET="7")
    start = started(store, progress=(1, 0))
    assert names(start.old) == ["first"]
    assert newest(start) == ["first", "other"]


def test_start_keeps_marks_beyond_the_open_limit(store: LiveStore) -> None:
    places = [put_half(store, str(number)) for number in range(4)]
    commit(store, places[3])
    start = started(store, max_open=2)
    assert (newest(start), start.table.scanned_to, start.derived) == (["0", "1"], 2, [])
    assert start.derived_marks == {mark_of(places[3])}


def test_start_walks_log_from_the_third_last_mark(store: LiveStore) -> None:
    put_half(store, "old")
    places = [put_half(store, str(number)) for number in range(OVERLAP_MARKS + 1)]
    for number, place in enumerate(places):
        commit(store, place)
        put_mark(store, number + 1)
    start = started(store)
    assert newest(start) == ["old"]
    assert start.derived_marks == {mark_of(place) for place in places[2:]}
