"""`mqproc store retention`: show the files that retention would delete, or delete them."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, Final

import click

from mqproc.cli.options import DURATION, Invocation, command, detailed_exitcode_option, folder_argument
from mqproc.cli.output import Output, output_columns
from mqproc.config.options import Options
from mqproc.errors import ConfigurationError, CorruptStoreError, NotRunningError, RequestTimeoutError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.ipc.control_words import Words
from mqproc.ipc.store_lock import StoreLock, lock_holder
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store.access import read_settings
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.offsets.offset_store import read_unconsumed
from mqproc.store.read.views import GroupView
from mqproc.store.recovery.recovery import adopt_sizes
from mqproc.store.retention import plan as retention_request
from mqproc.store.retention.plan import DeletionRequest, Due, due_now
from mqproc.store.retention.survey import StoppedStore, Survey, check_stopped_in_order, delete_now, survey
from mqproc.util.units import counted, format_bytes, format_duration, format_time, now_ms

# There may be many files; at most ten segments are deleted per second.
WAIT_S: Final = 3600.0
_POLL_S: Final = 0.02
_LIVENESS_POLLS: Final = 50
_FILE_COLUMNS = output_columns("part", "file", "bytes:bytes", "why")
_QUEUE_COLUMNS = output_columns("topic", "queue_id:number:queue", "before:count:minimum", "after:count:then")
_GROUP_COLUMNS = output_columns(
    "group, topic, queue_id:number:queue, offset:count:committed, messages:count:unconsumed"
)
_DELETED = {
    "segments": words_of.RETENTION_SEGMENTS,
    "queue_files": words_of.RETENTION_QUEUE_FILES,
    "index_files": words_of.RETENTION_INDEX_FILES,
    "bytes": words_of.RETENTION_BYTES,
    "unconsumed_messages": words_of.RETENTION_UNCONSUMED,
}


@command()
@folder_argument
@click.option("--dry-run", is_flag=True, help="Only show the files. This is the default.")
@click.option("--execute", "--yes", "--now", "execute", is_flag=True, help="Delete the files now, at any hour.")
@detailed_exitcode_option
@click.option("--older-than", type=DURATION, metavar="AGE", help="This age instead of file_reserved_time: 90m, 12h.")
def retention(
    invocation: Invocation, folder: Path | None, dry_run: bool, execute: bool, older_than: float | None
) -> int:
    """Show which files retention would delete, or delete them.

    Shows for each file the reason, the new minimum offsets of the log and the queues, and the messages that consumer
    groups have not consumed. With --execute the keeper of a running group deletes the files, with the group's options,
    and the command waits for it; in a stopped store the command deletes them itself.
    """
    if dry_run and execute:
        raise click.UsageError("--dry-run and --execute exclude each other")
    io = StoreIO()
    paths = invocation.store_argument(io, folder)
    reserved_ms = None if older_than is None else round(older_than * 1000)
    running = RunningGroup.find(io, paths)
    if running is not None and invocation.set_:
        invocation.out.note("--set is ignored: a running group uses its own options")
    try:
        if execute and running is not None:
            _print_deleted(invocation.out, running.delete(reserved_ms, invocation.timeout_or(WAIT_S)), paths)
        elif execute:
            _print_deleted(invocation.out, _delete_stopped(io, paths, invocation, reserved_ms), paths)
        else:
            plan = _survey(io, paths, invocation, running, reserved_ms)
            _show(invocation.out, plan)
            return invocation.plan_exit_code(bool(plan["files"]))
    finally:
        if running is not None:
            running.close()
    return 0


@dataclasses.dataclass(frozen=True, slots=True)
class RunningGroup:
    """Control words and queues of a running group, read-only."""

    io: StoreIO
    paths: StorePaths
    control: Control
    table: QueueTable

    @classmethod
    def find(cls, io: StoreIO, paths: StorePaths) -> RunningGroup | None:
        """Open a running group; None if no group runs on the store."""
        view = GroupView.open(io, paths, Options())
        if view is None:
            return None
        view.close()
        return cls(io, paths, Control.open(io, paths), QueueTable(io, paths.queues))

    @property
    def words(self) -> Words:
        return self.control.words

    def close(self) -> None:
        self.table.close()
        self.control.close()

    def delete(self, reserved_ms: int | None, timeout_s: float) -> dict[str, Any]:
        """Ask the keeper to delete and wait for it. Raises RequestTimeoutError, NotRunningError."""
        words = self.words
        before = {name: words[word] for name, word in _DELETED.items()}
        minimum = words[words_of.MIN_PHYSICAL_OFFSET]
        asked = retention_request.submit_request(self.io, self.paths, reserved_ms)
        deadline = time.monotonic() + timeout_s
        polls = 0
        while self.io.exists(asked):
            if time.monotonic() > deadline:
                stuck = words[words_of.RETENTION_ERRNO]
                raise RequestTimeoutError(
                    f"{self.paths.root}: the keeper has not finished after {timeout_s:g} s; it continues"
                    + (f", held up by errno {stuck}" if stuck else "")
                )
            polls += 1
            if polls % _LIVENESS_POLLS == 0 and not self._alive():
                raise NotRunningError(f"{self.paths.root}: the group has ended; the next group's keeper continues")
            time.sleep(_POLL_S)
        # The query role raises committed offsets to the new minima, and counts unconsumed messages.
        while words[words_of.PROGRESS_AT] < words[words_of.MIN_PHYSICAL_OFFSET] and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        deleted = {name: words[word] - before[name] for name, word in _DELETED.items()}
        return _result_json(deleted, minimum, words)

    def _alive(self) -> bool:
        return lock_holder(self.io, self.paths) is not None and self.control.is_current(self.io, self.paths)


def _result_json(deleted: dict[str, int], minimum: int, words: Words) -> dict[str, Any]:
    held = words[words_of.RETENTION_HELD_BY]
    return {
        "executed": True,
        **deleted,
        "min_physical_offset_before": minimum,
        "min_physical_offset": words[words_of.MIN_PHYSICAL_OFFSET],
        "held_by": words_of.HELD_NAMES[held] if held else None,
    }


def _delete_stopped(io: StoreIO, paths: StorePaths, invocation: Invocation, reserved_ms: int | None) -> dict[str, Any]:
    lock = StoreLock.acquire(io, paths)
    try:
        check_stopped_in_order(io, paths)
        options = _stopped_options(io, paths, invocation)
        store = StoppedStore(io, paths, options)
        minimum = store.words[words_of.MIN_PHYSICAL_OFFSET]
        delete_now(io, paths, options, store, reserved_ms, now_ms(), lambda event, **figures: None)
    finally:
        lock.close()
    return _result_json({name: store.words[word] for name, word in _DELETED.items()}, minimum, store.words)


def _stopped_options(io: StoreIO, paths: StorePaths, invocation: Invocation) -> Options:
    """Explicit options, else those of the last group, else defaults."""
    try:
        options = read_settings(io, paths)
    except FileNotFoundError:
        options = Options()
    except ConfigurationError as error:  # Written by another version: not damaged.
        raise CorruptStoreError(f"{error}; mqproc up rewrites the file") from None
    except ValueError as error:
        raise CorruptStoreError(f"{paths.settings}: {error}; mqproc store repair quarantines it") from None
    explicit = {name: setting.value for name, setting in invocation.settings().items() if setting.source != "default"}
    return adopt_sizes(io, paths, dataclasses.replace(options, **explicit), invocation.out.note)


# The plan


def _survey(
    io: StoreIO, paths: StorePaths, invocation: Invocation, running: RunningGroup | None, reserved_ms: int | None
) -> dict[str, Any]:
    options = read_settings(io, paths) if running is not None else _stopped_options(io, paths, invocation)
    time_ms = now_ms()
    used, free = io.disk_usage(paths.root)
    due = due_now(options, time_ms, used, free, requested_ms=DeletionRequest(reserved_ms).reserved_ms_by(options))
    assert due is not None  # A request is always due.
    if running is not None:
        found = survey(io, paths, options, running.words, running.table, due, time_ms)
    else:
        stopped = StoppedStore(io, paths, options)
        found = survey(io, paths, options, stopped.words, stopped, due, time_ms)
    by_itself = due_now(options, time_ms, used, free)
    return {
        "executed": False,
        "store": str(paths.root),
        "running": running is not None,
        "disk_used_ratio": round(used / (used + free), 4) if used + free else 0.0,
        "expires_after_ms": due.reserved_ms,
        "due_by_itself": words_of.DUE_NAMES[by_itself.trigger] if by_itself else None,
        "delete_when": options.delete_when,
        **_plan_json(found, paths, due, time_ms),
        "unconsumed_since_ever": read_unconsumed(io, paths),
    }


def _plan_json(found: Survey, paths: StorePaths, due: Due, time_ms: int) -> dict[str, Any]:
    files = [
        {
            "part": file.part,
            "file": str(file.path.relative_to(paths.root)),
            "bytes": file.bytes,
            "why": _why(file, due, time_ms, found.minimum_after),
            "last_store_timestamp_ms": file.segment.last_ms if file.segment else None,
        }
        for file in found.files
    ]
    return {
        "files": files,
        "bytes": sum(file.bytes for file in found.files),
        "min_physical_offset_before": found.minimum_before,
        "min_physical_offset": found.minimum_after,
        "queues": [dataclasses.asdict(moved) for moved in found.queues],
        "groups": [dataclasses.asdict(each) | {"messages": each.messages} for each in found.skipped],
        "unconsumed_messages": sum(each.messages for each in found.skipped),
        "progress_error": found.progress_error or None,
        "held_by": words_of.HELD_NAMES[found.held.by] if found.held else None,
        "held_detail": (found.held.detail or None) if found.held else None,
    }


def _why(file: Any, due: Due, time_ms: int, minimum: int) -> str:
    if file.segment is None:
        what = "last unit" if file.part == "consumequeue" else "last entry"
        return f"{what} points below {minimum:,}"
    if file.segment.last_ms is None:
        return "holds no record"
    age = format_duration(max(0, time_ms - file.segment.last_ms) / 1000)
    stored = f"last stored {format_time(file.segment.last_ms)}, {age} ago"
    return stored if file.segment.expired else f"the disk is too full; {stored}"


def _show(out: Output, plan: dict[str, Any]) -> None:
    if out.is_json:
        out.document(plan)
        return
    if out.shape != "table":
        out.rows("files", _FILE_COLUMNS, plan["files"])
        return
    files = plan["files"]
    if files:
        out.rows("files", _FILE_COLUMNS, files)
        out.line("")
    for columns, name in ((_QUEUE_COLUMNS, "queues"), (_GROUP_COLUMNS, "groups")):
        if plan[name]:
            out.rows(name, columns, plan[name])
            out.line("")
    out.line(f"{counted(len(files), 'file')} with {format_bytes(plan['bytes'])} would be deleted")
    out.line(f"the log would begin at {plan['min_physical_offset']:,}, now {plan['min_physical_offset_before']:,}")
    if plan["unconsumed_messages"]:
        out.line(f"groups have not consumed {counted(plan['unconsumed_messages'], 'message')} of them")
    if plan["progress_error"]:
        out.line(f"committed offsets cannot be read: {plan['progress_error']}")
    if plan["held_by"]:
        out.line(f"held back by: {plan['held_by']}" + (f", {plan['held_detail']}" if plan["held_detail"] else ""))
    itself = plan["due_by_itself"]
    out.line(f"automatic deletion: {f'now ({itself})' if itself else 'at hour ' + plan['delete_when']}")


def _print_deleted(out: Output, done: dict[str, Any], paths: StorePaths) -> None:
    if out.is_json:
        out.document({"store": str(paths.root), **done})
        return
    out.line(
        f"deleted {counted(done['segments'], 'segment')}, {counted(done['queue_files'], 'ConsumeQueue file')} and "
        f"{counted(done['index_files'], 'index file')}, {format_bytes(done['bytes'])}"
    )
    out.line(f"the log begins at {done['min_physical_offset']:,}, before {done['min_physical_offset_before']:,}")
    if done["unconsumed_messages"]:
        out.line(f"groups had not consumed {counted(done['unconsumed_messages'], 'message')} of them")
    if done["held_by"]:
        out.line(f"held back by: {done['held_by']}")
