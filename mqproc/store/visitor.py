"""Whether another program has held the store since we did, and how much of our log it has left as it was.

RocketMQ writes its `lock` anew at each start. It recovers by its own rules: at a record that it does not like it cuts
the log, leaves the bytes behind it, and appends over them. Then a durable mark of ours may look right, and records that
were cut may seem to go on behind its own. Its checkpoint tells the last record that it found whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from mqproc.io import StoreIO
from mqproc.kernels.record_check import BLANK, checked_size
from mqproc.kernels.scan import VERIFY_ALL
from mqproc.layout import marks
from mqproc.layout.marks import Mark
from mqproc.paths import StorePaths
from mqproc.store import checkpoint_file
from mqproc.store.segments import LogSegments


@dataclass(frozen=True, slots=True)
class Visit:
    """Another program has held the store. It has left the log as it was below `kept`.

    Before, the log was ours up to `our_end`, whose last record was stored at `our_last_ms`.
    """

    kept: int
    our_end: int = 0
    our_last_ms: int = 0


def has_been_held(io: StoreIO, paths: StorePaths) -> bool:
    """Whether the lock file is another than the one that `remember` saw; False when that never was.

    A copy of a store has another one too: while the checkpoint is the one that we wrote with our mark, nobody else has
    been there. RocketMQ writes the start of a record there within a second.
    """
    return _has_another_lock(io, paths) and not _is_our_checkpoint(io, paths)


def _has_another_lock(io: StoreIO, paths: StorePaths) -> bool:
    noted = _noted(io, paths)
    return "lock_mtime_ns" in noted and noted["lock_mtime_ns"] != _lock_time(io, paths)


def remember(io: StoreIO, paths: StorePaths) -> None:
    """Note which lock file is ours."""
    _note(io, paths, "lock_mtime_ns", _lock_time(io, paths))


def remember_record_crcs(io: StoreIO, paths: StorePaths, *, written: bool) -> None:
    """Note whether each record that is appended from now on has a CRC over all of it."""
    _note(io, paths, "record_crcs", int(written))


def are_record_crcs_written(io: StoreIO, paths: StorePaths) -> bool:
    """What the last one noted of the records above the log's mark; not where another one may have been there since.

    RocketMQ 4.x that was killed leaves nothing but its lock and its records, which have no such CRC.
    """
    return bool(_noted(io, paths).get("record_crcs")) and not _has_another_lock(io, paths)


def _noted(io: StoreIO, paths: StorePaths) -> dict[str, int]:
    try:
        return io.read_json(paths.opened, dict[str, int])
    except (FileNotFoundError, msgspec.MsgspecError):
        return {}


def _note(io: StoreIO, paths: StorePaths, name: str, value: int) -> None:
    noted = _noted(io, paths)
    if noted.get(name) != value:
        io.write_file_atomically(paths.opened, msgspec.json.encode(noted | {name: value}), mode=0o600)


def visit_of(io: StoreIO, paths: StorePaths, segments: LogSegments, mark: Mark | None) -> Visit:
    """What a visit has left. `mark` is our mark of the log as it was before, valid or not."""
    starts = segments.starts()
    begin = starts[0] if starts else 0
    confirmed = checkpoint_file.read(io, paths.checkpoint).confirm_physical_offset
    kept = begin
    if segments.start_of(max(0, confirmed)) in starts and confirmed >= begin:
        base = segments.start_of(confirmed)
        view = segments.view(base)
        size = checked_size(view, confirmed - base, len(view), confirmed, VERIFY_ALL)
        if size > 0:
            behind = confirmed - base + size
            ended = checked_size(view, behind, len(view), base + behind, 0) == -BLANK
            kept = base + (len(view) if ended else behind)
    return Visit(kept, mark.offset, mark.store_timestamp_ms) if mark is not None else Visit(kept)


def _is_our_checkpoint(io: StoreIO, paths: StorePaths) -> bool:
    """Whether the checkpoint confirms the log just up to our mark, where no record begins that RocketMQ could name.

    RocketMQ 4.x knows only the times: what it appends has another than our mark's.
    """
    try:
        mark = marks.decode(io.read_file(paths.mark("commitlog")))
    except (FileNotFoundError, IsADirectoryError):
        return False
    there = checkpoint_file.read(io, paths.checkpoint)
    said = (there.confirm_physical_offset, there.physic_timestamp_ms)
    return mark is not None and said == (mark.offset, mark.store_timestamp_ms)


def _lock_time(io: StoreIO, paths: StorePaths) -> int:
    entry = io.entry(paths.lock)
    return entry.modified_ns if entry is not None else 0
