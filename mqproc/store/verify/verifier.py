"""Verify of a store: take a snapshot, run its tasks, join the results, query differences."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence, Set
from ctypes import c_int64
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import msgspec
import numpy as np

from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError, InternalError, StoreAccessError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.store_lock import lock_holder
from mqproc.kernels import dispatch, index_verify, record_check, scan, verify
from mqproc.layout import control, index_file
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.paths import StorePaths, segment_start
from mqproc.store import damage
from mqproc.store.access import check_is_store
from mqproc.store.commitlog.segments import adopted_segment_size
from mqproc.store.consumequeue.files import adopted_file_bytes
from mqproc.store.damage import unreadable_file, unreadable_files
from mqproc.store.index.files import adopted_index_shape
from mqproc.store.lost_messages import LostMessages, merged_losses, opened_search
from mqproc.store.read.views import RUNNING_STATES, open_control
from mqproc.store.verify.findings import Finding, FindingKind, Findings
from mqproc.store.verify.index import IndexFileResult, IndexFindings, IndexPass, IndexQuery, ItemComparison
from mqproc.store.verify.inventory import (
    Inventory,
    Queue,
    Sizes,
    misnamed_segments,
    take_inventory,
    without_consequences,
)
from mqproc.store.verify.log import LogPass, LogShare, OffsetGap, WholeLog, join_shares
from mqproc.store.verify.queues import (
    BELOW,
    ExtraQuery,
    QueueComparison,
    QueueFindings,
    QueuePass,
    QueueTotals,
    ShareQuery,
    UnitComparison,
    compare_totals,
    detect_delays,
    read_unit,
)
from mqproc.store.verify.snapshot import (
    SHARE_BYTES_MIN,
    SHARES_PER_JOB,
    IndexFile,
    LogPositions,
    Share,
    Snapshot,
    cut_into_shares,
    known_topics,
    read_deleted,
    read_index_headers,
)
from mqproc.store.verify.state import LOG_BYTES_MAX, RestartPositions, StateFindings, find_restart, known_holes
from mqproc.store.verify.timer import TimerFindings
from mqproc.util.signals import deferred_signals, reset_signals_in_child
from mqproc.util.units import counted

# Worker processes of a verify: one task at a time, results in order of completion.

_TICK_S: Final = 0.1

if TYPE_CHECKING:
    _Pipe = Connection[Any, Any]
OnBytesDone = Callable[[int], None]
"""Called with a number of bytes: more bytes of a worker, or all bytes of the workers so far."""


@dataclass(frozen=True, slots=True)
class QueueBatch:
    """Queues to sum up in one task."""

    queues: list[Queue]


Task = Share | QueueBatch | IndexFile | ShareQuery | ExtraQuery | IndexQuery


class Worker:
    """Runs tasks on one snapshot; state that a kind of task needs is created on first use."""

    def __init__(self, io: StoreIO, snapshot: Snapshot, advance: OnBytesDone) -> None:
        self._io = io
        self._snapshot = snapshot
        self._advance = advance
        self._log: LogPass | None = None
        self._index: IndexPass | None = None
        self._details: UnitComparison | None = None

    def run(self, task: Task) -> Any:
        """Run one task; the type of its result depends on the task."""
        io, snapshot, advance = self._io, self._snapshot, self._advance
        if isinstance(task, Share):
            self._log = self._log or LogPass(io, snapshot, advance)
            return self._log.run(task)
        if isinstance(task, QueueBatch):
            return QueuePass(io, snapshot, advance).run(task.queues)
        if isinstance(task, IndexFile):
            self._index = self._index or IndexPass(io, snapshot, advance)
            return self._index.run(task)
        if isinstance(task, IndexQuery):
            return ItemComparison(io, snapshot).run(task)
        self._details = self._details or UnitComparison(io, snapshot)
        return self._details.extras(task) if isinstance(task, ExtraQuery) else self._details.share(task)

    def close(self) -> None:
        """Close all files."""
        for part in (self._log, self._index, self._details):
            if part is not None:
                part.close()


class Workers:
    """Runs the tasks of one verify in processes, or in this process if there is little work."""

    def __init__(self, io: StoreIO, snapshot: Snapshot, jobs: int, on_progress: OnBytesDone) -> None:
        """Fork the processes at once: they inherit compiled kernels, and no thread exists yet."""
        self._on_progress = on_progress
        self._done = RawArray(c_int64, max(1, jobs))
        self._processes: dict[_Pipe, BaseProcess] = {}
        self._running: dict[_Pipe, Task] = {}
        self._local = Worker(io, snapshot, self._advance) if jobs <= 1 else None
        if jobs > 1:
            for module in (scan, dispatch, record_check, verify, index_verify):
                module.warm()
            try:
                for slot in range(jobs):
                    self._start(snapshot, slot)
            except BaseException:
                self.close()
                raise

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Yield each task with its result, in order of completion. Raises a task's exception."""
        if self._local is not None:
            for task in tasks:
                yield task, self._local.run(task)
            return
        waiting = list(tasks[::-1])
        for pipe in self._processes:
            self._send(pipe, waiting)
        while self._running:
            for ready in wait(list(self._running), _TICK_S):
                pipe = cast("_Pipe", ready)
                task, result = self._receive(pipe)
                self._send(pipe, waiting)
                yield task, result
            self._on_progress(sum(self._done))

    def close(self) -> None:
        """End the processes, including busy processes."""
        if self._local is not None:
            self._local.close()
        for pipe, process in self._processes.items():
            if pipe in self._running:
                process.terminate()
            pipe.close()
        for process in self._processes.values():
            process.join()

    def _advance(self, size: int) -> None:
        self._done[0] += size
        self._on_progress(self._done[0])

    def _start(self, snapshot: Snapshot, slot: int) -> None:
        here, there = multiprocessing.Pipe()
        others = [*self._processes, here]
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_serve, args=(there, others, snapshot, self._done, slot), daemon=True)
        with deferred_signals(forking=True):
            process.start()
            self._processes[here] = process
        there.close()

    def _send(self, pipe: _Pipe, waiting: list[Task]) -> None:
        if waiting:
            task = waiting.pop()
            self._running[pipe] = task
            pipe.send(task)

    def _receive(self, pipe: _Pipe) -> tuple[Task, Any]:
        task = self._running.pop(pipe)
        try:
            result = pipe.recv()
        except (EOFError, ConnectionResetError):
            process = self._processes[pipe]
            process.join(5)
            if process.exitcode == -signal.SIGBUS:
                raise CorruptStoreError(
                    f"{task}: a page of a file is unreadable: disk error, or the file was truncated during the verify"
                ) from None
            raise InternalError(
                f"verify process {process.pid} exited with {process.exitcode}; fewer --jobs need less memory"
            ) from None
        if isinstance(result, BaseException):
            raise result
        return task, result


def _serve(pipe: _Pipe, others: list[_Pipe], snapshot: Snapshot, done: Any, slot: int) -> None:
    """Main function of a worker: receive tasks, send results or exceptions, until hang-up."""
    # A copy of the parent's end would hide that the parent is gone.
    for other in others:
        other.close()
    reset_signals_in_child()

    def advance(size: int) -> None:
        done[slot] += size

    worker = Worker(StoreIO(), snapshot, advance)
    try:
        while True:
            task = pipe.recv()
            try:
                result = worker.run(task)
            except Exception as error:
                result = error
            pipe.send(result)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        worker.close()


_QUEUES_PER_TASK = 256
# Time that a running group may take to give a new file its length before it counts as damage.
_PATIENCE_S = 1.0
_RECHECK_S = 0.02

OnProgress = Callable[[int, int], None]
"""Called with the number of bytes verified and the total."""


class TaskRunner(Protocol):
    """Runs the tasks of a snapshot, or returns results computed before."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Yield each task with its result, in any order."""
        ...


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Result of a verify. `size` is the number of bytes of records, units and index entries."""

    store: Path
    running: bool
    log_begin: int
    log_end: int
    records: int
    units: int
    items: int
    queues: int
    size: int
    seconds: float
    findings: Findings
    queue_ends: dict[Queue, int] = dataclasses.field(default_factory=dict)
    """Next offset of each queue according to log and files."""
    lost: list[LostMessages] = dataclasses.field(default_factory=list)
    """Messages in damaged ranges of the log, after its end, and removed by earlier recoveries."""

    @property
    def clean(self) -> bool:
        return self.findings.damaged == 0

    @property
    def bytes_per_second(self) -> float:
        return self.size / max(self.seconds, 1e-9)

    def figures(self) -> dict[str, Any]:
        """Statistics for the JSON output."""
        findings = self.findings
        return {
            "store": str(self.store),
            "clean": self.clean,
            "running": self.running,
            "log_begin": self.log_begin,
            "log_end": self.log_end,
            "records": self.records,
            "units": self.units,
            "index_entries": self.items,
            "queues": self.queues,
            "bytes": self.size,
            "damage": findings.damaged,
            "notes": findings.counts.total() - findings.damaged,
            "omitted": findings.omitted,
        }


def verify_store(
    io: StoreIO,
    paths: StorePaths,
    options: Options,
    *,
    jobs: int = 0,
    is_mine: bool = False,
    shares: int = 0,
    share_bytes: int = SHARE_BYTES_MIN,
    on_progress: OnProgress = lambda done, total: None,
) -> VerifyResult:
    """Verify a whole store with `jobs` processes (0: one for each processor). Changes nothing.

    The log is cut into at most `shares` shares (0: a few for each process) of at least `share_bytes`; a store of less
    than two shares is verified by this process alone. `is_mine`: the caller holds the store's lock.

    Raises StoreAccessError if there is no store or it is not readable.
    """
    check_is_store(io, paths)
    jobs = jobs or len(os.sched_getaffinity(0))
    unreadable: set[Path] = set()
    while True:
        run = VerifyRun(io, paths, options, jobs, shares, share_bytes, on_progress, is_mine, unreadable)
        try:
            return run.run()
        except PermissionError as error:
            raise StoreAccessError(f"{error.filename}: {error.strerror}") from None
        except OSError as error:
            found = unreadable_file(error, paths)
            if found is None or found in unreadable:
                raise
            # Include all unreadable files: each would otherwise cost another verify.
            unreadable |= {found, *unreadable_files(io, paths)}
        except CorruptStoreError:
            # A worker may have died of an unreadable page of a map.
            others = unreadable_files(io, paths) - unreadable
            if not others:
                raise
            unreadable |= others


def take_snapshot(
    io: StoreIO, paths: StorePaths, options: Options, *, share_bytes: int = SHARE_BYTES_MIN, is_mine: bool = False
) -> Snapshot:
    """Take a snapshot, with shares of about `share_bytes`, for callers that run its tasks."""
    return VerifyRun(io, paths, options, shares=1 << 30, share_bytes=share_bytes, is_mine=is_mine).snapshot()


def tasks_of(snapshot: Snapshot) -> list[Task]:
    """Tasks of a snapshot: index files, shares of the log, batches of queues."""
    queues = snapshot.queues
    # An index file is one task, however large.
    tasks: list[Task] = [*snapshot.index, *snapshot.shares]
    return tasks + [QueueBatch(queues[at : at + _QUEUES_PER_TASK]) for at in range(0, len(queues), _QUEUES_PER_TASK)]


def compare(io: StoreIO, paths: StorePaths, options: Options, snapshot: Snapshot, answers: TaskRunner) -> VerifyResult:
    """Compare the results of a snapshot's tasks; `answers` returns them and answers queries."""
    return VerifyRun(io, paths, options).compare(snapshot, answers, time.perf_counter())


def sizes_of(io: StoreIO, paths: StorePaths, options: Options) -> Sizes:
    """Lengths of the store's files; those of the options where no file exists."""
    slots, items = adopted_index_shape(io, paths.index, options.max_hash_slot_num, options.max_index_num)
    return Sizes(
        adopted_segment_size(io, paths.commit_log, options.mapped_file_size_commit_log),
        adopted_file_bytes(io, paths.consume_queue, options.consume_queue_file_bytes),
        slots,
        items,
    )


def positions_of(io: StoreIO, paths: StorePaths, *, is_mine: bool = False) -> LogPositions:
    """Bounds of the log; of a running group from control words, read in a consistent order."""
    starts = (segment_start(name) for name in io.names(paths.commit_log))
    begin = min((start for start in starts if start is not None), default=0)
    if is_mine or lock_holder(io, paths) is None:
        return LogPositions(begin)
    words = open_control(io, paths.control)
    if words is None or words[control.GROUP_STATE] not in RUNNING_STATES:
        return LogPositions(begin, running=True)
    dispatched = words[control.DISPATCHED]
    end = words[control.WRITTEN]
    return LogPositions(max(begin, words[control.MIN_PHYSICAL_OFFSET]), end, min(dispatched, end), running=True)


def _without_known(findings: list[Finding], holes: list[tuple[int, int]]) -> Iterator[Finding]:
    """Drop missing segments that known holes already cover."""
    for finding in findings:
        start = finding.physical_offset or 0
        known = any(first <= start and start + finding.size <= stop for first, stop in holes)
        if finding.kind is not FindingKind.SEGMENT_MISSING or not known:
            yield finding


@dataclass(slots=True)
class VerifyRun:
    """One verify. `unreadable` are files of queues and index that the disk cannot read."""

    io: StoreIO
    paths: StorePaths
    options: Options
    jobs: int = 1
    shares: int = 0
    share_bytes: int = SHARE_BYTES_MIN
    on_progress: OnProgress = lambda done, total: None
    is_mine: bool = False
    unreadable: Set[Path] = frozenset()

    def run(self) -> VerifyResult:
        started = time.perf_counter()
        snapshot = self.snapshot()
        with contextlib.closing(self._workers(snapshot)) as workers:
            return self.compare(snapshot, workers, started)

    def snapshot(self) -> Snapshot:
        """Take a snapshot with the log cut into shares."""
        io, paths, options = self.io, self.paths, self.options
        positions = positions_of(io, paths, is_mine=self.is_mine)
        was_killed = not positions.running and io.exists(paths.abort)
        sizes = sizes_of(io, paths, options)
        inventory = take_inventory(io, paths, sizes, was_killed=was_killed, unreadable=self.unreadable)
        shares = self.shares or SHARES_PER_JOB * self.jobs
        return Snapshot(
            inventory,
            positions,
            detect_delays(io, inventory, options.message_delay_level),
            cut_into_shares(io, inventory, positions, shares, self.share_bytes),
            read_index_headers(io, inventory) if options.message_index_enable else [],
            read_deleted(io, paths, running=positions.end is not None),
        )

    def _workers(self, snapshot: Snapshot) -> Workers:
        slots = snapshot.inventory.sizes.slots
        log_bytes = sum(share.stop - share.start for share in snapshot.shares)
        total = log_bytes + sum(index_file.item_offset(slots, file.header.count) for file in snapshot.index)
        jobs = self.jobs if total >= 2 * self.share_bytes else 1
        return Workers(self.io, snapshot, jobs, lambda done: self.on_progress(min(done, total), total))

    def compare(self, snapshot: Snapshot, workers: TaskRunner, started: float) -> VerifyResult:
        """Run the tasks and evaluate their results."""
        findings = Findings()
        holes, ledger = known_holes(self.io, self.paths)
        findings.extend(ledger)
        shares, totals, checked = self._run_tasks(snapshot, workers)
        misnamed = misnamed_segments(self.io, snapshot.inventory)
        findings.extend(misnamed)
        lasting = self._persistent_findings(snapshot.inventory, is_running=snapshot.positions.running)
        findings.extend(without_consequences(misnamed, _without_known(lasting, holes)))
        self._apply_retention(snapshot)
        log = join_shares(self.io, snapshot, shares, partial(self._walk, snapshot), holes)
        both = compare_totals(snapshot, shares, totals)
        may_lag = snapshot.positions.running or self.io.exists(self.paths.abort)
        restart = RestartPositions()
        if may_lag and not snapshot.positions.running:
            restart = find_restart(self.io, self.paths, snapshot.inventory.sizes.segment, log.begin)
        findings.extend(restart.classify(without_consequences(misnamed, log.findings), log.unwritten))
        queues = QueueFindings(
            snapshot, log, shares, both, may_lag=may_lag, restart_from=restart.queues_from,
            topics=known_topics(self.io, self.paths), unsettled=self._changed_queues(snapshot),
        )  # fmt: skip
        findings.extend(queues.run(workers.run))
        findings.extend(self._find_expired(snapshot, both))
        if self.options.message_index_enable:
            index = IndexFindings(snapshot, log, shares, may_lag=may_lag, restart_from=restart.index_from)
            findings.extend(index.run(checked, workers.run))
        findings.extend(StateFindings(self.io, snapshot, log, both).run())
        findings.extend(TimerFindings(self.io, snapshot, log, both, self.options.timer_precision_ms).run())
        lost = self._lost(snapshot, log, both, queues.lost_gaps)
        return self._make_result(snapshot, log, both, findings, lost, time.perf_counter() - started)

    def _lost(
        self, snapshot: Snapshot, log: WholeLog, both: QueueComparison, gaps: Sequence[OffsetGap]
    ) -> list[LostMessages]:
        """Lost messages: in damaged ranges, after the log's end, and recorded by recoveries."""
        inventory = snapshot.inventory
        with opened_search(self.io, self.paths, inventory.sizes.segment, inventory.sizes.queue_file) as search:
            found = search.search(inventory.queues, log.fault_ranges)
            for gap in gaps:
                times = search.time_of(gap.previous), search.time_of(gap.physical_offset)
                found.append(LostMessages(*gap.queue, gap.expected, gap.found, *times))
            if not snapshot.positions.running:
                beyond = np.flatnonzero(both.states[:, verify.PHYSICAL_END] > log.end).tolist()
                found += search.search((both.queues[number] for number in beyond), [(log.end, LOG_BYTES_MAX)])
        with contextlib.suppress(msgspec.MsgspecError):
            found += damage.load(self.io, self.paths).lost
        return merged_losses(found)

    def _persistent_findings(self, inventory: Inventory, *, is_running: bool) -> list[Finding]:
        """Findings of the inventory, without those that a running group causes for a moment."""
        lasting = inventory.findings
        deadline = time.monotonic() + _PATIENCE_S
        while is_running and lasting:
            again = set(take_inventory(self.io, self.paths, inventory.sizes, unreadable=self.unreadable).findings)
            lasting = [finding for finding in lasting if finding in again]
            if time.monotonic() > deadline or all(finding.as_note for finding in lasting):
                break
            time.sleep(_RECHECK_S)
        return lasting

    def _changed_queues(self, snapshot: Snapshot) -> set[Queue]:
        """Queues that a running group has deleted or created again since the snapshot."""
        if not snapshot.positions.running:
            return set()
        now = read_deleted(self.io, self.paths, running=True)
        return {queue for queue, deletion in now.items() if snapshot.deleted.get(queue) != deletion}

    def _apply_retention(self, snapshot: Snapshot) -> None:
        """Move the start of the log to where retention has moved it meanwhile."""
        words = open_control(self.io, self.paths.control) if snapshot.positions.running else None
        if words is not None:
            begin = max(snapshot.positions.begin, words[control.MIN_PHYSICAL_OFFSET])
            snapshot.positions = dataclasses.replace(snapshot.positions, begin=begin)

    # Tasks

    def _run_tasks(
        self, snapshot: Snapshot, workers: TaskRunner
    ) -> tuple[list[LogShare], list[QueueTotals], list[IndexFileResult]]:
        """Run the tasks of log, queues and index."""
        results: dict[type[Task], list[Any]] = {Share: [], QueueBatch: [], IndexFile: []}
        for task, result in workers.run(tasks_of(snapshot)):
            results[type(task)].append(result)
        results[Share].sort(key=lambda found: found.share.number)
        results[IndexFile].sort(key=lambda found: found.name)
        return results[Share], results[QueueBatch], results[IndexFile]

    def _walk(self, snapshot: Snapshot, share: Share) -> LogShare:
        with contextlib.closing(LogPass(self.io, snapshot, lambda size: None)) as log_pass:
            return log_pass.run(share)

    def _find_expired(self, snapshot: Snapshot, both: QueueComparison) -> Iterator[Finding]:
        """Notes about deleted segments, and about queue files that point only to those."""
        inventory, begin = snapshot.inventory, snapshot.positions.begin
        units = int(both.more[:, BELOW, verify.COUNT].sum())
        if not begin or not units:
            return
        last = inventory.segment_name(begin - 1)
        text = f"{counted(units, 'unit')} of records below {begin:,}"
        yield Finding(FindingKind.SEGMENTS_EXPIRED, last, 0, begin, size=begin, text=text)
        for queue, files in sorted(inventory.queues.items()):
            first = min(files, default=None)
            if first is None or len(files) < 2 or files[first] < inventory.sizes.queue_file:
                continue
            offset, count = first // UNIT_SIZE, inventory.sizes.queue_file // UNIT_SIZE
            physical_offset = int(read_unit(self.io, inventory, queue, offset + count - 1)["physical_offset"])
            if 0 <= physical_offset < begin:
                name, text = inventory.queue_name(queue, offset, UNIT_SIZE)[0], "the whole first file"
                yield Finding(FindingKind.UNIT_EXPIRED, name, 0, physical_offset, count=count, text=text)

    def _make_result(
        self,
        snapshot: Snapshot,
        log: WholeLog,
        both: QueueComparison,
        findings: Findings,
        lost: list[LostMessages],
        seconds: float,
    ) -> VerifyResult:
        units = int(both.files[:, :, verify.COUNT].sum()) + int(both.more[:, :, verify.COUNT].sum())
        items = sum(file.header.count - index_file.FIRST_ITEM for file in snapshot.index)
        log_bytes = log.end - log.begin - sum(stop - start for start, stop in log.fault_ranges)
        size = log_bytes + units * UNIT_SIZE + items * index_file.ITEM_SIZE
        return VerifyResult(
            self.paths.root,
            snapshot.positions.running,
            log.begin,
            snapshot.positions.end or log.end,
            log.records,
            units,
            items,
            len(both.queues),
            size,
            seconds,
            findings,
            {queue: end for queue in both.queues if (end := both.max_offset(queue)) is not None},
            lost,
        )
