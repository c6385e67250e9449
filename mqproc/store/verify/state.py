"""Checkpoint, marks, markers, settings and consumers' progress against what the log and the queues hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from mqproc.errors import CorruptStoreError
from mqproc.io import Kind as EntryKind
from mqproc.io import StoreIO
from mqproc.kernels import verify
from mqproc.layout import checkpoint as checkpoint_layout
from mqproc.layout import index_file, marks
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.layout.progress import NAME_BYTES_MAX, OFFSET_MAX
from mqproc.names import SCHEDULE_TOPIC
from mqproc.paths import StorePaths
from mqproc.store import checkpoint_file, damage
from mqproc.store.consume_queue import as_units
from mqproc.store.delays import delay_offsets
from mqproc.store.groups import offsets_json
from mqproc.store.groups.offsets_json import Progress
from mqproc.store.groups.progress import all_progress, is_possible
from mqproc.store.queue_hints import read_hints
from mqproc.store.segments import LogSegments
from mqproc.store.topics import Topics
from mqproc.store.verify.durable import is_void, read_small
from mqproc.store.verify.findings import Finding, Kind
from mqproc.store.verify.inventory import Queue
from mqproc.store.verify.log_findings import WholeLog
from mqproc.store.verify.picture import Picture
from mqproc.store.verify.queue_findings import Both
from mqproc.store.verify.queue_pass import BEYOND
from mqproc.store.verify.settings import fault_of
from mqproc.store.visitor import has_been_held

# No log is as long as this: what points further is garbage.
_LOG_BYTES_MAX: Final = 1 << 50
# RocketMQ's largest record, twice.
_RECORD_BYTES_MAX: Final = 8 << 20
# So much is shown of a name that is too long.
_NAME_SHOWN: Final = 32


def known_holes(io: StoreIO, paths: StorePaths) -> tuple[list[tuple[int, int]], list[Finding]]:
    """Damage that was found before, and what is wrong with the list of it."""
    try:
        found = damage.load(io, paths)
    except msgspec.MsgspecError as error:
        return [], [Finding(Kind.LEDGER_UNREADABLE, _name(paths, paths.damage), 0, text=str(error))]
    return [(hole.start, hole.stop) for hole in found.holes], []


@dataclass(frozen=True, slots=True)
class _KnownEnd:
    """Records lie up to `end` at least, because `witness` names that place of the log, or `place` where it differs."""

    end: int
    witness: str
    place: int | None = None

    def __str__(self) -> str:
        return f"{self.witness} {self.end if self.place is None else self.place:,}"


class StateFindings:
    """Findings about everything that is neither log nor queue nor index."""

    def __init__(self, io: StoreIO, picture: Picture, log: WholeLog, both: Both) -> None:
        self._io = io
        self._picture = picture
        self._paths = picture.inventory.paths
        self._log = log
        self._both = both
        self._known_ends: list[_KnownEnd] = []

    def run(self) -> list[Finding]:
        """All of them."""
        running = self._picture.positions.running
        findings = [*self._markers(), *self._marks(), *self._checkpoint(), *self._settings(), *self._widths()]
        if not running:
            findings += [*self._queue_table(), *self._progress(), *self._lost_end()]
        return findings

    def _markers(self) -> Iterable[Finding]:
        if self._io.exists(self._paths.read_only):
            text = read_small(self._io, self._paths.read_only).decode(errors="replace").strip()
            yield Finding(Kind.READ_ONLY, _name(self._paths, self._paths.read_only), 0, text=text)
        if self._io.exists(self._paths.abort) and not self._picture.positions.running:
            yield Finding(Kind.NOT_CLOSED, "abort")

    # What was durable

    def _marks(self) -> Iterable[Finding]:
        segments = LogSegments(self._io, self._paths.commit_log, self._picture.inventory.sizes.segment, still=True)
        for name in ("commitlog", "consumequeue", "index"):
            path = self._paths.mark(name)
            data = read_small(self._io, path)
            mark = marks.decode(data)
            yield from self._broken_slots(path, data, is_readable=mark is not None)
            if mark is None:
                continue
            slot = marks.slot_offset(mark.sequence)
            if mark.offset > self._log.end:
                self._known_ends.append(_KnownEnd(mark.offset, f"mqproc/marks/{name} knows the log up to"))
            elif not self._picture.positions.running and is_void(self._io, segments, mark):
                yield Finding(Kind.MARK_VOID, _name(self._paths, path), slot, mark.offset)
        segments.close()

    def _broken_slots(self, path: Path, data: bytes, *, is_readable: bool) -> Iterable[Finding]:
        """A mark has two slots, of which a crash tears one at most; an empty one has not been written yet."""
        for start in (0, marks.SLOT_SPACING):
            slot = data[start : start + marks.SLOT_SIZE]
            if any(slot) and marks.decode(slot) is None:
                text = "the other copy counts" if is_readable else ""
                yield Finding(Kind.MARK_UNREADABLE, _name(self._paths, path), start, text=text, as_note=is_readable)

    def _checkpoint(self) -> Iterable[Finding]:
        path = self._paths.checkpoint
        entry = self._io.entry(path)
        if entry is None or entry.kind is not EntryKind.FILE:
            yield Finding(Kind.CHECKPOINT_MISSING, "checkpoint")
            return
        size = entry.size
        if size != checkpoint_layout.FILE_SIZE:
            yield Finding(Kind.CHECKPOINT_LENGTH, "checkpoint", size, text=f"{size:,} bytes")
        if self._picture.positions.running:
            return
        found = checkpoint_file.read(self._io, path)
        last_ms = self._log.max_store_timestamp_ms
        times = (
            ("physic time", checkpoint_layout.PHYSIC_TIMESTAMP, found.physic_timestamp_ms),
            ("logics time", checkpoint_layout.LOGICS_TIMESTAMP, found.logics_timestamp_ms),
            ("index time", checkpoint_layout.INDEX_TIMESTAMP, found.index_timestamp_ms),
        )
        for name, place, time_ms in times if not self._log.ends_with_loss else ():
            if not 0 <= time_ms <= last_ms and (self._log.records or not self._log.begin):
                text = f"{name} is {time_ms}; the log's last store time is {last_ms}"
                yield Finding(Kind.CHECKPOINT_AHEAD, "checkpoint", place, text=text)
        confirmed = found.confirm_physical_offset
        if confirmed > self._log.end:
            text = f"confirmed offset is {confirmed:,}; the log ends at {self._log.end:,}"
            place = checkpoint_layout.CONFIRM_PHYSICAL_OFFSET
            yield Finding(Kind.CHECKPOINT_AHEAD, "checkpoint", place, confirmed, text=text)
            self._known_ends.append(_KnownEnd(confirmed, "checkpoint knows the log up to"))

    def _lost_end(self) -> Iterable[Finding]:
        """Records at the log's end that others know of: the segments that they were in, the place where it ends."""
        self._known_ends += self._ends_by_units()
        self._known_ends += [
            # Of the last record an index file knows only where it begins.
            _KnownEnd(last + 1, f"index/{file.name} knows of a record at", last)
            for file in self._picture.index
            if file.header.count > index_file.FIRST_ITEM and (last := file.header.end_physical_offset) >= 0
        ]
        plausible = [each for each in self._known_ends if self._log.end < each.end < _LOG_BYTES_MAX]
        if not plausible:
            return
        known = max(plausible, key=lambda each: each.end)
        segment = self._picture.inventory.sizes.segment
        first_missing = -(-max(self._log.end, self._log.begin) // segment) * segment
        if first_missing < known.end and first_missing not in self._picture.inventory.segments:
            size = -(-(known.end - first_missing) // segment) * segment
            yield Finding(
                Kind.SEGMENT_MISSING,
                self._picture.inventory.segment_name(first_missing),
                0,
                first_missing,
                size=size,
                count=size // segment,
                text=f"{known}{self._assumed_size()}",
            )
        offset = self._log.end % segment
        text = f"the log ends at {self._log.end:,}; {known}"
        file = self._picture.inventory.segment_name(self._log.end)
        yield Finding(Kind.LOG_ENDS_EARLY, file, offset, self._log.end, size=known.end - self._log.end, text=text)

    def _assumed_size(self) -> str:
        """That the size of a segment is the options', when neither a segment's length nor a second name tells it."""
        segments = LogSegments(self._io, self._paths.commit_log, self._picture.inventory.sizes.segment)
        if self._picture.inventory.segments or len(segments.starts()) > 1:
            return ""
        return f"; no segment tells its size: the {segments.segment_size:,} bytes of the options are used"

    def _ends_by_units(self) -> Iterable[_KnownEnd]:
        """Where records of units end, in the log or beyond it.

        Beyond it queues count that end there: a unit alone, or one that leads absurdly far, is garbage.
        """
        ends = self._both.states[:, verify.PHYSICAL_END]
        if len(ends):
            yield _KnownEnd(int(ends.max()), "consumequeue knows of records up to")
        beyond, live = self._both.more[:, BEYOND], self._both.states[:, verify.LAST_LIVE]
        last = beyond[:, verify.LAST_PHYSICAL]
        furthest = (
            self._log.end
            + self._picture.inventory.sizes.segment
            + int(beyond[:, verify.COUNT].sum()) * _RECORD_BYTES_MAX
        )
        at_the_end = (beyond[:, verify.COUNT] > 0) & (beyond[:, verify.LAST_OFFSET] == live) & (last + 1 < furthest)
        for index in at_the_end.nonzero()[0][last[at_the_end].argsort()[-1:]].tolist():
            size = self._size_of(self._both.queues[index], int(live[index]))
            yield _KnownEnd(int(last[index]) + size, "consumequeue knows of records up to")

    def _size_of(self, queue: Queue, queue_offset: int) -> int:
        """How long a unit says that its record is; as much as any record at most, for it may be garbage."""
        name, place = self._picture.inventory.queue_name(queue, queue_offset, UNIT_SIZE)
        fd = self._io.open(self._paths.root / name)
        try:
            size = int(as_units(self._io.pread(fd, UNIT_SIZE, place))[0]["size"])
        finally:
            self._io.close(fd)
        return size if 0 < size <= _RECORD_BYTES_MAX else 1

    # The queue table

    def _queue_table(self) -> Iterable[Finding]:
        """What the next start believes of queues must be so. Only what was closed in order has it in writing."""
        file = _name(self._paths, self._paths.queues)
        if not self._io.exists(self._paths.queues):
            return
        hints = read_hints(self._io, self._paths)
        if hints is None:
            text = "cannot be read: the next start looks at everything"
            yield Finding(Kind.QUEUE_TABLE, file, 0, text=text, as_note=True)
            return
        if self._io.exists(self._paths.abort) or has_been_held(self._io, self._paths):
            return
        for queue, hint in sorted(hints.items()):
            end, first = self._both.max_offset(queue) or 0, self._both.first_offset(queue)
            if hint.max_offset > end:
                said = f"ends at {hint.max_offset:,}; queue and log know of {end:,}"
            elif first is not None and hint.min_offset > first:
                said = f"begins at {hint.min_offset:,}; the log has {first:,}"
            else:
                continue
            yield Finding(Kind.QUEUE_TABLE, file, text=f"{queue[0]} queue {queue[1]} {said}")

    # Settings

    def _settings(self) -> Iterable[Finding]:
        entry = self._io.entry(self._paths.config)
        names = self._io.names(self._paths.config) if entry is not None and entry.kind is EntryKind.FOLDER else []
        paths = [self._paths.config / name for name in names if name.endswith(".json")]
        copies = [self._paths.config / name for name in names if name.endswith(".json.bak")]
        faults = {
            path: fault
            for path in [*paths, *copies, self._paths.settings]
            if (fault := fault_of(self._io, self._paths, path))
        }
        for path, fault in faults.items():
            whole = path.with_name(path.name.removesuffix(".bak"))
            spare = path.suffix == ".bak" and whole in paths and whole not in faults
            yield Finding(Kind.CONFIG_UNREADABLE, _name(self._paths, path), 0, text=fault, as_note=spare)

    def _widths(self) -> Iterable[Finding]:
        topics = Topics(self._io, self._paths)
        # That a file cannot be read is told with the other settings.
        with contextlib.suppress(CorruptStoreError, IsADirectoryError):
            topics.load()
            for text in topics.too_wide:
                yield Finding(Kind.TOPIC_TOO_WIDE, _name(self._paths, self._paths.topics), None, text=text)

    def _progress(self) -> Iterable[Finding]:
        consumed = list(self._consumed())
        for at, path in consumed:
            if not is_possible(at) or (at.offset > OFFSET_MAX and self._next_offset((at.topic, at.queue_id)) is None):
                text = f"group {_short(at.group)}: {_short(at.topic)} queue {at.queue_id}: {at.offset:,}"
                yield Finding(Kind.PROGRESS_IMPOSSIBLE, _name(self._paths, path), None, text=text)
        groups = [((at.topic, at.queue_id), f"group {at.group}:", at.offset, path) for at, path in consumed]
        for queue, group, offset, path in [*groups, *self._delayed()]:
            end = self._next_offset(queue)
            if end is not None and offset > end:
                text = f"{group} {queue[0]} queue {queue[1]}: {offset:,}; the queue ends at {end:,}"
                yield Finding(Kind.PROGRESS_BEYOND_END, _name(self._paths, path), None, text=text.strip())

    def _next_offset(self, queue: Queue) -> int | None:
        """Where a queue goes on: one that was made again does it where it stood when its topic was deleted."""
        end = self._both.max_offset(queue)
        _, end_when_deleted = self._picture.deleted.get(queue, (0, 0))
        return end if end is None else max(end, end_when_deleted)

    def _consumed(self) -> Iterable[tuple[Progress, Path]]:
        try:
            in_json = set(offsets_json.load(self._io, self._paths).progress)
            progress = list(all_progress(self._io, self._paths))
        except (CorruptStoreError, IsADirectoryError):
            # That the file cannot be read is told with the other settings.
            return
        for at in progress:
            yield at, self._paths.consumer_offsets if at in in_json else self._paths.progress

    def _delayed(self) -> Iterable[tuple[Queue, str, int, Path]]:
        path = self._paths.delay_offsets
        try:
            levels = delay_offsets.levels(self._io, self._paths)
        except (CorruptStoreError, IsADirectoryError):
            # That the file cannot be read is told with the other settings.
            return
        for level, offset in levels.items():
            yield (SCHEDULE_TOPIC, level - 1), "delayed delivery:", offset, path


def _short(name: str) -> str:
    return name if len(name) <= NAME_BYTES_MAX else f"{name[:_NAME_SHOWN]}…"


def _name(paths: StorePaths, path: Path) -> str:
    return str(path.relative_to(paths.root))
