"""Queues against the log: where the two sides' totals differ, questions; from their answers, findings."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels import verify
from mqproc.layout import index_file
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.names import MULTI_DISPATCH_PREFIX
from mqproc.store.damage import merged
from mqproc.store.recovery.queue_recovery import is_nonsense
from mqproc.store.verify.findings import Finding, Kind
from mqproc.store.verify.inventory import Queue
from mqproc.store.verify.log_findings import WholeLog
from mqproc.store.verify.log_pass import Gap, LogShare
from mqproc.store.verify.picture import Picture
from mqproc.store.verify.queue_details import ExtraQuestion, Found, ShareQuestion, UnitRange
from mqproc.store.verify.queue_pass import BEYOND, MORE_TOTALS, NO_UNIT, QueueTotals

Ask = Callable[[Sequence[Any]], Iterable[tuple[Any, Any]]]
"""Answers questions, each with its answer."""

_KINDS: Final = {
    Found.ZEROS: (Kind.UNIT_MISSING, "zeros"),
    Found.FILLER: (Kind.UNIT_MISSING, "fillers"),
    Found.WRONG: (Kind.UNIT_WRONG, "another offset, size or tags code than the record's"),
    Found.BEYOND: (Kind.UNIT_BEYOND_LOG, ""),
    Found.IN_HOLE: (Kind.UNIT_IN_HOLE, ""),
    Found.NO_UNIT: (Kind.UNIT_DANGLING, "no place in a log"),
    Found.DANGLING: (Kind.UNIT_DANGLING, "no record of this queue and queue offset lies there"),
}


@dataclass(slots=True)
class Both:
    """Totals of the log and of the queues side by side: int64[queues, shares, TOTAL_COLUMNS], `queues` by number.

    `more` int64[queues, MORE_TOTALS, TOTAL_COLUMNS] is what of the files belongs to no share, `states`
    int64[queues, UNITS_SIZE] as sum_units left them; rows behind the first are of queues that have no files.
    """

    queues: list[Queue]
    log: NDArray[np.int64]
    files: NDArray[np.int64]
    more: NDArray[np.int64]
    states: NDArray[np.int64]
    numbers: dict[Queue, int] = field(default_factory=dict)

    def max_offset(self, queue: Queue) -> int | None:
        """A queue's next offset as log and files tell it together; None for an unknown queue."""
        number = self.numbers.get(queue)
        if number is None:
            return None
        live = int(self.states[number, verify.LAST_LIVE])
        last = self.log[number, :, verify.LAST_OFFSET].max(initial=-1)
        counted = self.log[number, :, verify.COUNT].any()
        return max(live, int(last) if counted else -1) + 1

    def first_offset(self, queue: Queue) -> int | None:
        """The queue offset of a queue's first record that the log has; None without one."""
        rows = self.log[self.numbers[queue]] if queue in self.numbers else self.log[:0]
        return next((int(row[verify.FIRST_OFFSET]) for row in rows if row[verify.COUNT]), None)


def side_by_side(picture: Picture, shares: Sequence[LogShare], totals: Sequence[QueueTotals]) -> Both:
    """Put the totals of both sides together."""
    queues = picture.queues
    numbers = {queue: number for number, queue in enumerate(queues)}
    for found in shares:
        for queue in found.more_queues:
            if queue not in numbers:
                numbers[queue] = len(queues)
                queues.append(queue)
    count = len(picture.shares)
    both = Both(
        queues,
        np.zeros((len(queues), count, verify.TOTAL_COLUMNS), np.int64),
        np.zeros((len(queues), count, verify.TOTAL_COLUMNS), np.int64),
        np.zeros((len(queues), MORE_TOTALS, verify.TOTAL_COLUMNS), np.int64),
        np.zeros((len(queues), verify.UNITS_SIZE), np.int64),
        numbers,
    )
    both.states[:, verify.LAST_LIVE] = -1
    for found in shares:
        known = len(picture.inventory.queues)
        both.log[:known, found.share.number] = found.totals[:known]
        for queue, row in zip(found.more_queues, found.totals[known:], strict=True):
            both.log[numbers[queue], found.share.number] = row
    for part in totals:
        rows = [numbers[queue] for queue in part.queues]
        both.files[rows] = part.totals[:, :count]
        both.more[rows] = part.totals[:, count:]
        both.states[rows] = part.states
    uncompared = [share.number for share in picture.shares if not share.compared]
    both.log[:, uncompared] = both.files[:, uncompared] = 0
    return both


class QueueFindings:
    """Compares both sides and asks about what differs."""

    def __init__(
        self,
        picture: Picture,
        log: WholeLog,
        shares: Sequence[LogShare],
        both: Both,
        *,
        may_be_behind: bool,
        restart_from: int | None,
        topics: set[str] | None,
        unsettled: Container[Queue] = (),
    ) -> None:
        """`may_be_behind`: the store was not closed in order, so its newest records need not have been dispatched:
        those from `restart_from` on, where that is known (`Restart`), else those behind all that have been.

        `topics` are those of the settings (None: not known); `unsettled` queues were deleted or made meanwhile.
        """
        self._picture = picture
        self._log = log
        self._shares = shares
        self._both = both
        self._may_be_behind = may_be_behind
        self._restart_from = restart_from
        self._topics = topics
        self._unsettled = unsettled
        self._repeated: dict[Queue, list[tuple[int, int]]] = {}
        # Of lone records that recovery does not believe, by queue and queue offset: the gap before each.
        self._too_high: dict[tuple[Queue, int], Gap] = {}
        self.dispatched = self._dispatched()

    def _dispatched(self) -> int:
        """Up to where the log was dispatched, as far as units and index tell, and surely so."""
        if self._picture.positions.dispatched is not None:
            return self._picture.positions.dispatched
        ends = [int(self._both.states[:, verify.PHYSICAL_END].max(initial=0))]
        ends += [
            file.header.end_physical_offset + 1
            for file in self._picture.index
            if file.header.count > index_file.FIRST_ITEM and 0 <= file.header.end_physical_offset < self._log.end
        ]
        return max(ends) if self._restart_from is None else min(max(ends), self._restart_from)

    def run(self, ask: Ask) -> list[Finding]:
        """All findings about queues."""
        both, findings = self._both, list(self._of_gaps())
        wrong = ((both.log[:, :, verify.COUNT] != both.files[:, :, verify.COUNT])
                 | (both.log[:, :, verify.FINGERPRINT] != both.files[:, :, verify.FINGERPRINT]))  # fmt: skip
        strange = (
            (both.more[:, BEYOND, verify.COUNT] > 0) & (not self._picture.positions.running)
            | (both.more[:, NO_UNIT, verify.COUNT] > 0)
            | (both.states[:, verify.INNER_ZEROS] > 0)
        )
        asked: dict[int, list[int]] = {}
        for number in np.flatnonzero(wrong.any(axis=1) | strange).tolist():
            queue = both.queues[number]
            if self._is_passed_over(queue):
                continue
            if both.states[number, verify.LAST_LIVE] < 0:
                findings += self._of_empty_queue(number)
            else:
                asked[number] = np.flatnonzero(wrong[number]).tolist()
        return findings + self._ask(asked, ask)

    def _is_passed_over(self, queue: Queue) -> bool:
        inventory = self._picture.inventory
        unchecked = inventory.has_rocksdb_queues or queue[0] in inventory.unchecked_topics
        return unchecked or queue[0].startswith(MULTI_DISPATCH_PREFIX) or queue in self._unsettled

    def _of_empty_queue(self, number: int) -> Iterable[Finding]:
        """A queue without a unit whose records the log has."""
        rows = self._both.log[number]
        rows = rows[rows[:, verify.COUNT] > 0]
        if len(rows):
            queue = self._both.queues[number]
            first, last = int(rows[0, verify.FIRST_OFFSET]), int(rows[-1, verify.LAST_OFFSET])
            physical = int(rows[0, verify.FIRST_PHYSICAL])
            found = UnitRange(queue, Found.ZEROS, first, last + 1, physical, int(rows[-1, verify.LAST_PHYSICAL]))
            count = int(rows[:, verify.COUNT].sum())
            if (
                self._topics is not None
                and queue[0] not in self._topics
                and queue not in self._picture.inventory.queues
                # A topic that was new when the store was killed need not be in the settings.
                and not (physical >= self.dispatched and self._is_pending())
            ):
                file = self._picture.inventory.segment_name(physical)
                offset = physical % self._picture.inventory.sizes.segment
                text = f"{queue[0]} queue {queue[1]}"
                yield Finding(Kind.TOPIC_DELETED, file, offset, physical, count=count, text=text)
            else:
                yield self._finding(found, count, "no file has units")

    def _ask(self, asked: dict[int, list[int]], ask: Ask) -> list[Finding]:
        both = self._both
        by_share: dict[int, list[Queue]] = {}
        for number, shares in asked.items():
            for share in shares:
                by_share.setdefault(share, []).append(both.queues[number])
        questions = [
            ShareQuestion(begin, found.end, self._log.fault_ranges, by_share[found.share.number], self.dispatched)
            for found in self._shares
            if found.share.number in by_share and (begin := found.begin) is not None
        ]
        ranges: dict[Queue, list[UnitRange]] = {}
        for _question, answer in ask(questions):
            for each in answer:
                ranges.setdefault(each.queue, []).append(each)
        extras = [self._extra(number, shares, ranges.get(both.queues[number], [])) for number, shares in asked.items()]
        found = [each for answer in ranges.values() for each in _joined(answer, self.dispatched)]
        for _question, answer in ask(extras):
            found += answer
        found.sort(key=lambda each: (each.queue, each.first))
        return [self._finding(each) for each in found if not self._is_right(each)]

    def _is_right(self, found: UnitRange) -> bool:
        """Whether units are as they should be; of records that share a place in their queue one only can be led to."""
        if found.found is not Found.WRONG:
            return found.found is Found.MATCHED
        return any(first <= found.first and found.stop <= stop for first, stop in self._repeated.get(found.queue, ()))

    def _extra(self, number: int, shares: list[int], ranges: list[UnitRange]) -> ExtraQuestion:
        bounds = [self._picture.shares[share] for share in shares]
        return ExtraQuestion(
            self._both.queues[number],
            merged((each.first, each.stop) for each in ranges),
            merged((share.start, share.stop) for share in bounds),
            self._log.fault_ranges,
            self._log.begin,
            self._log.end if not self._picture.positions.running else 1 << 62,
            int(self._both.states[number, verify.LAST_LIVE]),
        )

    def _finding(self, found: UnitRange, count: int = 0, text: str = "") -> Finding:
        file, offset = self._picture.inventory.queue_name(found.queue, found.first, UNIT_SIZE)
        kind, usual_text = _KINDS[found.found]
        text = text or usual_text
        if kind is Kind.UNIT_MISSING and found.physical_offset >= self.dispatched and self._is_pending():
            kind, text = Kind.NOT_DISPATCHED, ""
        elif kind is Kind.UNIT_MISSING and self._is_too_high(found):
            return self._of_record(Kind.QUEUE_OFFSET_TOO_HIGH, self._too_high[found.queue, found.first])
        last = f" to {found.stop - 1:,}" if found.stop - found.first > 1 else ""
        said = f"queue offset {found.first:,}{last}" + (f": {text}" if text else "")
        physical_offset = None if found.found is Found.NO_UNIT else found.physical_offset
        return Finding(kind, file, offset, physical_offset, count=count or found.stop - found.first, text=said)

    def _is_too_high(self, found: UnitRange) -> bool:
        return (found.queue, found.first) in self._too_high and found.stop == found.first + 1

    def _is_pending(self) -> bool:
        """Whether records behind what was dispatched may be so."""
        return self._may_be_behind and (self._restart_from is not None or self.dispatched > self._log.begin)

    # Gaps

    def _of_gaps(self) -> Iterable[Finding]:
        faults = self._log.fault_ranges
        for gap in sorted(self._gaps(), key=lambda gap: gap.physical_offset):
            if (before := self._too_high.get((gap.queue, gap.expected - 1))) is not None:
                # The queue stands where it did before that record.
                gap = replace(gap, expected=before.expected, previous=before.previous)
                if gap.found == gap.expected:
                    continue
            if is_nonsense(gap.found - gap.expected, gap.physical_offset - gap.previous):
                self._too_high[gap.queue, gap.found] = gap
            if gap.found > gap.expected and any(gap.previous < start < gap.physical_offset for start, _stop in faults):
                continue
            kind = Kind.QUEUE_OFFSET_GAP if gap.found > gap.expected else Kind.QUEUE_OFFSET_REPEATED
            if kind is Kind.QUEUE_OFFSET_REPEATED:
                self._repeated.setdefault(gap.queue, []).append((gap.found, gap.expected))
            yield self._of_record(kind, gap, max(1, gap.found - gap.expected))

    def _of_record(self, kind: Kind, gap: Gap, count: int = 1) -> Finding:
        """A finding about the record behind a gap."""
        position = gap.physical_offset
        return Finding(
            kind,
            self._picture.inventory.segment_name(position),
            position % self._picture.inventory.sizes.segment,
            position,
            count=count,
            text=f"{gap.queue[0]} queue {gap.queue[1]}: queue offset {gap.found:,} behind {gap.expected - 1:,}",
        )

    def _gaps(self) -> Iterable[Gap]:
        """Gaps within shares, and between them."""
        for found in self._shares:
            yield from found.gaps
        log = self._both.log
        last = np.full(len(self._both.queues), -1, np.int64)
        physical = np.zeros(len(self._both.queues), np.int64)
        for share in range(log.shape[1]):
            there = log[:, share, verify.COUNT] > 0
            first = log[:, share, verify.FIRST_OFFSET]
            for number in np.flatnonzero(there & (last >= 0) & (first != last + 1)).tolist():
                yield Gap(
                    self._both.queues[number],
                    int(last[number]) + 1,
                    int(first[number]),
                    int(physical[number]),
                    int(log[number, share, verify.FIRST_PHYSICAL]),
                )
            last[there] = log[there, share, verify.LAST_OFFSET]
            physical[there] = log[there, share, verify.LAST_PHYSICAL]


def _joined(ranges: list[UnitRange], dispatched: int) -> list[UnitRange]:
    """A queue's ranges with those that a share's border cut put together."""
    joined: list[UnitRange] = []
    for each in sorted(ranges, key=lambda each: each.first):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.found is each.found
            and last.stop == each.first
            and (last.physical_offset < dispatched) == (each.physical_offset < dispatched)
        ):
            last.stop, last.last_physical_offset = each.stop, each.last_physical_offset
        else:
            joined.append(each)
    return joined
