"""Bringing a damaged store in order: what verify found and recovery does not mend, then recovery that trusts no mark.

    verify ──▶ findings ──▶ own actions ──┐
                                          ├──▶ all done over DryRunIO ──▶ the plan: which files change, and why
               recovery, marks distrusted ┘
    --execute: copies of everything that changes under mqproc/repaired/TIME/, then the same for real, then verify

The plan is no guess: it is the very code that then runs, on storage that keeps nothing. A repair that was killed is
done by the next one. `abort` lies there meanwhile, so a start in between takes nothing for granted.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from mqproc.config import OnDamage, Options
from mqproc.errors import CorruptStoreError, StoreAccessError, StoreReadOnlyError
from mqproc.io import FailedSyncError, StoreIO
from mqproc.io import Kind as EntryKind
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.layout import record
from mqproc.layout.record_codec import encode_blank
from mqproc.names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.paths import StorePaths
from mqproc.store import misnamed
from mqproc.store.delays import delay_offsets
from mqproc.store.misnamed import Misnamed
from mqproc.store.queue_table import QueueTable
from mqproc.store.recovery.copies import Copies
from mqproc.store.recovery.dry_run_io import Change, DryRunIO
from mqproc.store.recovery.plan import opened
from mqproc.store.recovery.recovery import Recovery, Report, adopt_sizes
from mqproc.store.recovery.scan_ahead import usable_scanners
from mqproc.store.recovery.timer_repair import (
    file_again,
    filed_beyond,
    make_wheel,
    remove_timer,
    timer_damage,
)
from mqproc.store.recovery.unit_mender import UnitMender
from mqproc.store.segments import adopted_segment_size
from mqproc.store.verify import Finding, Kind, Verified
from mqproc.store.verify.findings import LISTED_MAX, Severity
from mqproc.store.verify.inventory import Queue

_INDEX_DAMAGE: Final = frozenset(
    {
        Kind.INDEX_FILE_LENGTH,
        Kind.INDEX_MISSING,
        Kind.INDEX_HEADER,
        Kind.INDEX_LINK,
        Kind.INDEX_ORDER,
        Kind.ENTRY_WRONG,
        Kind.ENTRY_MISSING,
        Kind.ENTRY_BEYOND_LOG,
    }
)
_WRONG_UNITS: Final = frozenset(
    {
        Kind.UNIT_WRONG,
        Kind.UNIT_DANGLING,
        Kind.UNIT_BEYOND_LOG,
        Kind.UNIT_MISSING,
        Kind.QUEUE_FILE_MISSING,
        Kind.QUEUE_FILE_LENGTH,
    }
)
# consumequeue, topic, queue id, file
_QUEUE_FILE_PARTS: Final = 4
# No damage, since the next start does the rest; but whoever repairs a store wants to have it whole afterwards, with
# the records behind pages that were never written too.
_UNFINISHED: Final = frozenset(
    {
        Kind.NOT_DISPATCHED,
        Kind.NOT_INDEXED,
        Kind.FILE_BEGUN,
        Kind.TORN_TAIL,
        Kind.RECORD_MAGIC,
        Kind.RECORD_SIZE,
        Kind.RECORD_BODY_CRC,
        Kind.RECORD_CRC,
        Kind.RECORD_ZEROS,
    }
)
# What no repair can mend.
_HOPELESS: Final = frozenset({Kind.QUEUE_OFFSET_REPEATED, Kind.QUEUE_OFFSET_TOO_HIGH})
# What is done at once where segments have each other's names: all else is seen only when they have their own.
_WHATEVER_THE_LOG_HAS: Final = frozenset(
    {Kind.STRAY_FILE, Kind.MISPLACED_FILE, Kind.FILE_UNREADABLE, Kind.CONFIG_UNREADABLE, Kind.READ_ONLY}
)
_MOVE_ASIDE: Final = "move aside"
_Step = Callable[[StoreIO], None]


@dataclass(frozen=True, slots=True)
class Action:
    """Something to be done before recovery runs: to which file, what, and why."""

    path: Path
    what: str
    why: str
    step: _Step


@dataclass(slots=True)
class RepairPlan:
    """What a repair does. `said` is what recovery reports, `hopeless` what will still be found afterwards."""

    actions: list[Action] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    hopeless: list[Finding] = field(default_factory=list)

    @property
    def nothing_to_do(self) -> bool:
        return not self.actions and not self.changes


class Repair:
    """Repair of one stopped store, whose lock the caller holds when it is carried out."""

    def __init__(self, paths: StorePaths, options: Options, verified: Verified, now: datetime.datetime) -> None:
        """`verified` is what a verify of the store found; `now` names the folder of the copies."""
        self._paths = paths
        self._options = replace(options, on_damage=OnDamage.SERVE)
        self._verified = verified
        self._findings = verified.findings.in_order()
        self._counts = verified.findings.counts
        self.kept = paths.repaired / now.strftime("%Y%m%dT%H%M%S%f")[:-3]

    def plan(self) -> RepairPlan:
        """What would be done. Changes nothing. Raises StoreAccessError, CorruptStoreError, OSError."""
        plan = RepairPlan()
        if self._verified.clean and not self._counts.keys() & _UNFINISHED:
            return plan
        if links := [finding for finding in self._findings if finding.kind is Kind.SYMLINK]:
            raise StoreAccessError(f"{self._paths.root / links[0].file}: a symlink; put the file itself there first")
        plan.hopeless = [finding for finding in self._findings if finding.kind in _HOPELESS]
        plan.actions = list(self._actions())
        with DryRunIO(self._paths.root) as io:
            self._carry_out(io, plan.actions, plan.said.append)
            plan.changes = [change for change in io.changes() if not self._is_told(change)]
        return plan

    def _is_told(self, change: Change) -> bool:
        """What an action moves is told by the action."""
        return change.target is not None and self.kept in change.target.parents

    def execute(self, io: StoreIO, plan: RepairPlan, report: Report) -> None:
        """Keep copies, then do it. Raises StoreAccessError when nothing was done, else what recovery raises."""
        document = {
            "schema_version": 1,
            "findings": [finding.to_json() for finding in self._findings],
            "actions": [action_row(action, self._paths) for action in plan.actions],
            "changes": [change_row(change, self._paths) for change in plan.changes],
        }
        # These are moved to where their copies would lie; of one that the disk cannot read there is none.
        moved = {action.path for action in plan.actions if action.what == _MOVE_ASIDE}
        try:
            Copies(io, self._paths, self.kept).keep((each for each in plan.changes if each.path not in moved), document)
        except OSError as error:
            text = f"{error.filename or self.kept}: {error.strerror}: no copies can be kept, so nothing was changed"
            raise StoreAccessError(text) from error
        self._carry_out(io, plan.actions, report)

    def _carry_out(self, io: StoreIO, actions: Iterable[Action], report: Report) -> None:
        with opened(io, self._paths, report) as opening:
            for action in actions:
                action.step(io)
            misnamed.settle(io, self._paths.commit_log)
            words = self._recover(io, report, clean=opening.was_closed and not self._counts.keys() & _INDEX_DAMAGE)
            opening.is_complete = words[words_of.DISPATCHED] == words[words_of.WRITTEN]

    def _recover(self, io: StoreIO, report: Report, *, clean: bool) -> Words:
        options = adopt_sizes(io, self._paths, self._options, lambda line: None)
        words = Words(bytearray(words_of.FILE_SIZE))
        scanners = usable_scanners()
        Recovery(io, self._paths, options, words, report, clean=clean, trust_marks=False, scanners=scanners).run()
        # What could not be dispatched for lack of room is in the log, and may be delivered already.
        self._set_back(io, self._queue_ends(io, QueueTable.next_offset), report)
        if queues := self._queues_with_wrong_units():
            mender = UnitMender(io, self._paths, options, words[words_of.MIN_PHYSICAL_OFFSET], words[words_of.WRITTEN])
            changed = mender.run(queues, self._queue_ends(io, QueueTable.max_offset))
            mender.close()
            if changed:
                # Recovery looked for the queues' minima among the units as they were; the next start makes it anew.
                io.unlink(self._paths.queues)
                io.sync_folder(self._paths.own)
        return words

    def _set_back(self, io: StoreIO, ends: dict[Queue, int], report: Report) -> None:
        """Delivery of delayed and timed messages to where their queues end now."""
        try:
            lowered = delay_offsets.lower(io, self._paths, lambda level: ends.get((SCHEDULE_TOPIC, level - 1)))
        except CorruptStoreError as error:
            # It has been moved aside, and its copy is none either.
            report(f"recovery: delay levels: {error}; the log tells what was delivered")
            lowered = {}
        for level, end in lowered.items():
            report(f"recovery: delay level {level}: set back to its queue's end {end:,}")
        if filed_beyond(io, self._paths, ends.get((TIMER_TOPIC, 0), 0)):
            report("recovery: timer: its queue has lost its end; the next start files again what waits")
            remove_timer(io, self._paths)
            file_again(io, self._paths, self._options)

    def _queue_ends(self, io: StoreIO, end_of: Callable[[QueueTable, int], int]) -> dict[Queue, int]:
        with contextlib.closing(QueueTable(io, self._paths.queues)) as table:
            return {(topic, queue_id): end_of(table, number) for number, topic, queue_id in table.live()}

    def _queues_with_wrong_units(self) -> set[Queue]:
        if any(self._counts[kind] > LISTED_MAX for kind in _WRONG_UNITS):
            return set(self._verified.queue_ends)
        parts = [finding.file.split("/") for finding in self._findings if finding.kind in _WRONG_UNITS]
        return {(part[1], int(part[2])) for part in parts if len(part) == _QUEUE_FILE_PARTS}

    # What recovery leaves to us

    def _actions(self) -> Iterator[Action]:
        wrong = self._misnamed()
        yield from self._renames(wrong)
        _is_damaged, goes_whole = timer_damage(self._findings, self._paths)
        for finding in self._findings:
            path = self._paths.root / finding.file
            if finding.severity is Severity.NOTE or (goes_whole and self._goes_with_timer(path, later=bool(wrong))):
                continue
            if wrong and finding.kind not in _WHATEVER_THE_LOG_HAS:
                continue
            if finding.kind is Kind.STRAY_FILE:
                yield self._aside(path, "none of the store's files")
            elif finding.kind in (Kind.MISPLACED_FILE, Kind.FILE_UNREADABLE):
                yield self._aside(path, finding.text)
            elif finding.kind is Kind.CONFIG_UNREADABLE:
                yield self._aside(path, f"cannot be read: {finding.text}")
            elif finding.kind is Kind.READ_ONLY:
                yield Action(path, "remove", "the store has been read from the disk and checked", _unlinking(path))
            elif finding.kind is Kind.BLANK_SIZE:
                yield self._blank(path, finding)
        if not wrong:
            yield from self._expired_index_actions()
            yield from self._timer_actions()

    def _goes_with_timer(self, path: Path, *, later: bool) -> bool:
        """Whether a path is moved aside with all of the timer's files; a repair of names leaves these for `later`."""
        paths = self._paths
        return path.parent == paths.timer_log or (not later and path in (paths.timer_log, paths.timer_wheel))

    def _misnamed(self) -> list[Misnamed]:
        """Segments of other names than their records tell."""
        if not self._counts[Kind.SEGMENT_MISNAMED]:
            return []
        io = StoreIO()
        size = adopted_segment_size(io, self._paths.commit_log, self._options.mapped_file_size_commit_log)
        return misnamed.find_misnamed(io, self._paths.commit_log, size)

    def _renames(self, wrong: list[Misnamed]) -> Iterator[Action]:
        folder = self._paths.commit_log
        for each in misnamed.in_the_way(wrong):
            yield self._aside(folder / each.name, f"its records belong to {each.right_name}, which is there")
        for each in (each for each in wrong if not each.taken):
            move = functools.partial(misnamed.move, folder=folder, misnamed=each)
            yield Action(folder / each.name, f"rename to {each.right_name}", "its records belong there", move)

    def _expired_index_actions(self) -> Iterator[Action]:
        """Damaged files of the index that the log cannot make again: all their records are gone."""
        damaged = {finding.file for finding in self._findings if finding.kind in _INDEX_DAMAGE}
        for finding in self._findings:
            if finding.kind is Kind.ENTRY_EXPIRED and finding.file in damaged:
                yield self._aside(self._paths.root / finding.file, "damaged, and its records have expired")

    def _timer_actions(self) -> Iterator[Action]:
        paths, options = self._paths, self._options
        is_damaged, is_more_than_wheel = timer_damage(self._findings, paths)
        if is_more_than_wheel:
            there = StoreIO()
            for path in (paths.timer_log, paths.timer_wheel):
                if there.exists(path):
                    yield self._aside(path, "what waits is filed again")
            why = "the next start files what waits"
            yield Action(paths.timer_check, "set back", why, lambda io: file_again(io, paths, options))
        elif is_damaged:
            why = "slots do not lead to their units"
            yield Action(paths.timer_wheel, "make anew", why, lambda io: make_wheel(io, paths, options))

    def _aside(self, path: Path, why: str) -> Action:
        target = Copies.place(self.kept, self._paths, path)

        def move(io: StoreIO) -> None:
            io.make_folder(target.parent, mode=0o700)
            io.rename(path, target)

        return Action(path, _MOVE_ASIDE, why, move)

    def _blank(self, path: Path, finding: Finding) -> Action:
        offset = finding.offset or 0

        def write(io: StoreIO) -> None:
            fd = io.open(path, write=True)
            try:
                io.pwrite(fd, encode_blank(io.size(fd) - offset)[: record.MAGIC], offset)
                io.sync(fd)
            finally:
                io.close(fd)

        return Action(path, "write the right size", "the filler at its end tells another one", write)


def read_from_disk(io: StoreIO, paths: StorePaths) -> None:
    """After a failed sync memory may show what the disk has lost: forget all of a store that is in memory.

    Raises StoreReadOnlyError when the disk still fails, OSError.
    """
    fd = io.open(paths.root)
    try:
        io.sync_file_system(fd)
    except FailedSyncError as error:
        raise StoreReadOnlyError(f"{paths.root}: the disk still fails: {error}; mend it first") from error
    finally:
        io.close(fd)
    for path in _files_below(io, paths.root):
        fd = io.open(path)
        try:
            if size := io.size(fd):
                io.drop_cache(fd, 0, size)
        finally:
            io.close(fd)


def _files_below(io: StoreIO, folder: Path) -> Iterator[Path]:
    for entry in io.entries(folder):
        if entry.kind is EntryKind.FOLDER:
            yield from _files_below(io, folder / entry.name)
        elif entry.kind is EntryKind.FILE:
            yield folder / entry.name


def action_row(action: Action, paths: StorePaths) -> dict[str, Any]:
    """An action for people and JSON."""
    return {"file": str(action.path.relative_to(paths.root)), "what": action.what, "why": action.why}


def change_row(change: Change, paths: StorePaths) -> dict[str, Any]:
    """A change for people and JSON."""
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


def _unlinking(path: Path) -> _Step:
    def unlink(io: StoreIO) -> None:
        io.unlink(path)
        io.sync_folder(path.parent)

    return unlink
