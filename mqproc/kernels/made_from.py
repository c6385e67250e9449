"""Which records of the log say that they were made from an earlier one: deliveries of parked messages, commits.

`preparedTransactionOffset` is where they say it: RocketMQ keeps a committed message's half message there, and 0 in all
others; we name the parked record of a delivered one too. Walking the log for it is what tells a role, after a kill,
which of its deliveries were stored.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels.ahead import prefetch_alike
from mqproc.kernels.intrinsics import load_be32, load_be64
from mqproc.kernels.jit import kernel
from mqproc.kernels.primitive import Bytes, Words
from mqproc.kernels.record_check import REACHED_STOP, body_length_at, checked_size
from mqproc.layout import record

# What the walk says, int64[OUT_SIZE].
STOPPED_AT, REASON, COUNT = range(3)
OUT_SIZE = 3
FOUND_FULL = -1
"""A reason of its own: `found` has no room for more; go on at STOPPED_AT."""

# Bytes before a record's body length.
_PREPARED_BACK = record.BODY_LENGTH - record.PREPARED_TRANSACTION_OFFSET


@kernel
def find_made_from(view: Bytes, start: int, stop: int, base: int, found: Words, out: Words) -> int:
    """Walk records of view[start:stop] and put what each was made from into `found` int64[n], where it says so.

    `view` uint8 is one segment and `base` the physical offset of its byte 0. Prepared and rollback records are passed
    over. Returns how many were found; `out` tells STOPPED_AT and REASON, which is REACHED_STOP also when `stop` cuts a
    record, FOUND_FULL, or what is wrong with the record there. CRCs are not looked at.
    """
    at = start
    count = 0
    last_total = 0
    out[REASON] = REACHED_STOP
    while at < stop:
        total = checked_size(view, at, view.size, base + at, 0)
        if total < 0:
            out[REASON] = -total
            break
        if at + total > stop:
            break
        prefetch_alike(view, at, total, last_total)
        last_total = total
        made_from = load_be64(view, body_length_at(view, at) - _PREPARED_BACK)
        # None and commit have the bit of prepared and rollback clear.
        if made_from > 0 and load_be32(view, at + record.SYS_FLAG) & record.SYS_FLAG_PREPARED == 0:
            if count == found.size:
                out[REASON] = FOUND_FULL
                break
            found[count] = made_from
            count += 1
        at += total
    out[STOPPED_AT] = at
    out[COUNT] = count
    return count


def warm() -> None:
    """Compile or load the kernel."""
    nothing: NDArray[np.uint8] = np.zeros(1, np.uint8)
    find_made_from(nothing, 0, 0, 0, np.zeros(1, np.int64), np.zeros(OUT_SIZE, np.int64))
