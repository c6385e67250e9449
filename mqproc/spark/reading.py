"""The records of one range of a log: where they really begin, which are wanted, and what is damaged.

    range ──boundaries proven──▶ walk ──positions of wanted records──▶ columns
                                  └──no record where one must be──▶ error, or the next intact one

A range's records are those that begin between two boundaries. Both are found by the same rule from the bytes behind a
position, so the task of a range and the one of its neighbour agree without talking; and since each walk, record by
record, must come out at the boundary exactly, a false one cannot stay unnoticed: its left neighbour fails.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.kernels import log_range as kernels
from mqproc.kernels.record_check import (
    BLANK,
    REACHED_STOP,
    REASON_NAMES,
    VERIFY_ALL,
    VERIFY_CRCS,
    VERIFY_NOTHING,
    stored_at_ms,
)
from mqproc.paths import segment_name
from mqproc.spark.ranges import LogRange
from mqproc.spark.segment_bytes import SegmentBytes
from mqproc.spark.wanted import Wanted

_LET_GO_BYTES: Final = 32 << 20
# What is looked at in one call, and fetched at once from remote storage.
_PART_BYTES: Final = 32 << 20


BAD_TOPIC: Final = kernels.CUT_BY_VIEW + 1
# Why a walk stopped where the log is not what it must be, in words.
_DAMAGE: Final = {reason: name for reason, name in enumerate(REASON_NAMES) if reason not in (REACHED_STOP, BLANK)} | {
    BAD_TOPIC: "a topic that is no text"
}


class Verify(enum.Enum):
    """What is looked at beside sizes: (of wanted records, of the others of the ranges)."""

    NOTHING = (VERIFY_NOTHING, VERIFY_NOTHING)
    WANTED = (VERIFY_CRCS, VERIFY_NOTHING)
    # All that `mqproc store verify` takes for damage.
    EVERYTHING = (VERIFY_ALL, VERIFY_ALL)


@dataclass(frozen=True, slots=True)
class Found:
    """Wanted records: they begin at `positions` int64[n] of `view` uint8[m]. Valid until the next."""

    view: NDArray[np.uint8]
    positions: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lost:
    """Log positions [start, stop) where records should be and none are."""

    start: int
    stop: int
    reason: str


class RangeReader:
    """Reads ranges of one store's log, one after the other."""

    def __init__(
        self, wanted: Wanted, *, batch_rows: int, batch_bytes: int, verify: Verify, fail_on_data_loss: bool
    ) -> None:
        self._wanted = wanted
        self._positions = np.zeros(batch_rows, np.int64)
        self._state = np.zeros(kernels.STATE_SIZE, np.int64)
        self._state[kernels.BEGIN_MS] = wanted.selection.begin_ms
        self._state[kernels.END_MS] = wanted.selection.end_ms
        self._state[kernels.VERIFY], self._state[kernels.VERIFY_UNWANTED] = verify.value
        self._state[kernels.BYTES_MAX] = batch_bytes
        self._fail_on_data_loss = fail_on_data_loss
        self.lost: list[Lost] = []
        """What was passed over, without `fail_on_data_loss`."""

    def records(self, segment: SegmentBytes, of: LogRange, place: str) -> Iterator[Found]:
        """The wanted records of a range. Raises CorruptStoreError where there is damage, as `place` of the log."""
        bytes_ = SegmentView(segment, of)
        start = of.start if of.exact_start else bytes_.boundary(of.start, of.limit)
        if start is None:
            return
        stop = of.stop if of.exact_stop else bytes_.boundary(of.stop, of.limit)
        at, stop = start, of.limit if stop is None else stop
        let_go = at
        while at < stop:
            reason, following = self._walk(bytes_, at, stop)
            if self._state[kernels.FOUND]:
                yield Found(bytes_.view, self._positions[: int(self._state[kernels.FOUND])])
            at = following
            if at - let_go > _LET_GO_BYTES:
                segment.let_go(let_go, at)
                let_go = at
            if reason == BLANK:
                # What lies behind a BLANK is no part of the log; a boundary there is a false one.
                if stop != of.limit and of.exact_stop and not of.open_end:
                    # Not one that was looked for: the index, say, names a record here.
                    self._lose(of, at, stop, "a BLANK", place)
                at = stop if stop == of.limit or of.exact_stop else at
                break
            if reason in _DAMAGE:
                at = self._after_damage(bytes_, at, stop, _DAMAGE[reason], place)
        segment.let_go(let_go, at)
        if at != stop and not of.open_end:
            raise CorruptStoreError(
                f"{place}: the records from byte {start:,} on end at {at:,}, those behind begin at {stop:,}; bodies "
                f"seem to hold copies of records: read with splitBytes of a segment's size, {bytes_.segment_size:,}"
            )

    def _walk(self, bytes_: SegmentView, at: int, stop: int) -> tuple[int, int]:
        """Select from `at` on; (reason, where it stopped), positions from the segment's begin."""
        until = min(stop, at + _PART_BYTES)
        bytes_.show_on(at, until)
        while True:
            reason, stopped = self._select(bytes_, at, until)
            if reason != kernels.CUT_BY_VIEW or stopped != at:
                return reason, stopped
            bytes_.show_more(at, until)

    def _select(self, bytes_: SegmentView, at: int, until: int) -> tuple[int, int]:
        """One pass of the kernel over what is in view, which takes up queues as they come."""
        wanted, state = self._wanted, self._state
        base = bytes_.first
        state[kernels.AT], state[kernels.STOP] = at - base, until - base
        state[kernels.LIMIT], state[kernels.SEGMENT_STOP] = bytes_.limit - base, bytes_.segment_size - base
        state[kernels.BASE] = bytes_.of.segment + base
        state[kernels.FOUND] = state[kernels.FOUND_BYTES] = 0
        while True:
            table = wanted.table
            reason = int(
                kernels.select_positions(
                    bytes_.view,
                    table.bytes_view,
                    table.cells,
                    table.slots,
                    wanted.verdicts,
                    wanted.tags,
                    wanted.tag_ends,
                    wanted.keys,
                    wanted.key_ends,
                    self._positions,
                    state,
                )
            )
            at = int(state[kernels.AT])
            if reason != kernels.UNKNOWN_QUEUE:
                return reason, at + base
            if not wanted.learn(bytes_.view, at):
                return BAD_TOPIC, at + base

    def _after_damage(self, bytes_: SegmentView, at: int, stop: int, reason: str, place: str) -> int:
        """Where records go on behind damage at `at`. Raises CorruptStoreError when that is not to be passed over."""
        following = bytes_.intact(at + 1, bytes_.limit)
        if following is None and bytes_.of.open_end:
            return stop
        end = stop if following is None else min(following, stop)
        self._lose(bytes_.of, at, end, reason, place)
        return end

    def _lose(self, of: LogRange, start: int, stop: int, reason: str, place: str) -> None:
        """Note bytes without records. Raises CorruptStoreError when such are not to be passed over."""
        if self._fail_on_data_loss:
            raise CorruptStoreError(
                f"{place}: no intact record in bytes [{start:,}, {stop:,}): {reason}; "
                "failOnDataLoss=false leaves such ranges out"
            )
        self.lost.append(Lost(of.segment + start, of.segment + stop, reason))


class SegmentView:
    """The part of a segment that is looked at. Positions are bytes from the segment's begin."""

    def __init__(self, segment: SegmentBytes, of: LogRange) -> None:
        self._segment = segment
        self.of = of
        self.segment_size = of.segment_size
        self.limit = min(of.limit, segment.size)
        self.first = 0
        self.view = np.zeros(0, np.uint8)
        self._out = np.zeros(kernels.BOUNDARY_SIZE, np.int64)

    def show(self, start: int, stop: int) -> None:
        self.view, self.first = self._segment.part(start, stop)

    def show_on(self, at: int, stop: int) -> None:
        """Have some of [at, stop) in view: as much as is there already, where that begins so."""
        if not self.first <= at < self._end:
            self.show(at, stop)

    def show_more(self, at: int, stop: int) -> None:
        """Have [at, stop) in view, and more than there is of the record at `at`, which ends behind the view."""
        self.show(at, min(self.limit, max(stop, at + 2 * (self._end - at))))

    @property
    def _end(self) -> int:
        return self.first + len(self.view)

    def boundary(self, start: int, stop: int) -> int | None:
        """The first boundary in [start, stop)."""
        return self._find(start, stop, successor=1)

    def intact(self, start: int, stop: int) -> int | None:
        """The first intact record in [start, stop), whatever follows it."""
        return self._find(start, stop, successor=0)

    def store_time_ms(self, at: int) -> int | None:
        """Store time of the record at a boundary; None where that is a BLANK."""
        stored = int(stored_at_ms(self.view, at - self.first, len(self.view), self.of.segment + at))
        return None if stored < 0 else stored

    def _find(self, start: int, stop: int, successor: int) -> int | None:
        until = start + (1 << 16)
        while True:
            self.show(start, until)
            base = self.first
            found = int(
                kernels.find_boundary(
                    self.view,
                    start - base,
                    stop - base,
                    self.of.segment + base,
                    self.limit - base,
                    self.segment_size - base,
                    successor,
                    self._out,
                )
            )
            if found == kernels.NOWHERE:
                return None
            if found != kernels.NEEDS_MORE:
                return base + found
            until = max(base + int(self._out[kernels.NEEDED]), start + 2 * (until - start))


def place_of(uri: str, of: LogRange) -> str:
    """The file of a range, for people."""
    return f"{uri}/commitlog/{segment_name(of.segment)}"
