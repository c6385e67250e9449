"""Find the stores at a path, and survey segments, log end, queues and damage of each.

    path, pattern, list, URL ──▶ uris ──▶ StoreSurvey

A store in a folder is read through `StoreReader`; a running group has published its positions. Of a store on remote
storage only segments are read, and its log ends after its last record.
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
from mqproc.io.store_io import StoreIO
from mqproc.kernels import scan
from mqproc.kernels.record_check import BAD_MAGIC, BAD_OFFSET, BLANK, REACHED_STOP, REASON_NAMES
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.paths import StorePaths, segment_start
from mqproc.spark.options import Queue, without_scheme
from mqproc.spark.segment_bytes import is_archive, join_path, open_file_system, storage_errors
from mqproc.store.access import not_a_store
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.durable_marks import DurableMark
from mqproc.store.read.reader import StoreReader
from mqproc.store.recovery.log import Resync
from mqproc.store.verify.snapshot import read_deleted

_WILD: Final = frozenset("*?[")
_LOG: Final = "commitlog"
# Remote storage returns at least this much a request.
_UNWRITTEN_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Segment:
    """A CommitLog file: its start in the log, its length, and where the log ends in it."""

    start: int
    size: int
    limit: int


@dataclass(slots=True)
class StoreSurvey:
    """One store at one moment. `end` is None when only the records show the log's end."""

    uri: str
    segment_size: int
    begin: int
    end: int | None
    segments: list[Segment]
    deleted: Mapping[Queue, tuple[int, int]] = field(default_factory=dict)
    reader: StoreReader | None = None
    """Reads queues, index and times; None on remote storage."""
    damage: str = ""
    """Damage that is known before the read; "" for none."""
    archived: bool = False
    """Whether each task must decompress a segment from its start on."""

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()


def find_stores(paths: Iterable[str]) -> list[str]:
    """The stores that paths, patterns and URLs name, each once.

    A store's own name wins over a pattern. If a folder has several names, its real path is used, else the first name.
    Raises StoreNotFoundError when one names no store.
    """
    named: dict[str, str] = {}
    for path in paths:
        path = without_scheme(path)
        stores = _remote_stores(path) if "://" in path else _local_stores(path)
        if not stores:
            raise StoreNotFoundError(f"{path}: no store: no matching folder contains a folder commitlog")
        for store in stores:
            folder = store if "://" in store else os.path.realpath(store)
            if folder not in named or store == folder:
                named[folder] = store
    return list(named.values())


def _local_stores(path: str) -> list[str]:
    is_one = not _WILD & set(path) or os.path.isdir(os.path.join(path, _LOG))
    stores = [path] if is_one else [each for each in sorted(glob.glob(path)) if (Path(each) / _LOG).is_dir()]
    return [str(Path(each).absolute()) for each in stores]


def _remote_stores(url: str) -> list[str]:
    if not _WILD & set(url):
        return [url.rstrip("/")]
    with storage_errors(url):
        files, pattern = open_file_system(url)
        if files.isdir(join_path(pattern, _LOG)):
            return [url.rstrip("/")]
        stores = [each for each in sorted(files.glob(pattern)) if files.isdir(join_path(each, _LOG))]
    scheme, _, place = url.partition("://")
    # The location of an archive follows the path in it: zip://stores/*::s3://bucket/stores.zip
    _, *around = place.partition("::")
    return [f"{scheme}://{each}{''.join(around)}" for each in stores]


def survey_store(uri: str) -> StoreSurvey:
    """Survey a store. Raises StoreAccessError, and CorruptStoreError if it is unreadable."""
    if "://" in uri:
        with storage_errors(uri):
            return _survey_remote(uri)
    io, paths = StoreIO(), StorePaths(Path(uri))
    reader = StoreReader(paths.root, whole=False)
    visible = reader.visible
    size = reader.options.mapped_file_size_commit_log
    log = LogSegments(io, paths.commit_log, size, whole=False, static=True)
    end, damage = visible.end, ""
    if not reader.running:
        if not _was_closed_at(io, paths, log, end):
            end, damage = _scan_after_end(log, end)
        damage = _short_segment(log) or damage or _unit_after_end(reader, end) or _mark_after_end(io, paths, log, end)
    segments = _segments(log, visible.begin, end)
    # Segments that retention has deleted in the meantime are not missing.
    begin = reader.visible.begin
    damage = _missing_segment(segments, begin, end, size) or damage
    log.close()
    deleted = read_deleted(io, paths, running=reader.running)
    return StoreSurvey(uri, size, begin, end, segments, deleted, reader, damage)


def _segments(log: LogSegments, begin: int, end: int) -> list[Segment]:
    """The segments that overlap [begin, end), without any that are being deleted."""
    segments = []
    for start in log.starts():
        limit = min(log.segment_size, end - start)
        if start + log.segment_size > begin and limit > 0:
            with suppress(FileNotFoundError):
                segments.append(Segment(start, log.io.size_of(log.path(start)), limit))
    return segments


def _short_segment(log: LogSegments) -> str:
    """Describe the first segment that is too short."""
    for start in log.starts():
        length = log.io.size_of(log.path(start))
        if length < log.segment_size:
            return f"segment {start:020d} has {length:,} bytes; a segment has {log.segment_size:,}"
    return ""


def _missing_segment(segments: list[Segment], begin: int, end: int, size: int) -> str:
    """Describe the first missing segment between begin and end."""
    there = {segment.start for segment in segments}
    for start in range(begin - begin % size, end, size):
        if start not in there:
            return f"segment {start:020d} is missing"
    return ""


def _was_closed_at(io: StoreIO, paths: StorePaths, log: LogSegments, end: int) -> bool:
    """Whether the store was stopped cleanly with its log durable up to `end`."""
    return not io.exists(paths.abort) and DurableMark(io, paths.mark("commitlog"), log).is_at(end)


def _scan_after_end(log: LogSegments, end: int) -> tuple[int, str]:
    """(end of the last intact record of a stopped store, damage if that is after `end`).

    A log whose queues are lost appears to end at the first damage.
    """
    starts = log.starts()
    limit = starts[-1] + log.segment_size if starts else 0
    resync = Resync(log)
    reason, stopped = _walk(log, end) if end < limit else (REACHED_STOP, end)
    last, damage = end, ""
    while stopped < limit:
        # Zeros may be a lost sector or space that was never written.
        is_whole = reason in (BLANK, REACHED_STOP)
        following = resync.next_record(log.start_of(stopped) + log.segment_size if is_whole else stopped + 1, limit)
        if following is None:
            break
        damage = damage or f"the log ends at {end:,} ({REASON_NAMES[reason]}), but a record follows at {following:,}"
        reason, stopped = _walk(log, following)
        last = stopped
    if starts and last == starts[0] and reason in (BAD_MAGIC, BAD_OFFSET):
        # A torn first record would begin with a valid header for this position.
        damage = f"the log has no intact record and does not begin with one ({REASON_NAMES[reason]})"
    return last, damage


def _walk(log: LogSegments, position: int) -> tuple[int, int]:
    """(reason, position) at which intact records end, within the segment of a position."""
    base = log.start_of(position)
    if not log.io.exists(log.path(base)):
        return REACHED_STOP, position
    out = np.zeros(scan.SCAN_SIZE, np.int64)
    reason = int(scan.scan_records(log.view(base), position - base, log.segment_size, base, 0, out))
    return reason, base + int(out[scan.STOPPED_AT])


def _unit_after_end(reader: StoreReader, end: int) -> str:
    """Describe a queue whose last unit refers to a record after the log's end."""
    for queue in reader.queues():
        if queue.min_offset >= queue.max_offset:
            continue
        last = queue.max_offset - 1
        unit = as_units(reader.reading.files.read_units(queue.topic, queue.queue_id, last, 1))[0]
        if int(unit["size"]) != FILLER_SIZE and int(unit["physical_offset"]) >= end:
            place = f"offset {last:,} of queue {queue.queue_id} of {queue.topic}"
            return f"the log ends at {end:,}, but {place} has its record at {int(unit['physical_offset']):,}"
    return ""


def _mark_after_end(io: StoreIO, paths: StorePaths, log: LogSegments, end: int) -> str:
    """Describe a durable mark of a stopped store that is after the log's end."""
    for name in ("commitlog", "consumequeue"):
        mark = DurableMark(io, paths.mark(name), log).mark
        if mark is not None and mark.offset > end:
            return f"the log ends at {end:,}, but mqproc/marks/{name} knows it up to {mark.offset:,}"
    return ""


def _survey_remote(uri: str) -> StoreSurvey:
    files, root = open_file_system(uri)
    if not files.isdir(join_path(root, _LOG)):
        raise not_a_store(uri)
    found: dict[int, int] = {}
    for entry in files.ls(join_path(root, _LOG), detail=True):
        start = segment_start(str(entry["name"]).rsplit("/", 1)[-1])
        if start is not None and entry["type"] == "file" and entry["size"]:
            found[start] = int(entry["size"])
    if not found:
        return StoreSurvey(uri, 1 << 30, 0, None, [])
    size = _segment_size(uri, found)
    while len(found) > 1 and _is_unwritten(files, root, max(found)):
        del found[max(found)]
    segments = [Segment(start, length, size) for start, length in sorted(found.items())]
    begin = segments[0].start
    damage = _missing_segment(segments, begin, segments[-1].start + size, size)
    return StoreSurvey(uri, size, begin, None, segments, damage=damage, archived=is_archive(files))


def _segment_size(uri: str, found: Mapping[int, int]) -> int:
    """The size of all segments but the last, and the unit of their names."""
    sizes = {length for start, length in found.items() if start != max(found)} or set(found.values())
    if len(sizes) != 1:
        raise BadRequestError(f"{uri}: segments of {len(sizes)} sizes: {', '.join(map(str, sorted(sizes)))}")
    return sizes.pop()


def _is_unwritten(files: Any, root: str, start: int) -> bool:
    """Whether a segment was only preallocated: a lost record leaves fewer zeros."""
    return not any(files.cat_file(join_path(root, f"{_LOG}/{start:020d}"), start=0, end=_UNWRITTEN_BYTES))
