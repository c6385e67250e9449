"""Item by item, where the index differs from the log: items that lead to no such record, records without an item."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.io import StoreIO
from mqproc.kernels import index_verify as kernels
from mqproc.kernels.keyed import KEYS_NAME, UNIQ_KEY_NAME
from mqproc.layout import index_file as layout
from mqproc.store.verify.findings import Finding, Kind
from mqproc.store.verify.index_walk import index_view
from mqproc.store.verify.log_pass import Scanner
from mqproc.store.verify.picture import IndexFile, Picture

# Items of so much log are held at once; a key of theirs takes 31 bits for the hash and the rest for the place.
_WINDOW_BYTES: Final = 1 << 30
_HASH_BITS: Final = 31

# Beside the faults of kernels.index_verify.
_EXPIRED, _BEYOND, _IN_HOLE = 10, 11, 12


@dataclass(frozen=True, slots=True)
class IndexQuestion:
    """What is wrong with the items of [begin, end) of the log, for each of `spans`, which a record or BLANK begins?

    No records are in `faults`; the log is [log_begin, log_end). Missing entries end at `border`, and begin there anew.
    """

    spans: list[tuple[int, int]]
    faults: list[tuple[int, int]]
    log_begin: int
    log_end: int
    border: int | None = None


@dataclass(slots=True)
class MissingEntries:
    """Records without an item: the first and the last of them, how many entries they should have."""

    physical_offset: int
    last_physical_offset: int
    count: int


@dataclass(slots=True)
class IndexAnswered:
    """`last_indexed` is the last record that an item leads to."""

    findings: list[Finding] = field(default_factory=list)
    missing: list[MissingEntries] = field(default_factory=list)
    last_indexed: int = -1


@dataclass(frozen=True, slots=True)
class _Items:
    """A file's items 1…: `offsets` int64[n], `hashes` int64[n], what is wrong with each `faults` uint8[n]."""

    offsets: NDArray[np.int64]
    hashes: NDArray[np.int64]
    faults: NDArray[np.uint8]


class IndexDetails:
    """Answers questions about one picture's index."""

    def __init__(self, io: StoreIO, picture: Picture) -> None:
        self._io = io
        self._picture = picture
        self._slots = picture.inventory.sizes.slots
        self._scanner = Scanner(io, picture)
        self._missing_goes_on = False

    def run(self, question: IndexQuestion) -> IndexAnswered:
        """Look up every item's record, then every record's items."""
        answered = IndexAnswered()
        items = []
        for file in self._picture.index:
            found = self._check_items(file, question)
            answered.findings += self._findings(file, found)
            valid = found.offsets[found.faults == kernels.ITEM_FITS]
            answered.last_indexed = max(answered.last_indexed, int(valid.max(initial=-1)))
            items.append(found)
        for begin, end in question.spans:
            self._look_for(begin, end, question, items, answered)
        self._scanner.views.close()
        return answered

    # Items

    def _check_items(self, file: IndexFile, question: IndexQuestion) -> _Items:
        view = index_view(self._io, self._picture, file)
        if view is None:
            nothing = np.zeros(0, np.int64)
            return _Items(nothing, nothing, nothing.astype(np.uint8))
        count = file.header.count - layout.FIRST_ITEM
        start = layout.item_offset(self._slots, layout.FIRST_ITEM)

        def column(offset: int, kind: str) -> NDArray[np.int64]:
            strided: NDArray[np.int64] = np.ndarray((count,), kind, view.data, start + offset, (layout.ITEM_SIZE,))
            return strided.astype(np.int64)

        offsets, hashes = column(layout.ITEM_PHYSICAL_OFFSET, ">i8"), column(layout.ITEM_KEY_HASH, ">i4")
        faults = np.full(count, kernels.NO_RECORD, np.uint8)
        faults[(offsets >= 0) & (offsets < question.log_begin)] = _EXPIRED
        faults[offsets >= question.log_end] = _BEYOND
        for first, stop in question.faults:
            faults[(offsets >= first) & (offsets < stop)] = _IN_HOLE
        known = faults != kernels.NO_RECORD
        segments = offsets - offsets % self._scanner.views.segment_size
        for base in np.unique(segments[~known]).tolist():
            log = self._scanner.views.view(base)
            if log is not None and base >= 0:
                self._check_in_segment(view, file, np.flatnonzero(~known & (segments == base)), log, base, faults)
        return _Items(offsets, hashes, faults)

    def _check_in_segment(
        self,
        view: NDArray[np.uint8],
        file: IndexFile,
        places: NDArray[np.int64],
        log: NDArray[np.uint8],
        base: int,
        faults: NDArray[np.uint8],
    ) -> None:
        found = np.zeros(len(places), np.uint8)
        items = (places + layout.FIRST_ITEM).astype(np.int64)
        kernels.check_items(view, self._slots, items, file.previous_end_ms, log, base, UNIQ_KEY_NAME, KEYS_NAME, found)
        faults[places] = found

    def _findings(self, file: IndexFile, items: _Items) -> Iterator[Finding]:
        texts = {
            kernels.NO_RECORD: (Kind.ENTRY_WRONG, "no record begins there"),
            kernels.OTHER_KEY: (Kind.ENTRY_WRONG, "the record has no such key"),
            kernels.OTHER_TIME: (Kind.ENTRY_WRONG, "the record was stored at another time"),
            _BEYOND: (Kind.ENTRY_BEYOND_LOG, ""),
            _IN_HOLE: (Kind.ENTRY_IN_HOLE, ""),
        }
        cuts = np.flatnonzero(np.diff(items.faults)) + 1
        starts = [0, *cuts.tolist()] if len(items.faults) else []
        for start, stop in zip(starts, [*starts[1:], len(items.faults)], strict=False):
            fault = int(items.faults[start])
            if fault in (kernels.ITEM_FITS, _EXPIRED):
                continue
            kind, text = texts[fault]
            place = layout.item_offset(self._slots, start + layout.FIRST_ITEM)
            said = f"item {start + layout.FIRST_ITEM:,}" + (f": {text}" if text else "")
            physical_offset = int(items.offsets[start])
            yield Finding(kind, f"index/{file.name}", place, physical_offset, count=stop - start, text=said)

    # Records

    def _look_for(
        self, begin: int, end: int, question: IndexQuestion, items: list[_Items], answered: IndexAnswered
    ) -> None:
        """Note the records of [begin, end) that no item leads to."""
        window = begin
        keys = np.zeros(0, np.int64)
        window_end = begin
        for result in self._scanner.walk(begin, end, question.faults):
            if not result.entries:
                continue
            offsets = result.offsets
            hashes = result.hashes.astype(np.int64)
            if int(offsets[-1]) >= window_end:
                window = int(offsets[0])
                window_end = max(window + _WINDOW_BYTES, int(offsets[-1]) + 1)
                keys = _keys_of(items, window, window_end)
            wanted = (offsets - window) << _HASH_BITS | hashes
            place = np.searchsorted(keys, wanted)
            missing = keys[np.minimum(place, len(keys) - 1)] != wanted if len(keys) else np.ones(len(wanted), bool)
            self._note_missing(offsets, missing, answered.missing, question.border)
        self._missing_goes_on = False

    def _note_missing(
        self, offsets: NDArray[np.int64], missing: NDArray[np.bool_], found: list[MissingEntries], border: int | None
    ) -> None:
        """Add entries that are missing; those without a present one or the border in between as one."""
        cuts = {0, *(np.flatnonzero(np.diff(missing)) + 1).tolist()}
        first_above = len(offsets) if border is None else int(np.searchsorted(offsets, border))
        starts = sorted({*cuts, first_above} - {len(missing)})
        for start, stop in zip(starts, [*starts[1:], len(missing)], strict=True):
            if missing[start] and self._missing_goes_on and not self._is_border(found[-1], int(offsets[start]), border):
                found[-1].last_physical_offset = int(offsets[stop - 1])
                found[-1].count += stop - start
            elif missing[start]:
                found.append(MissingEntries(int(offsets[start]), int(offsets[stop - 1]), stop - start))
            self._missing_goes_on = bool(missing[start])

    @staticmethod
    def _is_border(last: MissingEntries, physical_offset: int, border: int | None) -> bool:
        """Whether the border lies between the last entries that are missing and those of a record behind them."""
        return border is not None and last.physical_offset < border <= physical_offset


def _keys_of(items: list[_Items], start: int, stop: int) -> NDArray[np.int64]:
    """Place and hash in one number of every right item that points into [start, stop): int64[n], sorted."""
    parts = []
    for each in items:
        chosen = (each.faults == kernels.ITEM_FITS) & (each.offsets >= start) & (each.offsets < stop)
        parts.append((each.offsets[chosen] - start) << _HASH_BITS | each.hashes[chosen])
    return np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
