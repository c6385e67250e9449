"""Recovery of a stopped store by a tool: for real, or over storage that keeps nothing, which tells what it would do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from mqproc.config import Options
from mqproc.errors import CorruptStoreError, StoreReadOnlyError
from mqproc.io import FailedSyncError, StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store import damage
from mqproc.store.final_syncs import remember_failed_sync
from mqproc.store.recovery.dry_run_io import Change, DryRunIO
from mqproc.store.recovery.recovery import Recovery, Report, adopt_sizes
from mqproc.store.recovery.scan_ahead import usable_scanners
from mqproc.store.recovery.store_files import mark_open


@dataclass(slots=True)
class RecoveryPlan:
    """`said` is what recovery reports, `changes` what would become of files; `refused` says why no start would come.

    `cuts` are ends of the log, each with the one that had been durable: so much is lost.
    `queues` (the table that every start makes anew) is left out of the changes.
    """

    said: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    holes: list[tuple[int, int]] = field(default_factory=list)
    cuts: list[tuple[int, int]] = field(default_factory=list)
    log_begin: int = 0
    log_end: int = 0
    cut_bytes: int = 0
    refused: str = ""


def plan_recovery(paths: StorePaths, options: Options) -> RecoveryPlan:
    """Recover a stopped store without changing it. Raises StoreAccessError, OSError."""
    plan = RecoveryPlan()
    words = Words(bytearray(words_of.FILE_SIZE))
    with DryRunIO(paths.root) as io:
        try:
            _recover(io, paths, options, words, plan.said.append)
            known = damage.load(io, paths)
            plan.holes = [(hole.start, hole.stop) for hole in known.holes]
            plan.cuts = [(cut.end, cut.durable_end) for cut in known.cuts]
        except CorruptStoreError as error:
            plan.refused = str(error)
        plan.changes = [change for change in io.changes() if change.path not in (paths.queues, paths.next_queues)]
    plan.log_begin, plan.log_end = words[words_of.MIN_PHYSICAL_OFFSET], words[words_of.WRITTEN]
    plan.cut_bytes = words[words_of.RECOVERY_CUT_BYTES]
    return plan


def run_recovery(io: StoreIO, paths: StorePaths, options: Options) -> list[str]:
    """Recover a stopped store for real, whose lock the caller holds; what was reported.

    Raises StoreAccessError, CorruptStoreError, StoreReadOnlyError, OSError.
    """
    said: list[str] = []
    _recover(io, paths, options, Words(bytearray(words_of.FILE_SIZE)), said.append)
    return said


def _recover(io: StoreIO, paths: StorePaths, options: Options, words: Words, report: Report) -> None:
    adopted = adopt_sizes(io, paths, options, report)
    clean = not io.exists(paths.abort)
    recovery = Recovery(io, paths, adopted, words, report, clean=clean, scanners=usable_scanners())
    recovery.check()
    with opened(io, paths, report) as opening:
        recovery.run()
        opening.is_complete = words[words_of.DISPATCHED] == words[words_of.WRITTEN]


@dataclass(slots=True)
class Opening:
    """A stopped store in the hands of a tool. `is_complete`: queues and index hold all of the log, so it can close."""

    was_closed: bool
    is_complete: bool = False


@contextlib.contextmanager
def opened(io: StoreIO, paths: StorePaths, report: Report) -> Iterator[Opening]:
    """`abort` lies in a store while it is changed, so whoever comes after a kill knows; it goes when all is complete.

    A sync that fails is final: what memory shows need not be on the disk. Raises StoreReadOnlyError then, OSError.
    """
    io.make_folder(paths.own, mode=0o700)
    opening = Opening(was_closed=not io.exists(paths.abort))
    try:
        mark_open(io, paths, report)
        yield opening
        if opening.is_complete:
            io.unlink(paths.abort)
            io.sync_folder(paths.root)
    except FailedSyncError as error:
        remember_failed_sync(io, paths, f"recovery: {error}")
        text = f"{paths.root}: a sync failed: {error}; the store takes no messages until mqproc store repair"
        raise StoreReadOnlyError(text) from error
