"""The index's part of recovery: cut to what can be believed, before dispatch puts the rest."""

from __future__ import annotations

from mqproc.config import Options
from mqproc.io import StoreIO
from mqproc.paths import StorePaths
from mqproc.quantities import counted
from mqproc.store.damage import DamageLedger
from mqproc.store.index_files import IndexFiles
from mqproc.store.index_headers import index_file_names, last_offset
from mqproc.store.marks import DurableMark
from mqproc.store.reads.log_records import LogRecords, Visible
from mqproc.store.recovery.index_recovery import IndexCheck
from mqproc.store.recovery.log_step import LogState
from mqproc.store.segments import LogSegments


class IndexStep:
    """Recovery of one store's index. Nothing else has the store open; all its files have the right length."""

    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        options: Options,
        segments: LogSegments,
        index: IndexFiles,
        ledger: DamageLedger,
        log: LogState,
        mark: DurableMark,
    ) -> None:
        self._io = io
        self._paths = paths
        self._slots = options.max_hash_slot_num
        self._segments = segments
        self._index = index
        self._ledger = ledger
        self._log = log
        self._mark = mark
        self.changed = False

    def run(self, trusted: int | None, *, clean: bool) -> tuple[int, str]:
        """Cut; (the log position up to which the index then holds every entry, what was found).

        `trusted` is the log position up to which the index's mark vouches for it, None without one; `clean` as the
        store was left.
        """
        log, names = self._log, self._names()
        # RocketMQ leaves no mark, but a store that it has closed has a whole index, as far as its files are there; it
        # does not index anew what it appends where it has cut.
        closed = log.end if log.kept is None else min(log.end, log.kept)
        limit = trusted if trusted is not None else closed if clean else log.begin
        reached = last_offset(self._io, self._paths.index / names[-1]) if names else -1
        if not clean or reached >= limit or limit < log.end:
            self.cut(limit)
        at = self._check().complete_up_to(self._names(), log.begin, limit)
        if at < limit:
            self.cut(at)
        text = f"index: {counted(len(names), 'file')}"
        if log.end > log.begin:
            text += f", whole up to {at:,}" if at > log.begin else ", to be made again"
        if at < limit:
            text += f"; entries from there to {limit:,} were missing or wrong"
        return at, text

    def cut(self, position: int) -> None:
        """Remove the entries of records at or above a log position."""
        records = LogRecords(self._segments, lambda: Visible(self._log.begin, self._log.end))

        def store_timestamp_ms(offset: int) -> int | None:
            found = records.store_timestamp_ms(offset)
            return found if found >= 0 else None

        self._mark.take_back(position)
        self._index.rebuild(position, store_timestamp_ms)
        self.changed = True

    def count_entries(self) -> int:
        """Entries of records that the log still has."""
        return self._check().count_entries(self._names(), self._log.begin)

    def _names(self) -> list[str]:
        return index_file_names(self._io, self._paths.index)

    def _check(self) -> IndexCheck:
        return IndexCheck(self._io, self._paths, self._segments, self._slots, self._ledger.ranges)
