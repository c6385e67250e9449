"""What must be true at every turn of a running group: positions that stand for something are never ahead of it."""

from __future__ import annotations

from pathlib import PurePath

from mqproc.layout import control as words_of
from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE
from tests.crash.disk import Disk
from tests.crash.group import Group
from tests.crash.placed import expect


class Watch:
    """Looks at one group after each turn."""

    def __init__(self, group: Group, disk: Disk) -> None:
        self._control = group.control
        self._disk = disk
        self._flushed = self._queues_mark = 0

    def look(self) -> None:
        """Raises Broken."""
        load = self._control.load
        dispatched, flushed = load(words_of.DISPATCHED), self._control.flushed
        reserved, written = load(words_of.RESERVED_END), load(words_of.WRITTEN)
        expect(dispatched <= written, f"dispatched {dispatched} is ahead of written {written}")
        expect(flushed <= written, f"flushed {flushed} is ahead of written {written}")
        expect(written <= reserved, f"written {written} is ahead of reserved {reserved}")
        for mark in (words_of.CQ_SYNCED, words_of.INDEX_SYNCED):
            expect(load(mark) <= flushed, f"a mark at {load(mark)} is ahead of flushed {flushed}")
        if flushed != self._flushed:
            self._flushed = flushed
            self._look_at_segments(flushed)
        if (mark := load(words_of.CQ_SYNCED)) != self._queues_mark:
            self._queues_mark = mark
            self._look_at_queues(mark)

    def _look_at_segments(self, flushed: int) -> None:
        lost = [path for path in self._disk.unsynced_names("commitlog") if int(PurePath(path).name) < flushed]
        expect(not lost, f"flushed {flushed} is ahead of the names of {lost}, which a power loss may take")

    def _look_at_queues(self, mark: int) -> None:
        unnamed = set(self._disk.unsynced_names("consumequeue"))
        for path, durable, now in self._disk.unsynced("consumequeue"):
            for at in range(0, len(now) - UNIT_SIZE + 1, UNIT_SIZE):
                unit = now[at : at + UNIT_SIZE]
                physical, size = int.from_bytes(unit[:8], "big"), int.from_bytes(unit[8:12], "big")
                is_durable = durable[at : at + UNIT_SIZE] == unit and path not in unnamed
                expect(
                    size in (0, FILLER_SIZE) or physical >= mark or is_durable,
                    f"the queues' mark {mark} is ahead of the unit at {at} of {path}, which a power loss may take",
                )
