"""The dispatcher as a role: published words and their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mqproc.ipc.bell import Bell
from mqproc.ipc.counters import read_buckets
from mqproc.kernels.dispatch_step import publish_step
from mqproc.kernels.jit.compile import plain
from mqproc.kernels.jit.intrinsics import observe_stores
from mqproc.layout import control as words_of
from mqproc.layout import histograms
from mqproc.roles import dispatcher as dispatcher_module
from mqproc.roles.dispatcher import Dispatcher, committed
from tests.roles.rigs import Rig
from tests.support.fakes import ManualClock


def test_dispatcher_publishes_position_before_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of the time and then the position must not pair a time with an earlier position."""
    rig = Rig(tmp_path)
    rig.dispatch(10)
    rig.control.store(words_of.DISPATCHED, 0)
    words = rig.control.words
    stores = []
    monkeypatch.setattr(dispatcher_module, "publish_step", plain(publish_step))
    dispatcher = Dispatcher(rig.context(words_of.DISPATCHER))
    with observe_stores(lambda array, position, size: stores.append(position // words_of.WORD_SIZE)):
        assert dispatcher.do_work() == 10
    dispatcher.close()
    at, time_at = (stores.index(word) for word in (words_of.DISPATCHED, words_of.DISPATCHED_STORE_TIMESTAMP_MS))
    assert stores.index(words_of.COMMIT_SEQUENCE) < at < time_at
    assert words[words_of.DISPATCHED] == words[words_of.WRITTEN]
    assert words[words_of.DISPATCHED_STORE_TIMESTAMP_MS] == words[words_of.WRITTEN_STORE_TIMESTAMP_MS] > 0


def test_dispatcher_commits_steps_alternately_in_two_slots(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.dispatch(10)
    words = rig.control.words
    before = words[words_of.COMMIT_SEQUENCE]
    entries = words[words_of.DISPATCHED_ENTRIES]
    rig.control.store(words_of.DISPATCHED, 0)
    rig.control.store(words_of.DISPATCH_ERRNO, 28)
    dispatcher = Dispatcher(rig.context(words_of.DISPATCHER))
    messages = words[words_of.DISPATCHED_MESSAGES]
    assert dispatcher.do_work() == 10
    dispatcher.close()
    slot = words[words_of.COMMIT_SEQUENCE] & 1
    assert words[words_of.COMMIT_SEQUENCE] == before + 1
    assert words[words_of.COMMIT_DISPATCHED[slot]] == words[words_of.DISPATCHED] == words[words_of.WRITTEN]
    assert words[words_of.COMMIT_MESSAGES[slot]] == words[words_of.DISPATCHED_MESSAGES] == messages + 10
    assert words[words_of.COMMIT_INDEX_ITEMS[slot]] == words[words_of.INDEX_ITEMS] > 0
    assert words[words_of.DISPATCHED_ENTRIES] == entries + 10
    assert words[words_of.DISPATCH_ERRNO] == 0


def test_dispatch_delays_count_all_messages_or_a_slow_step_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.dispatch(10)
    rig.control.store(words_of.DISPATCHED, 0)
    dispatcher = Dispatcher(rig.context(words_of.DISPATCHER))
    assert dispatcher.do_work() == 10
    now_ns = rig.clock.monotonic_ns()
    dispatcher.timed(now_ns - 1, now_ns, alone=False)
    dispatcher.timed(now_ns - 1, now_ns, alone=True)
    dispatcher.close()
    assert sum(read_buckets(rig.control.words, histograms.DISPATCH_DELAYS).counts) == 10


class SlowClock(ManualClock):
    """Each reading advances the clock by 1 µs; the `at`th one runs an action."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.at = 0
        self.happens: Callable[[], None] = lambda: None

    def monotonic_ns(self) -> int:
        self.looks += 1
        self._monotonic_ns += 1000
        if self.looks == self.at:
            self.happens()
        return self._monotonic_ns


@dataclass
class Alone:
    """A dispatcher whose log is published message by message; `ends` are their end offsets."""

    rig: Rig
    clock: SlowClock
    dispatcher: Dispatcher
    ends: list[int]

    def append(self, number: int) -> None:
        """The writer publishes the first `number` messages."""
        self.rig.control.store(words_of.WRITTEN, self.ends[number - 1])

    @property
    def bell(self) -> Bell:
        return self.rig.bells[words_of.DISPATCHER]

    def is_rung(self, role: str) -> bool:
        """Whether a role's bell was rung since the last call."""
        bell = self.rig.bells[role]
        rung = bell.wait(0)
        bell.drain()
        return rung


MESSAGES = 6


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    rig = Rig(tmp_path)
    ends = []
    for _ in range(MESSAGES):
        rig.dispatch(1)
        ends.append(rig.control.load(words_of.WRITTEN))
    rig.control.store(words_of.DISPATCHED, 0)
    rig.control.store(words_of.WRITTEN, 0)
    clock = SlowClock()
    dispatcher = Dispatcher(dataclasses.replace(rig.context(words_of.DISPATCHER), clock=clock))
    alone = Alone(rig, clock, dispatcher, ends)
    alone.append(1)
    assert dispatcher.do_work() == 1
    yield alone
    dispatcher.close()


def test_dispatch_single_record_is_published_like_batches(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    words = alone.rig.control.words
    steps = []
    monkeypatch.setattr(alone.dispatcher._dispatch, "step", lambda *given: steps.append(given))
    messages, entries = words[words_of.DISPATCHED_MESSAGES], words[words_of.DISPATCHED_ENTRIES]
    for number in range(2, MESSAGES + 1):
        sequence = words[words_of.COMMIT_SEQUENCE] + 1
        alone.append(number)
        assert alone.dispatcher.do_work() == 1
        assert words[words_of.DISPATCHED] == alone.ends[number - 1]
        assert words[words_of.DISPATCHED_MESSAGES] == messages + number - 1
        assert words[words_of.DISPATCHED_ENTRIES] == entries + number - 1
        assert words[words_of.DISPATCHED_STORE_TIMESTAMP_MS] == words[words_of.WRITTEN_STORE_TIMESTAMP_MS]
        assert words[words_of.COMMIT_SEQUENCE] == sequence
        assert committed(words) == alone.dispatcher._dispatch.index.commit()
    assert alone.dispatcher.do_work() == 0
    assert steps == []


def test_dispatcher_rings_query_when_a_pull_waits(alone: Alone) -> None:
    alone.rig.bells[words_of.QUERY].announce()
    alone.append(2)
    alone.dispatcher.do_work()
    assert not alone.is_rung(words_of.QUERY)
    alone.rig.control.store(words_of.WAITING_PULLS, 1)
    alone.append(3)
    alone.dispatcher.do_work()
    assert alone.is_rung(words_of.QUERY)


def test_dispatcher_woken_early_spins_for_the_record(alone: Alone) -> None:
    alone.rig.control.store(words_of.WAITING_PULLS, 1)
    alone.clock.at, alone.clock.happens = alone.clock.looks + 10, lambda: alone.append(2)
    alone.bell.announce()
    alone.bell.ring()
    alone.dispatcher.wait(60)
    assert alone.clock.looks < alone.clock.at + 5
    # The writer then does not ring again, which would cost more than this check.
    alone.bell.drain()
    alone.bell.ring()
    assert not alone.is_rung(words_of.DISPATCHER)
    assert alone.dispatcher.do_work() == 1


def test_dispatcher_woken_without_record_stops_spinning(alone: Alone) -> None:
    alone.rig.control.store(words_of.WAITING_PULLS, 1)
    alone.bell.announce()
    alone.bell.ring()
    looks = alone.clock.looks
    alone.dispatcher.wait(60)
    assert looks + 10 < alone.clock.looks <= looks + alone.rig.options.max_spin_us + 5
    assert alone.dispatcher.do_work() == 0


@pytest.mark.parametrize("waiting", [0, 1])
def test_dispatcher_does_not_spin_without_waiters_or_with_work(alone: Alone, waiting: int) -> None:
    alone.rig.control.store(words_of.WAITING_PULLS, waiting)
    alone.append(2 if waiting else 1)
    alone.bell.announce()
    alone.bell.ring()
    looks = alone.clock.looks
    alone.dispatcher.wait(60)
    assert alone.clock.looks <= looks + 2
