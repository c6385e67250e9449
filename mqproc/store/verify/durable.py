"""What the durable marks of a store say, and what the next start of one that was not closed in order brings anew."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.layout import marks
from mqproc.paths import StorePaths
from mqproc.store import checkpoint_file
from mqproc.store.marks import fingerprint
from mqproc.store.segments import LogSegments
from mqproc.store.verify.findings import Finding, Kind
from mqproc.store.visitor import has_been_held

_LOSS: Final = "never written, above all that was durable: the next start ends the log here"


@dataclass(frozen=True, slots=True)
class Restart:
    """From where on the next start cuts what is no record, and brings records into queues and index, whatever these
    hold by then.

    A role that is killed leaves a step half done: a record at the log's end, units of this queue without those of that
    one, one of a record's entries. Only what the marks vouch for is surely whole. None: no mark tells. `loss_from`: the
    log ends at the first bad record there, though intact ones follow.
    """

    log_from: int | None = None
    queues_from: int | None = None
    index_from: int | None = None
    loss_from: int | None = None

    def judged(self, findings: Iterable[Finding], unwritten: Container[int]) -> Iterator[Finding]:
        """Findings about the log, as notes where a crash has left it so: torn ends, and pages that came neither to the
        disk nor into a copy, though later ones did. `unwritten` are the positions of ranges with such pages."""
        for finding in findings:
            position = finding.physical_offset or 0
            if self.log_from is not None and finding.kind is Kind.TORN_TAIL and position >= self.log_from:
                finding = replace(finding, as_note=True)
            elif self.loss_from is not None and position >= self.loss_from and position in unwritten:
                finding = replace(finding, as_note=True, text=_LOSS)
            yield finding


def next_restart(io: StoreIO, paths: StorePaths, segment_size: int, log_begin: int) -> Restart:
    """That of a store which nobody runs and nobody has closed. A mark that another program has outrun tells nothing."""
    segments = LogSegments(io, paths.commit_log, segment_size, still=True)
    try:
        log, queues, index = (_position(io, paths, segments, name) for name in ("commitlog", "consumequeue", "index"))
        if _has_only_begun(io, paths, log_begin):
            queues = index = log_begin
        return Restart(log, queues, index, _loss_from(io, paths, log))
    finally:
        segments.close()


def _position(io: StoreIO, paths: StorePaths, segments: LogSegments, name: str) -> int | None:
    mark = marks.decode(read_small(io, paths.mark(name)))
    return None if mark is None or is_void(io, segments, mark) else mark.offset


def _loss_from(io: StoreIO, paths: StorePaths, log: int | None) -> int | None:
    if log is None or has_been_held(io, paths):
        return None
    # A copy has marks that are older than its checkpoint.
    return max(log, checkpoint_file.read(io, paths.checkpoint).confirm_physical_offset)


def _has_only_begun(io: StoreIO, paths: StorePaths, log_begin: int) -> bool:
    """Whether neither checkpoint nor marks know of a sync of queues or index: they may never have had anything."""
    if log_begin or not io.exists(paths.checkpoint):
        return False
    found = checkpoint_file.read(io, paths.checkpoint)
    known = [marks.decode(read_small(io, paths.mark(name))) for name in ("consumequeue", "index")]
    return not (found.logics_timestamp_ms or found.index_timestamp_ms or any(mark and mark.offset for mark in known))


def is_void(io: StoreIO, segments: LogSegments, mark: marks.Mark) -> bool:
    """Whether the log before a mark is not what it was when the mark was set."""
    try:
        return fingerprint(io, segments, mark.offset) != mark.fingerprint
    except (CorruptStoreError, FileNotFoundError):
        return True


def read_small(io: StoreIO, path: Path) -> bytes:
    """A small file; nothing when it is not there, or in its place lies something else, which is told elsewhere."""
    try:
        return io.read_file(path)
    except (FileNotFoundError, IsADirectoryError):
        return b""
