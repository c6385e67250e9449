"""Frames in a buffer that a socket was read into (layout/frame.py): how far whole ones of one operation reach."""

from __future__ import annotations

import numpy as np

from mqproc.kernels.intrinsics import load_le16, load_le32, load_le64
from mqproc.kernels.jit import kernel
from mqproc.kernels.primitive import Bytes, Words
from mqproc.layout.frame import (
    HEADER_SIZE,
    MAGIC,
    OPERATION_AT,
    OPTIONS_SIZE_AT,
    PAYLOAD_SIZE_AT,
    VERSION,
    VERSION_AT,
    ZERO_AT,
)


@kernel
def leading_run(buffer: Bytes, at: int, end: int, operation: int, bytes_max: int, limit: Words) -> int:
    """Where the whole frames that begin at `at` end: those of `operation`, none larger than `bytes_max`.

    `buffer` uint8[n] was filled up to `end`. At most `limit[0]` frames are taken, which is counted down by them. The
    first one that is not whole, or not as it must be, is left for whoever can say what it is.
    """
    while limit[0] > 0 and end - at >= HEADER_SIZE:
        if (
            load_le32(buffer, at) != MAGIC
            or load_le16(buffer, at + VERSION_AT) != VERSION
            or load_le16(buffer, at + OPERATION_AT) != operation
            or load_le32(buffer, at + ZERO_AT) != 0
        ):
            break
        rest = HEADER_SIZE + load_le32(buffer, at + OPTIONS_SIZE_AT)
        payload = load_le64(buffer, at + PAYLOAD_SIZE_AT)
        # Apart: their sum may be no number of 64 bits.
        if payload < 0 or payload > bytes_max or rest + payload > bytes_max or rest + payload > end - at:
            break
        at += rest + payload
        limit[0] -= 1
    return at


def warm() -> None:
    """Compile or load this kernel."""
    leading_run(np.zeros(1, np.uint8), 0, 0, 0, 0, np.zeros(1, np.int64))
