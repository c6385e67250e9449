"""What must be true at every turn of a running group: positions that stand for something are never ahead of it."""

from __future__ import annotations

from pathlib import PurePath

from mqproc.io.store_io import StoreIO
from mqproc.layout import control as words_of
from mqproc.layout import durable_marks
from mqproc.layout.consume_queue import FILLER_SIZES, UNIT_SIZE
from mqproc.store import checkpoint as checkpoint_file
from mqproc.store.consumequeue.files import as_units
from tests.crash.disk import Disk
from tests.crash.group import Group
from tests.crash.placed import expect
from tests.crash.schedule import SimulatedClock

# Within one start of a group they only grow, whoever is killed.
GROWING = {
    "written": words_of.WRITTEN,
    "writer_synced": words_of.WRITER_SYNCED,
    "flusher_synced": words_of.FLUSHER_SYNCED,
    "commitlog_mark": words_of.COMMITLOG_MARK,
    "dispatched": words_of.DISPATCHED,
    "cq_synced": words_of.CQ_SYNCED,
    "index_synced": words_of.INDEX_SYNCED,
    "min_physical_offset": words_of.MIN_PHYSICAL_OFFSET,
}
MARKS = ("commitlog", "consumequeue", "index")
TURNS_PER_LOOK_AT_FILES = 8


class Watch:
    """Looks at one group after each turn; at what its files vouch for now and then, and when a mark has moved."""

    def __init__(self, group: Group, disk: Disk, clock: SimulatedClock, *, times_grow: bool) -> None:
        """`times_grow`: no life before has had its clock set back so far that store times went back with it."""
        self._control = group.control
        self._paths = group.paths
        self._io = StoreIO()
        self._disk = disk
        self._flushed = self._queues_mark = 0
        self._words = dict.fromkeys(GROWING, 0)
        self._marks = dict.fromkeys(MARKS, (0, 0))
        self._turns = 0
        self._clock = clock
        self._times_grow = times_grow

    def look(self) -> None:
        """Raises Broken."""
        load = self._control.load
        dispatched, flushed = load(words_of.DISPATCHED), self._control.flushed
        reserved, written = load(words_of.RESERVED_END), load(words_of.WRITTEN)
        expect(dispatched <= written, f"dispatched {dispatched} is ahead of written {written}")
        expect(flushed <= written, f"flushed {flushed} is ahead of written {written}")
        expect(written <= reserved, f"written {written} is ahead of reserved {reserved}")
        for mark in (words_of.COMMITLOG_MARK, words_of.CQ_SYNCED, words_of.INDEX_SYNCED):
            expect(load(mark) <= flushed, f"a mark at {load(mark)} is ahead of flushed {flushed}")
        words = {name: load(word) for name, word in GROWING.items()}
        if words != self._words:
            back = {name: value for name, value in words.items() if value < self._words[name]}
            expect(not back, f"positions went back to {back} from {self._words}")
        moved = any(words[mark] != self._words[mark] for mark in ("commitlog_mark", "cq_synced", "index_synced"))
        self._words = words
        self._turns += 1
        if moved or self._turns % TURNS_PER_LOOK_AT_FILES == 0:
            self._look_at_marks(flushed)
        if flushed != self._flushed:
            self._flushed = flushed
            self._look_at_segments(flushed)
        if (mark := load(words_of.CQ_SYNCED)) != self._queues_mark:
            self._queues_mark = mark
            self._look_at_queues(mark)

    def _look_at_marks(self, flushed: int) -> None:
        """What a start would believe: no mark and no checkpoint vouches for what is not durable, and none goes back."""
        for name in MARKS:
            path = self._paths.mark(name)
            mark = durable_marks.decode(path.read_bytes()) if path.exists() else None
            if mark is None:
                continue
            expect(mark.offset <= flushed, f"the {name} mark's file, at {mark.offset}, is ahead of flushed {flushed}")
            now, before = (mark.sequence, mark.offset), self._marks[name]
            expect(now[0] >= before[0] and now[1] >= before[1], f"the {name} mark went back to {now} from {before}")
            self._marks[name] = now
        checkpoint = checkpoint_file.read(self._io, self._paths.checkpoint)
        confirmed = checkpoint.confirm_physical_offset
        expect(confirmed <= flushed, f"the checkpoint confirms {confirmed}, ahead of flushed {flushed}")
        if self._clock.set_back or not self._times_grow:
            return
        latest_ms = self._control.load(words_of.WRITTEN_STORE_TIMESTAMP_MS)
        for what, time_ms in (
            ("physic", checkpoint.physic_timestamp_ms),
            ("logics", checkpoint.logics_timestamp_ms),
            ("index", checkpoint.index_timestamp_ms),
        ):
            expect(time_ms <= latest_ms, f"the checkpoint's {what} time {time_ms} is ahead of the log's {latest_ms}")

    def _look_at_segments(self, flushed: int) -> None:
        lost = [path for path in self._disk.unsynced_names("commitlog") if int(PurePath(path).name) < flushed]
        expect(not lost, f"flushed {flushed} is ahead of the names of {lost}, which a power loss may take")

    def _look_at_queues(self, mark: int) -> None:
        unnamed = set(self._disk.unsynced_names("consumequeue"))
        for path, durable, now in self._disk.unsynced("consumequeue"):
            for number, (physical, size, _tags) in enumerate(as_units(now).tolist()):
                at = number * UNIT_SIZE
                is_durable = path not in unnamed and durable[at : at + UNIT_SIZE] == now[at : at + UNIT_SIZE]
                expect(
                    size in (0, *FILLER_SIZES) or physical >= mark or is_durable,
                    f"the queues' mark {mark} is ahead of the unit at {at} of {path}, which a power loss may take",
                )
