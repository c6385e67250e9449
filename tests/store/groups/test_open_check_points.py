"""What is open by the revive topic: check points, acknowledgements in any order, and where all of it begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc.store.cooperative import finish
from mqproc.store.offsets import pop_receipts as open_check_points
from mqproc.store.offsets.consumer_offset_json import CommittedOffset
from mqproc.store.offsets.pop_receipts import NEVER, OpenCheckPoints, PopCheckPoint, revive_start_offsets
from mqproc.topic_names import REVIVE_QUEUES, REVIVE_TOPIC, TIMER_TOPIC
from tests.store.live_store import FIRST_MS, LiveStore


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
    """As RocketMQ's broker puts it into its timer."""
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


def test_nothing_is_open_where_nobody_ever_received(store: LiveStore) -> None:
    found = opened(store)
    assert (len(found), found.log_begin, found.oldest_revive_offsets()) == (0, NEVER, {})


def test_what_is_not_acknowledged_is_open_and_the_first_of_it_is_where_the_log_begins(store: LiveStore) -> None:
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
def test_an_acknowledgement_may_lie_before_its_check_point_and_come_again(store: LiveStore, times: int) -> None:
    """As RocketMQ's do: both are parked until the check point is nearly due."""
    of = point(7, 8, 9)
    for _ in range(times):
        ack(store, of, 7, 9)
    check(store, of)
    ack(store, of, 7)
    other = point(10, time_ms=FIRST_MS + 1)
    ack(store, other, 10)
    check(store, other)
    assert offsets_of(opened(store)) == [(0, {8})]


def test_a_message_is_its_newest_check_points(store: LiveStore) -> None:
    first, changed = point(0, 1), point(1, time_ms=FIRST_MS + 5_000)
    check(store, first)
    check(store, changed)
    found = opened(store)
    assert sorted((each.pop_time_ms - FIRST_MS, each.open) for each in found) == [(0, {0}), (5_000, {1})]


def test_what_was_acknowledged_is_known_but_for_what_may_have_been_sent_again(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message whose time is over is sent again, and acknowledged by who sends it; its receiver was too late."""
    monkeypatch.setattr(open_check_points, "ACKS_KEPT", 2)
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
def test_a_message_that_is_received_again_after_a_reset_is_open_though_the_clock_was_set_back(
    store: LiveStore, queues: tuple[int, int]
) -> None:
    """The check point before, of a later time, was acknowledged."""
    first, again = (point(0, time_ms=FIRST_MS - 1000 * n, revive_queue=queue) for n, queue in enumerate(queues))
    check(store, first)
    ack(store, first, 0)
    check(store, again)
    assert [(each.pop_time_ms, each.open) for each in opened(store)] == [(again.pop_time_ms, {0})]


def test_what_rocketmq_has_parked_counts_while_it_is_not_delivered(store: LiveStore) -> None:
    """Here the timer has delivered a check point, and not yet its acknowledgement, nor another check point."""
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
    assert offsets_of(opened(store, {}, FIRST_MS)) == [(1, {3})], "one that is found twice is the same"
    delivered = opened(store, {}, FIRST_MS + 4_000)
    assert (offsets_of(delivered), delivered.parked_until_ms) == ([(0, {7})], -1)


def test_acknowledgements_name_the_offset_that_was_looked_from(store: LiveStore) -> None:
    """RocketMQ's check points begin before their first message where a filter has left some out."""
    of = PopCheckPoint("g", "T", 0, 2, (5, 6), FIRST_MS, 60_000, 0, "b")
    check(store, of)
    ack(store, of, 5)
    assert offsets_of(opened(store)) == [(0, {6})]


def test_reading_begins_at_the_groups_progress_and_gone_messages_hold_nothing(store: LiveStore) -> None:
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
    assert found.log_begin == NEVER, "there is no such queue any more"


def test_rocketmqs_check_points_are_newer_by_their_times(store: LiveStore) -> None:
    """It parks some of them, which come to the revive topic behind what was made later; they bear a unique id."""
    places = store.append("T", [b"0"], queues=1).physical_offsets
    first, changed = point(0), point(0, time_ms=FIRST_MS + 5_000)
    for each in (changed, first):
        parts = b"", b"", b"", b"UNIQ_KEY\x01id\x02"
        store.append(REVIVE_TOPIC, [each.body()], queues=REVIVE_QUEUES, fixed_queue=0, tags=["ck"], parts=parts)
    (found,) = opened(store)
    assert (found.pop_time_ms, found.open, found.is_local) == (changed.pop_time_ms, {0}, False)
    assert found.physical_offset == places[0]
