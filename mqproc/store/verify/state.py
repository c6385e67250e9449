"""Verification of checkpoint, marks, markers, settings and group offsets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import Kind as EntryKind
from mqproc.io.store_io import StoreIO
from mqproc.kernels import verify
from mqproc.layout import checkpoint as checkpoint_layout
from mqproc.layout import durable_marks, index_file
from mqproc.layout.committed_offsets import NAME_BYTES_MAX, OFFSET_MAX
from mqproc.paths import StorePaths
from mqproc.store import damage, rocketmq_json
from mqproc.store import topics as deleted_topics
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.compat import was_opened_elsewhere
from mqproc.store.consumequeue.table import read_queue_snapshots
from mqproc.store.durable_marks import fingerprint, read_checkpoint
from mqproc.store.offsets import consumer_offset_json
from mqproc.store.offsets.consumer_offset_json import CommittedOffset
from mqproc.store.offsets.offset_store import committed_offsets, is_valid_offset
from mqproc.store.offsets.settings import check_file
from mqproc.store.schedule import levels as delay_offsets
from mqproc.store.schedule.levels import DelayOffsets
from mqproc.store.topics import Topics
from mqproc.store.verify.findings import Finding, FindingKind
from mqproc.store.verify.inventory import Queue
from mqproc.store.verify.log import WholeLog
from mqproc.store.verify.queues import BEYOND, QueueComparison, read_unit
from mqproc.store.verify.snapshot import Snapshot
from mqproc.topic_names import SCHEDULE_TOPIC

# Consequences of a crash: durable marks, and corrections by the next start

_LOSS: Final = "never written, and above all that was durable: the next start ends the log here"


@dataclass(frozen=True, slots=True)
class RestartPositions:
    """Positions from which the next start repeats its work after an improper close.

    From there it cuts torn records (`log_from`) and dispatches all records again to queues and index: a killed role
    leaves a record at the end of the log, or units or index entries of only some records. Data below the durable marks
    is complete. None: no valid mark. `loss_from`: the log ends at the first invalid record after it, even if intact
    records follow.
    """

    log_from: int | None = None
    queues_from: int | None = None
    index_from: int | None = None
    loss_from: int | None = None

    def classify(self, findings: Iterable[Finding], unwritten: Container[int]) -> Iterator[Finding]:
        """Downgrade findings explained by a crash to notes: torn records and lost pages.

        Lost pages lie before pages that were written later, on disk or in a copy; `unwritten` are the starts of ranges
        with such pages.
        """
        for finding in findings:
            position = finding.physical_offset or 0
            if self.log_from is not None and finding.kind is FindingKind.TORN_TAIL and position >= self.log_from:
                finding = replace(finding, as_note=True)
            elif self.loss_from is not None and position >= self.loss_from and position in unwritten:
                finding = replace(finding, as_note=True, text=_LOSS)
            yield finding


def find_restart(io: StoreIO, paths: StorePaths, segment_size: int, log_begin: int) -> RestartPositions:
    """Find the restart positions of a stopped store. Stale marks count as missing."""
    segments = LogSegments(io, paths.commit_log, segment_size, static=True)
    try:
        log, queues, index = (_position(io, paths, segments, name) for name in ("commitlog", "consumequeue", "index"))
        if _has_no_sync(io, paths, log_begin):
            queues = index = log_begin
        loss = None
        if log is not None and not was_opened_elsewhere(io, paths):
            # The marks of a copy are older than its checkpoint.
            loss = max(log, read_checkpoint(io, paths.checkpoint).confirm_physical_offset)
        return RestartPositions(log, queues, index, loss)
    finally:
        segments.close()


def _position(io: StoreIO, paths: StorePaths, segments: LogSegments, name: str) -> int | None:
    mark = durable_marks.decode(read_small(io, paths.mark(name)))
    return None if mark is None or is_stale_mark(io, segments, mark) else mark.offset


def _has_no_sync(io: StoreIO, paths: StorePaths, log_begin: int) -> bool:
    """Whether checkpoint and marks record no sync of queues or index: both may be empty."""
    if log_begin or not io.exists(paths.checkpoint):
        return False
    found = read_checkpoint(io, paths.checkpoint)
    known = [durable_marks.decode(read_small(io, paths.mark(name))) for name in ("consumequeue", "index")]
    return not (found.logics_timestamp_ms or found.index_timestamp_ms or any(mark and mark.offset for mark in known))


def is_stale_mark(io: StoreIO, segments: LogSegments, mark: durable_marks.Mark) -> bool:
    """Whether the log before a mark has changed since the mark was written."""
    try:
        return fingerprint(io, segments, mark.offset) != mark.fingerprint
    except (CorruptStoreError, FileNotFoundError):
        return True


def read_small(io: StoreIO, path: Path) -> bytes:
    """Read a small file; empty if it is missing or not a file, which is reported elsewhere."""
    try:
        return io.read_file(path)
    except (FileNotFoundError, IsADirectoryError):
        return b""


# Settings files

_Reader = Callable[[StoreIO, StorePaths], str]


def _read_topics(io: StoreIO, paths: StorePaths) -> str:
    topics = Topics(io, paths)
    topics.load()
    return topics.file_remark


def _read_deletions(io: StoreIO, paths: StorePaths) -> str:
    deleted_topics.load_deletions(io, paths)
    return ""


_READERS: Final[dict[str, _Reader]] = {
    "topics.json": _read_topics,
    "deletedTopics.json": _read_deletions,
    "consumerOffset.json": lambda io, paths: consumer_offset_json.load(io, paths).remark,
    "delayOffset.json": lambda io, paths: DelayOffsets.load(io, paths).remark,
    "subscriptionGroup.json": check_file,
}
"""Readers of the files in `config/`; each returns a remark or "", or raises CorruptStoreError."""


def config_fault(io: StoreIO, paths: StorePaths, path: Path) -> str:
    """Reason why a settings file is unreadable; "" if it is readable or missing."""
    try:
        text = io.read_file(path).decode()
        if not text.strip():
            return "empty"
        value = rocketmq_json.parse(text)
    except (FileNotFoundError, IsADirectoryError):
        return ""
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        return str(error)
    if not isinstance(value, dict):
        return f"{type(value).__name__}; expected an object"
    reader = _READERS.get(path.name) if path.parent == paths.config else None
    try:
        return "" if reader is None else reader(io, paths).removeprefix(f"{path}: ")
    except IsADirectoryError:
        # A folder in place of another file that the reader needs, such as the topics' journal, is reported by its name.
        return ""
    except CorruptStoreError as error:
        return str(error).removeprefix(f"{path}: ")


# Upper bound of a log's length; larger offsets are garbage.
LOG_BYTES_MAX: Final = 1 << 50
# Twice RocketMQ's largest record.
_RECORD_BYTES_MAX: Final = 8 << 20
# Length to which names that are too long are shortened.
_NAME_SHOWN: Final = 32


def known_holes(io: StoreIO, paths: StorePaths) -> tuple[list[tuple[int, int]], list[Finding]]:
    """Known damaged ranges, and findings about the list of them."""
    try:
        found = damage.load(io, paths)
    except msgspec.MsgspecError as error:
        return [], [Finding(FindingKind.LEDGER_UNREADABLE, _name(paths, paths.damage), 0, text=str(error))]
    return [(hole.start, hole.stop) for hole in found.holes], []


@dataclass(frozen=True, slots=True)
class _KnownEnd:
    """A reference to the log's end: `witness` refers to `place`, or to `end` if None."""

    end: int
    witness: str
    place: int | None = None

    def __str__(self) -> str:
        return f"{self.witness} {self.end if self.place is None else self.place:,}"


class StateFindings:
    """Findings about everything except log, queues, index and timer."""

    def __init__(self, io: StoreIO, snapshot: Snapshot, log: WholeLog, both: QueueComparison) -> None:
        self._io = io
        self._snapshot = snapshot
        self._paths = snapshot.inventory.paths
        self._log = log
        self._both = both
        self._known_ends: list[_KnownEnd] = []

    def run(self) -> list[Finding]:
        """Return all findings."""
        running = self._snapshot.positions.running
        findings = [*self._markers(), *self._marks(), *self._checkpoint(), *self._settings(), *self._widths()]
        if not running:
            findings += [*self._queue_table(), *self._progress(), *self._lost_end()]
        return findings

    def _markers(self) -> Iterable[Finding]:
        if self._io.exists(self._paths.read_only):
            text = read_small(self._io, self._paths.read_only).decode(errors="replace").strip()
            yield Finding(FindingKind.READ_ONLY, _name(self._paths, self._paths.read_only), 0, text=text)
        if self._io.exists(self._paths.abort) and not self._snapshot.positions.running:
            yield Finding(FindingKind.NOT_CLOSED, "abort")

    # Marks and checkpoint

    def _marks(self) -> Iterable[Finding]:
        segments = LogSegments(self._io, self._paths.commit_log, self._snapshot.inventory.sizes.segment, static=True)
        for name in ("commitlog", "consumequeue", "index"):
            path = self._paths.mark(name)
            data = read_small(self._io, path)
            mark = durable_marks.decode(data)
            yield from self._broken_slots(path, data, is_readable=mark is not None)
            if mark is None:
                continue
            slot = durable_marks.slot_offset(mark.sequence)
            if mark.offset > self._log.end:
                self._known_ends.append(_KnownEnd(mark.offset, f"mqproc/marks/{name} refers to the log up to"))
            elif not self._snapshot.positions.running and is_stale_mark(self._io, segments, mark):
                yield Finding(FindingKind.MARK_VOID, _name(self._paths, path), slot, mark.offset)
        segments.close()

    def _broken_slots(self, path: Path, data: bytes, *, is_readable: bool) -> Iterable[Finding]:
        """Check both slots of a mark: a crash tears at most one; zeros were never written."""
        for start in (0, durable_marks.SLOT_SPACING):
            slot = data[start : start + durable_marks.SLOT_SIZE]
            if any(slot) and durable_marks.decode(slot) is None:
                text = "the other copy is used" if is_readable else ""
                file = _name(self._paths, path)
                yield Finding(FindingKind.MARK_UNREADABLE, file, start, text=text, as_note=is_readable)

    def _checkpoint(self) -> Iterable[Finding]:
        path = self._paths.checkpoint
        entry = self._io.entry(path)
        if entry is None or entry.kind is not EntryKind.FILE:
            yield Finding(FindingKind.CHECKPOINT_MISSING, "checkpoint")
            return
        size = entry.size
        if size != checkpoint_layout.FILE_SIZE:
            yield Finding(FindingKind.CHECKPOINT_LENGTH, "checkpoint", size, text=f"{size:,} bytes")
        if self._snapshot.positions.running:
            return
        found = read_checkpoint(self._io, path)
        last_ms = self._log.max_store_timestamp_ms
        times = (
            ("physic time", checkpoint_layout.PHYSIC_TIMESTAMP, found.physic_timestamp_ms),
            ("logics time", checkpoint_layout.LOGICS_TIMESTAMP, found.logics_timestamp_ms),
            ("index time", checkpoint_layout.INDEX_TIMESTAMP, found.index_timestamp_ms),
        )
        for name, place, time_ms in times if not self._log.ends_with_loss else ():
            if not 0 <= time_ms <= last_ms and (self._log.records or not self._log.begin):
                text = f"{name} is {time_ms}; the log's last store time is {last_ms}"
                yield Finding(FindingKind.CHECKPOINT_AHEAD, "checkpoint", place, text=text)
        confirmed = found.confirm_physical_offset
        if confirmed > self._log.end:
            text = f"confirmed offset is {confirmed:,}; the log ends at {self._log.end:,}"
            place = checkpoint_layout.CONFIRM_PHYSICAL_OFFSET
            yield Finding(FindingKind.CHECKPOINT_AHEAD, "checkpoint", place, confirmed, text=text)
            self._known_ends.append(_KnownEnd(confirmed, "checkpoint refers to the log up to"))

    def _lost_end(self) -> Iterable[Finding]:
        """Missing records at the end of the log that marks, queues, index or checkpoint refer to."""
        self._known_ends += self._ends_by_units()
        self._known_ends += [
            # Index files contain only the start of the last record.
            _KnownEnd(last + 1, f"index/{file.name} refers to a record at", last)
            for file in self._snapshot.index
            if file.header.count > index_file.FIRST_ITEM and (last := file.header.end_physical_offset) >= 0
        ]
        plausible = [each for each in self._known_ends if self._log.end < each.end < LOG_BYTES_MAX]
        if not plausible:
            return
        known = max(plausible, key=lambda each: each.end)
        inventory, segment = self._snapshot.inventory, self._snapshot.inventory.sizes.segment
        first_missing = -(-max(self._log.end, self._log.begin) // segment) * segment
        if first_missing < known.end and first_missing not in inventory.segments:
            size = -(-(known.end - first_missing) // segment) * segment
            file, count, text = inventory.segment_name(first_missing), size // segment, f"{known}{self._assumed_size()}"
            yield Finding(FindingKind.SEGMENT_MISSING, file, 0, first_missing, size=size, count=count, text=text)
        file, offset = inventory.log_place(self._log.end)
        size, text = known.end - self._log.end, f"the log ends at {self._log.end:,}; {known}"
        yield Finding(FindingKind.LOG_ENDS_EARLY, file, offset, self._log.end, size=size, text=text)

    def _assumed_size(self) -> str:
        """Remark that the segment size is assumed, if no segment or second name shows it."""
        segments = LogSegments(self._io, self._paths.commit_log, self._snapshot.inventory.sizes.segment)
        if self._snapshot.inventory.segments or len(segments.starts()) > 1:
            return ""
        return f"; the segment size is unknown, {segments.segment_size:,} bytes are assumed from the options"

    def _ends_by_units(self) -> Iterable[_KnownEnd]:
        """Ends of the records that units point to, in the log or beyond it.

        Beyond the log, only queues that end there count: a single unit, or one implausibly far ahead, is garbage.
        """
        ends = self._both.states[:, verify.PHYSICAL_END]
        if len(ends):
            yield _KnownEnd(int(ends.max()), "consumequeue refers to records up to")
        beyond, live = self._both.more[:, BEYOND], self._both.states[:, verify.LAST_LIVE]
        last = beyond[:, verify.LAST_PHYSICAL]
        room = self._snapshot.inventory.sizes.segment + int(beyond[:, verify.COUNT].sum()) * _RECORD_BYTES_MAX
        furthest = self._log.end + room
        at_the_end = (beyond[:, verify.COUNT] > 0) & (beyond[:, verify.LAST_OFFSET] == live) & (last + 1 < furthest)
        for index in at_the_end.nonzero()[0][last[at_the_end].argsort()[-1:]].tolist():
            size = self._size_of(self._both.queues[index], int(live[index]))
            yield _KnownEnd(int(last[index]) + size, "consumequeue refers to records up to")

    def _size_of(self, queue: Queue, queue_offset: int) -> int:
        """Record size in a unit; 1 if it exceeds every valid record, as in garbage."""
        size = int(read_unit(self._io, self._snapshot.inventory, queue, queue_offset)["size"])
        return size if 0 < size <= _RECORD_BYTES_MAX else 1

    # The queue table

    def _queue_table(self) -> Iterable[Finding]:
        """Check the queue table that the next start trusts after a proper close."""
        file = _name(self._paths, self._paths.queues)
        if not self._io.exists(self._paths.queues):
            return
        hints = read_queue_snapshots(self._io, self._paths)
        if hints is None:
            text = "unreadable: the next start checks the whole store"
            yield Finding(FindingKind.QUEUE_TABLE, file, 0, text=text, as_note=True)
            return
        if self._io.exists(self._paths.abort) or was_opened_elsewhere(self._io, self._paths):
            return
        for queue, hint in sorted(hints.items()):
            end, first = self._both.max_offset(queue) or 0, self._both.first_offset(queue)
            if hint.max_offset > end:
                problem = f"ends at {hint.max_offset:,}; queue and log know of {end:,}"
            elif first is not None and hint.min_offset > first:
                problem = f"begins at {hint.min_offset:,}; the log has {first:,}"
            else:
                continue
            yield Finding(FindingKind.QUEUE_TABLE, file, text=f"{queue[0]} queue {queue[1]} {problem}")

    # Settings

    def _settings(self) -> Iterable[Finding]:
        entry = self._io.entry(self._paths.config)
        names = self._io.names(self._paths.config) if entry is not None and entry.kind is EntryKind.FOLDER else []
        paths = [self._paths.config / name for name in names if name.endswith(".json")]
        copies = [self._paths.config / name for name in names if name.endswith(".json.bak")]
        faults = {
            path: fault
            for path in [*paths, *copies, self._paths.settings]
            if (fault := config_fault(self._io, self._paths, path))
        }
        for path, fault in faults.items():
            whole = path.with_name(path.name.removesuffix(".bak"))
            spare = path.suffix == ".bak" and whole in paths and whole not in faults
            yield Finding(FindingKind.CONFIG_UNREADABLE, _name(self._paths, path), 0, text=fault, as_note=spare)

    def _widths(self) -> Iterable[Finding]:
        topics = Topics(self._io, self._paths)
        # An unreadable file is reported with the other settings.
        with contextlib.suppress(CorruptStoreError, IsADirectoryError):
            topics.load()
            for text in topics.too_wide:
                yield Finding(FindingKind.TOPIC_TOO_WIDE, _name(self._paths, self._paths.topics), None, text=text)

    def _progress(self) -> Iterable[Finding]:
        consumed = list(self._committed_offsets())
        for at, path in consumed:
            if not is_valid_offset(at) or (
                at.offset > OFFSET_MAX and self._next_offset((at.topic, at.queue_id)) is None
            ):
                text = f"group {_short(at.group)}: {_short(at.topic)} queue {at.queue_id}: {at.offset:,}"
                yield Finding(FindingKind.PROGRESS_IMPOSSIBLE, _name(self._paths, path), None, text=text)
        groups = [((at.topic, at.queue_id), f"group {at.group}:", at.offset, path) for at, path in consumed]
        for queue, group, offset, path in [*groups, *self._delay_offsets()]:
            end = self._next_offset(queue)
            if end is not None and offset > end:
                text = f"{group} {queue[0]} queue {queue[1]}: {offset:,}; the queue ends at {end:,}"
                yield Finding(FindingKind.PROGRESS_BEYOND_END, _name(self._paths, path), None, text=text.strip())

    def _next_offset(self, queue: Queue) -> int | None:
        """Next offset of a queue, which for a recreated queue is at least its end at the deletion."""
        end = self._both.max_offset(queue)
        return end if end is None else max(end, self._snapshot.deleted.get(queue, (0, 0))[1])

    def _committed_offsets(self) -> Iterable[tuple[CommittedOffset, Path]]:
        try:
            in_json = set(consumer_offset_json.load(self._io, self._paths).progress)
            progress = list(committed_offsets(self._io, self._paths))
        except (CorruptStoreError, IsADirectoryError):
            # An unreadable file is reported with the other settings.
            return
        for at in progress:
            yield at, self._paths.consumer_offsets if at in in_json else self._paths.progress

    def _delay_offsets(self) -> Iterable[tuple[Queue, str, int, Path]]:
        path = self._paths.delay_offsets
        try:
            levels = delay_offsets.read_levels(self._io, self._paths)
        except (CorruptStoreError, IsADirectoryError):
            # An unreadable file is reported with the other settings.
            return
        for level, offset in levels.items():
            yield (SCHEDULE_TOPIC, level - 1), "delayed delivery:", offset, path


def _short(name: str) -> str:
    return name if len(name) <= NAME_BYTES_MAX else f"{name[:_NAME_SHOWN]}…"


def _name(paths: StorePaths, path: Path) -> str:
    return str(path.relative_to(paths.root))
