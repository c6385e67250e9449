"""One verify from beginning to end: look, cut into shares, do tasks, put results together, ask about differences."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mqproc.config import Options
from mqproc.errors import CorruptStoreError, StoreAccessError
from mqproc.io import StoreIO
from mqproc.ipc.lock import holder_of
from mqproc.kernels import verify as kernels
from mqproc.layout import control as words_of
from mqproc.layout import index_file
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.paths import StorePaths, segment_start
from mqproc.quantities import counted
from mqproc.store.consume_queue import as_units
from mqproc.store.derived import unreadable_file, unreadable_files
from mqproc.store.existing import check_is_store
from mqproc.store.index_shape import adopted_index_shape
from mqproc.store.queue_folders import adopted_file_bytes
from mqproc.store.reads.store_views import RUNNING_STATES, open_control
from mqproc.store.segments import adopted_segment_size
from mqproc.store.verify.delays import delays_of
from mqproc.store.verify.deletions import known_topics, read_deleted
from mqproc.store.verify.durable import Restart, next_restart
from mqproc.store.verify.findings import Finding, Findings, Kind
from mqproc.store.verify.index_findings import IndexFindings
from mqproc.store.verify.index_pass import IndexChecked
from mqproc.store.verify.inventory import Inventory, Queue, Sizes, take_inventory
from mqproc.store.verify.log_findings import WholeLog, join_shares
from mqproc.store.verify.log_pass import LogPass, LogShare
from mqproc.store.verify.misnaming import misnamed_segments, without_consequences
from mqproc.store.verify.picture import (
    SHARE_BYTES_MIN,
    SHARES_PER_JOB,
    Picture,
    Positions,
    Share,
    cut_into_shares,
    read_index_headers,
)
from mqproc.store.verify.queue_findings import Both, QueueFindings, side_by_side
from mqproc.store.verify.queue_pass import BELOW, QueueTotals
from mqproc.store.verify.state import StateFindings, known_holes
from mqproc.store.verify.timer import TimerFindings
from mqproc.store.verify.workers import QueueGroup, Task, Workers, usable_jobs

_QUEUES_PER_TASK = 256
# How long a file of a running group may take from its name to its length before it counts as damage.
_PATIENCE_S = 1.0
_LOOK_S = 0.02

OnProgress = Callable[[int, int], None]
"""Told now and then how many bytes of how many have been looked at."""


class Answers(Protocol):
    """Has the tasks of a picture done, or done already."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Each task with its result, in any order."""
        ...


@dataclass(frozen=True, slots=True)
class Verified:
    """What a verify looked at and found. `size` counts bytes of records, units and index entries."""

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
    """By queue: its next offset, as log and files tell it together."""

    @property
    def clean(self) -> bool:
        return self.findings.damaged == 0

    @property
    def bytes_per_second(self) -> float:
        return self.size / max(self.seconds, 1e-9)

    def figures(self) -> dict[str, Any]:
        """What was looked at, and how much of it was damaged."""
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
) -> Verified:
    """Look at all of a store, with `jobs` processes (0: as many as there are processors). Changes nothing.

    The log is cut into so many `shares` (0: some for each process) or fewer of `share_bytes`; a store of less than two
    of them is looked at by this process alone. `is_mine`: the caller holds the store's lock, so nobody works in it.

    Raises StoreAccessError when there is no store or it may not be read.
    """
    check_is_store(io, paths)
    jobs = jobs or usable_jobs()
    unreadable: set[Path] = set()
    while True:
        how = _Verifier(io, paths, options, jobs, shares, share_bytes, on_progress, is_mine=is_mine)
        how.unreadable = frozenset(unreadable)
        try:
            return how.run()
        except PermissionError as error:
            raise StoreAccessError(f"{error.filename}: {error.strerror}") from None
        except OSError as error:
            found = unreadable_file(error, paths)
            if found is None or found in unreadable:
                raise
            # The others too: to begin anew for each of them would take as long as so many verifies.
            unreadable |= {found, *unreadable_files(io, paths)}
        except CorruptStoreError:
            # A process of ours may have died of a page of a map.
            others = unreadable_files(io, paths) - unreadable
            if not others:
                raise
            unreadable |= others


def picture_of(
    io: StoreIO, paths: StorePaths, options: Options, *, share_bytes: int = SHARE_BYTES_MIN, is_mine: bool = False
) -> Picture:
    """A store at this moment, for others that do its tasks, in shares of about `share_bytes`."""
    most = 1 << 30
    return _Verifier(io, paths, options, 1, most, share_bytes, lambda done, total: None, is_mine=is_mine).picture()


def tasks_of(picture: Picture) -> list[Task]:
    """What must be done of a picture: index files, the log's shares, its queues."""
    queues = picture.queues
    # A file of the index is one task, however large.
    tasks: list[Task] = [*picture.index, *picture.shares]
    return tasks + [QueueGroup(queues[at : at + _QUEUES_PER_TASK]) for at in range(0, len(queues), _QUEUES_PER_TASK)]


def compare(io: StoreIO, paths: StorePaths, options: Options, picture: Picture, answers: Answers) -> Verified:
    """What the tasks of a picture come to; `answers` has their results, and answers what is asked about differences."""
    verifier = _Verifier(io, paths, options, 1, 0, SHARE_BYTES_MIN, lambda done, total: None, is_mine=False)
    return verifier.compare(picture, answers, Findings(), time.perf_counter())


def sizes_of(io: StoreIO, paths: StorePaths, options: Options) -> Sizes:
    """The lengths that a store's files have; the options' where nothing tells."""
    slots, items = adopted_index_shape(io, paths.index, options.max_hash_slot_num, options.max_index_num)
    return Sizes(
        adopted_segment_size(io, paths.commit_log, options.mapped_file_size_commit_log),
        adopted_file_bytes(io, paths.consume_queue, options.consume_queue_file_bytes),
        slots,
        items,
    )


def positions_of(io: StoreIO, paths: StorePaths, *, is_mine: bool = False) -> Positions:
    """Where the log begins and ends: from the words of a running group, in an order that keeps them consistent."""
    starts = (segment_start(name) for name in io.names(paths.commit_log))
    begin = min((start for start in starts if start is not None), default=0)
    if is_mine or holder_of(io, paths) is None:
        return Positions(begin)
    words = open_control(io, paths.control)
    if words is None or words[words_of.GROUP_STATE] not in RUNNING_STATES:
        return Positions(begin, running=True)
    dispatched = words[words_of.DISPATCHED]
    end = words[words_of.WRITTEN]
    return Positions(max(begin, words[words_of.MIN_PHYSICAL_OFFSET]), end, min(dispatched, end), running=True)


def _unknown(findings: list[Finding], holes: list[tuple[int, int]]) -> Iterator[Finding]:
    """Findings but missing segments that are known already: the log's holes tell of them."""
    for finding in findings:
        start = finding.physical_offset or 0
        known = any(first <= start and start + finding.size <= stop for first, stop in holes)
        if finding.kind is not Kind.SEGMENT_MISSING or not known:
            yield finding


class _Verifier:
    """The steps of one verify."""

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
        """Files of queues and index that were found to be so."""

    def run(self) -> Verified:
        started = time.perf_counter()
        findings = Findings()
        picture = self.picture()
        with contextlib.closing(self._workers(picture)) as workers:
            return self.compare(picture, workers, findings, started)

    def picture(self) -> Picture:
        """The store at this moment, its log cut into shares."""
        positions = positions_of(self._io, self._paths, is_mine=self._is_mine)
        sizes = sizes_of(self._io, self._paths, self._options)
        was_killed = not positions.running and self._io.exists(self._paths.abort)
        inventory = take_inventory(self._io, self._paths, sizes, was_killed=was_killed, unreadable=self.unreadable)
        return self._picture(inventory, positions)

    def _workers(self, picture: Picture) -> Workers:
        slots = picture.inventory.sizes.slots
        log_bytes = sum(share.stop - share.start for share in picture.shares)
        total = log_bytes + sum(index_file.item_offset(slots, file.header.count) for file in picture.index)
        jobs = self._jobs if total >= 2 * self._share_bytes else 1
        return Workers(self._io, picture, jobs, lambda done: self._on_progress(min(done, total), total))

    def compare(self, picture: Picture, workers: Answers, findings: Findings, started: float) -> Verified:
        """Have the tasks done, and say what they come to."""
        holes, ledger = known_holes(self._io, self._paths)
        findings.extend(ledger)
        shares, totals, checked = self._passes(picture, workers)
        misnamed = misnamed_segments(self._io, picture.inventory)
        findings.extend(misnamed)
        lasting = self._lasting(picture.inventory, is_running=picture.positions.running)
        findings.extend(without_consequences(misnamed, _unknown(lasting, holes)))
        self._follow_retention(picture)
        log = join_shares(self._io, picture, shares, self._again(picture), holes)
        both = side_by_side(picture, shares, totals)
        behind = picture.positions.running or self._io.exists(self._paths.abort)
        restart = Restart()
        if behind and not picture.positions.running:
            restart = next_restart(self._io, self._paths, picture.inventory.sizes.segment, log.begin)
        findings.extend(restart.judged(without_consequences(misnamed, log.findings), log.unwritten))
        queues = QueueFindings(
            picture,
            log,
            shares,
            both,
            may_be_behind=behind,
            restart_from=restart.queues_from,
            topics=known_topics(self._io, self._paths),
            unsettled=self._unsettled(picture),
        )
        findings.extend(queues.run(workers.run))
        findings.extend(self._expired(picture, both))
        if self._options.message_index_enable:
            index = IndexFindings(picture, log, shares, may_be_behind=behind, restart_from=restart.index_from)
            findings.extend(index.run(checked, workers.run))
        findings.extend(StateFindings(self._io, picture, log, both).run())
        findings.extend(TimerFindings(self._io, picture, log, both, self._options.timer_precision_ms).run())
        return self._verified(picture, log, both, findings, time.perf_counter() - started)

    def _lasting(self, inventory: Inventory, *, is_running: bool) -> list[Finding]:
        """What was found by name and length, but not what a running group was about to do: it had made a file, say,
        and not yet given it its length. Such a finding is soon gone; damage stays."""
        lasting = inventory.findings
        deadline = time.monotonic() + _PATIENCE_S
        while is_running and lasting:
            again = set(take_inventory(self._io, self._paths, inventory.sizes, unreadable=self.unreadable).findings)
            lasting = [finding for finding in lasting if finding in again]
            if time.monotonic() > deadline or all(finding.as_note for finding in lasting):
                break
            time.sleep(_LOOK_S)
        return lasting

    def _unsettled(self, picture: Picture) -> set[Queue]:
        """Queues that a running group has deleted since, or made again."""
        if not picture.positions.running:
            return set()
        now = read_deleted(self._io, self._paths, running=True)
        return {queue for queue, deletion in now.items() if picture.deleted.get(queue) != deletion}

    def _follow_retention(self, picture: Picture) -> None:
        """What a running group has deleted since is no damage: the log begins behind it."""
        words = open_control(self._io, self._paths.control) if picture.positions.running else None
        if words is not None:
            begin = max(picture.positions.begin, words[words_of.MIN_PHYSICAL_OFFSET])
            picture.positions = dataclasses.replace(picture.positions, begin=begin)

    def _picture(self, inventory: Inventory, positions: Positions) -> Picture:
        shares = cut_into_shares(self._io, inventory, positions, self._shares, self._share_bytes)
        delays_ms = delays_of(self._io, inventory, self._options.message_delay_level)
        picture = Picture(inventory, positions, delays_ms, shares)
        picture.deleted = read_deleted(self._io, self._paths, running=positions.end is not None)
        if self._options.message_index_enable:
            picture.index = read_index_headers(self._io, inventory)
        return picture

    # Tasks

    def _passes(
        self, picture: Picture, workers: Answers
    ) -> tuple[list[LogShare], list[QueueTotals], list[IndexChecked]]:
        """Log, queues and index files, each once."""
        shares: list[LogShare] = []
        totals: list[QueueTotals] = []
        checked: list[IndexChecked] = []
        for task, result in workers.run(tasks_of(picture)):
            if isinstance(task, Share):
                shares.append(result)
            elif isinstance(task, QueueGroup):
                totals.append(result)
            else:
                checked.append(result)
        shares.sort(key=lambda found: found.share.number)
        checked.sort(key=lambda found: found.name)
        return shares, totals, checked

    def _again(self, picture: Picture) -> Callable[[Share], LogShare]:
        def walk(share: Share) -> LogShare:
            with contextlib.closing(LogPass(self._io, picture, lambda size: None)) as log_pass:
                return log_pass.run(share)

        return walk

    def _expired(self, picture: Picture, both: Both) -> Iterator[Finding]:
        """That the log's beginning is gone, and queue files that lead nowhere else: retention is not there yet."""
        inventory, begin = picture.inventory, picture.positions.begin
        units = int(both.more[:, BELOW, kernels.COUNT].sum())
        if not begin or not units:
            return
        last = inventory.segment_name(begin - 1)
        text = f"{counted(units, 'unit')} of records below {begin:,}"
        yield Finding(Kind.SEGMENTS_EXPIRED, last, 0, begin, size=begin, text=text)
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
                yield Finding(Kind.UNIT_EXPIRED, name, 0, physical_offset, count=count, text="the whole first file")

    def _verified(self, picture: Picture, log: WholeLog, both: Both, findings: Findings, seconds: float) -> Verified:
        units = int(both.files[:, :, kernels.COUNT].sum()) + int(both.more[:, :, kernels.COUNT].sum())
        items = sum(file.header.count - index_file.FIRST_ITEM for file in picture.index)
        log_bytes = log.end - log.begin - sum(stop - start for start, stop in log.fault_ranges)
        size = log_bytes + units * UNIT_SIZE + items * index_file.ITEM_SIZE
        return Verified(
            self._paths.root,
            picture.positions.running,
            log.begin,
            picture.positions.end or log.end,
            log.records,
            units,
            items,
            len(both.queues),
            size,
            seconds,
            findings,
            {queue: end for queue in both.queues if (end := both.max_offset(queue)) is not None},
        )
