"""A clock that is set back: the writer notes where store times descend, or keeps its time."""

from __future__ import annotations

import pytest

from mqproc.layout import control as words_of
from mqproc.store import compat
from tests.roles.rigs import MakeRig, error_of, single

YEAR_MS = 400 * 86_400_000


def test_writer_notes_clock_step_before_following_it(make_rig: MakeRig) -> None:
    rig = make_rig()
    client = rig.client()
    client.send(single(1, "A") + single(2, "A"))
    client.wait_for([1, 2])
    assert rig.words[words_of.TIME_ORDERED_FROM] == 0
    rig.clock.set_time_ms(rig.clock.time_ms() - YEAR_MS)
    end = rig.written
    client.send(single(3, "A") + single(4, "A"))
    client.wait_for([3, 4])
    assert rig.words[words_of.TIME_ORDERED_FROM] == compat.time_ordered_from(rig.io, rig.paths) == end


def test_writer_that_cannot_note_a_step_keeps_its_time(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    client = rig.client()
    client.send(single(1, "A"))
    client.wait_for([1])
    before_ms = rig.words[words_of.WRITTEN_STORE_TIMESTAMP_MS]
    rig.clock.set_time_ms(before_ms - YEAR_MS)
    with monkeypatch.context() as patch:
        patch.setattr("mqproc.roles.writer.role.note_time_order", _full_disk)
        client.send(single(2, "A"))
        client.wait_for([2])
    assert error_of(client, 2) is None
    assert rig.words[words_of.WRITTEN_STORE_TIMESTAMP_MS] == before_ms
    assert rig.words[words_of.TIME_ORDERED_FROM] == 0


def _full_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")
