"""Check of a store's file names, with a rule for each unexpected name, type or length.

    symlink, file of another user      rejected with StoreAccessError
    queues without folder commitlog    rejected as well: the log may be elsewhere
    unknown name                       left alone, reported
    folder or device with our name     quarantined, reported
    small file over its limit          quarantined, reported; settings by their readers
    file in place of a folder          quarantined if it is consumequeue, index, or may be needed for a topic or queue;
                                       else rejected
    next version of a small file       removed: it was incomplete at a power loss
    CommitLog segment   0 bytes        removed
                        short          extended with zeros; the missing part is suspected as damage
                        too long       cut, the rest is quarantined
                        after the end of the log: quarantined if the store was closed properly; otherwise the first
                        bytes are copied if they contain intact records
                        misnamed: renamed according to its records if that name is free
    ConsumeQueue file   0 bytes        removed
                        short          extended with zeros after its last whole unit, or removed without any;
                                       its queue is inspected
                        too long       cut: it can be rebuilt
    index file          0 bytes        removed
                        wrong length   removed with all newer files, and rebuilt

Quarantined files are in `mqproc/aside/`. The check costs one `lstat` per file.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mqproc.config.options import Options
from mqproc.errors import StoreAccessError
from mqproc.io.file_limits import oversized, size_limit
from mqproc.io.store_io import REPLACING_SUFFIX, FolderEntry, Kind, StoreIO, dirty_end
from mqproc.layout import index_file
from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE
from mqproc.paths import (
    StorePaths,
    index_name_time_ms,
    owner_of_files,
    printable_path,
    segment_name,
    segment_start,
)
from mqproc.store.commitlog.misnamed_segments import conflicting_segments, find_misnamed, rename_misnamed
from mqproc.store.compat import note_maker
from mqproc.store.consumequeue.bounds import as_units, normalize_fillers
from mqproc.store.consumequeue.files import bars_queue, bars_topic, is_queue_id, is_topic
from mqproc.store.damage import free_quarantine_path, quarantine_file

Report = Callable[[str], None]
# Maximum number of lines reported about files.
LINES_MAX: Final = 20
_COPY_BYTES: Final = 1 << 20
TAIL_BYTES_MAX: Final = 64 << 20
"""Maximum number of bytes of a torn tail that a start copies to the quarantine."""
FREE_BYTES_MIN: Final = 256 << 20
"""Disk space that those copies leave free: a start needs some for the queue table."""
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# A record's first bytes are never all zeros.
_PROBE_BYTES: Final = 4096


@dataclass(slots=True)
class QueueFiles:
    """Files of one queue by first byte, and whether any was missing or incomplete."""

    starts: list[int] = field(default_factory=list)
    suspect: bool = False


@dataclass(slots=True)
class LogFiles:
    """Starts of the existing segments, and the original lengths of `short` segments."""

    starts: list[int] = field(default_factory=list)
    short: dict[int, int] = field(default_factory=dict)


class StoreFiles:
    """Checks and normalises the files of one store, which nothing else has open."""

    def __init__(self, io: StoreIO, paths: StorePaths, options: Options, report: Report) -> None:
        """`options` contain the sizes of the store's files."""
        self._io = io
        self._paths = paths
        self._segment_size = options.mapped_file_size_commit_log
        self._queue_bytes = options.consume_queue_file_bytes
        self._index_bytes = index_file.file_size(options.max_hash_slot_num, options.max_index_num)
        self._report = report
        self._lines = 0
        self._uid = owner_of_files(paths.root)
        self.log = LogFiles()
        self.queues: dict[tuple[str, int], QueueFiles] = {}
        self.index_names: list[str] = []
        self._folders: dict[Path, FolderEntry | None] = {}

    def check(self) -> None:
        """Raise StoreAccessError for the first symlink or file of another user. Changes nothing.

        Also raised for queues without a log folder: they would lose all units for a log that is elsewhere. The entries
        found are kept for the next steps.
        """
        paths = self._paths
        markers = [paths.checkpoint, paths.lock, paths.timer_wheel, paths.timer_check]
        markers += [paths.queues, paths.opened, paths.damage, paths.progress, paths.topics_journal]
        markers += [paths.retention_report, paths.unconsumed, paths.settings]
        markers += [paths.marks / entry.name for entry in self._list(paths.marks)]
        self._top = {path: self._checked_entry(path) for path in markers}
        self._timer_log = self._checked_entry(paths.timer_log)
        has_timer_log = self._timer_log is not None and self._timer_log.kind is Kind.FOLDER
        self._timer_entries = self._list(paths.timer_log) if has_timer_log else []
        for folder in (paths.commit_log, paths.consume_queue, paths.index, paths.config, paths.marks):
            self._folders[folder] = self._checked_entry(folder)
        for folder in (paths.commit_log, paths.config):
            if (found := self._folders[folder]) is not None and found.kind is not Kind.FOLDER:
                raise StoreAccessError(f"{folder}: not a folder")
        self._log_entries = self._list(paths.commit_log)
        self._index_entries = self._list(paths.index)
        self._config_entries = self._list(paths.config)
        self._topics = self._list(paths.consume_queue)
        self._queues_of: dict[str, list[FolderEntry]] = {}
        self._files_of: dict[tuple[str, str], list[FolderEntry]] = {}
        for topic in self._topics:
            if not is_topic(topic):
                continue
            folder = paths.consume_queue / topic.name
            self._queues_of[topic.name] = self._list(folder)
            for queue in self._queues_of[topic.name]:
                if queue.kind is Kind.FOLDER:
                    self._files_of[topic.name, queue.name] = self._list(folder / queue.name)
        if self._folders[paths.commit_log] is None and any(self._files_of.values()):
            raise StoreAccessError(
                f"{paths.commit_log}: no such folder, but {paths.consume_queue} has queues; nothing was changed. "
                "Move a log that is elsewhere (storePathCommitLog) to this place; create the folder if the log is lost"
            )

    def normalize_markers(self) -> None:
        """Quarantine anything in place of a folder or a small file."""
        for folder, found in self._folders.items():
            if found is not None and found.kind is not Kind.FOLDER:
                self._quarantine(folder, found.kind.value)
        if self._timer_log is not None and self._timer_log.kind is not Kind.FOLDER:
            self._quarantine(self._paths.timer_log, self._timer_log.kind.value)
        for filed in self._timer_entries:
            if filed.kind is not Kind.FILE:
                self._quarantine(self._paths.timer_log / filed.name, filed.kind.value)
        for path, entry in self._top.items():
            if entry is not None:
                self._check_small_file(path, entry)
        for entry in self._config_entries:
            if entry.name.endswith((".json", ".json.bak")):
                self._check_small_file(self._paths.config / entry.name, entry)
        self._remove_next_versions()

    def _check_small_file(self, path: Path, entry: FolderEntry) -> None:
        """Quarantine a folder in place of a small file, or a file that is too long.

        Settings are left to their readers, which use the `.bak`, quarantine them, and report a loss.
        """
        mapped = self._paths.timer_wheel, self._paths.queues, self._paths.progress
        is_settings = path.parent == self._paths.config and path.name.endswith((".json", ".json.bak"))
        if entry.kind is not Kind.FILE:
            self._quarantine(path, entry.kind.value)
        elif entry.size > (limit := size_limit(path)) and path not in mapped and not is_settings:
            self._quarantine(path, oversized(entry.size, limit))

    def _remove_next_versions(self) -> None:
        """Remove next versions left by a crash. The next segment is replaced anyway."""
        paths, io = self._paths, self._io
        replaced = (paths.abort, paths.checkpoint, paths.timer_check)
        left = [path.with_name(path.name + REPLACING_SUFFIX) for path in replaced]
        endings = (f".json{REPLACING_SUFFIX}", f".bak{REPLACING_SUFFIX}")
        left += [paths.config / entry.name for entry in self._config_entries if entry.name.endswith(endings)]
        left += [paths.own / entry.name for entry in io.entries(paths.own) if entry.name.endswith(REPLACING_SUFFIX)]
        for path in left:
            if path != paths.next_segment and (entry := io.entry(path)) is not None and entry.kind is Kind.FILE:
                io.unlink(path)

    # The log

    def has_invalid_names(self) -> bool:
        """Whether the log's folder has files that are not segments, or the sequence has a gap."""
        starts = [segment_start(entry.name) for entry in self._log_entries if entry.kind is Kind.FILE]
        row = [start for start in starts if start is not None]
        steps = (later - earlier for earlier, later in itertools.pairwise(row))
        size = self._segment_size
        return len(row) < len(starts) or any(start % size for start in row) or any(step != size for step in steps)

    def fix_segment_names(self) -> bool:
        """Rename segments according to their records; return whether any was renamed."""
        folder = self._paths.commit_log
        misnamed = find_misnamed(self._io, folder, self._segment_size)
        if all(each.taken for each in misnamed):
            return False
        for each in conflicting_segments(misnamed):
            self._quarantine(folder / each.name, f"its records belong to {each.right_name}, which exists")
        rename_misnamed(self._io, folder, misnamed, self._report_line)
        self._log_entries = self._list(folder)
        self.log = LogFiles()
        return True

    def list_segments(self) -> LogFiles:
        """List the segments; quarantine unusable names. Lengths are unchanged."""
        folder, size = self._paths.commit_log, self._segment_size
        for entry in self._log_entries:
            path = folder / entry.name
            start = segment_start(entry.name)
            if start is None:
                self._leave_alone(path)
            elif entry.kind is not Kind.FILE:
                self._quarantine(path, entry.kind.value)
            elif start % size:
                self._quarantine(path, f"no segment of {size:,} bytes begins there")
            else:
                self.log.starts.append(start)
                if entry.size < size:
                    self.log.short[start] = entry.size
        return self.log

    def fix_segment_lengths(self) -> None:
        """Give segments their full length. Missing parts must have been recorded before."""
        for entry in self._log_entries:
            start = segment_start(entry.name)
            if start not in self.log.starts or entry.size == self._segment_size:
                continue
            path = self._paths.commit_log / entry.name
            if entry.size == 0:
                self._io.unlink(path)
                self._io.sync_folder(path.parent)
                self.log.starts.remove(start)
                self._report_line(f"{path}: empty, removed")
            elif entry.size < self._segment_size:
                with self._io.opened(path, write=True) as fd:
                    self._io.allocate(fd, 0, self._segment_size)
                    self._io.sync(fd)
                self._report_line(f"{path}: {entry.size:,} bytes, extended to {self._segment_size:,} with zeros")
            else:
                self._shorten_segment(path, entry.size)

    def _shorten_segment(self, path: Path, size: int) -> None:
        """Cut a segment to its length; copy nonzero bytes after that to the quarantine."""
        with self._io.opened(path, write=True) as fd:
            end = dirty_end(self._io, fd, self._segment_size)
            kept = ""
            if end > self._segment_size:
                rest = self._copy_to_quarantine(fd, path, self._segment_size, end)
                kept = f", {end - self._segment_size:,} bytes of it kept in {rest}"
            self._io.set_size(fd, self._segment_size)
            self._io.sync(fd)
        self._report_line(f"{path}: {size:,} bytes, cut to {self._segment_size:,}{kept}")

    def quarantine_after_end(self, end: int) -> None:
        """Quarantine bytes right after the end of a properly closed log: no crash has caused them."""
        for start in reversed(self.log.starts):
            path = self._paths.commit_log / segment_name(start)
            begin = max(0, end - start)
            if begin >= self._segment_size or self._io.entry(path) is None:
                continue
            with self._io.opened(path) as fd:
                if not any(self._io.pread(fd, _PROBE_BYTES, begin)):
                    continue
                if start <= end:
                    stop = dirty_end(self._io, fd, begin)
                    kept = self._copy_to_quarantine(fd, path, begin, stop)
                    self._report_line(f"{path}: {stop - begin:,} bytes after the end of the log, kept in {kept}")
            if start > end:
                self._quarantine(path, "after the end of the log")

    def save_tail(self, end: int) -> None:
        """Copy up to TAIL_BYTES_MAX bytes after the end of the log to the quarantine.

        Without enough space they are reported and still cut: a full disk must not prevent a start.
        """
        _, free = self._io.disk_usage(self._paths.root)
        left = max(0, min(TAIL_BYTES_MAX, free - FREE_BYTES_MIN))
        not_kept = "not kept" if left == TAIL_BYTES_MAX else f"not kept: {free:,} bytes are free"
        for start in self.log.starts:
            path = self._paths.commit_log / segment_name(start)
            begin = max(0, end - start)
            if begin >= self._segment_size:
                continue
            fd = self._io.open(path)
            try:
                stop = dirty_end(self._io, fd, begin)
                taken = min(stop - begin, left)
                left -= taken
                part = f"the first {taken:,} " if begin + taken < stop else ""
                kept = f"{part}kept in {self._copy_to_quarantine(fd, path, begin, begin + taken)}" if taken else ""
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                kept = f"not kept: {error.strerror}"
            finally:
                self._io.close(fd)
            if stop > begin:
                self._report_line(f"{path}: {stop - begin:,} bytes after the end of the log, {kept or not_kept}")

    def _copy_to_quarantine(self, fd: int, path: Path, begin: int, end: int) -> Path:
        target = free_quarantine_path(self._io, self._paths, f"{path.parent.name}.{path.name}.rest")
        copy = self._io.open(target, write=True, create=True, mode=0o600)
        try:
            for start in range(begin, end, _COPY_BYTES):
                data = self._io.pread(fd, min(_COPY_BYTES, end - start), start)
                self._io.pwrite(copy, data, start - begin)
            self._io.sync(copy)
        except OSError:
            self._io.unlink(target)
            raise
        finally:
            self._io.close(copy)
        self._io.sync_folder(target.parent)
        return target

    # Queues

    def normalize_queues(self) -> None:
        """Set `queues`: the queues with a folder. Suspect queues lack a file or had a short file."""
        for topic in self._topics:
            path = self._paths.consume_queue / topic.name
            if not is_topic(topic):
                self._handle_stray(path, topic, bars=bars_topic(topic))
                continue
            for entry in self._queues_of[topic.name]:
                name = entry.name
                if entry.kind is Kind.FOLDER and is_queue_id(name):
                    self.queues[topic.name, int(name)] = self._queue(topic.name, name)
                else:
                    self._handle_stray(path / name, entry, bars=bars_queue(entry))

    def _handle_stray(self, path: Path, entry: FolderEntry, *, bars: bool) -> None:
        """Leave a stray entry alone, unless it `bars` the way of a topic or queue."""
        if bars:
            self._quarantine(path, entry.kind.value)
        else:
            self._leave_alone(path)

    def _leave_alone(self, path: Path) -> None:
        self._report_line(f"{printable_path(path)}: not a file of the store, left alone")

    def _queue(self, topic: str, queue: str) -> QueueFiles:
        found, size = QueueFiles(), self._queue_bytes
        for entry in self._files_of[topic, queue]:
            start = segment_start(entry.name)
            if start is not None and entry.kind is Kind.FILE and entry.size == size and start % size == 0:
                found.starts.append(start)
                continue
            path = self._paths.consume_queue / topic / queue / entry.name
            if start is None:
                self._leave_alone(path)
            elif entry.kind is not Kind.FILE or start % size:
                misplaced = f"no file of {size:,} bytes begins there"
                self._quarantine(path, misplaced if entry.kind is Kind.FILE else entry.kind.value)
                found.suspect = True
            else:
                found.suspect = True
                if self._fix_queue_file_length(path, entry.size):
                    found.starts.append(start)
        expected = range(found.starts[0], found.starts[-1] + 1, size) if found.starts else ()
        found.suspect |= len(expected) != len(found.starts)
        return found

    def _fix_queue_file_length(self, path: Path, size: int) -> bool:
        """Give a file its full length; return whether it still exists."""
        if size < self._queue_bytes and not self._holds_units(path, size):
            self._io.unlink(path)
            self._report_line(f"{path}: {size:,} bytes without a unit, removed")
            return False
        with self._io.opened(path, write=True) as fd:
            if size < self._queue_bytes and size % UNIT_SIZE:
                # Half a unit could pass for a whole one with wrong size or tags code: cut it, it is rebuilt.
                self._io.set_size(fd, size - size % UNIT_SIZE)
            self._io.set_size(fd, self._queue_bytes)
        self._report_line(f"{path}: {size:,} bytes, resized to {self._queue_bytes:,}")
        return True

    def _holds_units(self, path: Path, size: int) -> bool:
        """Whether a file has more than zeros and a queue's initial fillers."""
        with self._io.opened(path) as fd:
            units = as_units(normalize_fillers(self._io.pread(fd, size - size % UNIT_SIZE, 0)))
        return bool(((units["size"] != FILLER_SIZE) & (units["size"] > 0)).any())

    # The index

    def normalize_index(self) -> None:
        """Set `index_names`, the files of the right length, oldest first; others are removed."""
        sizes: dict[str, int] = {}
        for entry in self._index_entries:
            path = self._paths.index / entry.name
            if index_name_time_ms(entry.name) is None:
                self._leave_alone(path)
            elif entry.kind is not Kind.FILE:
                self._quarantine(path, entry.kind.value)
            elif entry.size == 0:
                self._io.unlink(path)
                self._report_line(f"{path}: empty, removed")
            else:
                sizes[entry.name] = entry.size
        right = list(itertools.takewhile(lambda name: sizes[name] == self._index_bytes, sizes))
        for name in reversed(list(sizes)[len(right) :]):
            self._io.unlink(self._paths.index / name)
            self._report_line(f"{self._paths.index / name}: {sizes[name]:,} bytes, removed and rebuilt")
        self.index_names = right

    # Single names

    def _list(self, folder: Path) -> list[FolderEntry]:
        found = self._io.entries(folder)
        if folder == self._paths.commit_log:
            found = [entry for entry in found if entry.name != self._paths.guard.name]
        for entry in found:
            if entry.kind is Kind.SYMLINK or entry.uid != self._uid:
                self._reject_foreign(folder / entry.name, entry)
        return found

    def _checked_entry(self, path: Path) -> FolderEntry | None:
        entry = self._io.entry(path)
        if entry is not None:
            self._reject_foreign(path, entry)
        return entry

    def _reject_foreign(self, path: Path, entry: FolderEntry) -> None:
        if entry.kind is Kind.SYMLINK:
            raise StoreAccessError(f"{path}: a symlink; files of a store must not be symlinks")
        if entry.uid != self._uid:
            raise StoreAccessError(f"{path}: belongs to user {entry.uid}, not to user {self._uid}")

    def quarantine(self, path: Path, why: str) -> None:
        """Quarantine a file if it exists."""
        if self._io.entry(path) is not None:
            self._quarantine(path, why)

    def _quarantine(self, path: Path, why: str) -> None:
        self._report_line(f"{path}: {why}, moved to {quarantine_file(self._io, self._paths, path)}")

    @property
    def nothing_reported(self) -> bool:
        """Whether nothing was reported so far."""
        return self._lines == 0

    def _report_line(self, line: str) -> None:
        """Report a line, up to LINES_MAX of them."""
        self._lines += 1
        if self._lines <= LINES_MAX:
            self._report(f"recovery: {line}")
        elif self._lines == LINES_MAX + 1:
            self._report("recovery: more such files, not listed")


def mark_open(io: StoreIO, paths: StorePaths, report: Report) -> None:
    """Write `abort`, which marks the store as open. Anything else in its place is quarantined.

    A store that is opened for the first time also gets a note of its maker.
    """
    for path in (paths.opened, paths.abort):
        entry = io.entry(path)
        if entry is not None and entry.kind is not Kind.FILE:
            report(f"{path}: {entry.kind.value}, moved to {quarantine_file(io, paths, path)}")
    note_maker(io, paths)
    io.write_file_atomically(paths.abort, str(os.getpid()).encode())
