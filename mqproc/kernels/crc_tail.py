"""RocketMQ's `__CRC32#` pair, with which a record's properties may end: ten digits, the least significant first.

The digits are made and read eight at once, in the lanes of a word: a number below 10⁸ is split into two below 10⁴, four
below 100, eight below 10, each split for all lanes by one multiplication (the reciprocal trick of Granlund and
Montgomery, "Division by Invariant Integers using Multiplication", 1994). One after the other they would cost as much as
the CRC itself.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.crc import crc32
from mqproc.kernels.intrinsics import copy_bytes, load_le16, load_le64, store_le32, store_le64
from mqproc.kernels.jit import inlined
from mqproc.kernels.primitive import Bytes
from mqproc.layout import record
from mqproc.layout.properties import PAIR_END

_CRC_NAME = np.frombuffer(record.CRC_NAME + b"\x01", np.uint8).copy()
_TAIL_SIZE = record.CRC_TAIL_SIZE
_NAME_SIZE = _TAIL_SIZE - record.CRC_DIGITS - 1
assert record.CRC_DIGITS == 10

_EIGHT_DIGITS = 10**8
# n // d as n * (2^k / d, rounded up) >> k, exact for all n that come: 31 bits, below 10⁸, below 10⁴, below 100.
_BY_EIGHT_DIGITS, _EIGHT_DIGITS_SHIFT = 1_441_151_881, 57
_BY_10_000, _10_000_SHIFT = 109_951_163, 40
_BY_100, _100_SHIFT = 10_486, 20
_BY_10, _10_SHIFT = 103, 10
_LANES_32_LOW_7 = 0x0000_007F_0000_007F
_LANES_32_LOW_16 = 0x0000_FFFF_0000_FFFF
_LANES_16_LOW_4 = 0x000F_000F_000F_000F
_LANES_16_LOW_8 = 0x00FF_00FF_00FF_00FF
_LANES_8_LOW_4 = 0x0F0F_0F0F_0F0F_0F0F
_ZEROS = 0x3030_3030_3030_3030
_LAST_TWO_AND_END = 0x3030 << 8 | ord(PAIR_END) << 24
_THREES = 0x0303_0303_0303_0303
# A byte from '0' to '?' goes beyond '?' with this when it is above '9'.
_SIXES = 0x0606_0606_0606_0606


@inlined
def store_digits(buf: Bytes, at: int, value: int) -> None:
    """Store a number of at most 31 bits as ten decimal digits, the least significant first, and the pair's end."""
    high = value * _BY_EIGHT_DIGITS >> _EIGHT_DIGITS_SHIFT
    low = value - high * _EIGHT_DIGITS
    upper = low * _BY_10_000 >> _10_000_SHIFT
    lanes = low - upper * 10_000 | upper << 32
    hundreds = lanes * _BY_100 >> _100_SHIFT & _LANES_32_LOW_7
    lanes = lanes - 100 * hundreds | hundreds << 16
    tens = lanes * _BY_10 >> _10_SHIFT & _LANES_16_LOW_4
    eight = (lanes - 10 * tens | tens << 8) + _ZEROS
    store_le64(buf, at, eight)
    tens = high * _BY_10 >> _10_SHIFT
    store_le32(buf, at + 7, eight >> 56 | (high - 10 * tens) << 8 | tens << 16 | _LAST_TWO_AND_END)


@inlined
def load_digits(buf: Bytes, at: int) -> int:
    """The number of ten decimal digits, the least significant first; −1 for other characters."""
    low = load_le64(buf, at)
    if low >> 4 & _LANES_8_LOW_4 != _THREES or low + _SIXES >> 4 & _LANES_8_LOW_4 != _THREES:
        return -1
    high = load_le16(buf, at + 8)
    ones = (high & 0xFF) - 48
    tens = (high >> 8) - 48
    if ones < 0 or ones > 9 or tens < 0 or tens > 9:
        return -1
    low -= _ZEROS
    low = low + (low >> 8) * 10 & _LANES_16_LOW_8
    low = low + (low >> 16) * 100 & _LANES_32_LOW_16
    low = low + (low >> 32) * 10_000 & 0xFFFF_FFFF
    return int(low + (ones + 10 * tens) * _EIGHT_DIGITS)


@inlined
def write_crc_tail(staging: Bytes, start: int, at: int) -> None:
    """Write the pair for [start, at)."""
    value = crc32(staging, start, at) & 0x7FFFFFFF
    copy_bytes(staging, at, _CRC_NAME, 0, _NAME_SIZE)
    store_digits(staging, at + _NAME_SIZE, value)
