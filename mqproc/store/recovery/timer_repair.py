"""Mending the timer's files, which all follow from its queue: the wheel anew from its log, or all of it filed again."""

from __future__ import annotations

import time
from collections.abc import Iterable

from mqproc.config import Options
from mqproc.io import StoreIO
from mqproc.layout import timer_check
from mqproc.layout.timer_check import TimerCheck
from mqproc.paths import StorePaths
from mqproc.store.delays.timer_store import TimerStore
from mqproc.store.verify import Finding, Kind
from mqproc.store.verify.findings import Severity
from mqproc.store.verify.inventory import take_inventory
from mqproc.store.verify.timer_records import first_waiting
from mqproc.store.verify.verifier import sizes_of

# No check of a store that is in use is older.
_TIMERS_MS = 365 * 86_400_000
# What was due shortly before the page was written may not have been delivered.
_DELIVERY_MS = 60_000
_KINDS = frozenset(
    {
        Kind.TIMER_FILE_MISSING,
        Kind.TIMER_FILE_LENGTH,
        Kind.TIMER_CHECK_MISSING,
        Kind.TIMER_CHECK_AHEAD,
        Kind.TIMER_UNIT_WRONG,
        Kind.TIMER_UNIT_MISSING,
        Kind.TIMER_SLOT_WRONG,
    }
)


def timer_damage(findings: Iterable[Finding], paths: StorePaths) -> tuple[bool, bool]:
    """Whether anything of the timer is to be mended, and whether that is more than its wheel.

    A start after a crash makes the wheel anew, and files all again without a check, so what is wrong with these is only
    noted. But a repair closes a store, and notes have become damage then.
    """
    of_timer = [each for each in findings if _is_to_be_mended(each, paths)]
    return bool(of_timer), any(each.file != paths.timer_wheel.name for each in of_timer)


def _is_to_be_mended(finding: Finding, paths: StorePaths) -> bool:
    if finding.kind is Kind.FILE_BEGUN:
        return (paths.root / finding.file).parent == paths.timer_log
    if finding.kind not in _KINDS:
        return False
    noted = finding.file == paths.timer_wheel.name or finding.kind is Kind.TIMER_CHECK_MISSING
    return noted or finding.severity is Severity.DAMAGE


def make_wheel(io: StoreIO, paths: StorePaths, options: Options) -> None:
    """The wheel anew from the timer log, durably. Raises OSError, FailedSyncError."""
    store = TimerStore(io, io, paths, options.timer_precision_ms, options.mapped_file_size_timer_log)
    try:
        store.open(_now_ms(), lambda physical_offset: None)
        if store.remark:
            # The log was not whole, after all.
            store.write(store.snapshot(log=0, log_end=0, now_ms=_now_ms()))
        else:
            store.sync()
    finally:
        store.close()


def filed_beyond(io: StoreIO, paths: StorePaths, end: int) -> bool:
    """Whether the check counts messages as filed that the timer's queue, which ends at `end`, does not have."""
    return io.exists(paths.timer_check) and timer_check.decode(io.read_file(paths.timer_check)).queue_offset > end


def remove_timer(io: StoreIO, paths: StorePaths) -> None:
    """Remove log and wheel. Raises OSError."""
    for name in io.names(paths.timer_log):
        io.unlink(paths.timer_log / name)
    io.unlink(paths.timer_wheel)


def file_again(io: StoreIO, paths: StorePaths, options: Options) -> None:
    """A check that has the next start file what waits; log and wheel are gone already.

    What was delivered of it bears marks in the log, which that start looks for. RocketMQ's deliveries bear none: what
    it has delivered of the slot that it was at, or behind the first message that waits, may come again.
    """
    try:
        check = timer_check.decode(io.read_file(paths.timer_check))
    except FileNotFoundError:
        check = TimerCheck()
    inventory = take_inventory(io, paths, sizes_of(io, paths, options))
    read_ms = _delivered_up_to(check, _now_ms())
    queue_offset = first_waiting(io, inventory, read_ms)
    again = TimerCheck(read_ms, 0, queue_offset, _now_ms(), check.counter + 1, log=0)
    io.make_folder(paths.config)
    io.write_file_atomically(paths.timer_check, timer_check.encode(again))


def _delivered_up_to(check: TimerCheck, now_ms: int) -> int:
    """What the check says, or when it was written where that cannot be; 0 where that is not known either."""
    if not check.is_ahead(now_ms):
        return check.read_ms
    written_ms = check.timestamp_ms - _DELIVERY_MS
    return written_ms if now_ms - _TIMERS_MS < written_ms < now_ms else 0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
