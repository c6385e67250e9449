"""What waits in the timer, by its files alone: for who runs beside the keeper, or without it. Changes nothing."""

from __future__ import annotations

from typing import Final

import numpy as np

from mqproc.io import StoreIO
from mqproc.layout import timer_check, timer_log
from mqproc.layout.timer_check import TimerCheck
from mqproc.names import TIMER_TOPIC
from mqproc.paths import StorePaths, segment_name, segment_start
from mqproc.store.groups.offsets_json import Progress
from mqproc.store.slices import Slices

_UNITS_PER_SLICE: Final = 1 << 14


def saved_check(io: StoreIO, paths: StorePaths) -> TimerCheck:
    """`timercheck` as it was saved last; zeros without one."""
    try:
        return timer_check.decode(io.read_file(paths.timer_check))
    except FileNotFoundError:
        return TimerCheck()


def filed(check: TimerCheck) -> Progress:
    """How far the timer's queue is filed, as if the timer were a group."""
    return Progress("of the timer", TIMER_TOPIC, 0, check.queue_offset)


def first_waiting(io: StoreIO, paths: StorePaths, check: TimerCheck, minimum: int) -> Slices[int | None]:
    """The first record, at or above `minimum` of the log, that is filed and not delivered; None without any.

    The timer log has its units in the order of the log, so the first unit that waits is that of the first record.
    """
    starts = sorted(start for name in io.names(paths.timer_log) if (start := segment_start(name)) is not None)
    for start in starts:
        try:
            fd = io.open(paths.timer_log / segment_name(start))
        except FileNotFoundError:
            continue  # All its slots are delivered: the keeper has deleted it.
        try:
            at, end = 0, min(io.size(fd), check.timer_log_flushed - start)
            while at < end:
                size = min(_UNITS_PER_SLICE * timer_log.UNIT_SIZE, end - at)
                data = io.pread(fd, size, at)
                units = np.frombuffer(data, timer_log.UNIT_DTYPE, len(data) // timer_log.UNIT_SIZE)
                places = units["physical_offset"]
                waits = units["enqueued_ms"].astype(np.int64) + units["delay_ms"] >= check.read_ms
                found = np.flatnonzero(waits & (places >= minimum) & (units["size"] == timer_log.UNIT_SIZE))
                if len(found):
                    return int(places[found[0]])
                at += size
                yield
        finally:
            io.close(fd)
    return None
