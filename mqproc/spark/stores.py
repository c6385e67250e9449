"""Which stores a path means, and what of each one there is to read at this moment.

    path, pattern, list, URL ──▶ uris ──▶ Survey: segments, ends, queues, what was deleted

A store in a folder is looked at by `StoreReader`: of one that runs, positions are those that its group has published.
Of one on remote storage only the segments are looked at; its log ends where its records do.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from mqproc.errors import BadRequestError, StoreNotFoundError
from mqproc.io import StoreIO
from mqproc.kernels import scan
from mqproc.kernels.record_check import BAD_MAGIC, BAD_OFFSET, BLANK, REACHED_STOP, REASON_NAMES
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.paths import StorePaths, segment_start
from mqproc.spark.options import Queue, without_scheme
from mqproc.spark.segment_bytes import is_archive, remote, telling, within
from mqproc.store.consume_queue import as_units
from mqproc.store.existing import not_a_store
from mqproc.store.marks import DurableMark
from mqproc.store.reads.reader import StoreReader
from mqproc.store.recovery.resync import Resync
from mqproc.store.segments import LogSegments
from mqproc.store.verify.deletions import read_deleted

_WILD: Final = frozenset("*?[")
_LOG: Final = "commitlog"
# Fetched from remote storage in one request anyway.
_UNWRITTEN_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Segment:
    """A CommitLog file: where it begins in the log, its length, and where the log ends in it."""

    start: int
    size: int
    limit: int


@dataclass(slots=True)
class Survey:
    """One store at one moment. `begin` and `end` are log positions; `end` None: where the records end."""

    uri: str
    segment_size: int
    begin: int
    end: int | None
    segments: list[Segment]
    deleted: Mapping[Queue, tuple[int, int]] = field(default_factory=dict)
    reader: StoreReader | None = None
    """For questions about queues, index and times; None on remote storage."""
    trouble: str = ""
    """What is wrong with the store already now; "" when nothing is known to be."""
    archived: bool = False
    """Whether a segment is unpacked from its begin by each task that has some of it."""

    def close(self) -> None:
        """Let go of files."""
        if self.reader is not None:
            self.reader.close()


def find_stores(paths: Iterable[str]) -> list[str]:
    """The stores that paths, patterns and URLs mean, each once. Raises StoreNotFoundError when one means none.

    A store has the name that was given, even one that could be a pattern. Of several names of one folder, that of the
    folder itself, else the first.
    """
    named: dict[str, str] = {}
    for path in paths:
        path = without_scheme(path)
        for store in _remote_stores(path) if "://" in path else _local_stores(path):
            folder = store if "://" in store else os.path.realpath(store)
            if folder not in named or store == folder:
                named[folder] = store
    return list(named.values())


def _local_stores(path: str) -> list[str]:
    if not _WILD & set(path) or os.path.isdir(os.path.join(path, "commitlog")):
        return [str(Path(path).absolute())]
    stores = [each for each in sorted(glob.glob(path)) if (Path(each) / "commitlog").is_dir()]
    if not stores:
        raise StoreNotFoundError(f"{path}: no store there: no folder that it matches has a folder commitlog")
    return [str(Path(each).absolute()) for each in stores]


def _remote_stores(url: str) -> list[str]:
    if not _WILD & set(url):
        return [url.rstrip("/")]
    with telling(url):
        files, pattern = remote(url)
        if files.isdir(within(pattern, _LOG)):
            return [url.rstrip("/")]
        stores = [each for each in sorted(files.glob(pattern)) if files.isdir(within(each, _LOG))]
    if not stores:
        raise StoreNotFoundError(f"{url}: no store there: no folder that it matches has a folder commitlog")
    scheme, _, place = url.partition("://")
    # Behind the path in an archive comes where that is: zip://stores/*::s3://bucket/stores.zip
    _, *around = place.partition("::")
    return [f"{scheme}://{each}{''.join(around)}" for each in stores]


def survey(uri: str) -> Survey:
    """Look at a store. Raises StoreAccessError when there is none, CorruptStoreError when it cannot be read."""
    if "://" not in uri:
        return _survey_folder(uri)
    with telling(uri):
        return _survey_remote(uri)


def _survey_folder(uri: str) -> Survey:
    io, paths = StoreIO(), StorePaths(Path(uri))
    reader = StoreReader(paths.root, whole=False)
    visible = reader.visible
    size = reader.options.mapped_file_size_commit_log
    log = LogSegments(io, paths.commit_log, size, whole=False, still=True)
    end, trouble = visible.end, ""
    if not reader.running:
        if not _was_closed_at(io, paths, log, end):
            end, trouble = _behind_the_end(log, end)
        trouble = _short(log) or trouble or _without_records(reader, end) or _below_a_mark(io, paths, log, end)
    segments = _segments(log, visible.begin, end)
    # What retention has deleted meanwhile is not missing.
    begin = reader.visible.begin
    trouble = _missing(segments, begin, end, size) or trouble
    log.close()
    deleted = read_deleted(io, paths, running=reader.running)
    return Survey(uri, size, begin, end, segments, deleted, reader, trouble)


def _segments(log: LogSegments, begin: int, end: int) -> list[Segment]:
    """The segments that have some of [begin, end), but for those that are deleted at this moment."""
    segments = []
    for start in log.starts():
        limit = min(log.segment_size, end - start)
        if start + log.segment_size > begin and limit > 0:
            with suppress(FileNotFoundError):
                segments.append(Segment(start, log.io.size_of(log.path(start)), limit))
    return segments


def _short(log: LogSegments) -> str:
    """The first segment that is not as long as segments are."""
    for start in log.starts():
        length = log.io.size_of(log.path(start))
        if length < log.segment_size:
            return f"segment {start:020d} has {length:,} bytes; a segment has {log.segment_size:,}"
    return ""


def _missing(segments: list[Segment], begin: int, end: int, size: int) -> str:
    """The first segment between begin and end that is not there."""
    there = {segment.start for segment in segments}
    for start in range(begin - begin % size, end, size):
        if start not in there:
            return f"segment {start:020d} is missing"
    return ""


def _was_closed_at(io: StoreIO, paths: StorePaths, log: LogSegments, end: int) -> bool:
    """Whether the store was stopped in order with its log made durable up to `end`: nothing was written behind it."""
    return not io.exists(paths.abort) and DurableMark(io, paths.mark("commitlog"), log).stands_at(end)


def _behind_the_end(log: LogSegments, end: int) -> tuple[int, str]:
    """Where the last intact record of a stopped store ends, and what is wrong when that is not `end`.

    With its queues lost, a log seems to end at the first damage.
    """
    starts = log.starts()
    limit = starts[-1] + log.segment_size if starts else 0
    resync = Resync(log)
    reason, stopped = _walk(log, end) if end < limit else (REACHED_STOP, end)
    last, trouble = end, ""
    while stopped < limit:
        # Zeros may be a sector that was lost as well as space that was never written.
        is_whole = reason in (BLANK, REACHED_STOP)
        following = resync.next_record(log.start_of(stopped) + log.segment_size if is_whole else stopped + 1, limit)
        if following is None:
            break
        trouble = trouble or f"the log ends at {end:,} ({REASON_NAMES[reason]}), but at {following:,} is a record"
        reason, stopped = _walk(log, following)
        last = stopped
    if starts and last == starts[0] and reason in (BAD_MAGIC, BAD_OFFSET):
        # What a kill leaves behind the last record, or of the very first, begins as a record of this place does.
        trouble = f"the log has no intact record, and does not begin as one ({REASON_NAMES[reason]})"
    return last, trouble


def _walk(log: LogSegments, position: int) -> tuple[int, int]:
    """(why, where) whole records end, within the segment of a position."""
    base = log.start_of(position)
    if not log.io.exists(log.path(base)):
        return REACHED_STOP, position
    out = np.zeros(scan.SCAN_SIZE, np.int64)
    reason = int(scan.scan_records(log.view(base), position - base, log.segment_size, base, 0, out))
    return reason, base + int(out[scan.STOPPED_AT])


def _without_records(reader: StoreReader, end: int) -> str:
    """A queue of a stopped store whose last unit has its record behind the log's end, where none is."""
    for queue in reader.queues():
        if queue.min_offset >= queue.max_offset:
            continue
        last = queue.max_offset - 1
        unit = as_units(reader.reading.files.read_units(queue.topic, queue.queue_id, last, 1))[0]
        if int(unit["size"]) != FILLER_SIZE and int(unit["physical_offset"]) >= end:
            place = f"offset {last:,} of queue {queue.queue_id} of {queue.topic}"
            return f"the log ends at {end:,}, but {place} has its record at {int(unit['physical_offset']):,}"
    return ""


def _below_a_mark(io: StoreIO, paths: StorePaths, log: LogSegments, end: int) -> str:
    """A durable mark of a stopped store that knows of records behind the log's end."""
    for name in ("commitlog", "consumequeue"):
        mark = DurableMark(io, paths.mark(name), log).mark
        if mark is not None and mark.offset > end:
            return f"the log ends at {end:,}, but mqproc/marks/{name} knows it up to {mark.offset:,}"
    return ""


def _survey_remote(uri: str) -> Survey:
    files, root = remote(uri)
    if not files.isdir(within(root, _LOG)):
        raise not_a_store(uri)
    found: dict[int, int] = {}
    for entry in files.ls(within(root, _LOG), detail=True):
        start = segment_start(str(entry["name"]).rsplit("/", 1)[-1])
        if start is not None and entry["type"] == "file" and entry["size"]:
            found[start] = int(entry["size"])
    if not found:
        return Survey(uri, 1 << 30, 0, None, [])
    size = _segment_size(uri, found)
    while len(found) > 1 and _is_unwritten(files, root, max(found)):
        del found[max(found)]
    segments = [Segment(start, length, size) for start, length in sorted(found.items())]
    begin = segments[0].start
    trouble = _missing(segments, begin, segments[-1].start + size, size)
    return Survey(uri, size, begin, None, segments, trouble=trouble, archived=is_archive(files))


def _segment_size(uri: str, found: Mapping[int, int]) -> int:
    """What all segments but the last must be long, and what their names are multiples of."""
    sizes = {length for start, length in found.items() if start != max(found)} or {found[max(found)]}
    if len(sizes) != 1:
        raise BadRequestError(f"{uri}: segments of {len(sizes)} sizes: {', '.join(map(str, sorted(sizes)))}")
    return sizes.pop()


def _is_unwritten(files: Any, root: str, start: int) -> bool:
    """Whether a segment was only made ready: it begins with more zeros than a record that is lost would leave."""
    return not any(files.cat_file(within(root, f"{_LOG}/{start:020d}"), start=0, end=_UNWRITTEN_BYTES))
