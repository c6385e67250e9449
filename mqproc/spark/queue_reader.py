"""Read the selected records of slices of queues, located by their units.

The units of a partition's slices are sorted by log position, and each record is checked.

    slices ──units──▶ (log position, queue, offset) ──sorted──▶ segment by segment ──kernel──▶ selected positions

Each record must carry this queue and this offset. Positions ascend with offsets in a queue, so its messages stay in
order. When damage is skipped, the log is searched for messages whose units do not lead to them:

    units of a queue   … 4 ──▶ a        5 ──▶ nowhere        6 ──▶ b …
    log                   a ───── record of 5, if it exists ───── b
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.kernels import log_range as kernels
from mqproc.kernels.log_range import (
    AT,
    BASE,
    BEGIN_MS,
    BYTES_MAX,
    END_MS,
    FOUND,
    FULL,
    LIMIT,
    STATE_SIZE,
    VERIFY,
)
from mqproc.kernels.record_check import REACHED_STOP, REASON_NAMES
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.paths import StorePaths, segment_name, segment_start
from mqproc.spark.log_reader import FoundRecords, KernelSelection, RangeReader, Verify, segment_uri
from mqproc.spark.options import EARLIEST, LATEST, TIME_MAX, Offsets, Queue
from mqproc.spark.partitions import LogRange, QueueSlice, StoreSelection
from mqproc.spark.segment_bytes import MappedSegment
from mqproc.store.consumequeue.files import ConsumeQueueFiles, as_units
from mqproc.store.read.filter_program import compile_filter

_NOWHERE: Final = TIME_MAX
_RELEASE_BYTES: Final = 32 << 20
# The log may have records that a queue has lost.
_BY_LOG: Final = "; a batch read with byUnits=false reads the log alone"
Words = NDArray[np.int64]


class AbsenceReason(enum.Enum):
    """Why messages of a slice are missing."""

    UNITS = "the queue does not have them"
    DAMAGED = "the queue has fillers in their place, as for damaged records"
    DELETED = "its part of the log is deleted"


class UnitGaps:
    """Finds messages of one store's queues whose units do not lead to them."""

    def __init__(self, store: StoreSelection, *, batch_rows: int, batch_bytes: int, verify: Verify) -> None:
        self._store = store
        self._paths = StorePaths(Path(store.uri))
        self._io = StoreIO()
        self._batch_rows = batch_rows
        self._batch_bytes = batch_bytes
        self._verify = verify

    def records(self, queue: Queue, missed: Words, offsets: Words, positions: Words) -> Iterator[FoundRecords]:
        """The selected ones among the messages `missed` of a queue.

        The queue's other records, with `offsets`, are at `positions`.
        """
        missed, order = np.unique(missed), np.argsort(offsets)
        offsets, positions = offsets[order], positions[order]
        for run in np.split(missed, np.flatnonzero(np.diff(missed) != 1) + 1):
            first, last = int(run[0]), int(run[-1])
            before, after = int(np.searchsorted(offsets, first)) - 1, int(np.searchsorted(offsets, last))
            low = int(positions[before]) if before >= 0 else self._position_of(queue, first - 1, 0)
            high = int(positions[after]) if after < len(positions) else self._position_of(queue, last + 1, _NOWHERE)
            yield from self._between(low, high, queue, first, last + 1)

    def _position_of(self, queue: Queue, offset: int, otherwise: int) -> int:
        """The log position in the unit of a neighbouring message of another slice."""
        files = ConsumeQueueFiles(self._io, self._paths.consume_queue, self._store.queue_file_bytes)
        with closing(files):
            try:
                units = as_units(files.read_units(*queue, offset, 1)) if offset >= 0 else as_units(b"")
            except FileNotFoundError:
                return otherwise
        return int(units["physical_offset"][0]) if len(units) and units["size"][0] > 0 else otherwise

    def _between(self, low: int, high: int, queue: Queue, first: int, stop: int) -> Iterator[FoundRecords]:
        """The selected records in [low, high) of the log that are messages [first, stop) of a queue."""
        selection = dataclasses.replace(
            self._store.selection,
            queues=(queue,),
            starting=Offsets(EARLIEST, {queue: first}),
            ending=Offsets(LATEST, {queue: stop}),
        )
        reader = RangeReader(
            KernelSelection(selection, self._store.deleted),
            batch_rows=self._batch_rows,
            batch_bytes=self._batch_bytes,
            verify=self._verify,
            fail_on_data_loss=False,
        )
        size = self._store.segment_size
        for start in self._segments():
            begin, end = max(low - start, 0), min(high - start, size)
            if begin >= end:
                continue
            log_range = LogRange(start, begin, end, size, size, exact_start=not begin, exact_stop=True, open_end=True)
            try:
                segment = MappedSegment(self._io, self._paths.commit_log / segment_name(start), size)
            except FileNotFoundError:
                continue
            with closing(segment):
                yield from reader.records(segment, log_range, segment_uri(self._store.uri, log_range))

    def _segments(self) -> list[int]:
        starts = (segment_start(name) for name in self._io.names(self._paths.commit_log))
        return sorted(start for start in starts if start is not None)


@dataclass(frozen=True, slots=True)
class _Listed:
    """Records by ascending log position, with their queue numbers and offsets."""

    positions: Words
    numbers: Words
    offsets: Words

    def part(self, first: int, stop: int) -> _Listed:
        return _Listed(self.positions[first:stop], self.numbers[first:stop], self.offsets[first:stop])


class SliceReader:
    """Reads slices of one store in a folder of this machine."""

    def __init__(
        self, store: StoreSelection, *, batch_rows: int, batch_bytes: int, verify: Verify, fail_on_data_loss: bool
    ) -> None:
        self._store = store
        self._paths = StorePaths(Path(store.uri))
        self._io = StoreIO()
        self._selection = KernelSelection(store.selection, {})
        self._positions = np.zeros(batch_rows, np.int64)
        self._state = np.zeros(STATE_SIZE, np.int64)
        self._state[BEGIN_MS], self._state[END_MS] = store.selection.begin_ms, store.selection.end_ms
        self._state[VERIFY], _others = verify.value
        self._state[BYTES_MAX] = batch_bytes
        self._fail_on_data_loss = fail_on_data_loss
        self._gaps = UnitGaps(store, batch_rows=batch_rows, batch_bytes=batch_bytes, verify=verify)
        self._missed: dict[Queue, list[int]] = {}

    def records(self, slices: Sequence[QueueSlice]) -> Iterator[FoundRecords]:
        """The selected records of slices.

        With `fail_on_data_loss`, raises CorruptStoreError for missing messages.

        Otherwise missing messages that are found in the log come last.
        """
        self._missed = {}
        listed = self._listed(slices)
        size = self._store.segment_size
        segments = listed.positions // size
        borders = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
        for first, stop in itertools.pairwise(borders):
            if first < stop:
                yield from self._of_segment(int(segments[first]) * size, listed.part(first, stop))
        for queue, offsets in self._missed.items():
            missed = np.array(offsets, np.int64)
            there = (listed.numbers == self._selection.queue_number(queue)) & ~np.isin(listed.offsets, missed)
            yield from self._gaps.records(queue, missed, listed.offsets[there], listed.positions[there])

    # Units

    def _listed(self, slices: Sequence[QueueSlice]) -> _Listed:
        files = ConsumeQueueFiles(self._io, self._paths.consume_queue, self._store.queue_file_bytes)
        with closing(files):
            parts = [self._of_queue(files, queue_slice) for queue_slice in slices]
        positions, numbers, offsets = (np.concatenate([part[row] for part in parts]) for row in range(3))
        order = np.argsort(positions, kind="stable")
        return _Listed(positions[order], numbers[order], offsets[order])

    def _of_queue(self, files: ConsumeQueueFiles, queue_slice: QueueSlice) -> tuple[Words, Words, Words]:
        """(positions, queue numbers, offsets) of the records that a slice's units name.

        Units whose tag hash excludes them are left out.
        """
        try:
            units = as_units(
                files.read_units(queue_slice.topic, queue_slice.queue_id, queue_slice.start, len(queue_slice))
            )
        except FileNotFoundError:
            units = as_units(b"")
        sizes, positions = units["size"].astype(np.int64), units["physical_offset"].astype(np.int64)
        offsets = np.arange(queue_slice.start, queue_slice.start + len(units), dtype=np.int64)
        there = sizes > 0
        if not there.all() or len(units) < len(queue_slice):
            zeros = offsets[~there].tolist()
            missing = min([*zeros, queue_slice.start + len(units)])
            self._report_absent(queue_slice, missing, queue_slice.stop, AbsenceReason.UNITS)
            self._miss((queue_slice.topic, queue_slice.queue_id), zeros)
        keep = there & (sizes != FILLER_SIZE)
        if (keep != there).any():
            filler = queue_slice.start + int(np.argmax(keep != there))
            self._report_absent(queue_slice, filler, filler + 1, AbsenceReason.DAMAGED)
        codes = compile_filter(queue_slice.topic, self._store.selection.tags).codes
        if len(codes):
            keep &= np.isin(units["tags_code"].astype(np.int64), codes)
        if not keep.all():
            positions, offsets = positions[keep], offsets[keep]
        number = self._selection.queue_number((queue_slice.topic, queue_slice.queue_id))
        return positions, np.full(len(positions), number, np.int64), offsets

    def _report_absent(self, queue_slice: QueueSlice, start: int, stop: int, reason: AbsenceReason) -> None:
        if self._fail_on_data_loss:
            raise CorruptStoreError(
                f"{self._store.uri}: offsets [{start:,}, {stop:,}) of queue {queue_slice.queue_id} of "
                f"{queue_slice.topic}: {reason.value}; "
                f"failOnDataLoss=false leaves such offsets out{_BY_LOG}"
            )

    # Records

    def _of_segment(self, start: int, listed: _Listed) -> Iterator[FoundRecords]:
        try:
            segment = MappedSegment(self._io, self._paths.commit_log / segment_name(start), self._store.segment_size)
        except FileNotFoundError:
            if self._fail_on_data_loss:
                file = f"{self._store.uri}/commitlog/{segment_name(start)}"
                raise CorruptStoreError(
                    f"{file}: {AbsenceReason.DELETED.value}, "
                    f"with {len(listed.positions):,} selected messages; "
                    "failOnDataLoss=false leaves them out"
                ) from None
            for number in np.unique(listed.numbers).tolist():
                self._miss(self._selection.table.name(number), listed.offsets[listed.numbers == number].tolist())
            return
        with closing(segment):
            yield from self._selected(segment, start, listed)

    def _selected(self, segment: MappedSegment, start: int, listed: _Listed) -> Iterator[FoundRecords]:
        selection, state = self._selection, self._state
        view, _first = segment.part(0, segment.size)
        state[AT], state[BASE], state[LIMIT] = 0, start, segment.size
        released, reason = 0, FULL
        while reason != REACHED_STOP:
            reason = int(
                kernels.select_by_unit(
                    view,
                    listed.positions,
                    listed.numbers,
                    listed.offsets,
                    selection.table.bytes_view,
                    selection.table.cells,
                    selection.table.slots,
                    selection.tags,
                    selection.tag_ends,
                    selection.keys,
                    selection.key_ends,
                    self._positions,
                    state,
                )
            )
            if state[FOUND]:
                found = self._positions[: int(state[FOUND])]
                yield FoundRecords(view, found)
                if int(found[-1]) - released > _RELEASE_BYTES:
                    segment.release_pages(released, int(found[-1]))
                    released = int(found[-1])
            if reason not in (REACHED_STOP, FULL):
                self._damaged(listed, int(state[AT]), reason)
                state[AT] += 1

    def _miss(self, queue: Queue, offsets: Sequence[int]) -> None:
        """Note existing messages whose units do not lead to them."""
        if offsets:
            self._missed.setdefault(queue, []).extend(offsets)

    def _damaged(self, listed: _Listed, index: int, reason: int) -> None:
        topic, queue_id = self._selection.table.name(int(listed.numbers[index]))
        offset, position = int(listed.offsets[index]), int(listed.positions[index])
        if self._fail_on_data_loss:
            cause = "a record of another place" if reason == kernels.OTHER_PLACE else REASON_NAMES[reason]
            raise CorruptStoreError(
                f"{self._store.uri}: offset {offset:,} of queue {queue_id} of {topic} has no intact record at log "
                f"position {position:,}: {cause}; failOnDataLoss=false leaves such messages out{_BY_LOG}"
            )
        self._miss((topic, queue_id), [offset])
