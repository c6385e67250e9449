"""Simple consumers in the query role: a start that finds many unacknowledged messages."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import pytest

from mqproc.errors import BadRequestError, GroupInUseError, StoreBusyError
from mqproc.layout import control as words_of
from mqproc.layout.record_codec import decode_records
from mqproc.roles.pop import receivers as receivers_module
from mqproc.roles.pop.revive import PopCopies
from mqproc.roles.query.role import Query
from mqproc.roles.request_limits import COMPACT_MIN
from mqproc.store.cooperative import Slices
from mqproc.store.offsets import pop_receipts as check_points
from mqproc.store.offsets.pop_receipts import PopCheckPoint
from mqproc.store.read import queries as queries_module
from mqproc.topic_names import CHECK_POINT_MESSAGES, REVIVE_QUEUES, REVIVE_TOPIC
from mqproc.wire.operations import (
    EARLIEST,
    LATEST,
    FrameOptions,
    GroupAckRequest,
    GroupInvisibleRequest,
    GroupJoinRequest,
    GroupReceiveRequest,
    GroupRequest,
    GroupResetRequest,
    GroupSettingsRequest,
    Operation,
)
from tests.roles.query.test_role import Caller, Group
from tests.support.group import wait_until
from tests.support.records import decode_record, encode_record

COUNT = 100
SOON_S = 10.0


def held_back(group: Group, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[int], None]]:
    """Stores requests when the test calls it, at the first one's queue offset."""
    stored: list[Callable[[int], None]] = []
    monkeypatch.setattr(group.role._pops._writes, "store", lambda _messages, done, *_: stored.append(done))
    return stored


def is_read(caller: Caller) -> bool:
    """Whether requests are accepted: one for a message that was never received is refused."""
    try:
        with pytest.raises(BadRequestError, match="no longer held by this receiver"):
            caller.call(
                Operation.GROUP_INVISIBLE, GroupInvisibleRequest("g", "Orders", "0 1 1000 0 0 mqproc 0 0", 1000)
            )
    except StoreBusyError:
        return False
    return True


def test_pop_start_reads_open_receipts_in_bounded_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The role answers others meanwhile, however much follows the first open receipt."""
    monkeypatch.setattr(queries_module, "BATCH_MESSAGES", 4)
    group = Group(tmp_path / "store")
    now_ms = time.time_ns() // 1_000_000
    found = [
        PopCheckPoint("billing", "Orders", 0, number, (number,), now_ms, 600_000, 0, "mqproc")
        for number in range(COUNT)
    ]
    bodies = [point.body() for point in found]
    group.store.engine.append(REVIVE_TOPIC, bodies, now_ms, queues=REVIVE_QUEUES, tags=["ck"] * COUNT)
    group.dispatch()
    try:
        caller = group.connect()
        looks = 0
        while not is_read(caller):
            looks += 1
        assert looks >= 3
        assert {found.key[3] for found in group.role._pops._open} == set(range(COUNT))
    finally:
        group.close()


def test_pop_held_receive_is_woken_by_dispatch(tmp_path: Path) -> None:
    """As for pulls: otherwise the message waited for the role's next scan."""
    group = Group(tmp_path / "store")
    group.put("Orders", 0, count=1, queues=1)
    group.dispatch()
    words = group.control.words
    try:
        caller = group.connect()
        while not is_read(caller):
            pass
        group.dispatcher_bell.linger()
        caller.ask(Operation.GROUP_RECEIVE, GroupReceiveRequest("g", ["Orders"], 1, timeout_ms=600_000))
        assert caller.answer() is None
        assert words[words_of.WAITING_PULLS] == 1
        rung = select.poll()  # A select takes no descriptor above 1,023.
        rung.register(group.dispatcher_bell, select.POLLIN)
        assert rung.poll(0), "the first that waits hurries the dispatcher"
    finally:
        group.close()


def started_from_the_begin(group: Group) -> int | None:
    """Offset of `billing` in the queue of `Orders` after a role without it read the receipts."""
    group.dispatch()
    try:
        state = group.role._pops._state
        state.init_offsets("billing", "Orders", EARLIEST)
        caller = group.connect()
        while not is_read(caller):
            pass
        return state.progress.offset("billing", "Orders", 0)
    finally:
        group.close()


def test_pop_offset_passes_all_open_receipts_in_any_read_order(tmp_path: Path) -> None:
    """A power loss may move the offset back past receipts in any queue of the revive topic."""
    group = Group(tmp_path / "store")
    now_ms = time.time_ns() // 1_000_000
    group.store.engine.append("Orders", [b"%d" % number for number in range(3)], now_ms, queues=1)
    for number, revive_queue in ((0, 1), (1, 0)):
        point = PopCheckPoint("billing", "Orders", 0, number, (number,), now_ms, 600_000, revive_queue, "mqproc")
        group.store.engine.append(
            REVIVE_TOPIC, [point.body()], now_ms, queues=REVIVE_QUEUES, fixed_queue=revive_queue, tags=["ck"]
        )
    assert started_from_the_begin(group) == 2


def test_pop_offset_passes_receipts_with_filtered_gaps(
    tmp_path: Path,
) -> None:
    """Every second message matches: the second receipt covers gaps of the first."""
    group = Group(tmp_path / "store")
    now_ms = time.time_ns() // 1_000_000
    group.store.engine.append("Orders", [b"%d" % number for number in range(COUNT)], now_ms, queues=1)
    records = [encode_record(topic="Orders", body=b"", queue_offset=offset) for offset in range(0, COUNT, 2)]
    every_second = [decode_record(record) for record in records]
    points = check_points.check_points_of_receive(("billing", "Orders", 0), every_second, now_ms, 600_000, 0, "mqproc")
    assert [len(point.offsets) for point in points] == [CHECK_POINT_MESSAGES, COUNT // 2 - CHECK_POINT_MESSAGES]
    bodies = [point.body() for point in points]
    group.store.engine.append(REVIVE_TOPIC, bodies, now_ms, queues=REVIVE_QUEUES, tags=["ck"] * len(points))
    assert started_from_the_begin(group) == COUNT - 1


@pytest.mark.parametrize("deleted", [False, True], ids=["reset", "deleted"])
def test_pop_receipts_from_before_a_reset_do_not_move_the_offset(tmp_path: Path, *, deleted: bool) -> None:
    """They are still open: a start moved the group past their messages, including finished ones."""
    group = Group(tmp_path / "store")
    now_ms = time.time_ns() // 1_000_000
    group.store.engine.append("Orders", [b"%d" % number for number in range(COUNT)], now_ms, queues=1)
    point = PopCheckPoint("g", "Orders", 0, 0, tuple(range(COUNT)), now_ms, 600_000, 0, "mqproc")
    group.store.engine.append(REVIVE_TOPIC, [point.body()], now_ms, queues=REVIVE_QUEUES, tags=["ck"])
    group.dispatch()
    try:
        caller, state = group.connect(), group.role._pops._state
        state.ensure_group("g")
        while not is_read(caller):
            pass
        state.init_offsets("g", "Orders", LATEST)
        if deleted:
            caller.call(Operation.GROUP_DELETE, GroupRequest("g"))
            state.init_offsets("g", "Orders", EARLIEST)
        else:
            caller.call(Operation.GROUP_RESET, GroupResetRequest("g", [("Orders", 0, 7)]))
        group.role.close()
        group.role = Query(group.context)
        caller = group.connect()
        while not is_read(caller):
            pass
        pops = group.role._pops
        assert pops._state.progress.offset("g", "Orders", 0) == (0 if deleted else 7)
        assert len(pops._open) == 1, "its messages are redelivered"
    finally:
        group.close()


def test_pop_ack_stored_by_killed_role_is_accepted_when_repeated(tmp_path: Path) -> None:
    """A client whose ack is rejected would expect a redelivery that never comes."""
    group = Group(tmp_path / "store")
    now_ms = time.time_ns() // 1_000_000
    group.store.engine.append("Orders", [b"0", b"1"], now_ms, queues=1)
    point = PopCheckPoint("g", "Orders", 0, 0, (0, 1), now_ms, 600_000, 0, "mqproc")
    for body, tag in ((point.body(), "ck"), (point.ack_body((0,)), "ack")):
        group.store.engine.append(REVIVE_TOPIC, [body], now_ms, queues=REVIVE_QUEUES, fixed_queue=0, tags=[tag])
    group.dispatch()
    try:
        caller = group.connect()
        while not is_read(caller):
            pass
        handle = ("Orders", f"{point.handle()} 0")
        answer, _ = caller.call(Operation.GROUP_ACK, GroupAckRequest("g", [handle, handle]))
        assert answer.accepted == 1
        answer, _ = caller.call(Operation.GROUP_ACK, GroupAckRequest("g", [("Orders", f"{point.handle()} 7")]))
        assert answer.accepted == 0
    finally:
        group.close()


def test_pop_start_searches_copies_in_topic_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order must not depend on the hash seed of the process."""
    group = Group(tmp_path / "store")
    engine, now_ms, names = group.store.engine, time.time_ns() // 1_000_000, [f"T{number}" for number in range(COUNT)]
    bodies = [PopCheckPoint("billing", name, 0, 0, (0,), now_ms, 600_000, 0, "mqproc").body() for name in names]
    engine.append(REVIVE_TOPIC, bodies, now_ms, queues=REVIVE_QUEUES, fixed_queue=0, tags=["ck"] * COUNT)
    group.dispatch()
    looked_for: list[str] = []
    find = PopCopies.find

    def noted(copies: PopCopies, topics: Iterable[str], begin: int) -> Slices[None]:
        looked_for.extend(topics := list(topics))
        return find(copies, topics, begin)

    monkeypatch.setattr(PopCopies, "find", noted)
    try:
        caller = group.connect()
        while not is_read(caller):
            pass
        assert looked_for == sorted({*(f"%RETRY%billing_{name}" for name in names), "%DLQ%billing"})
    finally:
        group.close()


def test_pop_copies_of_killed_role_are_found_after_clock_moved_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Message 0's copy has a store time an hour before its receipt; earlier ones do not count."""
    group = Group(tmp_path / "store")
    engine, now_ms = group.store.engine, time.time_ns() // 1_000_000

    def copied(number: int, time_ms: int) -> None:
        host = engine.appender.store_host.hex().upper()
        origin = f"ORIGIN_MESSAGE_ID\x01{host}{places[number]:016X}\x02".encode()
        gaps = (b"", b"", b"", origin)
        engine.append("%RETRY%billing_Orders", [b"again"], time_ms, queues=1, reconsume_times=1, parts=gaps)

    places = engine.append("Orders", [b"0", b"1"], now_ms, queues=1).tolist()
    copied(1, now_ms)
    point = PopCheckPoint("billing", "Orders", 0, 0, (0, 1), now_ms - 9_000, 1_000, 0, "mqproc")
    engine.append(REVIVE_TOPIC, [point.body()], now_ms, queues=REVIVE_QUEUES, fixed_queue=0, tags=["ck"])
    copied(0, now_ms - 3_600_000)
    group.dispatch()
    sent: list[list[bytes]] = []
    try:
        group.role._pops._state.ensure_group("billing")
        group.role.close()
        group.role = Query(group.context)
        pops = group.role._pops
        monkeypatch.setattr(pops._writes, "store", lambda messages, *_: sent.append([bytes(m.body) for m in messages]))
        caller = group.connect()
        while not is_read(caller):
            pass
        while not sent:
            group.step()
        assert sent == [[b"1"]]
    finally:
        group.close()


def test_pop_ack_after_redelivery_by_killed_role_is_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ack counted despite the redelivery. Message 1 has no copy yet and is still held."""
    group = Group(tmp_path / "store")
    engine, now_ms = group.store.engine, time.time_ns() // 1_000_000
    place = int(engine.append("Orders", [b"0", b"1"], now_ms, queues=1)[0])
    # Not due yet: as after the clock was moved back, or just before it is closed.
    point = PopCheckPoint("g", "Orders", 0, 0, (0, 1), now_ms, 600_000, 0, "mqproc")
    engine.append(REVIVE_TOPIC, [point.body()], now_ms, queues=REVIVE_QUEUES, fixed_queue=0, tags=["ck"])
    origin = f"ORIGIN_MESSAGE_ID\x01{engine.appender.store_host.hex().upper()}{place:016X}\x02".encode()
    engine.append("%RETRY%g_Orders", [b"0"], now_ms, queues=1, reconsume_times=1, parts=(b"", b"", b"", origin))
    group.dispatch()
    try:
        group.role._pops._state.ensure_group("g")
        group.role.close()
        group.role = Query(group.context)
        caller = group.connect()
        while not is_read(caller):
            pass
        monkeypatch.setattr(group.role._pops._writes, "store", lambda _messages, stored, _last_refused: stored(0))
        handles = [f"{point.handle()} {offset}" for offset in (0, 1)]
        with pytest.raises(BadRequestError, match="no longer held by this receiver"):
            caller.call(Operation.GROUP_INVISIBLE, GroupInvisibleRequest("g", "Orders", handles[0], 1000))
        answers = [caller.call(Operation.GROUP_ACK, GroupAckRequest("g", [("Orders", each)]))[0] for each in handles]
        assert [answer.accepted for answer in answers] == [0, 1]
    finally:
        group.close()


def test_pop_waiting_receive_is_tried_after_the_previous_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's answer may follow the receipt's dispatch, and nothing else may wake the role."""
    group = Group(tmp_path / "store")
    stored = held_back(group, monkeypatch)
    try:
        pops = group.role._pops
        pops._state.ensure_group("g")
        callers = [group.connect(), group.connect()]
        while not is_read(callers[0]):
            pass
        for caller in callers:
            caller.ask(Operation.GROUP_RECEIVE, GroupReceiveRequest("g", ["Orders"], 1, timeout_ms=600_000))
        wait_until(lambda: caller.answer() is None and len(pops._long_polls) == 2)
        group.store.engine.append("Orders", [b"0", b"1"], time.time_ns() // 1_000_000, queues=1)
        group.dispatch()
        found = []
        for caller in callers:
            wait_until(lambda: group.step() >= 0 and stored, SOON_S, "a check point")
            while group.step():
                pass
            stored.pop()(0)
            found.append(wait_until(caller.answer, SOON_S, "an answer"))
        assert [decode_records(payload)[0].body for _, _, payload in found] == [b"0", b"1"]
    finally:
        group.close()


def test_pop_waiting_receive_is_refused_once_group_has_members(tmp_path: Path) -> None:
    """Both would receive the next message."""
    group = Group(tmp_path / "store")
    try:
        receiver, member = group.connect(), group.connect()
        while not is_read(receiver):
            pass
        receiver.ask(Operation.GROUP_RECEIVE, GroupReceiveRequest("g", ["Orders"], 1, timeout_ms=600_000))
        wait_until(lambda: receiver.answer() is None and len(group.role._pops._long_polls) == 1)
        member.call(Operation.GROUP_JOIN, GroupJoinRequest("g", ["Orders"], "one", start=EARLIEST))
        group.store.engine.append("Orders", [b"0"], time.time_ns() // 1_000_000, queues=1)
        group.dispatch()
        with pytest.raises(GroupInUseError, match="has members"):
            wait_until(receiver.answer, SOON_S, "a refusal")
        assert len(group.role._pops._long_polls) == 0
    finally:
        group.close()


@pytest.mark.parametrize("change", ["reset", "deleted", "stopped"])
def test_pop_waiting_receive_retries_when_its_group_is_recreated(tmp_path: Path, change: str) -> None:
    """No dispatch follows from it, so the receive waited for its whole timeout."""
    group = Group(tmp_path / "store")
    group.store.engine.append("Orders", [b"0"], time.time_ns() // 1_000_000, queues=1)
    group.dispatch()
    requests: dict[str, tuple[Operation, FrameOptions]] = {
        "reset": (Operation.GROUP_RESET, GroupResetRequest("g", [("Orders", 0, 0)])),
        "deleted": (Operation.GROUP_DELETE, GroupRequest("g")),
        "stopped": (Operation.GROUP_SETTINGS, GroupSettingsRequest("g", consume_enable=0)),
    }
    try:
        receiver, other, pops = group.connect(), group.connect(), group.role._pops
        while not is_read(other):
            pass
        receiver.ask(Operation.GROUP_RECEIVE, GroupReceiveRequest("g", ["Orders"], 1, 1000, 600_000, LATEST))
        wait_until(lambda: receiver.answer() is None and len(pops._long_polls) == 1)
        other.call(*requests[change])
        wait_until(lambda: group.step() >= 0 and not pops._long_polls, SOON_S, "a look")
    finally:
        group.close()


def received(number: int, popped_ms: int, invisible_ms: int = 1_000) -> PopCheckPoint:
    """The receipt of one message."""
    return PopCheckPoint("g", "Orders", 0, number, (number,), popped_ms, invisible_ms, 0, "mqproc")


def test_pop_expired_messages_are_redelivered_in_bounded_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests are answered in between, and the role does not sleep while some are left."""
    group = Group(tmp_path / "store")
    try:
        monkeypatch.setattr(receivers_module, "STEP_NS", 0)
        pops, again = group.role._pops, list[PopCheckPoint]()
        monkeypatch.setattr(pops, "_revive", again.append)
        for number in range(COUNT):
            pops._register(received(number, 1), 0)
        for count in range(1, COUNT):
            assert (pops._revive_due(), len(again)) == (1, count)
            pops._starting = None
            assert pops.seconds_left(time.monotonic_ns(), 1.0) == 0.0
        assert (pops._revive_due(), pops._revive_due(), len(again)) == (1, 0, COUNT)
    finally:
        group.close()


def test_pop_acked_messages_are_not_held_until_their_timeout(tmp_path: Path) -> None:
    group = Group(tmp_path / "store")
    try:
        pops, now_ms = group.role._pops, time.time_ns() // 1_000_000
        for number in range(20 * COUNT):
            found = received(number, now_ms, 43_200_000)
            pops._register(found, 0)
            if number % 20:
                pops._open.done(found, [number])
        assert len(pops._open) == COUNT
        assert len(pops._due) <= 2 * (COUNT + 1) + COMPACT_MIN, "of 2,000"
        assert {id(found) for found in pops._open} <= {id(entry[2]) for entry in pops._due}
    finally:
        group.close()


def test_pop_recreated_group_starts_at_the_next_message(tmp_path: Path) -> None:
    """A recreated group that starts at the latest message does so in existing topics too."""
    group = Group(tmp_path / "store")
    try:
        caller = group.connect()
        while not is_read(caller):
            pass
        request = GroupReceiveRequest("g", ["Orders"], start=LATEST)
        assert caller.call(Operation.GROUP_RECEIVE, request)[0].count == 0
        caller.call(Operation.GROUP_DELETE, GroupRequest("g"))
        group.store.engine.append("Orders", [b"0", b"1"], time.time_ns() // 1_000_000, queues=1)
        group.dispatch()
        assert caller.call(Operation.GROUP_RECEIVE, request)[0].count == 0
        assert group.role._pops._state.progress.offset("g", "Orders", 0) == 2
    finally:
        group.close()


class Members:
    """What members of a group subscribe to."""

    def __init__(self, *topics: str) -> None:
        self.topics = list(topics)


def test_pop_offset_advances_past_stored_copies_moved_for_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(tmp_path / "store")
    topic = "%RETRY%g_Orders"
    group.store.engine.append(topic, [b"0", b"1", b"2"], time.time_ns() // 1_000_000, queues=1)
    group.dispatch()
    sent: list[tuple[Any, ...]] = []
    try:
        pops = group.role._pops
        moves, progress = pops._migration, pops._state.progress
        monkeypatch.setattr(pops._writes, "store", lambda *what: sent.append(what))
        pops._state.ensure_group("g")
        members: Any = {"g": Members("Orders", "%RETRY%g")}

        def move(busy: Container[tuple[str, str, int]] = ()) -> int:
            before = len(sent)
            moves.move(0, members, busy)
            return len(sent) - before

        assert move() == 0, "a topic without offsets of the group belongs to another"
        progress.set("g", topic, 0, 1)
        assert move(busy={("g", topic, 0)}) == 0, "a receive is being answered from it"
        members["g"].topics.append(topic)
        assert move() == 0, "members read it themselves"
        members["g"].topics.remove(topic)
        assert move() == 1
        assert not moves.is_due(1 << 62), "one at a time"
        sent[0][2](StoreBusyError("not now"))
        assert (moves.is_due(1 << 62), progress.offset("g", topic, 0)) == (True, 1)
        assert move() == 1
        copies, stored, *_ = sent[1]
        assert [(each.topic, each.body) for each in copies] == [("%RETRY%g", b"1"), ("%RETRY%g", b"2")]
        assert progress.offset("g", "%RETRY%g", 0) == 0, "so that all count as not consumed"
        stored(0)
        assert (progress.offset("g", topic, 0), move()) == (3, 0)
        progress.set("g", topic, 0, 0)
        assert move() == 1
        progress.set("g", topic, 0, 2)
        sent[2][1](0)
        assert progress.offset("g", topic, 0) == 2, "a reset meanwhile holds"
        assert move() == 1
        sent[3][1](0)
        progress.set("g", topic, 0, 0)
        for bodies in ([b"0", b"1", b"2"], [b"0", b"2"], [b"2"]):
            assert move() == 1
            copies, _stored, refused, part = sent[-1]
            assert [each.body for each in copies] == bodies, "stored copies are not sent twice"
            part(copies[1:2] if len(copies) == 3 else copies[:1])
            refused(StoreBusyError("not now"))
        assert (move(), progress.offset("g", topic, 0)) == (0, 3), "refused messages may be deleted"
        progress.set("g", topic, 0, 0)
        assert (move(), [each.body for each in sent[-1][0]]) == (1, [b"0", b"1", b"2"]), "but by a reset"
    finally:
        group.close()
