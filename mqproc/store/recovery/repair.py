"""Bringing a damaged store in order: what verify found and recovery does not mend, then recovery that trusts no mark.

    verify ──▶ findings ──▶ own actions ──┐
                                          ├──▶ all done over DryRunIO ──▶ the plan: which files change, and why
               recovery, marks distrusted ┘
    --execute: copies of everything that changes under mqproc/repaired/<time>/, then the same for real, then verify

The plan is no guess: it is the very code that then runs, on storage that keeps nothing.
"""

from __future__ import annotations

import datetime
import errno
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from mqproc.config import MIB, OnDamage, Options
from mqproc.errors import StoreAccessError
from mqproc.io import StoreIO
from mqproc.layout import control as words_of
from mqproc.layout import record
from mqproc.layout.record_codec import encode_blank
from mqproc.paths import StorePaths
from mqproc.shm.words import Words
from mqproc.store import rocketmq_json
from mqproc.store.recovery.dry_run_io import Change, DryRunIO
from mqproc.store.recovery.recovery import Recovery, adopt_sizes
from mqproc.store.recovery.unit_mender import UnitMender
from mqproc.store.topics import SCHEDULE_TOPIC
from mqproc.store.verify import Finding, Kind, Verified
from mqproc.store.verify.inventory import Queue

# Of a larger file only the bytes that change are kept.
_WHOLE_COPY_BYTES: Final = 64 * MIB
_CHUNK: Final = 1 << 20
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
# What no repair can mend.
_HOPELESS: Final = frozenset({Kind.SYMLINK, Kind.QUEUE_OFFSET_REPEATED})
_Step = Callable[[StoreIO], None]


@dataclass(frozen=True, slots=True)
class Action:
    """Something to be done before recovery runs: to which file, what, and why."""

    path: Path
    what: str
    why: str
    step: _Step
    keeps: bool = True
    """Whether a copy of the file is wanted; what is only moved is kept already."""


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
        self.kept = paths.own / "repaired" / now.strftime("%Y%m%dT%H%M%S%f")[:-3]
        kinds = set(verified.findings.counts)
        self._index_damaged = bool(kinds & _INDEX_DAMAGE)

    def plan(self) -> RepairPlan:
        """What would be done. Changes nothing. Raises StoreAccessError, CorruptStoreError, OSError."""
        plan = RepairPlan()
        findings = self._verified.findings.in_order()
        plan.hopeless = [finding for finding in findings if finding.kind in _HOPELESS]
        if self._verified.clean:
            return plan
        if links := [finding for finding in findings if finding.kind is Kind.SYMLINK]:
            raise StoreAccessError(f"{self._paths.root / links[0].file}: a symlink; put the file itself there first")
        plan.actions = list(self._actions(findings))
        io = DryRunIO(self._paths.root)
        self._carry_out(io, plan.actions, plan.said.append)
        tables = (self._paths.queues, self._paths.next_queues)
        plan.changes = [change for change in io.changes() if change.path not in tables and self._counts(change)]
        io.close_all()
        return plan

    def _counts(self, change: Change) -> bool:
        """What an action moves is told by the action."""
        return change.target is None or self.kept not in change.target.parents

    def execute(self, io: StoreIO, plan: RepairPlan, report: Callable[[str], None]) -> None:
        """Keep copies, then do it. Raises OSError, CorruptStoreError."""
        io.make_folder(self.kept, mode=0o700)
        self._keep(io, plan)
        self._carry_out(io, plan.actions, report)
        if io.exists(self._paths.abort):
            io.unlink(self._paths.abort)
            io.sync_folder(self._paths.root)

    def _carry_out(self, io: StoreIO, actions: Iterable[Action], report: Callable[[str], None]) -> None:
        io.make_folder(self._paths.own, mode=0o700)
        for action in actions:
            action.step(io)
        clean = not io.exists(self._paths.abort) and not self._index_damaged
        options = adopt_sizes(io, self._paths, self._options, report)
        words = Words(bytearray(words_of.FILE_SIZE))
        Recovery(io, self._paths, options, words, report, clean=clean, trust_marks=False).run()
        queues = self._queues_with_wrong_units()
        if queues:
            begin, end = words[words_of.MIN_PHYSICAL_OFFSET], words[words_of.WRITTEN]
            mender = UnitMender(io, self._paths, options, begin, end)
            mender.run(queues)
            mender.close()

    def _queues_with_wrong_units(self) -> set[Queue]:
        findings = self._verified.findings.listed
        parts = [finding.file.split("/") for finding in findings if finding.kind in _WRONG_UNITS]
        return {(part[1], int(part[2])) for part in parts if len(part) == _QUEUE_FILE_PARTS}

    # What recovery leaves to us

    def _actions(self, findings: list[Finding]) -> Iterator[Action]:
        for finding in findings:
            path = self._paths.root / finding.file
            if finding.kind is Kind.STRAY_FILE and finding.severity == "damage":
                yield self._aside(path, "none of the store's files")
            elif finding.kind is Kind.CONFIG_UNREADABLE:
                yield self._aside(path, f"cannot be read: {finding.text}")
            elif finding.kind is Kind.READ_ONLY:
                yield Action(path, "remove", "the whole log has been read and checked", _unlinking(path))
            elif finding.kind is Kind.BLANK_SIZE:
                yield self._blank(path, finding)
        if Kind.PROGRESS_BEYOND_END in self._verified.findings.counts:
            yield from self._progress()

    def _aside(self, path: Path, why: str) -> Action:
        target = self.kept / path.relative_to(self._paths.root)

        def move(io: StoreIO) -> None:
            io.make_folder(target.parent, mode=0o700)
            io.rename(path, target)

        return Action(path, "move aside", why, move, keeps=False)

    def _blank(self, path: Path, finding: Finding) -> Action:
        offset = finding.offset or 0

        def write(io: StoreIO) -> None:
            fd = io.open(path, write=True)
            try:
                io.pwrite(fd, encode_blank(io.size(fd) - offset)[: record.MAGIC], offset)
                io.sync(fd)
            finally:
                io.close(fd)

        return Action(path, "write the right size", "the filler at its end tells another one", write, keeps=False)

    def _progress(self) -> Iterator[Action]:
        ends = self._verified.queue_ends
        for name, clamped in (("consumerOffset.json", _clamped_groups), ("delayOffset.json", _clamped_levels)):
            path = self._paths.config / name

            def write(io: StoreIO, path: Path = path, clamped: _Clamp = clamped) -> None:
                value, _remark = rocketmq_json.load(io, path)
                if isinstance(value, dict) and isinstance(value.get("offsetTable"), dict):
                    table = clamped(value["offsetTable"], ends)
                    if table != value["offsetTable"]:
                        rocketmq_json.save(io, path, {**value, "offsetTable": table})

            yield Action(path, "set back", "progress beyond the queue's end is set to the end", write)

    # Copies

    def _keep(self, io: StoreIO, plan: RepairPlan) -> None:
        """Copies of everything that will change, and a list of it all, durable before anything is done."""
        kept = {action.path for action in plan.actions if action.keeps and io.exists(action.path)}
        for path in sorted(kept):
            self._copy(io, path, 0, io.size_of(path))
        for change in plan.changes:
            if change.path in kept:
                continue
            if change.what == "removed":
                self._link(io, change.path)
            elif change.what == "changed":
                self._copy_changing(io, change)
        document = {
            "findings": [finding.to_json() for finding in self._verified.findings.in_order()],
            "actions": [action_row(action, self._paths) for action in plan.actions],
            "changes": [change_row(change, self._paths) for change in plan.changes],
        }
        data = msgspec.json.format(msgspec.json.encode(document), indent=1)
        io.write_file_atomically(self.kept / "repair.json", data, mode=0o600)
        fd = io.open(self.kept)
        try:
            io.sync_file_system(fd)
        finally:
            io.close(fd)

    def _place(self, io: StoreIO, path: Path, suffix: str = "") -> Path:
        target = self.kept / path.relative_to(self._paths.root)
        io.make_folder(target.parent, mode=0o700, sync=False)
        return target.with_name(target.name + suffix)

    def _link(self, io: StoreIO, path: Path) -> None:
        """Keep a file that goes: it gets a second name, or a copy where file systems cannot."""
        try:
            io.keep_link(path, self._place(io, path))
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                raise
            self._copy(io, path, 0, io.size_of(path))

    def _copy_changing(self, io: StoreIO, change: Change) -> None:
        if change.was <= _WHOLE_COPY_BYTES:
            self._copy(io, change.path, 0, change.was)
        else:
            stop = min(change.stop, change.was)
            if stop > change.first:
                self._copy(io, change.path, change.first, stop, f".bytes-{change.first}-{stop}")

    def _copy(self, io: StoreIO, path: Path, start: int, stop: int, suffix: str = "") -> None:
        """Copy bytes [start, stop) of a file, what was never written left out."""
        target = self._place(io, path, suffix)
        source = io.open(path)
        try:
            copy = io.open(target, write=True, create=True, mode=0o600)
            try:
                io.set_size(copy, stop - start)
                at = start
                while at < stop and (data := io.next_data(source, at)) is not None and data < stop:
                    hole = min(io.next_hole(source, data), stop)
                    for place in range(data, hole, _CHUNK):
                        io.pwrite(copy, io.pread(source, min(_CHUNK, hole - place), place), place - start)
                    at = hole
            finally:
                io.close(copy)
        finally:
            io.close(source)


def action_row(action: Action, paths: StorePaths) -> dict[str, Any]:
    """An action for people and JSON."""
    return {"file": str(action.path.relative_to(paths.root)), "what": action.what, "why": action.why}


def change_row(change: Change, paths: StorePaths) -> dict[str, Any]:
    """A change for people and JSON."""
    target = change.target
    return {
        "file": str(change.path.relative_to(paths.root)),
        "what": change.what,
        "was_bytes": change.was,
        "bytes": change.size,
        "first_byte": change.first,
        "differing_bytes": change.differing,
        "moved_to": None if target is None else str(target.relative_to(paths.root)),
    }


def _unlinking(path: Path) -> _Step:
    def unlink(io: StoreIO) -> None:
        io.unlink(path)
        io.sync_folder(path.parent)

    return unlink


_Clamp = Callable[[dict[str, Any], dict[Queue, int]], dict[str, Any]]


def _clamped_groups(table: dict[str, Any], ends: dict[Queue, int]) -> dict[str, Any]:
    """`T@G` → queue id → offset, none beyond its queue's end."""
    return {
        key: {queue: _clamped((key.partition("@")[0], queue), offset, ends) for queue, offset in offsets.items()}
        if isinstance(offsets, dict)
        else offsets
        for key, offsets in table.items()
    }


def _clamped_levels(table: dict[str, Any], ends: dict[Queue, int]) -> dict[str, Any]:
    """Delay level → offset, none beyond its queue's end."""
    return {
        level: _clamped((SCHEDULE_TOPIC, str(int(level) - 1) if level.isdigit() else ""), offset, ends)
        for level, offset in table.items()
    }


def _clamped(queue: tuple[str, str], offset: Any, ends: dict[Queue, int]) -> Any:
    end = ends.get((queue[0], int(queue[1]))) if queue[1].isdigit() else None
    return min(offset, end) if isinstance(offset, int) and end is not None else offset
