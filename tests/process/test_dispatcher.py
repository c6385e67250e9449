"""The dispatcher as a role: what it publishes, and in which order."""

from __future__ import annotations

from pathlib import Path

from mqproc.layout import control as words_of
from mqproc.process.dispatcher import Dispatcher
from mqproc.shm.words import Words
from tests.process.flusher_rig import Rig


class OrderedWords(Words):
    """Notes where `dispatched` stood when its time was stored."""

    __slots__ = ("dispatched_at_time",)

    def __init__(self, words: Words) -> None:
        super().__init__(words.mapping)
        self.dispatched_at_time: list[int] = []

    def __setitem__(self, index: int, value: int) -> None:
        if index == words_of.DISPATCHED_STORE_TIMESTAMP_MS:
            self.dispatched_at_time.append(self[words_of.DISPATCHED])
        super().__setitem__(index, value)


def test_the_position_is_stored_before_its_time(tmp_path: Path) -> None:
    """Who reads the time and then the position must not take a record's time for that of an earlier position."""
    rig = Rig(tmp_path)
    rig.dispatch(10)
    rig.control.store(words_of.DISPATCHED, 0)
    words = rig.control.words = OrderedWords(rig.control.words)
    dispatcher = Dispatcher(rig.context(words_of.DISPATCHER))
    assert dispatcher.do_work() == 10
    dispatcher.close()
    assert words.dispatched_at_time == [words[words_of.WRITTEN]]
    assert words[words_of.DISPATCHED_STORE_TIMESTAMP_MS] == words[words_of.WRITTEN_STORE_TIMESTAMP_MS] > 0
