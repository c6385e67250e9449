"""What recovery would do to a store: its own run over storage calls that change nothing."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from mqproc.config import Options
from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.shm.words import Words
from mqproc.store.recovery.dry_run_io import Change, DryRunIO
from mqproc.store.recovery.recovery import Recovery, adopt_sizes


@dataclass(slots=True)
class RecoveryPlan:
    """`said` is what a start would report, `changes` what would become of files; `refused` says why none would come.

    `queues` (the table that every start makes anew) is left out of the changes.
    """

    said: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    holes: list[tuple[int, int]] = field(default_factory=list)
    log_begin: int = 0
    log_end: int = 0
    cut_bytes: int = 0
    refused: str = ""


def plan_recovery(paths: StorePaths, options: Options, *, io: DryRunIO | None = None) -> RecoveryPlan:
    """Recover a stopped store without changing it. `io` may hold changes that are to be made before.

    Raises StoreAccessError, OSError.
    """
    plan = RecoveryPlan()
    own = io or DryRunIO(paths.root)
    words = Words(bytearray(words_of.FILE_SIZE))
    try:
        own.make_folder(paths.own)
        adopted = adopt_sizes(own, paths, options, plan.said.append)
        clean = not own.exists(paths.abort)
        Recovery(own, paths, adopted, words, plan.said.append, clean=clean).run()
    except CorruptStoreError as error:
        plan.refused = str(error)
    plan.changes = [change for change in own.changes() if change.path not in (paths.queues, paths.next_queues)]
    plan.log_begin, plan.log_end = words[words_of.MIN_PHYSICAL_OFFSET], words[words_of.WRITTEN]
    plan.cut_bytes = words[words_of.RECOVERY_CUT_BYTES]
    if not plan.refused:
        plan.holes = _holes(own, paths)
    if io is None:
        own.close_all()
    return plan


def run_recovery(io: StoreIO, paths: StorePaths, options: Options) -> list[str]:
    """Recover a stopped store for real, whose lock the caller holds; what was reported. `abort` goes.

    Raises StoreAccessError, CorruptStoreError, OSError.
    """
    said: list[str] = []
    io.make_folder(paths.own, mode=0o700)
    adopted = adopt_sizes(io, paths, options, said.append)
    words = Words(bytearray(words_of.FILE_SIZE))
    clean = not io.exists(paths.abort)
    Recovery(io, paths, adopted, words, said.append, clean=clean).run()
    if not clean and words[words_of.DISPATCHED] == words[words_of.WRITTEN]:
        io.unlink(paths.abort)
        io.sync_folder(paths.root)
    return said


def _holes(io: StoreIO, paths: StorePaths) -> list[tuple[int, int]]:
    from mqproc.store import damage

    with contextlib.suppress(FileNotFoundError):
        return [(hole.start, hole.stop) for hole in damage.load(io, paths).holes]
    return []
