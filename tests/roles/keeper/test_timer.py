"""Timer deliveries on an mqproc store, with a manual clock and no writer."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from mqproc.layout import control as words_of
from mqproc.layout import timer_files
from mqproc.layout.queue_table import MAX_OFFSET
from mqproc.roles.keeper import timer as timer_module
from mqproc.roles.keeper.role import Keeper
from mqproc.roles.keeper.timer import TimerDelivery
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.schedule import timer_store
from mqproc.store.schedule.timer_store import TimerStore
from mqproc.topic_names import TIMER_TOPIC
from tests.roles.rigs import Rig, append_and_dispatch
from tests.support.store_builders import SMALL, LiveStore

BEGIN_MS = 1_700_000_000_000
SLOT_MS = BEGIN_MS + 5_000
"""The first of a slot's milliseconds; the keeper begins five seconds before."""


def pairs(due_ms: int, **more: str) -> bytes:
    out_ms = (due_ms - 1) // 1000 * 1000
    named = {"REAL_TOPIC": "T", "REAL_QID": "3", "TIMER_DELIVER_MS": due_ms, "TIMER_OUT_MS": out_ms, **more}
    return "".join(f"{name}\x01{value}\x02" for name, value in named.items()).encode()


def rig_with(root: Path, parked: Sequence[tuple[bytes, bytes]], **options: int) -> Rig:
    """A stopped store with delayed messages, by body and properties, and the keeper's context."""
    store = LiveStore(root)
    for body, properties in parked:
        store.append(TIMER_TOPIC, [body], BEGIN_MS, queues=1, parts=(b"", b"", b"", properties))
    store.dispatch()
    store.close()
    rig = Rig(root, mapped_file_size_commit_log=store.options.mapped_file_size_commit_log, **SMALL, **options)
    rig.clock.set_time_ms(BEGIN_MS)
    return rig


def begun(rig: Rig) -> Keeper:
    """Return a keeper that has filed everything."""
    keeper = Keeper(rig.context(words_of.KEEPER))
    keeper.do_work()
    return keeper


def handed_over(keeper: Keeper) -> list[bytes]:
    """Bodies that await a writer."""
    found: list[bytes] = []
    for frame in keeper._deliveries.producer._waiting:
        ends = [0, *itertools.accumulate(frame.columns.body_lengths.tolist())]
        found += [frame.columns.bodies[first:end].tobytes() for first, end in itertools.pairwise(ends)]
    return found


def until_saved(keeper: Keeper) -> None:
    """Run a step; return the saves that it starts."""
    keeper.do_work()
    while keeper._timer._save.under_way:
        keeper.do_work()


def steps_until_handed_over(keeper: Keeper, most: int = 20) -> int:
    for step in range(1, most):
        keeper.do_work()
        if handed_over(keeper):
            return step
    pytest.fail("nothing was released")


def test_timer_delivers_nothing_before_its_slot_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages of a slot are loaded a step; the one due first was filed last."""
    monkeypatch.setattr(timer_module, "LOAD_MESSAGES", 2)
    rig = rig_with(tmp_path, [(b"%d" % number, pairs(SLOT_MS + 900 - 100 * number)) for number in range(7)])
    keeper = begun(rig)
    rig.clock.advance(7000)
    assert steps_until_handed_over(keeper) >= 4, "seven messages, two a step"
    assert handed_over(keeper) == [b"%d" % number for number in reversed(range(7))]
    keeper.close()


def test_timer_slots_due_together_are_scanned_few_times_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a stop of a day, 86,400 slots may be due: each message must not scan them all."""
    looks: list[TimerStore] = []
    move_read = TimerDelivery.advance_read_time

    def counted(self: TimerDelivery, store: TimerStore) -> None:
        looks.append(store)
        move_read(self, store)

    monkeypatch.setattr(TimerDelivery, "advance_read_time", counted)
    rig = rig_with(tmp_path, [(b"", pairs(SLOT_MS + 1000 * number)) for number in range(20)])
    keeper = begun(rig)
    rig.clock.advance(40_000)
    looks.clear()
    keeper.do_work()
    assert len(keeper._timer._slots) == 20
    assert not keeper._timer._loading
    assert len(looks) <= 2, "when they rise, and when they are held"
    keeper.close()


def test_timer_message_due_before_a_loading_slot_is_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_module, "LOAD_MESSAGES", 1)
    later = [(b"later", pairs(SLOT_MS + 1500 + number)) for number in range(5)]
    rig = rig_with(tmp_path, [(b"before", pairs(SLOT_MS + 500)), *later])
    keeper = begun(rig)
    rig.clock.advance(9000)
    steps_until_handed_over(keeper)
    assert handed_over(keeper) == [b"before"]
    assert keeper._timer._loading, "the later slot is not held yet"
    assert keeper._timer._due_until_ms(rig.clock.time_ms()) == SLOT_MS + 1000
    keeper.close()


def test_timer_cancellation_at_slot_end_cancels_its_first_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_module, "LOAD_MESSAGES", 1)
    due_ms = SLOT_MS + 100
    waiting = [(b"%d" % number, pairs(due_ms + number, UNIQ_KEY=f"id-{number}")) for number in range(3)]
    rig = rig_with(tmp_path, [*waiting, (b"", pairs(SLOT_MS + 900, TIMER_DEL_UNIQKEY="id-0"))])
    keeper = begun(rig)
    rig.clock.advance(7000)
    steps_until_handed_over(keeper)
    assert handed_over(keeper) == [b"1", b"2"]
    keeper.close()


def test_timer_delivers_nothing_before_the_backlog_is_filed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that follows a killed one files some messages again; it delivered cancelled ones."""
    monkeypatch.setattr(timer_module, "ENQUEUE_MESSAGES", 2)
    monkeypatch.setattr(timer_module, "ENQUEUE_GATHER_NS", 0)
    waiting = [(b"%d" % number, pairs(SLOT_MS + 100 + number, UNIQ_KEY=f"id-{number}")) for number in range(5)]
    rig = rig_with(tmp_path, [*waiting, (b"", pairs(SLOT_MS + 900, TIMER_DEL_UNIQKEY="id-0"))])
    rig.clock.advance(9000)
    keeper = begun(rig)
    assert steps_until_handed_over(keeper) >= 2
    assert handed_over(keeper) == [b"1", b"2", b"3", b"4"]
    keeper.close()


def no_room(*_arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def saved_and_closed(rig: Rig, keeper: Keeper) -> None:
    keeper._timer.save(rig.control.words[words_of.WRITTEN])
    keeper.close()


def test_timer_message_filed_late_awaits_cancellation_after_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer's files were lost, so all messages due by then are filed under one slot."""
    monkeypatch.setattr(timer_module, "LOAD_MESSAGES", 1)
    past_ms = BEGIN_MS - 3000
    waiting = [(b"%d" % number, pairs(past_ms - number, UNIQ_KEY=f"id-{number}")) for number in range(3)]
    rig = rig_with(tmp_path, [*waiting, (b"", pairs(past_ms, TIMER_DEL_UNIQKEY="id-0"))])
    saved_and_closed(rig, begun(rig))
    keeper = begun(rig)
    assert keeper._timer._loading, "a message a step"
    steps_until_handed_over(keeper)
    assert handed_over(keeper) == [b"2", b"1"]
    keeper.close()


def test_timer_message_filed_after_errors_waits_for_cancellation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper files two at a time; the first message's cancellation follows eight others."""
    monkeypatch.setattr(timer_module, "ENQUEUE_MESSAGES", 2)
    monkeypatch.setattr(timer_module, "ENQUEUE_GATHER_NS", 0)
    monkeypatch.setattr(timer_module, "ENQUEUE_SOON_GATHER_NS", 0)
    waiting = [(b"%d" % number, pairs(SLOT_MS + 100 + number, UNIQ_KEY=f"id-{number}")) for number in range(9)]
    rig = rig_with(tmp_path, [*waiting, (b"", pairs(SLOT_MS + 100, TIMER_DEL_UNIQKEY="id-0"))])
    keeper = begun(rig)
    keeper._timer._backlog.end = 0  # As if all else had come since.
    rig.clock.advance(4500)
    keeper.do_work()
    assert len(keeper._timer._heap) == 4
    with monkeypatch.context() as full:
        full.setattr(rig.io, "pwrite", no_room)
        keeper.do_work()
        rig.clock.advance(2000)
        keeper.do_work()
        keeper.do_work()
        assert handed_over(keeper) == [], "what cancels one that is held may wait to be filed"
    rig.clock.advance(1000)
    assert steps_until_handed_over(keeper) >= 2
    assert handed_over(keeper) == [b"%d" % number for number in range(1, 9)]
    keeper.close()


def test_timer_offset_survives_a_start_without_space_for_its_queue(tmp_path: Path) -> None:
    """The offset was reset to the dispatched end, and messages were delivered twice."""
    rig = rig_with(tmp_path, [(b"%d" % number, pairs(SLOT_MS + 100 + number)) for number in range(2)])
    keeper = begun(rig)
    rig.clock.advance(7000)
    steps_until_handed_over(keeper)
    keeper._deliveries._open.pop().on_done()
    saved_and_closed(rig, keeper)
    words = rig.control.words
    dispatched = words[words_of.DISPATCHED]
    with contextlib.closing(QueueTable(rig.io, rig.paths.queues, write=True)) as table:
        number = table.entry(TIMER_TOPIC, 0)
        end = table.max_offset(number)
        table.store(number, MAX_OFFSET, 0)
        rig.control.store(words_of.DISPATCHED, 0)
        keeper = begun(rig)
        table.store(number, MAX_OFFSET, end)
        rig.control.store(words_of.DISPATCHED, dispatched)
    for _ in range(5):
        rig.clock.advance(1000)
        keeper.do_work()
    assert (handed_over(keeper), keeper._timer.pending) == ([], 0)
    assert keeper._timer._store is not None
    assert keeper._timer._store.queue_offset == end > 0
    keeper.close()


@pytest.mark.parametrize("how", ["waits", "hangs", "waits as the keeper begins"])
def test_timer_holds_messages_whose_cancellation_is_undispatched(tmp_path: Path, how: str) -> None:
    """The cancellation was in the log but not in its queue yet, and the message was delivered."""
    due_ms = SLOT_MS + 100
    begins = how == "waits as the keeper begins"
    waiting = [(b"%d" % number, pairs(due_ms + number, UNIQ_KEY=f"id-{number}")) for number in range(2)]
    rig = rig_with(tmp_path, waiting)
    words = rig.control.words
    words.add(words_of.WRITTEN, int(begins))
    keeper = begun(rig)
    words[words_of.DISPATCH_ERRNO] = errno.ENOSPC if how == "waits" else 0
    words.add(words_of.WRITTEN, int(not begins))
    for _ in range(7):
        rig.clock.advance(1000)
        until_saved(keeper)
        assert keeper._timer.due_ns > rig.clock.monotonic_ns(), "until then it does nothing"
    assert handed_over(keeper) == []
    words[words_of.DISPATCH_ERRNO] = 0
    keeper.do_work()
    assert handed_over(keeper) == [], "the records written meanwhile are not dispatched yet"
    words.add(words_of.WRITTEN, -1)
    cancels = pairs(due_ms, TIMER_DEL_UNIQKEY="id-0")
    append_and_dispatch(rig.io, rig.paths, rig.options, words, 1, TIMER_TOPIC, cancels)
    assert steps_until_handed_over(keeper) >= 1
    assert handed_over(keeper) == [b"1"]
    keeper.close()


def test_timer_delivers_while_dispatch_is_always_late(tmp_path: Path) -> None:
    """Dispatch lags by one second: deliveries lag as much, and no more."""
    rig = rig_with(tmp_path, [(b"%d" % number, pairs(SLOT_MS + 500 + 1000 * number)) for number in range(6)])
    words = rig.control.words
    keeper = begun(rig)
    rig.clock.advance(4600)
    came = []
    for second in range(8):
        words[words_of.WRITTEN] += 1
        for _ in range(4):
            keeper.do_work()
        came.append(len(handed_over(keeper)))
        while keeper._deliveries._open:
            keeper._deliveries._open.pop().on_done()
        rig.clock.advance(1000)
        words[words_of.DISPATCHED] = words[words_of.WRITTEN]
        words[words_of.DISPATCHED_STORE_TIMESTAMP_MS] = SLOT_MS - 1400 + 1000 * second
        words[words_of.WRITTEN] += 1
    assert came == [0, 0, 1, 2, 3, 4, 5, 6], "the first was due in the second one"
    keeper.close()


def test_timer_idle_store_delays_nothing(tmp_path: Path) -> None:
    """The last record is not dispatched and the one before is old: it is checked again soon."""
    rig = rig_with(tmp_path, [(b"message", pairs(SLOT_MS + 100))])
    words = rig.control.words
    keeper = begun(rig)
    rig.clock.advance(5100)
    words[words_of.WRITTEN] += 1
    keeper.do_work()
    assert keeper._timer.due_ns <= rig.clock.monotonic_ns() + 5_000_000
    words[words_of.DISPATCHED] += 1
    assert keeper._timer.due_ns <= rig.clock.monotonic_ns()
    keeper.do_work()
    assert handed_over(keeper) == [b"message"]
    keeper.close()


def test_timer_cancellation_beyond_the_roll_window_is_rolled(tmp_path: Path) -> None:
    """The cancellation counted for the slot of its roll, and its message took another way."""
    rig = rig_with(tmp_path, [(b"", pairs(BEGIN_MS + 60_000, TIMER_DEL_UNIQKEY="id-0"))], timer_roll_window_slot=4)
    keeper = begun(rig)
    rig.clock.advance(6000)
    steps_until_handed_over(keeper)
    (frame,) = keeper._deliveries.producer._waiting
    assert frame.columns.topic == TIMER_TOPIC
    assert b"TIMER_DEL_UNIQKEY\x01id-0\x02" in frame.columns.properties.tobytes()
    assert keeper._timer.pending == 1, "as long as it is on its way"
    keeper.close()


def test_timer_due_message_waits_for_rolled_cancellations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late keeper: the cancellation is still being rolled when its rolled message is due."""
    monkeypatch.setattr(timer_module, "ENQUEUE_MESSAGES", 1)
    cancels = b"cancels", pairs(SLOT_MS + 900, TIMER_DEL_UNIQKEY="id-0")
    rig = rig_with(tmp_path, [cancels, (b"message", pairs(SLOT_MS + 1, UNIQ_KEY="id-0"))], timer_roll_window_slot=4)
    keeper = begun(rig)
    rig.clock.advance(3000)
    keeper.do_work()
    assert keeper._timer.pending == 2
    rig.clock.advance(5000)
    steps_until_handed_over(keeper)
    assert handed_over(keeper) == [b"cancels"]
    words, (release,) = rig.control.words, keeper._deliveries._open
    words[words_of.WRITTEN] += 1000
    release.on_done()
    for _ in range(5):
        rig.clock.advance(20)
        keeper.do_work()
    assert handed_over(keeper) == [b"cancels"], "the stored record is not dispatched"
    words[words_of.DISPATCHED] = words[words_of.WRITTEN]
    assert keeper._timer.due_ns <= rig.clock.monotonic_ns()
    keeper.do_work()
    assert handed_over(keeper) == [b"cancels", b"message"]
    keeper.close()


def test_timer_rolled_message_is_cancelled_in_an_otherwise_empty_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late keeper files the message after its slot, which has only the cancellation."""
    monkeypatch.setattr(timer_module, "ENQUEUE_MESSAGES", 1)
    message = pairs(SLOT_MS + 1, UNIQ_KEY="id-0")
    cancels = b"", pairs(SLOT_MS + 900, TIMER_DEL_UNIQKEY="id-0")
    rig = rig_with(tmp_path, [(b"message", message), cancels], timer_roll_window_slot=4)
    keeper = begun(rig)
    rig.clock.advance(3000)
    steps_until_handed_over(keeper)
    assert keeper._timer.pending == 2
    rig.clock.advance(5000)
    keeper.do_work()
    (release,) = keeper._deliveries._open
    append_and_dispatch(rig.io, rig.paths, rig.options, rig.control.words, 1, TIMER_TOPIC, message)
    release.on_done()
    for _ in range(5):
        rig.clock.advance(1000)
        keeper.do_work()
    assert handed_over(keeper) == [b"message"], "it went again, to its own topic"
    assert keeper._timer.pending == 0
    assert keeper._timer._store is not None
    assert keeper._timer._store.read_ms > SLOT_MS
    keeper.close()


def test_timer_late_messages_are_rolled_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages filed at different times leave different slots; each delayed the next roll."""
    monkeypatch.setattr(timer_module, "ENQUEUE_MESSAGES", 1)
    far = [(b"%d" % number, pairs(BEGIN_MS + 160_000)) for number in range(5)]
    rig = rig_with(tmp_path, [*far, (b"soon", pairs(BEGIN_MS + 25_000))], timer_roll_window_slot=100)
    keeper = begun(rig)
    for _ in range(5):
        rig.clock.advance(3000)
        keeper.do_work()
    rig.clock.advance(135_000)
    steps_until_handed_over(keeper)
    assert handed_over(keeper) == [b"soon"]
    (release,) = keeper._deliveries._open
    release.on_done()
    rig.clock.advance(20)
    keeper.do_work()
    assert handed_over(keeper) == [b"soon", b"0", b"1", b"2", b"3", b"4"]
    keeper.close()


def test_timer_clock_moved_back_delivers_nothing_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_module, "LOAD_MESSAGES", 2)
    rig = rig_with(tmp_path, [(b"%d" % number, pairs(SLOT_MS + 100 + number)) for number in range(6)])
    keeper = begun(rig)
    rig.clock.advance(4500)
    keeper.do_work()
    assert keeper._timer._loading, "the slot is up, half a second before it begins"
    rig.clock.set_time_ms(SLOT_MS - 3000)
    assert keeper._timer._due_until_ms(rig.clock.time_ms()) == SLOT_MS - 3000
    for _ in range(5):
        keeper.do_work()
    assert not keeper._timer._loading
    assert handed_over(keeper) == []
    rig.clock.set_time_ms(SLOT_MS + 102)
    keeper.do_work()
    assert handed_over(keeper) == [b"0", b"1", b"2"]
    keeper.close()


def test_timer_damaged_slot_delivers_the_rest_without_blocking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain of a slot breaks in its middle: the rest and later slots are still delivered."""
    monkeypatch.setattr(timer_store, "SPAN_BYTES_MAX", 0)
    parked = [(b"%d" % number, pairs(SLOT_MS + 100 + number)) for number in range(5)]
    rig = rig_with(tmp_path, [*parked, (b"later", pairs(SLOT_MS + 1500))])
    keeper = begun(rig)
    (path,) = rig.paths.timer_log.iterdir()
    with path.open("r+b") as file:
        file.seek(2 * timer_files.UNIT_SIZE)
        file.write(b"\x07" * timer_files.UNIT_SIZE)
    errors = rig.control.words[words_of.role_word(words_of.KEEPER, "errors")]
    rig.clock.advance(8000)
    steps_until_handed_over(keeper)
    assert handed_over(keeper) == [b"3", b"4", b"later"]
    assert rig.control.words[words_of.role_word(words_of.KEEPER, "errors")] == errors + 1
    assert not keeper._timer._loading
    keeper.close()


def test_timer_records_without_time_or_topic_are_counted_and_skipped(tmp_path: Path) -> None:
    timeless = b"REAL_TOPIC\x01T\x02TIMER_OUT_MS\x01soon\x02"
    placeless = b"TIMER_OUT_MS\x01%d\x02TIMER_DELIVER_MS\x01%d\x02" % (SLOT_MS, SLOT_MS + 5)
    rig = rig_with(tmp_path, [(b"a", timeless), (b"good", pairs(SLOT_MS + 5)), (b"b", placeless)])
    keeper = begun(rig)
    assert rig.control.words[words_of.DELIVERIES_LOST] == 2
    assert keeper._timer.pending == 1
    rig.clock.advance(5005)
    steps_until_handed_over(keeper)
    assert handed_over(keeper) == [b"good"]
    keeper.close()


def test_timer_duplicate_unit_is_one_message(tmp_path: Path) -> None:
    rig = rig_with(tmp_path, [(b"once", pairs(SLOT_MS + 5)), (b"too", pairs(SLOT_MS + 6))])
    keeper = begun(rig)
    (path,) = rig.paths.timer_log.iterdir()
    with path.open("r+b") as file:
        unit = file.read(timer_files.UNIT_SIZE)
        file.write(unit)
    rig.clock.advance(6000)
    steps_until_handed_over(keeper)
    assert handed_over(keeper) == [b"once"]
    keeper.close()


@pytest.mark.parametrize(("ahead_ms", "gathered_ms"), [(400, 5), (60_000, 25)])
def test_timer_files_in_batches_and_sooner_when_due_soon(tmp_path: Path, ahead_ms: int, gathered_ms: int) -> None:
    more = 10
    messages = timer_module.ENQUEUE_MESSAGES + more
    rig = rig_with(tmp_path, [(b"%d" % number, pairs(BEGIN_MS + ahead_ms)) for number in range(messages)])
    keeper = begun(rig)
    assert keeper._timer.pending == messages - more
    rig.clock.advance(gathered_ms - 1)
    keeper.do_work()
    assert keeper._timer.pending == messages - more
    rig.clock.advance(2)
    keeper.do_work()
    assert keeper._timer.pending == messages
