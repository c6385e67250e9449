"""Verify of a store: take a snapshot, run its tasks, join the results, query differences."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int64
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError, InternalError, StoreAccessError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.store_lock import lock_holder
from mqproc.kernels import dispatch, index, record_check, scan, verify
from mqproc.kernels import verify as kernels
from mqproc.layout import control, index_file
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.paths import StorePaths, segment_start
from mqproc.store.commitlog.segments import adopted_segment_size
from mqproc.store.consumequeue.files import adopted_file_bytes, as_units
from mqproc.store.index.files import adopted_index_shape
from mqproc.store.quarantine import unreadable_file, unreadable_files
from mqproc.store.read.views import RUNNING_STATES, open_control
from mqproc.store.store_check import check_is_store
from mqproc.store.verify.findings import Finding, FindingKind, Findings
from mqproc.store.verify.index import IndexFileResult, IndexFindings, IndexPass, IndexQuery, IndexWalk, ItemComparison
from mqproc.store.verify.inventory import (
    Inventory,
    Queue,
    Sizes,
    misnamed_segments,
    take_inventory,
    without_consequences,
)
from mqproc.store.verify.log import LogPass, LogShare, WholeLog, join_shares
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
from mqproc.store.verify.state import RestartPositions, StateFindings, find_restart, known_holes
from mqproc.store.verify.timer import TimerFindings
from mqproc.util.signals import deferred_signals, reset_signals_in_child
from mqproc.util.units import counted

# Worker processes of a verify: one task at a time, results in order of completion.


_TICK_S: Final = 0.1

if TYPE_CHECKING:
    _Pipe = Connection[Any, Any]
OnShareDone = Callable[[int], None]
"""Called with the number of bytes verified so far."""


@dataclass(frozen=True, slots=True)
class QueueBatch:
    """Queues to sum up in one task."""

    queues: list[Queue]


Task = Share | QueueBatch | IndexFile | ShareQuery | ExtraQuery | IndexQuery


class Worker:
    """Runs tasks on one snapshot; state that a kind of task needs is created on first use."""

    def __init__(self, io: StoreIO, snapshot: Snapshot, advance: Callable[[int], None]) -> None:
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
            self._log = self._log or LogPass(io, snapshot, IndexWalk, advance)
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

    def __init__(self, io: StoreIO, snapshot: Snapshot, jobs: int, on_progress: OnShareDone) -> None:
        """Fork the processes at once: they inherit compiled kernels, and no thread exists yet."""
        self._on_progress = on_progress
        self._done = RawArray(c_int64, max(1, jobs))
        self._processes: dict[_Pipe, BaseProcess] = {}
        self._running: dict[_Pipe, Task] = {}
        self._local = Worker(io, snapshot, self._advance) if jobs <= 1 else None
        if jobs > 1:
            for module in (scan, dispatch, record_check, verify, index):
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
        """End the processes, including busy ones."""
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


def usable_jobs() -> int:
    """Number of processors available to this process."""
    return len(os.sched_getaffinity(0))


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
    jobs = jobs or usable_jobs()
    unreadable: set[Path] = set()
    while True:
        how = VerifyRun(io, paths, options, jobs, shares, share_bytes, on_progress, is_mine=is_mine)
        how.unreadable = frozenset(unreadable)
        try:
            return how.run()
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
    most = 1 << 30
    return VerifyRun(io, paths, options, 1, most, share_bytes, lambda done, total: None, is_mine=is_mine).snapshot()


def tasks_of(snapshot: Snapshot) -> list[Task]:
    """Tasks of a snapshot: index files, shares of the log, batches of queues."""
    queues = snapshot.queues
    # An index file is one task, however large.
    tasks: list[Task] = [*snapshot.index, *snapshot.shares]
    return tasks + [QueueBatch(queues[at : at + _QUEUES_PER_TASK]) for at in range(0, len(queues), _QUEUES_PER_TASK)]


def compare(io: StoreIO, paths: StorePaths, options: Options, snapshot: Snapshot, answers: TaskRunner) -> VerifyResult:
    """Compare the results of a snapshot's tasks; `answers` returns them and answers queries."""
    verifier = VerifyRun(io, paths, options, 1, 0, SHARE_BYTES_MIN, lambda done, total: None, is_mine=False)
    return verifier.compare(snapshot, answers, Findings(), time.perf_counter())


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


class VerifyRun:
    """Runs one verify."""

    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        options: Options,
        jobs: int,
        shares: int,
        share_bytes: int,
        on_progress: OnProgress,
        *,
        is_mine: bool,
    ) -> None:
        self._io = io
        self._is_mine = is_mine
        self._paths = paths
        self._options = options
        self._jobs = jobs
        self._shares = shares or SHARES_PER_JOB * jobs
        self._share_bytes = share_bytes
        self._on_progress = on_progress
        self.unreadable: frozenset[Path] = frozenset()
        """Files of queues and index that the disk cannot read."""

    def run(self) -> VerifyResult:
        started = time.perf_counter()
        findings = Findings()
        snapshot = self.snapshot()
        with contextlib.closing(self._workers(snapshot)) as workers:
            return self.compare(snapshot, workers, findings, started)

    def snapshot(self) -> Snapshot:
        """Take a snapshot with the log cut into shares."""
        positions = positions_of(self._io, self._paths, is_mine=self._is_mine)
        sizes = sizes_of(self._io, self._paths, self._options)
        was_killed = not positions.running and self._io.exists(self._paths.abort)
        inventory = take_inventory(self._io, self._paths, sizes, was_killed=was_killed, unreadable=self.unreadable)
        return self._snapshot(inventory, positions)

    def _workers(self, snapshot: Snapshot) -> Workers:
        slots = snapshot.inventory.sizes.slots
        log_bytes = sum(share.stop - share.start for share in snapshot.shares)
        total = log_bytes + sum(index_file.item_offset(slots, file.header.count) for file in snapshot.index)
        jobs = self._jobs if total >= 2 * self._share_bytes else 1
        return Workers(self._io, snapshot, jobs, lambda done: self._on_progress(min(done, total), total))

    def compare(self, snapshot: Snapshot, workers: TaskRunner, findings: Findings, started: float) -> VerifyResult:
        """Run the tasks and evaluate their results."""
        holes, ledger = known_holes(self._io, self._paths)
        findings.extend(ledger)
        shares, totals, checked = self._run_tasks(snapshot, workers)
        misnamed = misnamed_segments(self._io, snapshot.inventory)
        findings.extend(misnamed)
        lasting = self._persistent_findings(snapshot.inventory, is_running=snapshot.positions.running)
        findings.extend(without_consequences(misnamed, _without_known(lasting, holes)))
        self._apply_retention(snapshot)
        log = join_shares(self._io, snapshot, shares, self._rewalk(snapshot), holes)
        both = compare_totals(snapshot, shares, totals)
        behind = snapshot.positions.running or self._io.exists(self._paths.abort)
        restart = RestartPositions()
        if behind and not snapshot.positions.running:
            restart = find_restart(self._io, self._paths, snapshot.inventory.sizes.segment, log.begin)
        findings.extend(restart.classify(without_consequences(misnamed, log.findings), log.unwritten))
        queues = QueueFindings(
            snapshot,
            log,
            shares,
            both,
            may_be_behind=behind,
            restart_from=restart.queues_from,
            topics=known_topics(self._io, self._paths),
            unsettled=self._unsettled(snapshot),
        )
        findings.extend(queues.run(workers.run))
        findings.extend(self._expired(snapshot, both))
        if self._options.message_index_enable:
            index = IndexFindings(snapshot, log, shares, may_be_behind=behind, restart_from=restart.index_from)
            findings.extend(index.run(checked, workers.run))
        findings.extend(StateFindings(self._io, snapshot, log, both).run())
        findings.extend(TimerFindings(self._io, snapshot, log, both, self._options.timer_precision_ms).run())
        return self._verified(snapshot, log, both, findings, time.perf_counter() - started)

    def _persistent_findings(self, inventory: Inventory, *, is_running: bool) -> list[Finding]:
        """Findings of the inventory, without those that a running group causes for a moment."""
        lasting = inventory.findings
        deadline = time.monotonic() + _PATIENCE_S
        while is_running and lasting:
            again = set(take_inventory(self._io, self._paths, inventory.sizes, unreadable=self.unreadable).findings)
            lasting = [finding for finding in lasting if finding in again]
            if time.monotonic() > deadline or all(finding.as_note for finding in lasting):
                break
            time.sleep(_RECHECK_S)
        return lasting

    def _unsettled(self, snapshot: Snapshot) -> set[Queue]:
        """Queues that a running group has deleted or created again since the snapshot."""
        if not snapshot.positions.running:
            return set()
        now = read_deleted(self._io, self._paths, running=True)
        return {queue for queue, deletion in now.items() if snapshot.deleted.get(queue) != deletion}

    def _apply_retention(self, snapshot: Snapshot) -> None:
        """Move the start of the log to where retention has moved it meanwhile."""
        words = open_control(self._io, self._paths.control) if snapshot.positions.running else None
        if words is not None:
            begin = max(snapshot.positions.begin, words[control.MIN_PHYSICAL_OFFSET])
            snapshot.positions = dataclasses.replace(snapshot.positions, begin=begin)

    def _snapshot(self, inventory: Inventory, positions: LogPositions) -> Snapshot:
        shares = cut_into_shares(self._io, inventory, positions, self._shares, self._share_bytes)
        delays_ms = detect_delays(self._io, inventory, self._options.message_delay_level)
        snapshot = Snapshot(inventory, positions, delays_ms, shares)
        snapshot.deleted = read_deleted(self._io, self._paths, running=positions.end is not None)
        if self._options.message_index_enable:
            snapshot.index = read_index_headers(self._io, inventory)
        return snapshot

    # Tasks

    def _run_tasks(
        self, snapshot: Snapshot, workers: TaskRunner
    ) -> tuple[list[LogShare], list[QueueTotals], list[IndexFileResult]]:
        """Run the tasks of log, queues and index."""
        shares: list[LogShare] = []
        totals: list[QueueTotals] = []
        checked: list[IndexFileResult] = []
        for task, result in workers.run(tasks_of(snapshot)):
            if isinstance(task, Share):
                shares.append(result)
            elif isinstance(task, QueueBatch):
                totals.append(result)
            else:
                checked.append(result)
        shares.sort(key=lambda found: found.share.number)
        checked.sort(key=lambda found: found.name)
        return shares, totals, checked

    def _rewalk(self, snapshot: Snapshot) -> Callable[[Share], LogShare]:
        def walk(share: Share) -> LogShare:
            with contextlib.closing(LogPass(self._io, snapshot, IndexWalk, lambda size: None)) as log_pass:
                return log_pass.run(share)

        return walk

    def _expired(self, snapshot: Snapshot, both: QueueComparison) -> Iterator[Finding]:
        """Notes about deleted segments, and about queue files that point only to those."""
        inventory, begin = snapshot.inventory, snapshot.positions.begin
        units = int(both.more[:, BELOW, kernels.COUNT].sum())
        if not begin or not units:
            return
        last = inventory.segment_name(begin - 1)
        text = f"{counted(units, 'unit')} of records below {begin:,}"
        yield Finding(FindingKind.SEGMENTS_EXPIRED, last, 0, begin, size=begin, text=text)
        for queue, files in sorted(inventory.queues.items()):
            first = min(files, default=None)
            if first is None or len(files) < 2 or files[first] < inventory.sizes.queue_file:
                continue
            fd = self._io.open(inventory.paths.queue(*queue) / f"{first:020d}")
            try:
                unit = as_units(self._io.pread(fd, UNIT_SIZE, inventory.sizes.queue_file - UNIT_SIZE))[0]
            finally:
                self._io.close(fd)
            physical_offset = int(unit["physical_offset"])
            if 0 <= physical_offset < begin:
                name = inventory.queue_name(queue, first // UNIT_SIZE, UNIT_SIZE)[0]
                count = inventory.sizes.queue_file // UNIT_SIZE
                yield Finding(
                    FindingKind.UNIT_EXPIRED, name, 0, physical_offset, count=count, text="the whole first file"
                )

    def _verified(
        self, snapshot: Snapshot, log: WholeLog, both: QueueComparison, findings: Findings, seconds: float
    ) -> VerifyResult:
        units = int(both.files[:, :, kernels.COUNT].sum()) + int(both.more[:, :, kernels.COUNT].sum())
        items = sum(file.header.count - index_file.FIRST_ITEM for file in snapshot.index)
        log_bytes = log.end - log.begin - sum(stop - start for start, stop in log.fault_ranges)
        size = log_bytes + units * UNIT_SIZE + items * index_file.ITEM_SIZE
        return VerifyResult(
            self._paths.root,
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
        )
