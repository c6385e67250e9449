"""Verification of the index: each file by itself, and its items against the log.

`LogPass` compares items with the log's entries while it walks the log. `IndexPass` checks header, order, slots and
links of a file. `IndexFindings` evaluates both; where the walk found a difference, `ItemComparison` looks up the record
of each item and the items of each record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.io.store_io import StoreIO, read_through
from mqproc.kernels import index_verify as kernels
from mqproc.kernels.jit.intrinsics import load_be32, load_be64
from mqproc.kernels.record_check import stored_at_ms
from mqproc.layout import index_file
from mqproc.store.verify.findings import Finding, FindingKind
from mqproc.store.verify.log import LogScanner, LogShare, SegmentViews, WholeLog, index_view, is_required
from mqproc.store.verify.queues import RunQueries
from mqproc.store.verify.snapshot import IndexFile, Snapshot


@dataclass(slots=True)
class IndexFileResult:
    """Findings about one file, and whether its items are in log order."""

    name: str
    findings: list[Finding]
    ascends: bool


class IndexPass:
    """Checks index files, one after the other."""

    def __init__(self, io: StoreIO, snapshot: Snapshot, advance: Callable[[int], None]) -> None:
        self._io = io
        self._snapshot = snapshot
        self._advance = advance
        self._slots = snapshot.inventory.sizes.slots
        self._heads = np.zeros(self._slots, np.int32)
        self._out = np.zeros(kernels.CHAINS_SIZE, np.int64)
        self._views = SegmentViews(io, snapshot.inventory)

    def close(self) -> None:
        """Close the segments."""
        self._views.close()

    def run(self, file: IndexFile) -> IndexFileResult:
        """Check one file."""
        found = IndexFileResult(file.name, [], True)
        with contextlib.suppress(FileNotFoundError):
            read_through(self._io, self._snapshot.inventory.paths.index / file.name)
        view = index_view(self._io, self._snapshot, file)
        if view is None:
            return found
        self._heads[:] = 0
        kernels.check_chains(view, self._slots, file.header.count, self._heads, self._out)
        out: list[int] = self._out.tolist()
        found.ascends = not out[kernels.DESCENTS]
        for kind, item, count, text in (
            (FindingKind.INDEX_ORDER, out[kernels.FIRST_DESCENT], out[kernels.DESCENTS], ""),
            (FindingKind.INDEX_LINK, out[kernels.FIRST_BAD_LINK], out[kernels.BAD_LINKS],
             "its link does not point to the previous item of its chain"),
        ):  # fmt: skip
            if count:
                place, offset = index_file.item_offset(self._slots, item), self._offset_of(view, item)
                text = f"item {item:,}: {text}"
                found.findings.append(Finding(kind, f"index/{file.name}", place, offset, count=count, text=text))
        if out[kernels.BAD_SLOTS]:
            slot = out[kernels.FIRST_BAD_SLOT]
            place = index_file.HEADER_SIZE + index_file.SLOT_SIZE * slot
            text = f"slot {slot:,} does not point to its newest item"
            found.findings.append(
                Finding(FindingKind.INDEX_LINK, f"index/{file.name}", place, count=out[kernels.BAD_SLOTS], text=text)
            )
        found.findings += self._header(file, view, out[kernels.SLOTS_USED])
        self._advance(index_file.item_offset(self._slots, file.header.count))
        return found

    def _header(self, file: IndexFile, view: NDArray[np.uint8], used: int) -> list[Finding]:
        """Findings about a header that contradicts the items, except in the file being filled."""
        header = file.header
        stored_count = load_be32(view, index_file.ITEM_COUNT)
        if stored_count > self._snapshot.inventory.sizes.items or stored_count < 0:
            text = f"count is {stored_count:,}; the file has room for {self._snapshot.inventory.sizes.items:,} items"
            return [Finding(FindingKind.INDEX_HEADER, f"index/{file.name}", index_file.ITEM_COUNT, text=text)]
        if header.count == index_file.FIRST_ITEM or self._is_filled(file):
            return []
        begin, end = (self._offset_of(view, item) for item in (index_file.FIRST_ITEM, header.count - 1))
        words = [
            ("begin offset", index_file.BEGIN_PHYSICAL_OFFSET, header.begin_physical_offset, begin),
            ("end offset", index_file.END_PHYSICAL_OFFSET, header.end_physical_offset, end),
            ("begin time", index_file.BEGIN_TIMESTAMP, header.begin_timestamp_ms, self._stored_at_ms(begin)),
            ("end time", index_file.END_TIMESTAMP, header.end_timestamp_ms, self._stored_at_ms(end)),
            ("slots used", index_file.SLOT_COUNT, header.slots_used, used),
        ]
        return [
            Finding(
                FindingKind.INDEX_HEADER,
                f"index/{file.name}",
                place,
                text=f"{name} is {stored}; the items say {actual}",
            )
            for name, place, stored, actual in words
            if actual is not None and stored != actual
        ]

    def _offset_of(self, view: NDArray[np.uint8], item: int) -> int:
        return load_be64(view, index_file.item_offset(self._slots, item) + index_file.ITEM_PHYSICAL_OFFSET)

    def _stored_at_ms(self, physical_offset: int) -> int | None:
        """Store time of the record at a log offset; None if no record begins there."""
        base = self._views.start_of(physical_offset)
        view = self._views.view(base)
        if view is None:
            return None
        found = int(stored_at_ms(view, physical_offset - base, len(view), physical_offset))
        return found if found >= 0 else None

    def _is_filled(self, file: IndexFile) -> bool:
        return self._snapshot.positions.running and file.name == self._snapshot.inventory.index[-1]


# Comparison item by item


# Log range whose items are held at once. Their sort keys use 31 bits for the hash and the rest for the position.
_WINDOW_BYTES: Final = 1 << 30
_HASH_BITS: Final = 31

# Values beyond the faults of mqproc.kernels.index_verify.
_EXPIRED, _BEYOND, _IN_HOLE = 10, 11, 12
_KINDS: Final = {
    kernels.NO_RECORD: (FindingKind.ENTRY_WRONG, "no record begins there"),
    kernels.OTHER_KEY: (FindingKind.ENTRY_WRONG, "the record has no such key"),
    kernels.OTHER_TIME: (FindingKind.ENTRY_WRONG, "the record was stored at another time"),
    _BEYOND: (FindingKind.ENTRY_BEYOND_LOG, ""),
    _IN_HOLE: (FindingKind.ENTRY_IN_HOLE, ""),
}


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """Check the items of `spans` of the log, each of which begins at a record or BLANK.

    `faults` contain no records; the log is [log_begin, log_end). Ranges of missing entries are split at `border`.
    """

    spans: list[tuple[int, int]]
    faults: list[tuple[int, int]]
    log_begin: int
    log_end: int
    border: int | None = None


@dataclass(slots=True)
class MissingEntries:
    """Records without an item: the first and the last one, and the number of their entries."""

    physical_offset: int
    last_physical_offset: int
    count: int


@dataclass(slots=True)
class ItemAnswer:
    """Answer to an IndexQuery. `last_indexed` is the last record with an item."""

    findings: list[Finding] = field(default_factory=list)
    missing: list[MissingEntries] = field(default_factory=list)
    last_indexed: int = -1


@dataclass(frozen=True, slots=True)
class _Items:
    """Items 1… of a file: `offsets` int64[n], `hashes` int64[n], `faults` uint8[n]."""

    offsets: NDArray[np.int64]
    hashes: NDArray[np.int64]
    faults: NDArray[np.uint8]


class ItemComparison:
    """Answers queries about the index of one snapshot."""

    def __init__(self, io: StoreIO, snapshot: Snapshot) -> None:
        self._io = io
        self._snapshot = snapshot
        self._slots = snapshot.inventory.sizes.slots
        self._scanner = LogScanner(io, snapshot)
        self._continues_missing = False

    def run(self, query: IndexQuery) -> ItemAnswer:
        """Look up the record of every item, then the items of every record."""
        answer = ItemAnswer()
        items = []
        for file in self._snapshot.index:
            found = self._check_items(file, query)
            answer.findings += self._findings(file, found)
            valid = found.offsets[found.faults == kernels.ITEM_FITS]
            answer.last_indexed = max(answer.last_indexed, int(valid.max(initial=-1)))
            items.append(found)
        for begin, end in query.spans:
            self._find_missing(begin, end, query, items, answer)
        self._scanner.views.close()
        return answer

    # Items

    def _check_items(self, file: IndexFile, query: IndexQuery) -> _Items:
        view = index_view(self._io, self._snapshot, file)
        if view is None:
            return _Items(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint8))
        count = file.header.count - index_file.FIRST_ITEM
        start = index_file.item_offset(self._slots, index_file.FIRST_ITEM)

        def column(offset: int, kind: str) -> NDArray[np.int64]:
            strided: NDArray[np.int64] = np.ndarray((count,), kind, view.data, start + offset, (index_file.ITEM_SIZE,))
            return strided.astype(np.int64)

        offsets, hashes = column(index_file.ITEM_PHYSICAL_OFFSET, ">i8"), column(index_file.ITEM_KEY_HASH, ">i4")
        faults = np.full(count, kernels.NO_RECORD, np.uint8)
        faults[(offsets >= 0) & (offsets < query.log_begin)] = _EXPIRED
        faults[offsets >= query.log_end] = _BEYOND
        for first, stop in query.faults:
            faults[(offsets >= first) & (offsets < stop)] = _IN_HOLE
        known = faults != kernels.NO_RECORD
        segments = offsets - offsets % self._scanner.views.segment_size
        for base in np.unique(segments[~known]).tolist():
            log = self._scanner.views.view(base)
            if log is not None and base >= 0:
                places = np.flatnonzero(~known & (segments == base))
                found = np.zeros(len(places), np.uint8)
                items = (places + index_file.FIRST_ITEM).astype(np.int64)
                kernels.check_items(view, self._slots, items, file.previous_end_ms, log, base, found)
                faults[places] = found
        return _Items(offsets, hashes, faults)

    def _findings(self, file: IndexFile, items: _Items) -> Iterator[Finding]:
        cuts = np.flatnonzero(np.diff(items.faults)) + 1
        starts = [0, *cuts.tolist()] if len(items.faults) else []
        for start, stop in zip(starts, [*starts[1:], len(items.faults)], strict=False):
            fault = int(items.faults[start])
            if fault in (kernels.ITEM_FITS, _EXPIRED):
                continue
            kind, text = _KINDS[fault]
            place = index_file.item_offset(self._slots, start + index_file.FIRST_ITEM)
            text = f"item {start + index_file.FIRST_ITEM:,}" + (f": {text}" if text else "")
            physical_offset = int(items.offsets[start])
            yield Finding(kind, f"index/{file.name}", place, physical_offset, count=stop - start, text=text)

    # Records

    def _find_missing(self, begin: int, end: int, query: IndexQuery, items: list[_Items], answer: ItemAnswer) -> None:
        """Collect the records of [begin, end) without an item."""
        window = window_end = begin
        keys = np.zeros(0, np.int64)
        for result in self._scanner.walk(begin, end, query.faults):
            required = is_required(result.hashes)
            offsets = result.offsets[required]
            hashes = result.hashes[required].astype(np.int64)
            if not len(offsets):
                continue
            if int(offsets[-1]) >= window_end:
                window = int(offsets[0])
                window_end = max(window + _WINDOW_BYTES, int(offsets[-1]) + 1)
                keys = _keys_of(items, window, window_end)
            implied = (offsets - window) << _HASH_BITS | hashes
            place = np.searchsorted(keys, implied)
            missing = keys[np.minimum(place, len(keys) - 1)] != implied if len(keys) else np.ones(len(implied), bool)
            self._add_missing(offsets, missing, answer.missing, query.border)
        self._continues_missing = False

    def _add_missing(
        self, offsets: NDArray[np.int64], missing: NDArray[np.bool_], found: list[MissingEntries], border: int | None
    ) -> None:
        """Collect missing entries; consecutive entries form one range, split at the border."""
        cuts = {0, *(np.flatnonzero(np.diff(missing)) + 1).tolist()}
        first_above = len(offsets) if border is None else int(np.searchsorted(offsets, border))
        starts = sorted({*cuts, first_above} - {len(missing)})
        for start, stop in zip(starts, [*starts[1:], len(missing)], strict=True):
            physical_offset = int(offsets[start])
            if (
                missing[start]
                and self._continues_missing
                and (border is None or not found[-1].last_physical_offset < border <= physical_offset)
            ):
                found[-1].last_physical_offset = int(offsets[stop - 1])
                found[-1].count += stop - start
            elif missing[start]:
                found.append(MissingEntries(physical_offset, int(offsets[stop - 1]), stop - start))
            self._continues_missing = bool(missing[start])


def _keys_of(items: list[_Items], start: int, stop: int) -> NDArray[np.int64]:
    """Sorted keys of position and hash of correct items that point into [start, stop): int64[n]."""
    parts = []
    for each in items:
        chosen = (each.faults == kernels.ITEM_FITS) & (each.offsets >= start) & (each.offsets < stop)
        parts.append((each.offsets[chosen] - start) << _HASH_BITS | each.hashes[chosen])
    return np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.int64)


# Findings


class IndexFindings:
    """Findings about the index of one snapshot."""

    def __init__(
        self,
        snapshot: Snapshot,
        log: WholeLog,
        shares: Sequence[LogShare],
        *,
        may_lag: bool,
        restart_from: int | None,
    ) -> None:
        """Parameters as in QueueFindings."""
        self._snapshot = snapshot
        self._log = log
        self._shares = shares
        self._may_lag = may_lag
        self._restart_from = restart_from

    def run(self, checked: Iterable[IndexFileResult], run_queries: RunQueries) -> list[Finding]:
        """Return all findings about the index."""
        if not self._snapshot.index:
            return list(self._missing_index())
        checked = list(checked)
        findings = [*self._expired_files(), *self._misordered_files()]
        findings += [finding for file in checked for finding in file.findings]
        spans = [
            (begin, found.end)
            for found in self._shares
            if found.share.compared and not found.index_fits and (begin := found.begin) is not None
        ]
        if spans or self._leads_beyond() or not all(file.ascends for file in checked):
            end = 1 << 62 if self._snapshot.positions.running else self._log.end
            query = IndexQuery(spans, self._log.fault_ranges, self._log.begin, end, self._restart_from)
            for _query, answer in run_queries([query]):
                findings += self._answer_findings(answer)
        return findings

    def _missing_index(self) -> Iterable[Finding]:
        if self._log.entries:
            begin, count = self._log.begin, self._log.entries
            kind = FindingKind.NOT_INDEXED if self._restart_from == begin else FindingKind.INDEX_MISSING
            yield Finding(kind, "index", physical_offset=begin, count=count, text="no index file")

    def _expired_files(self) -> Iterable[Finding]:
        for file in self._snapshot.index:
            end = file.header.end_physical_offset
            if file.header.count > index_file.FIRST_ITEM and end < self._log.begin:
                count = file.header.count - index_file.FIRST_ITEM
                yield Finding(FindingKind.ENTRY_EXPIRED, f"index/{file.name}", index_file.HEADER_SIZE, end, count=count)

    def _misordered_files(self) -> Iterable[Finding]:
        """Files that begin before an earlier one ends: searches by key and time stop too early."""
        reached = 0
        # The newest header of a running group may have been read during an update.
        for file in self._snapshot.index[:-1] if self._snapshot.positions.running else self._snapshot.index:
            header = file.header
            if header.count == index_file.FIRST_ITEM:
                continue
            if header.begin_physical_offset < reached:
                place = index_file.item_offset(self._snapshot.inventory.sizes.slots, index_file.FIRST_ITEM)
                text = f"item 1: an earlier file ends with the record at {reached:,}"
                offset = header.begin_physical_offset
                yield Finding(FindingKind.INDEX_ORDER, f"index/{file.name}", place, offset, text=text)
            reached = max(reached, header.end_physical_offset)

    def _leads_beyond(self) -> bool:
        """Whether a header points beyond the end of the log."""
        running = self._snapshot.positions.running
        return not running and any(
            file.header.count > index_file.FIRST_ITEM and file.header.end_physical_offset >= self._log.end
            for file in self._snapshot.index
        )

    def _answer_findings(self, answer: ItemAnswer) -> Iterable[Finding]:
        yield from answer.findings
        for missing in answer.missing:
            pending = self._is_pending(missing, answer.last_indexed)
            kind = FindingKind.NOT_INDEXED if pending else FindingKind.ENTRY_MISSING
            first, text = missing.physical_offset, f"of records up to {missing.last_physical_offset:,}"
            # The file whose range contains the record; the newest one for later records.
            files = (file for file in self._snapshot.index if first <= file.header.end_physical_offset)
            name = next(files, self._snapshot.index[-1]).name
            yield Finding(kind, f"index/{name}", physical_offset=first, count=missing.count, text=text)

    def _is_pending(self, missing: MissingEntries, last_indexed: int) -> bool:
        """Whether these entries may be missing because the store was not closed properly."""
        if self._restart_from is not None:
            return missing.physical_offset >= self._restart_from
        return self._may_lag and 0 <= last_indexed < missing.physical_offset
