"""Looking at every file of a store before recovery reads it, and a rule for each that is not as it should be.

    symlink, another owner's           refused: StoreAccessError names it
    no folder commitlog, but queues    refused, the same way: the log may lie elsewhere
    a name that is none of ours        left alone, reported
    folder or device named like ours   moved aside, reported
    file named like a folder of ours   moved aside, where it was consumequeue or index, or a topic or queue may want it;
                                       else refused
    a small file's next version        removed: it was not whole when the power went, or it would have its name
    CommitLog segment   0 bytes        removed: it holds nothing
                        short          completed with zeros; what is missing is looked for as damage
                        too long       cut, what lay behind is kept aside
                        behind the end of a log that was closed in order: kept aside; of another one the first
                        bytes, if intact records are in them
                        with another name than its records tell: renamed, where that name is free
    ConsumeQueue file   0 bytes        removed
                        short          completed with zeros from its last whole unit on, or removed when it holds none;
                                       its queue is looked at
                        too long       cut: it can be made again
    index file          0 bytes        removed
                        other length   removed with all newer ones, and made again

What is aside lies in `mqproc/aside/`. Looking costs one `lstat` a file.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mqproc.config import Options
from mqproc.errors import StoreAccessError
from mqproc.io import REPLACING_SUFFIX, Entry, Kind, StoreIO
from mqproc.layout import index_file
from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE
from mqproc.paths import StorePaths, index_name_time_ms, segment_name, segment_start, shown
from mqproc.store.aside import free_place, move_aside
from mqproc.store.clearing import dirty_end
from mqproc.store.consume_queue import as_units
from mqproc.store.end_fillers import as_fillers
from mqproc.store.misnamed import find_misnamed, in_the_way, put_right
from mqproc.store.queue_folders import bars_queue, bars_topic, is_queue_id, is_topic

Report = Callable[[str], None]
# More lines of one kind than this are counted instead of told.
LINES_MAX: Final = 20
_COPY_BYTES: Final = 1 << 20
TAIL_BYTES_MAX: Final = 64 << 20
"""What a start keeps aside of a torn tail at most."""
FREE_BYTES_MIN: Final = 256 << 20
"""So much of the disk that leaves free: a start, which makes the table of all queues anew, needs some of it."""
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# A record's first bytes are no zeros.
_LOOK_BYTES: Final = 4096


@dataclass(slots=True)
class QueueFiles:
    """One queue's files: where they begin in its row, and whether any was missing or not whole."""

    starts: list[int] = field(default_factory=list)
    suspect: bool = False


@dataclass(slots=True)
class LogFiles:
    """Offsets of the segments that are there; `short` ones with the bytes that they had before they were completed."""

    starts: list[int] = field(default_factory=list)
    short: dict[int, int] = field(default_factory=dict)


class StoreFiles:
    """One look at a store's files. Nothing else may have the store open."""

    def __init__(self, io: StoreIO, paths: StorePaths, options: Options, report: Report) -> None:
        """`options` have the sizes that the store's files have."""
        self._io = io
        self._paths = paths
        self._segment_size = options.mapped_file_size_commit_log
        self._queue_bytes = options.consume_queue_file_bytes
        self._index_bytes = index_file.file_size(options.max_hash_slot_num, options.max_index_num)
        self._report = report
        self._lines = 0
        self._uid = os.geteuid()
        self.log = LogFiles()
        self.queues: dict[tuple[str, int], QueueFiles] = {}
        self.index_names: list[str] = []
        self._folders: dict[Path, Entry | None] = {}

    def check(self) -> None:
        """Raise StoreAccessError for the first symlink, or file of somebody else; nothing is changed before that.

        Also for queues without any folder of a log: they would lose all that leads to a log that lies elsewhere.

        What was seen is kept for the steps that follow.
        """
        paths = self._paths
        markers = [paths.checkpoint, paths.lock, paths.timer_wheel, paths.timer_check]
        markers += [paths.queues, paths.opened, paths.damage, paths.progress, paths.topics_journal]
        markers += [paths.retention_report, paths.unconsumed, paths.settings]
        markers += [paths.marks / entry.name for entry in self._look(paths.marks)]
        self._top = {path: self._allowed(path) for path in markers}
        self._timer_log = self._allowed(paths.timer_log)
        has_timer_log = self._timer_log is not None and self._timer_log.kind is Kind.FOLDER
        self._timer_entries = self._look(paths.timer_log) if has_timer_log else []
        for folder in (paths.commit_log, paths.consume_queue, paths.index, paths.config, paths.marks):
            self._folders[folder] = self._allowed(folder)
        for folder in (paths.commit_log, paths.config):
            if (found := self._folders[folder]) is not None and found.kind is not Kind.FOLDER:
                raise StoreAccessError(f"{folder}: not a folder")
        self._log_entries = self._look(paths.commit_log)
        self._index_entries = self._look(paths.index)
        self._config_entries = self._look(paths.config)
        self._topics = self._look(paths.consume_queue)
        self._queues_of: dict[str, list[Entry]] = {}
        self._files_of: dict[tuple[str, str], list[Entry]] = {}
        for topic in self._topics:
            if not is_topic(topic):
                continue
            folder = paths.consume_queue / topic.name
            self._queues_of[topic.name] = self._look(folder)
            for queue in self._queues_of[topic.name]:
                if queue.kind is Kind.FOLDER:
                    self._files_of[topic.name, queue.name] = self._look(folder / queue.name)
        if self._folders[paths.commit_log] is None and any(self._files_of.values()):
            raise StoreAccessError(
                f"{paths.commit_log}: no such folder, though {paths.consume_queue} has queues; nothing was changed. "
                "A log that lies elsewhere (storePathCommitLog) belongs there; for one that is lost make the folder"
            )

    def put_markers_in_order(self) -> None:
        """What lies in the place of a folder or of a small file goes aside."""
        for folder, found in self._folders.items():
            if found is not None and found.kind is not Kind.FOLDER:
                self._move_aside(folder, found.kind.value)
        if self._timer_log is not None and self._timer_log.kind is not Kind.FOLDER:
            self._move_aside(self._paths.timer_log, self._timer_log.kind.value)
        for filed in self._timer_entries:
            if filed.kind is not Kind.FILE:
                self._move_aside(self._paths.timer_log / filed.name, filed.kind.value)
        for path, entry in self._top.items():
            if entry is not None and entry.kind is not Kind.FILE:
                self._move_aside(path, entry.kind.value)
        for entry in self._config_entries:
            if entry.name.endswith(".json") and entry.kind is not Kind.FILE:
                self._move_aside(self._paths.config / entry.name, entry.kind.value)
        self._remove_next_versions()

    def _remove_next_versions(self) -> None:
        """What a crash left of files that were being replaced. The next segment is made under its name in any case."""
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

    def has_odd_names(self) -> bool:
        """Whether a file in the log's folder is none of its row, or the row has a gap."""
        starts = [segment_start(entry.name) for entry in self._log_entries if entry.kind is Kind.FILE]
        row = [start for start in starts if start is not None]
        steps = (later - earlier for earlier, later in itertools.pairwise(row))
        size = self._segment_size
        return len(row) < len(starts) or any(start % size for start in row) or any(step != size for step in steps)

    def put_names_right(self) -> bool:
        """Give segments the names that their records tell; whether any has been given one."""
        folder = self._paths.commit_log
        misnamed = find_misnamed(self._io, folder, self._segment_size)
        if all(each.taken for each in misnamed):
            return False
        for each in in_the_way(misnamed):
            self._move_aside(folder / each.name, f"its records belong to {each.right_name}, which is there")
        put_right(self._io, folder, misnamed, self._tell)
        self._log_entries = self._look(folder)
        self.log = LogFiles()
        return True

    def look_at_log(self) -> LogFiles:
        """Take stock of the segments; only names that cannot be used go aside. Lengths are still as they were."""
        folder, size = self._paths.commit_log, self._segment_size
        for entry in self._log_entries:
            path = folder / entry.name
            start = segment_start(entry.name)
            if start is None:
                self._tell(f"{shown(path)}: none of the store's files, left alone")
            elif entry.kind is not Kind.FILE:
                self._move_aside(path, entry.kind.value)
            elif start % size:
                self._move_aside(path, f"no segment of {size:,} bytes begins there")
            else:
                self.log.starts.append(start)
                if entry.size < size:
                    self.log.short[start] = entry.size
        return self.log

    def make_log_whole(self) -> None:
        """Give every segment its length. What short ones lack must have been written down as suspected before."""
        for entry in self._log_entries:
            start = segment_start(entry.name)
            if start not in self.log.starts or entry.size == self._segment_size:
                continue
            path = self._paths.commit_log / entry.name
            if entry.size == 0:
                self._io.unlink(path)
                self._io.sync_folder(path.parent)
                self.log.starts.remove(start)
                self._tell(f"{path}: empty, removed")
            elif entry.size < self._segment_size:
                self._complete_segment(path)
                self._tell(f"{path}: {entry.size:,} bytes, completed to {self._segment_size:,} with zeros")
            else:
                self._shorten_segment(path, entry.size)

    def _complete_segment(self, path: Path) -> None:
        fd = self._io.open(path, write=True)
        try:
            self._io.allocate(fd, 0, self._segment_size)
            self._io.sync(fd)
        finally:
            self._io.close(fd)

    def _shorten_segment(self, path: Path, size: int) -> None:
        """Cut a segment to its length; other bytes than zeros behind it are kept aside."""
        fd = self._io.open(path, write=True)
        try:
            end = dirty_end(self._io, fd, self._segment_size)
            kept = ""
            if end > self._segment_size:
                rest = self._keep_rest(fd, path, self._segment_size, end)
                kept = f", {end - self._segment_size:,} bytes of it kept in {rest}"
            self._io.set_size(fd, self._segment_size)
            self._io.sync(fd)
        finally:
            self._io.close(fd)
        self._tell(f"{path}: {size:,} bytes, cut to {self._segment_size:,}{kept}")

    def keep_behind(self, end: int) -> None:
        """Keep aside what lies right behind the end of a log that was closed in order: no crash has left it there."""
        for start in reversed(self.log.starts):
            path = self._paths.commit_log / segment_name(start)
            begin = max(0, end - start)
            if begin >= self._segment_size or self._io.entry(path) is None:
                continue
            fd = self._io.open(path)
            try:
                if not any(self._io.pread(fd, _LOOK_BYTES, begin)):
                    continue
                if start <= end:
                    stop = dirty_end(self._io, fd, begin)
                    kept = self._keep_rest(fd, path, begin, stop)
                    self._tell(f"{path}: {stop - begin:,} bytes behind the log's end, kept in {kept}")
            finally:
                self._io.close(fd)
            if start > end:
                self._move_aside(path, "behind the log's end")

    def keep_tail(self, end: int) -> None:
        """Keep aside what a crash has left behind a log's end, up to TAIL_BYTES_MAX of it.

        Where there is no room for that it is told, and cut all the same: a full disk is to keep no store from starting.
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
                kept = f"{part}kept in {self._keep_rest(fd, path, begin, begin + taken)}" if taken else ""
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                kept = f"not kept: {error.strerror}"
            finally:
                self._io.close(fd)
            if stop > begin:
                self._tell(f"{path}: {stop - begin:,} bytes behind the log's end, {kept or not_kept}")

    def _keep_rest(self, fd: int, path: Path, begin: int, end: int) -> Path:
        target = free_place(self._io, self._paths, f"{path.parent.name}.{path.name}.rest")
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

    def put_queues_in_order(self) -> dict[tuple[str, int], QueueFiles]:
        """Every queue that has a folder. Suspect ones lack a file, or had one that was not whole."""
        for topic in self._topics:
            path = self._paths.consume_queue / topic.name
            if not is_topic(topic):
                self._pass_over(path, topic, bars=bars_topic(topic))
                continue
            for entry in self._queues_of[topic.name]:
                name = entry.name
                if entry.kind is Kind.FOLDER and is_queue_id(name):
                    self.queues[topic.name, int(name)] = self._queue(topic.name, name)
                else:
                    self._pass_over(path / name, entry, bars=bars_queue(entry))
        return self.queues

    def _pass_over(self, path: Path, entry: Entry, *, bars: bool) -> None:
        """What is no folder of a topic or queue stays, unless it `bars` the way of one."""
        if bars:
            self._move_aside(path, entry.kind.value)
        else:
            self._tell(f"{shown(path)}: none of the store's files, left alone")

    def _queue(self, topic: str, queue: str) -> QueueFiles:
        found = QueueFiles()
        for entry in self._files_of[topic, queue]:
            start = segment_start(entry.name)
            if (
                entry.size == self._queue_bytes
                and entry.kind is Kind.FILE
                and start is not None
                and start % entry.size == 0
            ):
                found.starts.append(start)
                continue
            path = self._paths.consume_queue / topic / queue / entry.name
            if start is None:
                self._tell(f"{shown(path)}: none of the store's files, left alone")
            elif entry.kind is not Kind.FILE or start % self._queue_bytes:
                misplaced = f"no file of {self._queue_bytes:,} bytes begins there"
                self._move_aside(path, misplaced if entry.kind is Kind.FILE else entry.kind.value)
                found.suspect = True
            else:
                found.suspect = True
                if self._make_queue_file_whole(path, entry.size):
                    found.starts.append(start)
        expected = range(found.starts[0], found.starts[-1] + 1, self._queue_bytes) if found.starts else ()
        found.suspect |= len(expected) != len(found.starts)
        return found

    def _make_queue_file_whole(self, path: Path, size: int) -> bool:
        """Give a file its length; whether it is still there."""
        if size < self._queue_bytes and not self._holds_units(path, size):
            self._io.unlink(path)
            self._tell(f"{path}: {size:,} bytes without a unit, removed")
            return False
        fd = self._io.open(path, write=True)
        try:
            if size < self._queue_bytes and size % UNIT_SIZE:
                # Half a unit would pass for a whole one, with another size or tags code: it is made again instead.
                self._io.set_size(fd, size - size % UNIT_SIZE)
            self._io.set_size(fd, self._queue_bytes)
        finally:
            self._io.close(fd)
        self._tell(f"{path}: {size:,} bytes, made {self._queue_bytes:,}")
        return True

    def _holds_units(self, path: Path, size: int) -> bool:
        """Whether a file holds more than zeros and the fillers that a queue's first file may begin with."""
        units = as_units(as_fillers(self._io.read_file(path)[: size - size % UNIT_SIZE]))
        return bool(((units["size"] != FILLER_SIZE) & (units["size"] > 0)).any())

    # The index

    def put_index_in_order(self) -> list[str]:
        """Names of the index files, oldest first, all of the right length."""
        names: list[str] = []
        sizes: dict[str, int] = {}
        for entry in self._index_entries:
            path = self._paths.index / entry.name
            if index_name_time_ms(entry.name) is None:
                self._tell(f"{shown(path)}: none of the store's files, left alone")
            elif entry.kind is not Kind.FILE:
                self._move_aside(path, entry.kind.value)
            elif entry.size == 0:
                self._io.unlink(path)
                self._tell(f"{path}: empty, removed")
            else:
                names.append(entry.name)
                sizes[entry.name] = entry.size
        wrong = [name for name in names if sizes[name] != self._index_bytes]
        if wrong:
            for name in reversed(names[names.index(wrong[0]) :]):
                self._io.unlink(self._paths.index / name)
                self._tell(f"{self._paths.index / name}: {sizes[name]:,} bytes, removed to be made again")
            names = names[: names.index(wrong[0])]
        self.index_names = names
        return names

    # Each name

    def _look(self, folder: Path) -> list[Entry]:
        found = self._io.entries(folder)
        if folder == self._paths.commit_log:
            found = [entry for entry in found if entry.name != self._paths.guard.name]
        for entry in found:
            if entry.kind is Kind.SYMLINK or entry.uid != self._uid:
                self._refuse_foreign(folder / entry.name, entry)
        return found

    def _allowed(self, path: Path) -> Entry | None:
        entry = self._io.entry(path)
        if entry is not None:
            self._refuse_foreign(path, entry)
        return entry

    def _refuse_foreign(self, path: Path, entry: Entry) -> None:
        if entry.kind is Kind.SYMLINK:
            raise StoreAccessError(f"{path}: a symlink; a store's files are no symlinks")
        if entry.uid != self._uid:
            raise StoreAccessError(f"{path}: belongs to user {entry.uid}, not to user {self._uid}")

    def set_aside(self, path: Path, why: str) -> None:
        """Move a file that nobody can read out of the way, if it is there."""
        if self._io.entry(path) is not None:
            self._move_aside(path, why)

    def _move_aside(self, path: Path, why: str) -> None:
        self._tell(f"{path}: {why}, moved to {move_aside(self._io, self._paths, path)}")

    @property
    def all_in_order(self) -> bool:
        """Whether nothing had to be told so far."""
        return self._lines == 0

    def _tell(self, line: str) -> None:
        """Report a line; a store full of strays must not fill the log."""
        self._lines += 1
        if self._lines <= LINES_MAX:
            self._report(f"recovery: {line}")
        elif self._lines == LINES_MAX + 1:
            self._report("recovery: more such files, not told one by one")


def mark_open(io: StoreIO, paths: StorePaths, report: Report) -> None:
    """Write `abort`: until it is gone again, a crash is a crash. What else lies in its place goes aside."""
    entry = io.entry(paths.abort)
    if entry is not None and entry.kind is not Kind.FILE:
        place = move_aside(io, paths, paths.abort)
        report(f"{paths.abort}: {entry.kind.value}, moved to {place}")
    io.write_file_atomically(paths.abort, str(os.getpid()).encode())
