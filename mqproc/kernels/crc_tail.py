"""RocketMQ's `__CRC32#` pair, with which a record's properties may end."""

from __future__ import annotations

import numpy as np

from mqproc.kernels.crc import crc32
from mqproc.kernels.intrinsics import copy_bytes
from mqproc.kernels.jit import kernel
from mqproc.kernels.primitive import Bytes
from mqproc.layout import record
from mqproc.layout.properties import PAIR_END

_CRC_NAME = np.frombuffer(record.CRC_NAME + b"\x01", np.uint8).copy()
_TAIL_SIZE = record.CRC_TAIL_SIZE
_HALF = 10 ** (record.CRC_DIGITS // 2)
_PAIR_END = ord(PAIR_END)


@kernel
def write_crc_tail(staging: Bytes, start: int, at: int) -> None:
    """Write the pair for [start, at): ten decimal digits, least significant first."""
    value = crc32(staging, start, at) & 0x7FFFFFFF
    copy_bytes(staging, at, _CRC_NAME, 0, _TAIL_SIZE - record.CRC_DIGITS - 1)
    at += _TAIL_SIZE - record.CRC_DIGITS - 1
    # Two halves at once: each digit waits for the one before it.
    high = value // _HALF
    low = value - high * _HALF
    for digit in range(record.CRC_DIGITS // 2):
        low_rest = low // 10
        high_rest = high // 10
        staging[at + digit] = 48 + low - low_rest * 10
        staging[at + record.CRC_DIGITS // 2 + digit] = 48 + high - high_rest * 10
        low = low_rest
        high = high_rest
    staging[at + record.CRC_DIGITS] = _PAIR_END
