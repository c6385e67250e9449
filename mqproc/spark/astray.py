"""Messages that a slice has and its units do not lead to, of damage that is passed over: looked for in the log.

    units of a queue   … 4 ──▶ a        5 ──▶ nowhere        6 ──▶ b …
    log                   a ─────── here 5 must be, if at all ─────── b

Positions ascend with offsets in each queue, so what lies between two offsets lies between their records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.io import StoreIO
from mqproc.paths import StorePaths, segment_name, segment_start
from mqproc.spark.options import EARLIEST, LATEST, TIME_MAX, Offsets, Queue
from mqproc.spark.ranges import LogRange, StoreSelection
from mqproc.spark.reading import Found, RangeReader, Verify, place_of
from mqproc.spark.segment_bytes import MappedSegment
from mqproc.spark.wanted import Wanted
from mqproc.store.consume_queue import ConsumeQueueFiles, as_units

Words = NDArray[np.int64]
_NOWHERE: Final = TIME_MAX


class Astray:
    """Looks for the messages of one store's queues whose units do not lead to them."""

    def __init__(self, store: StoreSelection, *, batch_rows: int, batch_bytes: int, verify: Verify) -> None:
        self._store = store
        self._paths = StorePaths(Path(store.uri))
        self._io = StoreIO()
        self._batch_rows = batch_rows
        self._batch_bytes = batch_bytes
        self._verify = verify

    def records(self, queue: Queue, missed: Words, offsets: Words, places: Words) -> Iterator[Found]:
        """The wanted ones of the messages `missed` of a queue; at `offsets`, none of these, records are at `places`."""
        missed, order = np.unique(missed), np.argsort(offsets)
        offsets, places = offsets[order], places[order]
        for run in np.split(missed, np.flatnonzero(np.diff(missed) != 1) + 1):
            first, last = int(run[0]), int(run[-1])
            before, behind = int(np.searchsorted(offsets, first)) - 1, int(np.searchsorted(offsets, last))
            low = int(places[before]) if before >= 0 else self._place(queue, first - 1, 0)
            high = int(places[behind]) if behind < len(places) else self._place(queue, last + 1, _NOWHERE)
            yield from self._between(low, high, queue, first, last + 1)

    def _place(self, queue: Queue, offset: int, otherwise: int) -> int:
        """Where the unit of a message says that it lies, for a neighbour that belongs to another slice."""
        files = ConsumeQueueFiles(self._io, self._paths.consume_queue, self._store.queue_file_bytes)
        with closing(files):
            try:
                units = as_units(files.read_units(*queue, offset, 1)) if offset >= 0 else as_units(b"")
            except FileNotFoundError:
                return otherwise
        return int(units["physical_offset"][0]) if len(units) and units["size"][0] > 0 else otherwise

    def _between(self, low: int, high: int, queue: Queue, first: int, stop: int) -> Iterator[Found]:
        """The wanted records in [low, high) of the log that are messages [first, stop) of a queue."""
        selection = dataclasses.replace(
            self._store.selection,
            queues=(queue,),
            starting=Offsets(EARLIEST, {queue: first}),
            ending=Offsets(LATEST, {queue: stop}),
        )
        reader = RangeReader(
            Wanted(selection, self._store.deleted),
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
            of = LogRange(start, begin, end, size, size, exact_start=not begin, exact_stop=True, open_end=True)
            try:
                segment = MappedSegment(self._io, self._paths.commit_log / segment_name(start), size)
            except FileNotFoundError:
                continue
            with closing(segment):
                yield from reader.records(segment, of, place_of(self._store.uri, of))

    def _segments(self) -> list[int]:
        starts = (segment_start(name) for name in self._io.names(self._paths.commit_log))
        return sorted(start for start in starts if start is not None)
