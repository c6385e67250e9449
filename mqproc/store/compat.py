"""Coexistence with RocketMQ: detect its use of a store, and keep it off a running group's.

RocketMQ rewrites its `lock` at each start. It recovers by its own rules: at a record that it rejects it truncates the
log, leaves the bytes after that point and appends over them. Then our durable mark may still look right, and truncated
records may seem to follow its own. Its checkpoint has the last record that it accepted.
"""

from __future__ import annotations

import enum
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from mqproc.io.store_io import StoreIO
from mqproc.ipc.health import NOTE_LOST
from mqproc.kernels.record_check import BLANK, VERIFY_ALL, checked_size
from mqproc.layout import durable_marks
from mqproc.layout.durable_marks import Mark
from mqproc.paths import StorePaths
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.durable_marks import read_checkpoint


@dataclass(frozen=True, slots=True)
class ForeignSession:
    """Another program opened the store; the log below `kept` is unchanged.

    Before, the log was ours up to `our_end`, whose last record was stored at `our_last_ms`.
    """

    kept: int
    our_end: int = 0
    our_last_ms: int = 0


def was_opened_elsewhere(io: StoreIO, paths: StorePaths) -> bool:
    """Whether the lock file differs from the one that `remember` noted; False if none was noted.

    The lock of a copied store differs, too. So if the checkpoint is the one written with our mark, no other program
    has used the store: RocketMQ overwrites it within a second of its start.
    """
    return _has_another_lock(io, paths) and not _is_our_checkpoint(io, paths)


def _has_another_lock(io: StoreIO, paths: StorePaths) -> bool:
    noted = _opened_json(io, paths)
    return "lock_mtime_ns" in noted and noted["lock_mtime_ns"] != _lock_time(io, paths)


class Maker(enum.Enum):
    """The program that made a store. UNKNOWN: the note of it is lost."""

    MQPROC = "mqproc"
    ROCKETMQ = "RocketMQ"
    UNKNOWN = "unknown"


def maker_of(io: StoreIO, paths: StorePaths) -> Maker:
    """The store's maker by the note in `opened.json`.

    Without a note RocketMQ has made a store that has files, if mqproc has never used it.
    """
    noted = _opened_json(io, paths)
    if noted:
        return Maker.ROCKETMQ if noted.get("made_by_rocketmq") else Maker.MQPROC
    if io.exists(paths.opened) or any(map(io.exists, _made_after_note(paths))):
        return Maker.UNKNOWN
    has_files = any(map(io.exists, (paths.commit_log, paths.consume_queue, paths.checkpoint)))
    return Maker.ROCKETMQ if has_files else Maker.MQPROC


def _made_after_note(paths: StorePaths) -> tuple[Path, ...]:
    """Files that mqproc makes after it has noted the store's maker."""
    return paths.marks, paths.queues, paths.progress, paths.topics_journal, paths.damage, paths.deleted_topics


def note_maker(io: StoreIO, paths: StorePaths) -> None:
    """Record the store's maker before a change, and whether an earlier note was lost."""
    maker = maker_of(io, paths)
    facts = {"made_by_rocketmq": int(maker is Maker.ROCKETMQ)}
    if maker is Maker.UNKNOWN or NOTE_LOST in _opened_json(io, paths):
        facts[NOTE_LOST] = int(maker is Maker.UNKNOWN)
    _note(io, paths, facts)


def remember(io: StoreIO, paths: StorePaths) -> None:
    """Note the identity of our lock file."""
    _note(io, paths, {"lock_mtime_ns": _lock_time(io, paths)})


def remember_record_crcs(io: StoreIO, paths: StorePaths, *, written: bool) -> None:
    """Note whether records appended from now on have a CRC over the whole record."""
    _note(io, paths, {"record_crcs": int(written)})


def are_record_crcs_written(io: StoreIO, paths: StorePaths) -> bool:
    """Whether records above the log's mark have such CRCs; False if others may have appended.

    RocketMQ 4.x that was killed leaves only its lock and its records, which lack these CRCs.
    """
    return bool(_opened_json(io, paths).get("record_crcs")) and not _has_another_lock(io, paths)


TIME_ORDER_UNKNOWN: Final = 1 << 62


def note_time_order(io: StoreIO, paths: StorePaths, ordered_from: int) -> None:
    """Note durably that store times ascend from this log position on."""
    _note(io, paths, {"time_ordered_from": ordered_from})


def time_ordered_from(io: StoreIO, paths: StorePaths) -> int:
    """Noted log position from which store times ascend; TIME_ORDER_UNKNOWN without a note."""
    return _opened_json(io, paths).get("time_ordered_from", TIME_ORDER_UNKNOWN)


def _opened_json(io: StoreIO, paths: StorePaths) -> dict[str, int]:
    try:
        return io.read_json(paths.opened, dict[str, int])
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, msgspec.MsgspecError):
        return {}


def _note(io: StoreIO, paths: StorePaths, facts: dict[str, int]) -> None:
    noted = _opened_json(io, paths)
    if noted | facts != noted:
        io.write_file_atomically(paths.opened, msgspec.json.encode(noted | facts), mode=0o600)


def foreign_session(io: StoreIO, paths: StorePaths, segments: LogSegments, mark: Mark | None) -> ForeignSession:
    """Find how much of the log the other program kept.

    `mark` is our previous mark of the log, valid or not.
    """
    starts = segments.starts()
    begin = starts[0] if starts else 0
    confirmed = read_checkpoint(io, paths.checkpoint).confirm_physical_offset
    kept = begin
    if segments.start_of(max(0, confirmed)) in starts and confirmed >= begin:
        base = segments.start_of(confirmed)
        view = segments.view(base)
        size = checked_size(view, confirmed - base, len(view), confirmed, VERIFY_ALL)
        if size > 0:
            after = confirmed - base + size
            ended = checked_size(view, after, len(view), base + after, 0) == -BLANK
            kept = base + (len(view) if ended else after)
    return ForeignSession(kept, mark.offset, mark.store_timestamp_ms) if mark is not None else ForeignSession(kept)


def _is_our_checkpoint(io: StoreIO, paths: StorePaths) -> bool:
    """Whether the checkpoint confirms exactly our mark, where RocketMQ could confirm no record.

    RocketMQ 4.x stores only the times, which differ from our mark's after its appends.
    """
    try:
        mark = durable_marks.decode(io.read_file(paths.mark("commitlog")))
    except (FileNotFoundError, IsADirectoryError):
        return False
    found = read_checkpoint(io, paths.checkpoint)
    confirmed = found.confirm_physical_offset, found.physic_timestamp_ms
    return mark is not None and confirmed == (mark.offset, mark.store_timestamp_ms)


def _lock_time(io: StoreIO, paths: StorePaths) -> int:
    entry = io.entry(paths.lock)
    return entry.modified_ns if entry is not None else 0


# A running group

# High enough that a later process with the supervisor's pid hardly has such a descriptor.
_LOWEST_FD: Final = 700


class RocketmqGuard:
    """Makes RocketMQ refuse the store of a running group by a link in its log's folder.

    RocketMQ checks a store's lock only after loading it: by then it has deleted segments that were created ahead and
    the newest index file. But it loads nothing if the last file in `commitlog/` has another length than a segment. So
    there is a link to one of the supervisor's open files. Without the supervisor the link is dangling: RocketMQ takes
    it for an empty last file, removes it and continues. The caller holds the store's lock.
    """

    def __init__(self, io: StoreIO, paths: StorePaths) -> None:
        """Create the link, replacing that of a killed group. Raises OSError."""
        self._io = io
        self._path = paths.guard
        # `abort` exists by now; it is shorter than any segment.
        with io.opened(paths.abort) as fd:
            self._fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LOWEST_FD)
        io.unlink(self._path)
        io.make_link(self._path, f"/proc/{os.getpid()}/fd/{self._fd}")

    def remove(self) -> None:
        """Remove the link at the end of the group."""
        self._io.unlink(self._path)
        self._io.close(self._fd)
