"""The records of slices of a store's queues: found by their units, read in the order of the log, each one checked.

    slices ──units──▶ (log position, queue, offset) ──sorted──▶ segment by segment ──kernel──▶ positions of wanted ones

A record must say itself that it is of this queue and has this offset there. Within a queue positions ascend with
offsets, so its messages stay in order.
"""

from __future__ import annotations

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
from mqproc.io import StoreIO
from mqproc.kernels import listed as kernels
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
from mqproc.paths import StorePaths, segment_name
from mqproc.spark.astray import Astray
from mqproc.spark.options import Queue
from mqproc.spark.ranges import QueueSlice, StoreSelection
from mqproc.spark.reading import Found, Verify
from mqproc.spark.segment_bytes import MappedSegment
from mqproc.spark.wanted import Wanted
from mqproc.store.consume_queue import ConsumeQueueFiles, as_units
from mqproc.store.reads.passing import passing

_LET_GO_BYTES: Final = 32 << 20
# The log may have what a queue has lost.
_BY_LOG: Final = "; a batch read with byUnits=false goes by the log alone"
Words = NDArray[np.int64]


class Absent(enum.Enum):
    """Why a message of a slice is not there."""

    UNITS = "the queue does not have them"
    DAMAGED = "fillers are in their places, as for records that were damaged"
    DELETED = "its part of the log is deleted"


@dataclass(frozen=True, slots=True)
class _Listed:
    """Records of one segment or several: log positions, ascending, the numbers of their queues, their offsets there."""

    places: Words
    numbers: Words
    offsets: Words

    def part(self, first: int, stop: int) -> _Listed:
        return _Listed(self.places[first:stop], self.numbers[first:stop], self.offsets[first:stop])


class SliceReader:
    """Reads slices of one store in a folder of this machine."""

    def __init__(
        self, store: StoreSelection, *, batch_rows: int, batch_bytes: int, verify: Verify, fail_on_data_loss: bool
    ) -> None:
        self._store = store
        self._paths = StorePaths(Path(store.uri))
        self._io = StoreIO()
        self._wanted = Wanted(store.selection, {})
        self._positions = np.zeros(batch_rows, np.int64)
        self._state = np.zeros(STATE_SIZE, np.int64)
        self._state[BEGIN_MS], self._state[END_MS] = store.selection.begin_ms, store.selection.end_ms
        self._state[VERIFY], _others = verify.value
        self._state[BYTES_MAX] = batch_bytes
        self._fail_on_data_loss = fail_on_data_loss
        self._astray = Astray(store, batch_rows=batch_rows, batch_bytes=batch_bytes, verify=verify)
        self._missed: dict[Queue, list[int]] = {}

    def records(self, slices: Sequence[QueueSlice]) -> Iterator[Found]:
        """The wanted records of slices. Raises CorruptStoreError for what is not there, with `fail_on_data_loss`.

        Otherwise what the log has of it comes last.
        """
        self._missed = {}
        listed = self._listed(slices)
        size = self._store.segment_size
        segments = listed.places // size
        borders = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
        for first, stop in itertools.pairwise(borders):
            if first < stop:
                yield from self._of_segment(int(segments[first]) * size, listed.part(first, stop))
        for queue, offsets in self._missed.items():
            missed = np.array(offsets, np.int64)
            there = (listed.numbers == self._wanted.number_of(queue)) & ~np.isin(listed.offsets, missed)
            yield from self._astray.records(queue, missed, listed.offsets[there], listed.places[there])

    # Units

    def _listed(self, slices: Sequence[QueueSlice]) -> _Listed:
        files = ConsumeQueueFiles(self._io, self._paths.consume_queue, self._store.queue_file_bytes)
        with closing(files):
            parts = [self._of_queue(files, of) for of in slices]
        places, numbers, offsets = (np.concatenate([part[row] for part in parts]) for row in range(3))
        order = np.argsort(places, kind="stable")
        return _Listed(places[order], numbers[order], offsets[order])

    def _of_queue(self, files: ConsumeQueueFiles, of: QueueSlice) -> tuple[Words, Words, Words]:
        """Places, number of the queue, and offsets of the records that a slice's units name and that may be wanted."""
        try:
            units = as_units(files.read_units(of.topic, of.queue_id, of.start, len(of)))
        except FileNotFoundError:
            units = as_units(b"")
        sizes, places = units["size"].astype(np.int64), units["physical_offset"].astype(np.int64)
        offsets = np.arange(of.start, of.start + len(units), dtype=np.int64)
        there = sizes > 0
        if not there.all() or len(units) < len(of):
            zeros = offsets[~there].tolist()
            self._absent(of, min([*zeros, of.start + len(units)]), of.stop, Absent.UNITS)
            self._miss((of.topic, of.queue_id), zeros)
        keep = there & (sizes != FILLER_SIZE)
        if (keep != there).any():
            filler = of.start + int(np.argmax(keep != there))
            self._absent(of, filler, filler + 1, Absent.DAMAGED)
        codes = passing(of.topic, self._store.selection.tags).codes
        if len(codes):
            keep &= np.isin(units["tags_code"].astype(np.int64), codes)
        if not keep.all():
            places, offsets = places[keep], offsets[keep]
        return places, np.full(len(places), self._wanted.number_of((of.topic, of.queue_id)), np.int64), offsets

    def _absent(self, of: QueueSlice, start: int, stop: int, why: Absent) -> None:
        if self._fail_on_data_loss:
            raise CorruptStoreError(
                f"{self._store.uri}: offsets [{start:,}, {stop:,}) of queue {of.queue_id} of {of.topic}: {why.value}; "
                f"failOnDataLoss=false leaves such offsets out{_BY_LOG}"
            )

    # Records

    def _of_segment(self, start: int, listed: _Listed) -> Iterator[Found]:
        try:
            segment = MappedSegment(self._io, self._paths.commit_log / segment_name(start), self._store.segment_size)
        except FileNotFoundError:
            if self._fail_on_data_loss:
                place = f"{self._store.uri}/commitlog/{segment_name(start)}"
                raise CorruptStoreError(
                    f"{place}: {Absent.DELETED.value}, and {len(listed.places):,} messages that were to be read; "
                    "failOnDataLoss=false leaves them out"
                ) from None
            for number in np.unique(listed.numbers).tolist():
                self._miss(self._wanted.table.name(number), listed.offsets[listed.numbers == number].tolist())
            return
        with closing(segment):
            yield from self._selected(segment, start, listed)

    def _selected(self, segment: MappedSegment, start: int, listed: _Listed) -> Iterator[Found]:
        wanted, state = self._wanted, self._state
        view, _first = segment.part(0, segment.size)
        state[AT], state[BASE], state[LIMIT] = 0, start, segment.size
        let_go, reason = 0, FULL
        while reason != REACHED_STOP:
            reason = int(
                kernels.select_listed(
                    view,
                    listed.places,
                    listed.numbers,
                    listed.offsets,
                    wanted.table.bytes_view,
                    wanted.table.cells,
                    wanted.table.slots,
                    wanted.tags,
                    wanted.tag_ends,
                    wanted.keys,
                    wanted.key_ends,
                    self._positions,
                    state,
                )
            )
            if state[FOUND]:
                found = self._positions[: int(state[FOUND])]
                yield Found(view, found)
                if int(found[-1]) - let_go > _LET_GO_BYTES:
                    segment.let_go(let_go, int(found[-1]))
                    let_go = int(found[-1])
            if reason not in (REACHED_STOP, FULL):
                self._damaged(listed, int(state[AT]), reason)
                state[AT] += 1

    def _miss(self, queue: Queue, offsets: Sequence[int]) -> None:
        """Note messages that are there and whose units lead nowhere."""
        if offsets:
            self._missed.setdefault(queue, []).extend(offsets)

    def _damaged(self, listed: _Listed, index: int, reason: int) -> None:
        topic, queue_id = self._wanted.table.name(int(listed.numbers[index]))
        offset, place = int(listed.offsets[index]), int(listed.places[index])
        if self._fail_on_data_loss:
            why = "a record of another place" if reason == kernels.OTHER_PLACE else REASON_NAMES[reason]
            raise CorruptStoreError(
                f"{self._store.uri}: offset {offset:,} of queue {queue_id} of {topic} has no intact record at log "
                f"position {place:,}: {why}; failOnDataLoss=false leaves such ones out{_BY_LOG}"
            )
        self._miss((topic, queue_id), [offset])
