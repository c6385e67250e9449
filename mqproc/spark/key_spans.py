"""Which spans of a log can hold messages with a key: where the index says so, and whatever it does not cover.

Each index file says which part of the log it covers, and has an item for every key there. So the records that its items
point to are looked at, and all of the log before, between and behind the files. Only where topics are named: an item's
hash is that of topic and key. Damage to the files themselves is what `mqproc store verify` finds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from mqproc.io import StoreIO
from mqproc.kernels.gather import TIME_MAX, TIME_MIN
from mqproc.kernels.record_check import record_size
from mqproc.kernels.views import as_kernel_array
from mqproc.layout import index_file, record
from mqproc.paths import StorePaths
from mqproc.spark.options import Selection
from mqproc.spark.stores import Survey
from mqproc.store.damage import merged
from mqproc.store.index_headers import index_file_names, read_header
from mqproc.store.reads.index_query import IndexReader
from mqproc.store.segments import LogSegments

# With more hits than that, reading all of the log is no more work.
_HITS_MAX: Final = 16_384

Span = tuple[int, int]


def key_spans(found: Survey, selection: Selection, low: int, high: int) -> Iterator[Span]:
    """Spans of [low, high) that may hold messages with one of the selection's keys, ascending and apart."""
    topics = selection.topics or tuple(dict.fromkeys(topic for topic, _queue in selection.queues))
    covered = _covered(found, low, high) if topics else []
    hits = _hits(found, topics, selection.keys) if covered else []
    if not covered or hits is None:
        yield low, high
        return
    inside = [hit for hit in hits if low <= hit < high and any(start <= hit < stop for start, stop in covered)]
    yield from merged([*_uncovered(covered, low, high), *_records(found, inside)])


def _covered(found: Survey, low: int, high: int) -> list[Span]:
    """What of the log the index files cover, by their headers; nothing when these contradict the log or each other."""
    assert found.reader is not None
    io, paths = StoreIO(), StorePaths(found.reader.paths.root)
    covered: list[Span] = []
    for name in index_file_names(io, paths.index):
        fd = io.open(paths.index / name)
        try:
            size = io.size(fd)
            # A file without a whole header covers nothing; of no bytes there is no map.
            header = read_header(as_kernel_array(io.map(fd, size))) if size >= index_file.HEADER_SIZE else None
        finally:
            io.close(fd)
        if header is None or header.count <= 1:
            continue
        covered.append((header.begin_physical_offset, header.end_physical_offset))
    borders = [border for span in covered for border in span]
    if borders != sorted(borders) or (borders and borders[-1] >= high + found.segment_size):
        return []
    return [(max(start, low), min(stop, high)) for start, stop in covered if start < high and stop > low]


def _uncovered(covered: list[Span], low: int, high: int) -> Iterator[Span]:
    """The rest of [low, high). A file may still be filled with what its last record has: that one counts as not."""
    at = low
    for start, stop in covered:
        if at < start:
            yield at, start
        at = stop
    if at < high:
        yield at, high


def _hits(found: Survey, topics: tuple[str, ...], keys: tuple[str, ...]) -> list[int] | None:
    """Log positions that the index has for the keys of the topics; None when there are too many."""
    assert found.reader is not None
    options = found.reader.options
    index = IndexReader(
        StoreIO(), found.reader.paths.index, options.max_hash_slot_num, options.max_index_num, _HITS_MAX
    )
    hits: set[int] = set()
    with contextlib.closing(index):
        index.refresh(0)
        for topic in topics:
            for key in keys:
                offsets = index.query_offset(topic, key, _HITS_MAX, TIME_MIN, TIME_MAX).offsets
                hits.update(offsets)
                # A message is hit once for each of its keys of that hash: fewer messages may be all that had room.
                if index.passed_over or max(len(offsets), len(hits)) >= _HITS_MAX:
                    return None
    return sorted(hits)


def _records(found: Survey, positions: list[int]) -> Iterator[Span]:
    """The span of each record; of a damaged one its first bytes, so that whoever reads it meets the damage."""
    assert found.reader is not None
    log = LogSegments(StoreIO(), found.reader.paths.commit_log, found.segment_size, whole=False, still=True)
    sizes = {segment.start: min(segment.size, segment.limit) for segment in found.segments}
    for position in positions:
        base = log.start_of(position)
        size = record.BLANK_SIZE
        if sizes.get(base, 0) > position - base:
            size = max(size, int(record_size(log.view(base), position - base, sizes[base])))
            log.touched(position, size)
        yield position, position + size
    log.close()
