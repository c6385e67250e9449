"""Pop check points and acknowledgements in RocketMQ's format; unacknowledged messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mqproc.errors import BadRequestError
from mqproc.store.cooperative import finish
from mqproc.store.offsets import pop_receipts
from mqproc.store.offsets.consumer_offset_json import CommittedOffset
from mqproc.store.offsets.pop_receipts import (
    NEVER,
    OpenCheckPoints,
    PopAck,
    PopCheckPoint,
    parse_handle,
    read,
    revive_start_offsets,
)
from mqproc.topic_names import REVIVE_QUEUES, REVIVE_TOPIC, TIMER_TOPIC
from mqproc.types import StoredMessage
from tests.support.records import decode_record, encode_record
from tests.support.store_builders import FIRST_MS, LiveStore

POINT = PopCheckPoint("billing", "orders", 3, 120, (120, 121, 125), 1_700_000_000_000, 30_000, 5, "mqproc")


def revive_message(body: bytes, tag: str = "ck") -> StoredMessage:
    """A message of the revive topic, queue 5, offset 7."""
    message = decode_record(encode_record(topic=REVIVE_TOPIC, body=body, properties="", queue_id=5, queue_offset=7))
    return msgspec.structs.replace(message, tag=tag)


def test_read_check_point() -> None:
    found = read(revive_message(POINT.body()))
    assert isinstance(found, PopCheckPoint)
    assert (found.key, found.offsets, found.due_ms) == (POINT.key, POINT.offsets, 1_700_000_030_000)
    assert (found.revive_queue, found.revive_offset, found.open) == (5, 7, {120, 121, 125})
    assert msgspec.json.decode(POINT.body()) == {
        "so": 120,
        "pt": 1_700_000_000_000,
        "it": 30_000,
        "bm": 0,
        "n": 3,
        "q": 3,
        "t": "orders",
        "c": "billing",
        "ro": 0,
        "d": [0, 1, 5],
        "bn": "mqproc",
    }


def test_read_older_check_point_with_count_and_bitmap() -> None:
    found = read(revive_message(b'{"so":9,"pt":5,"it":6,"bm":5,"n":4,"q":0,"t":"T","c":"g"}'))
    assert isinstance(found, PopCheckPoint)
    assert (found.offsets, found.open) == ((9, 10, 11, 12), {10, 12})


@pytest.mark.parametrize(("offsets", "tag"), [((121,), "ack"), ((120, 125), "bAck")])
def test_read_acknowledgement(offsets: tuple[int, ...], tag: str) -> None:
    assert read(revive_message(POINT.ack_body(offsets), tag)) == PopAck(POINT.key, offsets)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"so":"x"}', b'{"so":1,"pt":1,"q":0,"t":"T","c":"g"}'])
@pytest.mark.parametrize("tag", ["ck", "ack"])
def test_read_invalid_body_returns_none(body: bytes, tag: str) -> None:
    assert read(revive_message(body, tag)) is None


def test_handle_names_its_check_point() -> None:
    handle = f"{POINT.handle()} 121"
    assert handle == "120 1700000000000 30000 5 0 mqproc 3 121"
    assert parse_handle("billing", "orders", handle) == (POINT.key, 121)


@pytest.mark.parametrize("handle", ["", "1 2 3", "120 1700000000000 30000 5 0 mqproc 3 x", "-1 2 3 4 5 b 6 7"])
def test_parse_handle_invalid_text_raises(handle: str) -> None:
    with pytest.raises(BadRequestError, match="no handle of a received message"):
        parse_handle("billing", "orders", handle)


# Open check points of the revive topic


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LiveStore]:
    found = LiveStore(tmp_path)
    yield found
    found.close()


def point(*offsets: int, queue_id: int = 0, time_ms: int = FIRST_MS, revive_queue: int = 0) -> PopCheckPoint:
    return PopCheckPoint("g", "T", queue_id, offsets[0], offsets, time_ms, 60_000, revive_queue, "mqproc")


def put(store: LiveStore, body: bytes, tag: str, queue_id: int = 0) -> None:
    store.append(REVIVE_TOPIC, [body], queues=REVIVE_QUEUES, fixed_queue=queue_id, tags=[tag])


def check(store: LiveStore, of: PopCheckPoint) -> None:
    put(store, of.body(), "ck", of.revive_queue)


def ack(store: LiveStore, of: PopCheckPoint, *offsets: int) -> None:
    put(store, of.ack_body(offsets), "ack" if len(offsets) == 1 else "bAck", of.revive_queue)


def park(store: LiveStore, body: bytes, tag: str, slot_ms: int, queue_id: int = 0) -> None:
    """Append a message to the timer topic as RocketMQ's broker does."""
    pairs = {"REAL_TOPIC": REVIVE_TOPIC, "REAL_QID": str(queue_id), "TIMER_OUT_MS": str(slot_ms)}
    text = "".join(f"{name}\x01{value}\x02" for name, value in pairs.items()).encode()
    store.append(TIMER_TOPIC, [body], queues=1, tags=[tag], parts=(b"", b"", b"", text))


def opened(store: LiveStore, begins: dict[int, int] | None = None, read_ms: int = 0) -> OpenCheckPoints:
    store.dispatch()
    found = OpenCheckPoints()
    finish(found.read(store.reading, begins or {}, read_ms))
    return found


def offsets_of(found: OpenCheckPoints) -> list[tuple[int, set[int]]]:
    return sorted((each.queue_id, each.open) for each in found)


def test_open_check_points_empty_store(store: LiveStore) -> None:
    found = opened(store)
    assert (len(found), found.log_begin, found.oldest_revive_offsets()) == (0, NEVER, {})


def test_open_check_points_hold_unacknowledged_and_log_begin(store: LiveStore) -> None:
    places = store.append("T", [b"%d" % number for number in range(6)], queues=1).physical_offsets
    first, second = point(0, 1, 2), point(3, 4, 5, time_ms=FIRST_MS + 1, revive_queue=2)
    check(store, first)
    check(store, second)
    ack(store, first, 0)
    ack(store, second, 3, 5)
    found = opened(store)
    assert offsets_of(found) == [(0, {1, 2}), (0, {4})]
    assert found.log_begin == places[1]
    assert found.oldest_revive_offsets() == {0: 0, 2: 0}
    found.done(next(each for each in found if 1 in each.open), [1, 2])
    assert (found.log_begin, found.oldest_revive_offsets()) == (places[4], {2: 0})


@pytest.mark.parametrize("times", [1, 3])
def test_ack_before_check_point_and_repeated_counts(store: LiveStore, times: int) -> None:
    """RocketMQ delays both until the check point is nearly due."""
    of = point(7, 8, 9)
    for _ in range(times):
        ack(store, of, 7, 9)
    check(store, of)
    ack(store, of, 7)
    other = point(10, time_ms=FIRST_MS + 1)
    ack(store, other, 10)
    check(store, other)
    assert offsets_of(opened(store)) == [(0, {8})]


def test_message_belongs_to_newest_check_point(store: LiveStore) -> None:
    first, changed = point(0, 1), point(1, time_ms=FIRST_MS + 5_000)
    check(store, first)
    check(store, changed)
    found = opened(store)
    assert sorted((each.pop_time_ms - FIRST_MS, each.open) for each in found) == [(0, {0}), (5_000, {1})]


def test_was_acknowledged_excludes_possible_redeliveries(store: LiveStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An overdue message is acknowledged by its redelivery; its receiver was too late."""
    monkeypatch.setattr(pop_receipts, "ACKS_KEPT", 2)
    received, late = point(0, 1, 2, 3), point(4, time_ms=FIRST_MS - 60_000)
    changed = point(3, time_ms=FIRST_MS + 5_000)
    for each in (received, late, changed):
        check(store, each)
    ack(store, received, 0, 1, 2)
    ack(store, late, 4)
    ack(store, received, 3)
    found = opened(store)
    assert [offset for offset in range(4) if found.was_acknowledged(received.key, offset)] == [1, 2]
    assert not found.was_acknowledged(late.key, 4)
    assert not found.was_acknowledged(changed.key, 3)


@pytest.mark.parametrize("queues", [(0, 0), (1, 2), (2, 1)])
def test_message_received_after_reset_and_clock_step_is_open(store: LiveStore, queues: tuple[int, int]) -> None:
    """The earlier check point, with a later time, was acknowledged."""
    first, again = (point(0, time_ms=FIRST_MS - 1000 * n, revive_queue=queue) for n, queue in enumerate(queues))
    check(store, first)
    ack(store, first, 0)
    check(store, again)
    assert [(each.pop_time_ms, each.open) for each in opened(store)] == [(again.pop_time_ms, {0})]


def test_check_points_in_timer_count_until_delivered(store: LiveStore) -> None:
    """The timer delivered one check point, not its acknowledgement nor another check point."""
    of, other, early = point(7, 8), point(3, queue_id=1, revive_queue=5), point(9, queue_id=2)
    park(store, of.body(), "ck", FIRST_MS)
    check(store, of)
    ack(store, of, 8)
    park(store, of.ack_body((7,)), "ack", FIRST_MS + 1_000)
    park(store, early.ack_body((9,)), "ack", FIRST_MS + 1_000)
    park(store, early.body(), "ck", FIRST_MS + 2_000)
    park(store, other.body(), "ck", FIRST_MS + 3_000, queue_id=5)
    store.append(TIMER_TOPIC, [b"{}"], queues=1, tags=["ck"])
    found = opened(store, {5: 4}, FIRST_MS + 1_000)
    assert offsets_of(found) == [(1, {3})]
    assert (found.parked_until_ms, found.oldest_revive_offsets()) == (FIRST_MS + 3_000, {5: 4})
    assert offsets_of(opened(store, {}, FIRST_MS)) == [(1, {3})], "a check point found twice counts once"
    delivered = opened(store, {}, FIRST_MS + 4_000)
    assert (offsets_of(delivered), delivered.parked_until_ms) == ([(0, {7})], -1)


def test_ack_names_start_offset_of_check_point(store: LiveStore) -> None:
    """RocketMQ's check points begin before their first message if a filter skipped some."""
    of = PopCheckPoint("g", "T", 0, 2, (5, 6), FIRST_MS, 60_000, 0, "b")
    check(store, of)
    ack(store, of, 5)
    assert offsets_of(opened(store)) == [(0, {6})]


def test_read_from_groups_offset_ignores_missing_messages(store: LiveStore) -> None:
    check(store, point(0))
    check(store, point(1, time_ms=FIRST_MS + 1))
    put(store, b"{}", "ck")
    progress = [
        CommittedOffset("CID_RMQ_SYS_REVIVE_GROUP", REVIVE_TOPIC, 0, 1),
        CommittedOffset("g", "T", 0, 9),
        CommittedOffset("g", REVIVE_TOPIC, 0, 2),
    ]
    found = opened(store, revive_start_offsets(progress))
    assert offsets_of(found) == [(0, {1})]
    assert found.log_begin == NEVER, "the queue does not exist"


def test_rocketmqs_check_points_are_ordered_by_time(store: LiveStore) -> None:
    """It delays some: they reach the revive topic after newer ones. They have a unique id."""
    places = store.append("T", [b"0"], queues=1).physical_offsets
    first, changed = point(0), point(0, time_ms=FIRST_MS + 5_000)
    for each in (changed, first):
        parts = b"", b"", b"", b"UNIQ_KEY\x01id\x02"
        store.append(REVIVE_TOPIC, [each.body()], queues=REVIVE_QUEUES, fixed_queue=0, tags=["ck"], parts=parts)
    (found,) = opened(store)
    assert (found.pop_time_ms, found.open, found.is_local) == (changed.pop_time_ms, {0}, False)
    assert found.physical_offset == places[0]
