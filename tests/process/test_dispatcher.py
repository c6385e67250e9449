"""The dispatcher as a role: what it publishes, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.kernels.dispatched import publish_step
from mqproc.kernels.intrinsics import observe_stores
from mqproc.kernels.jit import plain
from mqproc.layout import control as words_of
from mqproc.layout import figures
from mqproc.process import dispatcher as dispatcher_module
from mqproc.process.dispatcher import Dispatcher
from mqproc.shm.histogram import read_buckets
from tests.process.flusher_rig import Rig


def test_the_position_is_stored_before_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads the time and then the position must not take a record's time for that of an earlier position."""
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


def test_a_step_is_committed_with_its_counts_in_turn_in_two_slots(tmp_path: Path) -> None:
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


def test_delays_are_counted_for_all_messages_or_for_a_slow_steps_own(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.dispatch(10)
    rig.control.store(words_of.DISPATCHED, 0)
    dispatcher = Dispatcher(rig.context(words_of.DISPATCHER))
    assert dispatcher.do_work() == 10
    now_ns = rig.clock.monotonic_ns()
    dispatcher.timed(now_ns - 1, now_ns, alone=False)
    dispatcher.timed(now_ns - 1, now_ns, alone=True)
    dispatcher.close()
    assert sum(read_buckets(rig.control.words, figures.DISPATCH_DELAYS).counts) == 10
