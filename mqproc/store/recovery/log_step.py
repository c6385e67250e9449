"""The log's part of recovery: what is damaged is written down, then the tail is cut, then the log is whole again.

    look       segments' names and lengths; what short and missing ones below the mark lack is suspected
    names      segments get those that their records tell, where names or the walk say that something is amiss
    complete   every segment gets its length
    walk       to the end, from the mark or through all (`log_recovery`); what was known or suspected is looked at again
    write down damage.json, before anything is cut
    cut        the torn tail; or go on behind segments that are gone

Where the files end below what was surely durable, and nothing tells that another program did it, the log goes on
behind what is lost, in a segment of its own: no position in the log and no queue offset is given out twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from mqproc.io import StoreIO
from mqproc.kernels import scan
from mqproc.paths import StorePaths
from mqproc.store import checkpoint_file
from mqproc.store.damage import MISSING_SEGMENT, DamageLedger, Hole, merged
from mqproc.store.log_flush import make_segment
from mqproc.store.marks import DurableMark
from mqproc.store.misnamed import start_told
from mqproc.store.recovery.log_recovery import LogEnd, LogRecovery, Told
from mqproc.store.recovery.queue_recovery import LOG_BYTES_MAX
from mqproc.store.recovery.store_files import LogFiles, StoreFiles
from mqproc.store.segments import LogSegments
from mqproc.store.visitor import are_record_crcs_written, has_been_held, visit_of

Ranges = list[tuple[int, int]]
_BAD_OFFSET: Final = scan.REASON_NAMES[scan.BAD_OFFSET]


@dataclass(slots=True)
class LogState:
    """The log after recovery. `redispatch_from` is where records became readable again, `end` when none did.

    `fresh` are the holes that were not known before. `kept` is what another program has left as it was, None when none
    has held the store.
    """

    begin: int
    end: int
    found: LogEnd
    whence: str
    fresh: list[Hole] = field(default_factory=list)
    redispatch_from: int = 0
    kept: int | None = None


class LogStep:
    """Recovery of one store's log. Nothing else has the store open."""

    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        segments: LogSegments,
        files: StoreFiles,
        ledger: DamageLedger,
        mark: DurableMark,
        now_ms: Callable[[], int],
        told: Told,
        *,
        keeps: bool = False,
    ) -> None:
        """`keeps`: what lies behind the log's end is kept aside, since the store was closed in order."""
        self._io = io
        self._paths = paths
        self._segments = segments
        self._files = files
        self._ledger = ledger
        self._mark = mark
        self._now_ms = now_ms
        self._keeps = keeps
        self._recovery = LogRecovery(io, segments, told)

    def run(self, known_end: Callable[[], int]) -> LogState:
        """Recover. `known_end` tells up to where queues, index and marks know the log, if no segment is left of it.

        Raises CorruptStoreError for damage with `on_damage = refuse`, OSError.
        """
        if self._files.has_odd_names():
            self._files.put_names_right()
        found_files = self._files.look_at_log()
        mark = self._mark.valid()
        suspects = _suspects(found_files, self._segments.segment_size, mark.offset) if mark else []
        known = self._known(found_files)
        if suspects:
            # Lengths are the only trace of what was lost; a crash must not wipe it out.
            extra = [Hole(start, stop, kind) for start, stop, kind in suspects if not _covered(known, start, stop)]
            self._ledger.replace([*self._ledger.holes, *extra], self._now_ms())
        self._files.make_log_whole()
        starts = self._segments.starts()
        if not starts:
            return self._begin_anew(known_end())
        visit = None
        if has_been_held(self._io, self._paths):
            visit = visit_of(self._io, self._paths, self._segments, self._mark.mark)
            mark = mark if mark is not None and mark.offset <= visit.kept else None
        crcs = visit is None and are_record_crcs_written(self._io, self._paths)
        # A copy has marks that are older than its checkpoint.
        confirmed = checkpoint_file.read(self._io, self._paths.checkpoint).confirm_physical_offset
        holes = {start for start, _stop in known}
        found = self._recovery.find_end(mark, holes, visit, confirmed=confirmed, record_crcs=crcs)
        if mark is not None:
            ranges = merged([*known, *((start, stop) for start, stop, _kind in suspects)])
            found.holes = self._recovery.examine(_within(ranges, starts[0], found.start)) + found.holes
        if self._may_be_misnamed(found):
            self._segments.close()
            if self._files.put_names_right():
                return self.run(known_end)
        self._io.crash_point("recover.scanned")
        # Another program cuts whole segments too: then nothing is missing.
        resume = found.end if mark is not None or visit is not None else self._resume_at(starts, found)
        state = self._settle(starts[0], found, known, resume, "durable mark" if mark else "beginning")
        state.kept = visit.kept if visit is not None else None
        return state

    def _known(self, found_files: LogFiles) -> Ranges:
        """Damaged ranges that are in the log still."""
        begin = min(found_files.starts, default=0)
        return [(start, stop) for start, stop in self._ledger.ranges if stop > begin]

    def _may_be_misnamed(self, found: LogEnd) -> bool:
        """Whether segments may have each other's names, instead of being damaged or written in vain."""
        reasons = {found.cut_reason, *(hole.kind for hole in found.holes)}
        size = self._segments.segment_size
        behind = (start for start in self._segments.starts() if start > found.end)
        return _BAD_OFFSET in reasons or any(
            start_told(self._io, self._segments.path(start), size) not in (None, start) for start in behind
        )

    def _resume_at(self, starts: list[int], found: LogEnd) -> int:
        """Where the log goes on: behind the segments that are gone when its mark lies there, else at its end."""
        mark = self._mark.mark
        size = self._segments.segment_size
        if mark is None or not starts[-1] + size < mark.offset < LOG_BYTES_MAX:
            return found.end
        resume = _round_up(mark.offset, size)
        found.holes.append(Hole(_round_up(found.end, size), resume, MISSING_SEGMENT))
        found.last_store_timestamp_ms = max(found.last_store_timestamp_ms, mark.store_timestamp_ms)
        return resume

    def _settle(self, begin: int, found: LogEnd, known: Ranges, resume: int, whence: str) -> LogState:
        """Write down what is damaged, cut what lies behind the end, make the rest durable."""
        state = LogState(begin, resume, found, whence)
        state.fresh = self._ledger.replace(found.holes, self._now_ms())
        mark = self._mark.mark
        if mark is not None and resume < mark.offset < LOG_BYTES_MAX:
            self._ledger.note_cut(resume, mark.offset, self._now_ms())
        holes = self._ledger.ranges
        changed = [start for start, stop in known if (start, stop) not in holes]
        state.redispatch_from = max(begin, min(changed, default=resume))
        if self._keeps:
            self._files.keep_behind(found.end)
        elif found.cuts_records:
            self._files.keep_tail(found.end)
        self._recovery.cut(found)
        self._recovery.sync(found.start, found.end)
        if resume > found.end:
            self._recovery.seal(found.end)
            make_segment(self._io, self._paths, resume, self._segments.segment_size)
        return state

    def _begin_anew(self, known_end: int) -> LogState:
        """No segment is left: the log goes on behind what its queues, index and marks still know of."""
        begin = _round_up(min(known_end, LOG_BYTES_MAX), self._segments.segment_size)
        if known_end:
            self._ledger.note_cut(0, known_end, self._now_ms())
        found = LogEnd(begin, begin)
        if self._mark.mark is not None:
            found.last_store_timestamp_ms = self._mark.mark.store_timestamp_ms
        self._ledger.replace([], self._now_ms())
        make_segment(self._io, self._paths, begin, self._segments.segment_size)
        return LogState(begin, begin, found, "beginning", redispatch_from=begin)


def _suspects(files: LogFiles, segment_size: int, below: int) -> list[tuple[int, int, str]]:
    """(start, stop, kind) of segments below a position that are missing or were not whole."""
    suspects = [(start, start + segment_size, "short segment") for start in files.short]
    for earlier, later in itertools.pairwise(files.starts):
        if later > earlier + segment_size:
            suspects.append((earlier + segment_size, later, MISSING_SEGMENT))
    return sorted((start, min(stop, below), kind) for start, stop, kind in suspects if start < below)


def _covered(ranges: Ranges, start: int, stop: int) -> bool:
    return any(first <= start and stop <= last for first, last in merged(ranges))


def _within(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The parts of ranges that lie in [start, stop)."""
    cut = [(max(start, first), min(stop, last)) for first, last in ranges]
    return [(first, last) for first, last in cut if first < last]


def _round_up(position: int, size: int) -> int:
    return -(-position // size) * size
