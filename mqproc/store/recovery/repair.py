"""Repair of a damaged store: own fixes, then a recovery that trusts no mark.

    verify ──▶ findings ──▶ own actions ──┐
                                          ├──▶ all run on DryRunIO ──▶ plan: which files change, and why
               recovery without marks ────┘
    --execute: copies of everything that changes under mqproc/repaired/TIME/, then the same for real, then verify

The plan is exact: it is the code that runs later, on storage that keeps nothing. A killed repair is completed by the
next one. `abort` exists meanwhile, so a start in between checks everything.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.config.options import OnDamage, Options
from mqproc.errors import CorruptStoreError, StoreAccessError, StoreReadOnlyError
from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.io.store_io import Kind as EntryKind
from mqproc.ipc.control_words import Words
from mqproc.ipc.error_log import ErrorLog
from mqproc.layout import control, record, timer_files
from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE
from mqproc.layout.record_codec import encode_blank
from mqproc.layout.timer_files import TimerCheck
from mqproc.paths import StorePaths
from mqproc.store import damage
from mqproc.store.commitlog import misnamed_segments as misnamed
from mqproc.store.commitlog.misnamed_segments import MisnamedSegment
from mqproc.store.commitlog.segments import adopted_segment_size
from mqproc.store.consumequeue.bounds import UNIT_DTYPE, as_units, filler_position, put_end_fillers
from mqproc.store.consumequeue.files import ConsumeQueueFiles, filler_units
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.damage import merged
from mqproc.store.lost_messages import LostMessages, errors_about
from mqproc.store.recovery.dry_run import Change, DryRunIO
from mqproc.store.recovery.queues import FILL_MAX
from mqproc.store.recovery.rebuild import usable_scanners
from mqproc.store.recovery.recovery import Recovery, Report, adopt_sizes
from mqproc.store.recovery.store_files import mark_open
from mqproc.store.schedule import levels as delay_offsets
from mqproc.store.schedule.timer_store import TimerStore, read_timer_check
from mqproc.store.sync_guard import remember_failed_sync
from mqproc.store.verify import Finding, FindingKind, VerifyResult
from mqproc.store.verify.findings import LISTED_MAX, Severity
from mqproc.store.verify.inventory import Queue, take_inventory
from mqproc.store.verify.log import LogScanner
from mqproc.store.verify.queues import detect_delays
from mqproc.store.verify.snapshot import LogPositions, Snapshot, read_deleted
from mqproc.store.verify.timer import first_pending_offset
from mqproc.store.verify.verifier import sizes_of
from mqproc.topic_names import SCHEDULE_TOPIC, TIMER_TOPIC

# Repair of ConsumeQueue units that recovery leaves wrong
#
# Recovery overwrites units that differ from a record, and fills those of damaged records as far as it can. Here every
# unit between a queue's first and last one is checked:
#
#     expired …│ record record … no record … record │ after the end
#     garbage becomes a         zeros and garbage     cleared by
#     copy of the previous unit become fillers        recovery


_CHUNK_UNITS: Final = 1 << 16


class UnitRepair:
    """Repairs queues of one stopped store, whose log is [begin, end)."""

    def __init__(self, io: StoreIO, paths: StorePaths, options: Options, begin: int, end: int) -> None:
        self._begin = begin
        self._end = end
        self._holes = merged((hole.start, hole.stop) for hole in damage.load(io, paths).holes)
        sizes = sizes_of(io, paths, options)
        self._segment_size = sizes.segment
        self._files = ConsumeQueueFiles(io, paths.consume_queue, sizes.queue_file, write=True)
        inventory = take_inventory(io, paths, sizes)
        snapshot = Snapshot(
            inventory, LogPositions(begin, end), detect_delays(io, inventory, options.message_delay_level)
        )
        snapshot.deleted = read_deleted(io, paths, running=False)
        self._scanner = LogScanner(io, snapshot)

    def run(self, queues: Collection[Queue], ends: Mapping[Queue, int]) -> int:
        """Compare every unit of these queues with the log; return how many were changed.

        From the queues' `ends` on, recovery has already cleared implausible units.
        """
        chosen = set(queues)
        records: dict[Queue, list[tuple[int, int]]] = {queue: [] for queue in chosen}
        changed = 0
        for result in self._scanner.walk(self._begin, self._end, self._holes):
            for number, first, count, offset, _end, _time in result.runs.tolist():
                queue = self._scanner.table.name(number)
                if queue in chosen and first < ends.get(queue, 0):
                    expected = as_units(result.units[offset : offset + count * UNIT_SIZE])
                    changed += self._write_if_other(queue, first, expected)
                    records[queue].append((first, first + count))
        for queue, ranges in records.items():
            if ranges:
                changed += self._repair_gaps(queue, merged(ranges))
            elif self._begin > 0 and (starts := self._files.starts(*queue)):
                changed += self._expire_units(queue, starts[0] // UNIT_SIZE, self._files.extent(*queue).max_offset)
        return changed

    def close(self) -> None:
        """Sync and close the files."""
        self._files.sync()
        self._files.close()
        self._scanner.views.close()

    def _write_if_other(self, queue: Queue, first: int, expected: NDArray[np.void]) -> int:
        current = self._read(queue, first, len(expected))
        other = int(np.count_nonzero(current != expected))
        if other:
            self._files.write_run(*queue, first, expected.view(np.uint8))
        return other

    def _read(self, queue: Queue, first: int, count: int) -> NDArray[np.void]:
        """Units on disk; zeros where the files lack them."""
        units = np.zeros(count, UNIT_DTYPE)
        try:
            found = as_units(self._files.read_units(*queue, first, count))
        except FileNotFoundError:
            return units
        units[: len(found)] = found
        return units

    def _repair_gaps(self, queue: Queue, records: list[tuple[int, int]]) -> int:
        """Repair the units before a queue's first record and between its records."""
        starts = self._files.starts(*queue)
        changed = 0
        if starts and self._begin > 0:
            changed += self._expire_units(queue, starts[0] // UNIT_SIZE, records[0][0])
        elif starts:
            changed += self._fill(queue, starts[0] // UNIT_SIZE, records[0][0], before_all=True)
        for earlier, later in itertools.pairwise(records):
            # A longer gap is implausible and would fill the disk; recovery does not fill it either.
            if later[0] - earlier[1] <= FILL_MAX:
                changed += self._fill(queue, earlier[1], later[0])
        return changed

    def _expire_units(self, queue: Queue, first: int, stop: int) -> int:
        """Let units of deleted records point below the log, for the search of the minimum."""
        changed = 0
        last = np.array([(0, 1, 0)], UNIT_DTYPE)[0]
        for at in range(first, stop, _CHUNK_UNITS):
            units = self._read(queue, at, min(_CHUNK_UNITS, stop - at))
            physical, sizes = units["physical_offset"].astype(np.int64), units["size"]
            wrong = (sizes != FILLER_SIZE) & ((sizes <= 0) | (physical < 0) | (physical >= self._begin))
            wrong &= ~self._in_holes(physical)
            for index in np.flatnonzero(wrong).tolist():
                units[index] = units[index - 1] if index else last
            if wrong.any():
                put_end_fillers(units, self._segment_size)
                self._files.write_run(*queue, at, units.view(np.uint8))
                changed += int(np.count_nonzero(wrong))
            last = units[-1].copy()
        return changed

    def _fill(self, queue: Queue, first: int, stop: int, *, before_all: bool = False) -> int:
        """Write fillers where no record exists, except over units that point into damage."""
        changed = 0
        for at in range(first, stop, _CHUNK_UNITS):
            units = self._read(queue, at, min(_CHUNK_UNITS, stop - at))
            physical = units["physical_offset"].astype(np.int64)
            good = (units["size"] == FILLER_SIZE) | ((units["size"] > 0) & self._in_holes(physical))
            if good.all():
                continue
            place = 0 if before_all else self._filler_place(queue, at)
            expected = as_units(filler_units(len(units), place))
            expected[good] = units[good]
            if self._holes:
                # Without damage, RocketMQ would cut the queue at a unit that points beyond the end of the log.
                put_end_fillers(expected, self._segment_size)
            self._files.write_run(*queue, at, expected.view(np.uint8))
            changed += int(np.count_nonzero(~good))
        return changed

    def _filler_place(self, queue: Queue, queue_offset: int) -> int:
        """Position for a filler: the next hole after the preceding unit, if any."""
        before = self._read(queue, queue_offset - 1, 1)[0]
        position = int(before["physical_offset"])
        following = next((start for start, _stop in self._holes if start > position), None)
        return 0 if following is None else filler_position(following, self._segment_size)

    def _in_holes(self, physical: NDArray[np.int64]) -> NDArray[np.bool_]:
        found = np.zeros(len(physical), bool)
        for start, stop in self._holes:
            found |= (physical >= start) & (physical < stop)
        return found


# Copies of everything that a repair changes, under the store's own names
#
#     mqproc/repaired/TIME/repair.json    findings, plan, changes
#     mqproc/repaired/TIME/files/         original of every file that was changed, removed or moved
#
# To undo a repair, as long as nothing has run since: delete the files that `repair.json` lists as made or as the target
# of a move, then copy `files/` over the store.


_CHUNK: Final = 1 << 20
# Errors after which a file is copied instead of linked.
_NO_LINK: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP})


def copy_path(folder: Path, paths: StorePaths, path: Path) -> Path:
    """Path of a file's copy in a folder of copies."""
    return folder / "files" / path.relative_to(paths.root)


def save_copies(
    io: StoreIO, paths: StorePaths, folder: Path, changes: Iterable[Change], document: dict[str, Any]
) -> None:
    """Copy what will change and write `document`, durably. Raises OSError; then nothing is left."""
    io.make_folder(folder, mode=0o700)
    try:
        # A moved file is listed again if another one takes its name.
        differing = [change for change in changes if change.what != "made"]
        overwritten = {change.path for change in differing if change.in_place}
        for path in dict.fromkeys(change.path for change in differing):
            entry = io.entry(path)
            # Else a folder that is moved as a whole.
            if entry is not None and entry.kind is EntryKind.FILE:
                _save_copy(io, path, copy_path(folder, paths, path), in_place=path in overwritten)
        text = msgspec.json.format(msgspec.json.encode(document), indent=1)
        io.write_file_atomically(folder / "repair.json", text, mode=0o600)
        with io.opened(folder) as fd:
            io.sync_file_system(fd)
    except OSError:
        io.remove_folder(folder)
        raise


def _save_copy(io: StoreIO, path: Path, target: Path, *, in_place: bool) -> None:
    """Link a file; copy it without holes if it is overwritten `in_place` or cannot be linked."""
    io.make_folder(target.parent, mode=0o700, sync=False)
    if not in_place:
        try:
            io.keep_link(path, target)
            return
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
    with io.opened(path) as source, io.opened(target, write=True, create=True, mode=0o600) as copy:
        io.set_size(copy, io.size(source))
        at = 0
        while (data := io.next_data(source, at)) is not None:
            at = io.next_hole(source, data)
            for place in range(data, at, _CHUNK):
                io.pwrite(copy, io.pread(source, min(_CHUNK, at - place), place), place)


# Repair of the timer's files, which can be rebuilt from its queue


# A check in use is never older.
_TIMERS_MS = 365 * 86_400_000
# Messages due shortly before the check was written may not have been delivered.
_DELIVERY_MS = 60_000
_KINDS = frozenset(
    {
        FindingKind.TIMER_FILE_MISSING,
        FindingKind.TIMER_FILE_LENGTH,
        FindingKind.TIMER_CHECK_MISSING,
        FindingKind.TIMER_CHECK_AHEAD,
        FindingKind.TIMER_UNIT_WRONG,
        FindingKind.TIMER_UNIT_MISSING,
        FindingKind.TIMER_SLOT_WRONG,
    }
)


def timer_damage(findings: Iterable[Finding], paths: StorePaths) -> tuple[bool, bool]:
    """Whether any timer file needs repair, and whether that includes more than the wheel.

    After a crash, a start rebuilds the wheel, and all files without a check, so verify reports these as notes. A repair
    closes the store, so here they count as damage.
    """
    of_timer = [each for each in findings if _needs_repair(each, paths)]
    return bool(of_timer), any(each.file != paths.timer_wheel.name for each in of_timer)


def _needs_repair(finding: Finding, paths: StorePaths) -> bool:
    if finding.kind is FindingKind.FILE_BEGUN:
        return (paths.root / finding.file).parent == paths.timer_log
    if finding.kind not in _KINDS:
        return False
    is_note = finding.file == paths.timer_wheel.name or finding.kind is FindingKind.TIMER_CHECK_MISSING
    return is_note or finding.severity is Severity.DAMAGE


def rebuild_wheel(io: StoreIO, paths: StorePaths, options: Options) -> None:
    """Rebuild the wheel from the timer log, durably. Raises OSError, FailedSyncError."""
    timer = TimerStore(io, io, paths, options.timer_precision_ms, options.mapped_file_size_timer_log)
    with contextlib.closing(timer):
        timer.open(_now_ms(), lambda physical_offset: None, clean=False)
        if timer.remark:
            # The log was damaged after all.
            timer.write(timer.synced_snapshot(log=0, log_end=0, now_ms=_now_ms()))
        else:
            timer.sync()


def reset_timer_check(io: StoreIO, paths: StorePaths, options: Options) -> None:
    """Write a check that makes the next start enqueue all waiting messages.

    That start recognises messages already delivered by marks in the log. RocketMQ's deliveries have no marks: messages
    of its current slot, or after the first waiting message, may be delivered twice.
    """
    check = read_timer_check(io, paths)
    inventory = take_inventory(io, paths, sizes_of(io, paths, options))
    read_ms = _delivered_up_to(check, _now_ms())
    queue_offset = first_pending_offset(io, inventory, read_ms)
    reset = TimerCheck(read_ms, 0, queue_offset, _now_ms(), check.counter + 1, log=0)
    io.make_folder(paths.config)
    io.write_file_atomically(paths.timer_check, timer_files.encode_check(reset))


def _delivered_up_to(check: TimerCheck, now_ms: int) -> int:
    """Time up to which messages were delivered, from the check; 0 if unknown."""
    if not check.is_ahead(now_ms):
        return check.read_ms
    written_ms = check.timestamp_ms - _DELIVERY_MS
    return written_ms if now_ms - _TIMERS_MS < written_ms < now_ms else 0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


# Recovery of a stopped store by a tool, for real or as a dry run


@dataclass(slots=True)
class RecoveryPlan:
    """Result of a dry run. `reported`: recovery's report; `refused`: why a start would fail.

    `changes` omits the queue table, which every start rebuilds. `cuts` are new ends of the log with the previously
    durable ones: the data between them is lost.
    """

    reported: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    holes: list[tuple[int, int]] = field(default_factory=list)
    cuts: list[tuple[int, int]] = field(default_factory=list)
    log_begin: int = 0
    log_end: int = 0
    cut_bytes: int = 0
    refused: str = ""
    lost: list[LostMessages] = field(default_factory=list)


def plan_recovery(paths: StorePaths, options: Options) -> RecoveryPlan:
    """Recover a stopped store as a dry run. Raises StoreAccessError, OSError."""
    plan = RecoveryPlan()
    words = Words(bytearray(control.FILE_SIZE))
    with DryRunIO(paths.root) as io:
        try:
            plan.lost = _recover(io, paths, options, words, plan.reported.append)
            known = damage.load(io, paths)
            plan.holes = [(hole.start, hole.stop) for hole in known.holes]
            plan.cuts = [(cut.end, cut.durable_end) for cut in known.cuts]
        except CorruptStoreError as error:
            plan.refused = str(error)
        plan.changes = [change for change in io.changes() if change.path not in (paths.queues, paths.next_queues)]
    plan.log_begin, plan.log_end = words[control.MIN_PHYSICAL_OFFSET], words[control.WRITTEN]
    plan.cut_bytes = words[control.RECOVERY_CUT_BYTES]
    return plan


def run_recovery(io: StoreIO, paths: StorePaths, options: Options) -> list[str]:
    """Recover a stopped store whose lock the caller holds; return the report.

    Raises StoreAccessError, CorruptStoreError, StoreReadOnlyError, OSError.
    """
    reported: list[str] = []
    note_lost(io, paths, _recover(io, paths, options, Words(bytearray(control.FILE_SIZE)), reported.append))
    return reported


def note_lost(io: StoreIO, paths: StorePaths, lost: Collection[LostMessages]) -> None:
    """Note lost messages among the errors of a store whose lock the caller holds."""
    errors = ErrorLog.create(io, paths, control.SUPERVISOR) if lost else None
    if errors is not None:
        for text in errors_about(lost, "mqproc store verify"):
            errors.note(text, _now_ms())


def _recover(io: StoreIO, paths: StorePaths, options: Options, words: Words, report: Report) -> list[LostMessages]:
    """Recover a stopped store; return the messages that it found to be lost."""
    adopted = adopt_sizes(io, paths, options, report)
    clean = not io.exists(paths.abort)
    recovery = Recovery(io, paths, adopted, words, report, clean=clean, scanners=usable_scanners())
    recovery.check()
    with opened(io, paths, words, report):
        recovery.run()
    return recovery.lost


@contextlib.contextmanager
def opened(io: StoreIO, paths: StorePaths, words: Words, report: Report) -> Iterator[None]:
    """Keep `abort` in the store while it is changed; remove it once all records are dispatched.

    `words` are those of the recovery. A failed sync is final: memory may differ from the disk. Raises
    StoreReadOnlyError then, OSError.
    """
    io.make_folder(paths.own, mode=0o700)
    try:
        mark_open(io, paths, report)
        yield
        if words[control.DISPATCHED] == words[control.WRITTEN]:
            io.unlink(paths.abort)
            io.sync_folder(paths.root)
    except FailedSyncError as error:
        remember_failed_sync(io, paths, f"recovery: {error}")
        text = f"{paths.root}: a sync failed: {error}; the store rejects messages until mqproc store repair"
        raise StoreReadOnlyError(text) from error


_INDEX_DAMAGE: Final = frozenset(
    {
        FindingKind.INDEX_FILE_LENGTH,
        FindingKind.INDEX_MISSING,
        FindingKind.INDEX_HEADER,
        FindingKind.INDEX_LINK,
        FindingKind.INDEX_ORDER,
        FindingKind.ENTRY_WRONG,
        FindingKind.ENTRY_MISSING,
        FindingKind.ENTRY_BEYOND_LOG,
    }
)
_WRONG_UNITS: Final = frozenset(
    {
        FindingKind.UNIT_WRONG,
        FindingKind.UNIT_DANGLING,
        FindingKind.UNIT_BEYOND_LOG,
        FindingKind.UNIT_MISSING,
        FindingKind.QUEUE_FILE_MISSING,
        FindingKind.QUEUE_FILE_LENGTH,
    }
)
# consumequeue, topic, queue id, file
_QUEUE_FILE_PARTS: Final = 4
# Notes that a repair corrects too, since the store should be complete afterwards, including records after pages that
# were never written.
_UNFINISHED: Final = frozenset(
    {
        FindingKind.NOT_DISPATCHED,
        FindingKind.NOT_INDEXED,
        FindingKind.FILE_BEGUN,
        FindingKind.TORN_TAIL,
        FindingKind.RECORD_MAGIC,
        FindingKind.RECORD_SIZE,
        FindingKind.RECORD_BODY_CRC,
        FindingKind.RECORD_CRC,
        FindingKind.RECORD_ZEROS,
    }
)
# Damage that no repair can correct.
_UNREPAIRABLE: Final = frozenset({FindingKind.QUEUE_OFFSET_REPEATED, FindingKind.QUEUE_OFFSET_TOO_HIGH})
# Handled even if segments have each other's names; all other findings are reliable only after the renames.
_INDEPENDENT_OF_LOG: Final = frozenset(
    {
        FindingKind.STRAY_FILE,
        FindingKind.MISPLACED_FILE,
        FindingKind.FILE_UNREADABLE,
        FindingKind.CONFIG_UNREADABLE,
        FindingKind.READ_ONLY,
    }
)
_MOVE_ASIDE: Final = "move aside"


@dataclass(frozen=True, slots=True)
class Action:
    """A change before recovery runs: file, action and reason."""

    path: Path
    what: str
    why: str
    step: Callable[[StoreIO], None]


@dataclass(slots=True)
class RepairPlan:
    """Plan of a repair. `reported`: recovery's report; `unrepairable`: remaining findings.

    `lost` are messages that recovery finds to be lost.
    """

    actions: list[Action] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    unrepairable: list[Finding] = field(default_factory=list)
    lost: list[LostMessages] = field(default_factory=list)

    @property
    def nothing_to_do(self) -> bool:
        return not self.actions and not self.changes


class Repair:
    """Repair of one stopped store. The caller holds its lock while it is executed."""

    def __init__(self, paths: StorePaths, options: Options, verified: VerifyResult, now: datetime.datetime) -> None:
        """`verified` is the result of a verify; `now` names the folder of copies."""
        self._paths = paths
        self._options = replace(options, on_damage=OnDamage.SERVE)
        self._verified = verified
        self._findings = verified.findings.in_order()
        self._counts = verified.findings.counts
        self.kept = paths.repaired / now.strftime("%Y%m%dT%H%M%S%f")[:-3]

    def plan(self) -> RepairPlan:
        """Plan the repair. Raises StoreAccessError, CorruptStoreError, OSError."""
        plan = RepairPlan()
        if self._verified.clean and not self._counts.keys() & _UNFINISHED:
            return plan
        if links := [finding for finding in self._findings if finding.kind is FindingKind.SYMLINK]:
            raise StoreAccessError(f"{self._paths.root / links[0].file}: a symlink; replace it by the file first")
        plan.unrepairable = [finding for finding in self._findings if finding.kind in _UNREPAIRABLE]
        plan.actions = list(self._actions())
        with DryRunIO(self._paths.root) as io:
            plan.lost = self._carry_out(io, plan.actions, plan.reported.append)
            # An action covers a move to the copies.
            plan.changes = [
                change for change in io.changes() if change.target is None or self.kept not in change.target.parents
            ]
        return plan

    def execute(self, io: StoreIO, plan: RepairPlan, report: Report) -> None:
        """Copy the originals, then repair. Raises StoreAccessError if nothing was changed."""
        document = {
            "schema_version": 1,
            "findings": [finding.to_json() for finding in self._findings],
            "actions": [action_row(action, self._paths) for action in plan.actions],
            "changes": [change_row(change, self._paths) for change in plan.changes],
        }
        # These files are moved to the place of their copies; unreadable files cannot be copied.
        moved = {action.path for action in plan.actions if action.what == _MOVE_ASIDE}
        try:
            changes = [change for change in plan.changes if change.path not in moved]
            save_copies(io, self._paths, self.kept, changes, document)
        except OSError as error:
            text = f"{error.filename or self.kept}: {error.strerror}: originals cannot be copied; nothing was changed"
            raise StoreAccessError(text) from error
        note_lost(io, self._paths, self._carry_out(io, plan.actions, report))

    def _carry_out(self, io: StoreIO, actions: Iterable[Action], report: Report) -> list[LostMessages]:
        words = Words(bytearray(control.FILE_SIZE))
        clean = not io.exists(self._paths.abort) and not self._counts.keys() & _INDEX_DAMAGE
        with opened(io, self._paths, words, report):
            for action in actions:
                action.step(io)
            misnamed.finish_renames(io, self._paths.commit_log)
            return self._recover(io, words, report, clean=clean)

    def _recover(self, io: StoreIO, words: Words, report: Report, *, clean: bool) -> list[LostMessages]:
        options = adopt_sizes(io, self._paths, self._options, lambda line: None)
        recovery = Recovery(io, self._paths, options, words, report, clean=clean, scanners=usable_scanners())
        recovery.distrust_marks()
        recovery.run()
        # Records not dispatched because of a full disk are in the log, and may have been delivered.
        self._lower_delivery_offsets(io, self._queue_ends(io, QueueTable.next_offset), report)
        if queues := self._queues_with_wrong_units():
            begin, end = words[control.MIN_PHYSICAL_OFFSET], words[control.WRITTEN]
            unit_repair = UnitRepair(io, self._paths, options, begin, end)
            changed = unit_repair.run(queues, self._queue_ends(io, QueueTable.max_offset))
            unit_repair.close()
            if changed:
                # Recovery computed the queues' minima from the old units: let the next start rebuild the table.
                io.unlink(self._paths.queues)
                io.sync_folder(self._paths.own)
        return recovery.lost

    def _lower_delivery_offsets(self, io: StoreIO, ends: dict[Queue, int], report: Report) -> None:
        """Lower the offsets of delayed delivery and of the timer to their queues' ends."""
        try:
            lowered = delay_offsets.lower_levels(io, self._paths, lambda level: ends.get((SCHEDULE_TOPIC, level - 1)))
        except CorruptStoreError as error:
            # The file was quarantined and its copy is unreadable too.
            report(f"recovery: delay levels: {error}; delivered messages are found in the log")
            lowered = {}
        for level, end in lowered.items():
            report(f"recovery: delay level {level}: set back to its queue's end {end:,}")
        paths = self._paths
        if read_timer_check(io, paths).queue_offset > ends.get((TIMER_TOPIC, 0), 0):
            report("recovery: timer: its queue has lost its end; the next start files waiting messages again")
            for path in (*(paths.timer_log / name for name in io.names(paths.timer_log)), paths.timer_wheel):
                io.unlink(path)
            reset_timer_check(io, self._paths, self._options)

    def _queue_ends(self, io: StoreIO, end_of: Callable[[QueueTable, int], int]) -> dict[Queue, int]:
        with contextlib.closing(QueueTable(io, self._paths.queues)) as table:
            return {(topic, queue_id): end_of(table, number) for number, topic, queue_id in table.live()}

    def _queues_with_wrong_units(self) -> set[Queue]:
        if any(self._counts[kind] > LISTED_MAX for kind in _WRONG_UNITS):
            return set(self._verified.queue_ends)
        parts = [finding.file.split("/") for finding in self._findings if finding.kind in _WRONG_UNITS]
        return {(part[1], int(part[2])) for part in parts if len(part) == _QUEUE_FILE_PARTS}

    # Actions for findings that recovery does not handle

    def _actions(self) -> Iterator[Action]:
        wrong = self._misnamed_segments()
        yield from self._renames(wrong)
        _is_damaged, replaces_timer = timer_damage(self._findings, self._paths)
        for finding in self._findings:
            path = self._paths.root / finding.file
            if finding.severity is Severity.NOTE or (replaces_timer and self._goes_with_timer(path, later=bool(wrong))):
                continue
            if wrong and finding.kind not in _INDEPENDENT_OF_LOG:
                continue
            if finding.kind is FindingKind.STRAY_FILE:
                yield self._move_away_action(path, "not a file of the store")
            elif finding.kind in (FindingKind.MISPLACED_FILE, FindingKind.FILE_UNREADABLE):
                yield self._move_away_action(path, finding.text)
            elif finding.kind is FindingKind.CONFIG_UNREADABLE:
                yield self._move_away_action(path, f"unreadable: {finding.text}")
            elif finding.kind is FindingKind.READ_ONLY:
                yield self._unlink_action(path, "the store has been read from the disk and checked")
            elif finding.kind is FindingKind.BLANK_SIZE:
                yield self._blank_action(path, finding)
        if not wrong:
            yield from self._expired_index_actions()
            yield from self._timer_actions()

    def _goes_with_timer(self, path: Path, *, later: bool) -> bool:
        """Whether a path is moved with all timer files; after renames of segments, `later`."""
        paths = self._paths
        return path.parent == paths.timer_log or (not later and path in (paths.timer_log, paths.timer_wheel))

    def _misnamed_segments(self) -> list[MisnamedSegment]:
        if not self._counts[FindingKind.SEGMENT_MISNAMED]:
            return []
        io = StoreIO()
        size = adopted_segment_size(io, self._paths.commit_log, self._options.mapped_file_size_commit_log)
        return misnamed.find_misnamed(io, self._paths.commit_log, size)

    def _renames(self, wrong: list[MisnamedSegment]) -> Iterator[Action]:
        folder = self._paths.commit_log
        for each in misnamed.conflicting_segments(wrong):
            yield self._move_away_action(folder / each.name, f"its records belong to {each.right_name}, which is there")
        for each in (each for each in wrong if not each.taken):
            move = functools.partial(misnamed.begin_rename, folder=folder, misnamed=each)
            yield Action(folder / each.name, f"rename to {each.right_name}", "its records belong there", move)

    def _expired_index_actions(self) -> Iterator[Action]:
        """Damaged index files that cannot be rebuilt because all their records have expired."""
        damaged = {finding.file for finding in self._findings if finding.kind in _INDEX_DAMAGE}
        for finding in self._findings:
            if finding.kind is FindingKind.ENTRY_EXPIRED and finding.file in damaged:
                yield self._move_away_action(self._paths.root / finding.file, "damaged, and its records have expired")

    def _timer_actions(self) -> Iterator[Action]:
        paths, options = self._paths, self._options
        is_damaged, is_more_than_wheel = timer_damage(self._findings, paths)
        if is_more_than_wheel:
            io = StoreIO()
            for path in (paths.timer_log, paths.timer_wheel):
                if io.exists(path):
                    yield self._move_away_action(path, "waiting messages are filed again")
            why = "the next start files waiting messages"
            yield Action(paths.timer_check, "set back", why, lambda io: reset_timer_check(io, paths, options))
        elif is_damaged:
            why = "slots do not match their units"
            yield Action(paths.timer_wheel, "make anew", why, lambda io: rebuild_wheel(io, paths, options))

    def _move_away_action(self, path: Path, why: str) -> Action:
        target = copy_path(self.kept, self._paths, path)

        def move(io: StoreIO) -> None:
            io.make_folder(target.parent, mode=0o700)
            io.rename(path, target)

        return Action(path, _MOVE_ASIDE, why, move)

    def _unlink_action(self, path: Path, why: str) -> Action:
        def unlink(io: StoreIO) -> None:
            io.unlink(path)
            io.sync_folder(path.parent)

        return Action(path, "remove", why, unlink)

    def _blank_action(self, path: Path, finding: Finding) -> Action:
        offset = finding.offset or 0

        def write(io: StoreIO) -> None:
            with io.opened(path, write=True) as fd:
                io.pwrite(fd, encode_blank(io.size(fd) - offset)[: record.MAGIC], offset)
                io.sync(fd)

        return Action(path, "write the right size", "the filler at its end has a wrong size", write)


def drop_page_cache(io: StoreIO, paths: StorePaths) -> None:
    """Drop the store's pages from memory: after a failed sync they may differ from the disk.

    Raises StoreReadOnlyError if the disk still fails, OSError.
    """
    try:
        with io.opened(paths.root) as fd:
            io.sync_file_system(fd)
    except FailedSyncError as error:
        raise StoreReadOnlyError(f"{paths.root}: the disk still fails: {error}; repair or replace it first") from error
    for path in _files_below(io, paths.root):
        with io.opened(path) as fd:
            if size := io.size(fd):
                io.drop_cache(fd, 0, size)


def _files_below(io: StoreIO, folder: Path) -> Iterator[Path]:
    for entry in io.entries(folder):
        if entry.kind is EntryKind.FOLDER:
            yield from _files_below(io, folder / entry.name)
        elif entry.kind is EntryKind.FILE:
            yield folder / entry.name


def action_row(action: Action, paths: StorePaths) -> dict[str, Any]:
    """Row of an action for output and JSON."""
    return {"file": str(action.path.relative_to(paths.root)), "what": action.what, "why": action.why}


def change_row(change: Change, paths: StorePaths) -> dict[str, Any]:
    """Row of a change for output and JSON."""
    target, differs = change.target, change.what == "changed"
    return {
        "file": str(change.path.relative_to(paths.root)),
        "what": change.what,
        "was_bytes": change.was,
        "bytes": change.size,
        "first_byte": change.first if differs else None,
        "differing_bytes": change.differing if differs else None,
        "moved_to": None if target is None else str(target.relative_to(paths.root)),
    }
