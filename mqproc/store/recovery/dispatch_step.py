"""Recovery's way over the log: queues and index are brought to its end, and no part of it is gone over twice.

    index stands        log position                    queues' limit                  end
    below lost queues      index ├────── all, with entries ──────┼───── all, with entries ─────┤
    between            lost queues ├─ lost queues ─┤ index ├─ all ─┼───── all, with entries ─────┤
    ahead              lost queues ├────────── lost queues ──────────┼─ all ─┤ index ├─ all, … ────┤

Where the limit is passed, lost queues get back fillers for what they have lost with the log's records.
"""

from __future__ import annotations

from collections.abc import Callable

from mqproc.store.damage import DamageLedger
from mqproc.store.dispatcher import Gap
from mqproc.store.marks import DurableMark
from mqproc.store.recovery.index_step import IndexStep
from mqproc.store.recovery.log_step import LogState
from mqproc.store.recovery.queue_recovery import QueueRecovery
from mqproc.store.recovery.redispatch import Redispatch, Redispatched


class DispatchStep:
    """Dispatch of one recovery. `index` is None where the store has none; `mark` is the queues'."""

    def __init__(
        self,
        redispatch: Redispatch,
        mender: QueueRecovery,
        index: IndexStep | None,
        ledger: DamageLedger,
        log: LogState,
        mark: DurableMark,
        report: Callable[[str], None],
    ) -> None:
        self._redispatch = redispatch
        self._mender = mender
        self._index = index
        self._ledger = ledger
        self._log = log
        self._mark = mark
        self._report = report
        self.rebuilt: set[int] = set()
        """Numbers of the queues that were built again below the mark."""
        self.not_believed: list[Gap] = []
        """What the mender did not believe of them."""

    def run(self, index_at: int) -> Redispatched:
        """Bring queues, which stand at the mender's limit or are lost, and index, whole below `index_at`, to the end.

        Both stand at the position that the answer has; where a full disk has ended it early, they wait there. Raises
        OSError, also for a full disk while there are lost queues.
        """
        log, limit = self._log, self._mender.limit
        done = Redispatched(limit, limit)
        if self._mender.lost:
            done.add(self._bring_lost(index_at))
            index_at = max(index_at, limit)
        if limit < index_at:
            counted = self._redispatch.run(limit, index_at, put_entries=False)
            if limit == log.begin and counted.no_room is None and self._lacks_entries(counted.entries):
                self._report(f"recovery: index: entries are missing below {index_at:,}; it is made again")
                self._cut_index(log.begin)
                index_at = log.begin
            counted.entries = 0
            done.add(counted)
        if done.no_room is None:
            # Units are compared, so that going over some again does no harm; entries are put once.
            done.add(self._redispatch.run(index_at, log.end))
        else:
            # One position stands for both: what the index has above it would be put again.
            self._cut_index(done.position)
        return done

    def rebuild(self, lost: dict[int, int], stop: int) -> Redispatched:
        """Build queues again up to a log position: by number, from where on. Raises OSError."""
        self._mark.take_back(min(lost.values()))
        # Where all is missing above that position, nothing below it is to be gone over.
        done = self._redispatch.run(min(stop, *lost.values()), stop, put_entries=False, only=lost)
        if done.no_room is not None:
            raise done.no_room
        self.rebuilt.update(lost)
        return done

    def _bring_lost(self, index_at: int) -> Redispatched:
        """Bring lost queues up to the limit, and the index on the way, where it stands below that."""
        lost, limit = self._mender.lost, self._mender.limit
        done = Redispatched(limit, limit)
        self._mark.take_back(min(lost.values()))
        if min(lost.values()) < (alone := min(index_at, limit)):
            done.add(self.rebuild(lost, alone))
        if index_at < limit:
            done.add(self._redispatch.run(index_at, limit))
            if done.no_room is not None:
                raise done.no_room
        self.rebuilt.update(lost)
        self.not_believed = self._mender.not_believed(done.gaps)
        # What the log does not explain of them below the limit it has lost, or its records skip it. The mender fills it
        # between records, and tops up what it knows of.
        self._mender.fill(done.gaps, self._ledger.ranges, keep_units=True)
        done.gaps = []
        self._mender.top_up(self._ledger.ranges)
        return done

    def _cut_index(self, position: int) -> None:
        if self._index is not None:
            self._index.cut(position)

    def _lacks_entries(self, expected: int) -> bool:
        """Whether the index holds fewer entries than the log has; RocketMQ puts some twice."""
        return self._index is not None and self._index.count_entries() < expected
