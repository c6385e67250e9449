"""Record checksums: CRC-32 of bodies and of whole records (property `__CRC32#`).

The CRC is zlib's, with the reflected polynomial 0xEDB88320.

With carry-less multiplication (PCLMULQDQ) the message is folded 64 bytes a step into 128 bits with the same remainder,
which are then reduced to 32: Gopal and others, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
Instruction", Intel 2009, with its constants for this polynomial. With 512-bit registers (VPCLMULQDQ) one instruction
folds four parts, and long ranges are folded 256 bytes a step. Other processors use sixteen tables, 16 bytes a step:
Kounavis and Berry, "Novel Table Lookup-Based Algorithms for High-Performance CRC Generation", 2008. Uncompiled runs
call zlib.
"""

from __future__ import annotations

import zlib

import numpy as np

from mqproc.kernels.jit.compile import COMPILED, inlined, kernel
from mqproc.kernels.jit.intrinsics import copy_bytes, load_le16, load_le32, load_le64, load_u8, store_le32, store_le64
from mqproc.kernels.jit.lowering import Bytes, Vector128
from mqproc.kernels.jit.simd128 import (
    HAS_CLMUL,
    HAS_VPCLMUL,
    fold_128,
    fold_512,
    high_64,
    join_512,
    load_128,
    load_512,
    low_64,
    multiply_64,
    pair_128,
    part_0,
    part_1,
    part_2,
    part_3,
    shift_left_128,
    shift_right_128,
    xor_128,
    xor_512,
)
from mqproc.layout import record
from mqproc.layout.properties import PAIR_END

POLYNOMIAL = 0xEDB88320
MASK_31 = 0x7FFFFFFF
MASK_32 = 0xFFFFFFFF


def _power(exponent: int) -> int:
    """x^exponent modulo the polynomial, bit-reflected and shifted up one bit, as folding needs."""
    power = 1 << 31  # x^0
    for _ in range(exponent):
        power = power >> 1 ^ (POLYNOMIAL if power & 1 else 0)
    return power << 1


def _fold_keys(distance_bytes: int) -> tuple[int, int]:
    """Multipliers that move the two lanes of 128 bits by a distance."""
    bits = 8 * distance_bytes
    return _power(bits + 32), _power(bits - 32)


FOLD_256_BYTES = _fold_keys(256)
FOLD_64_BYTES = _fold_keys(64)
FOLD_48_BYTES = _fold_keys(48)
FOLD_32_BYTES = _fold_keys(32)
FOLD_16_BYTES = _fold_keys(16)
# Constants given in the paper.
assert FOLD_64_BYTES == (0x1_5444_2BD4, 0x1_C6E4_1596)
assert FOLD_16_BYTES == (0x1_7519_97D0, 0x0_CCAA_009E)
FOLD_TO_64_BITS = 0x1_63CD_6124
POLYNOMIAL_REFLECTED = 0x1_DB71_0641
POLYNOMIAL_INVERSE = 0x1_F701_1641


def _make_tables() -> Bytes:
    """Sixteen tables of 256 u32: table k, at byte 0x400 × k, for a byte and k zeros after it."""
    tables = np.empty((16, 256), np.uint32)
    row = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        row = np.where(row & 1, row >> np.uint32(1) ^ np.uint32(POLYNOMIAL), row >> np.uint32(1))
    tables[0] = row
    for k in range(1, 16):
        tables[k] = tables[k - 1] >> np.uint32(8) ^ tables[0][tables[k - 1] & np.uint32(0xFF)]
    return tables.reshape(-1).view(np.uint8)


TABLES = _make_tables()


@kernel
def crc32_table(crc: int, buf: Bytes, start: int, stop: int) -> int:
    """`crc32_update` with sixteen tables."""
    state = crc ^ MASK_32
    i = start
    while i + 16 <= stop:
        a = load_le64(buf, i) ^ state
        b = load_le64(buf, i + 8)
        state = (
            load_le32(TABLES, 0x3C00 + 4 * (a & 0xFF))
            ^ load_le32(TABLES, 0x3800 + 4 * (a >> 8 & 0xFF))
            ^ load_le32(TABLES, 0x3400 + 4 * (a >> 16 & 0xFF))
            ^ load_le32(TABLES, 0x3000 + 4 * (a >> 24 & 0xFF))
            ^ load_le32(TABLES, 0x2C00 + 4 * (a >> 32 & 0xFF))
            ^ load_le32(TABLES, 0x2800 + 4 * (a >> 40 & 0xFF))
            ^ load_le32(TABLES, 0x2400 + 4 * (a >> 48 & 0xFF))
            ^ load_le32(TABLES, 0x2000 + 4 * (a >> 56 & 0xFF))
            ^ load_le32(TABLES, 0x1C00 + 4 * (b & 0xFF))
            ^ load_le32(TABLES, 0x1800 + 4 * (b >> 8 & 0xFF))
            ^ load_le32(TABLES, 0x1400 + 4 * (b >> 16 & 0xFF))
            ^ load_le32(TABLES, 0x1000 + 4 * (b >> 24 & 0xFF))
            ^ load_le32(TABLES, 0x0C00 + 4 * (b >> 32 & 0xFF))
            ^ load_le32(TABLES, 0x0800 + 4 * (b >> 40 & 0xFF))
            ^ load_le32(TABLES, 0x0400 + 4 * (b >> 48 & 0xFF))
            ^ load_le32(TABLES, 4 * (b >> 56 & 0xFF))
        )
        i += 16
    while i < stop:
        state = state >> 8 ^ load_le32(TABLES, 4 * ((state ^ load_u8(buf, i)) & 0xFF))
        i += 1
    return state ^ MASK_32


@inlined
def reduce_folded(a: Vector128, buf: Bytes, i: int, stop: int) -> int:
    """Reduce `a`, the folded message up to `i` (16 bytes at least), and buf[i:stop] to a CRC."""
    fold_16 = pair_128(FOLD_16_BYTES[0], FOLD_16_BYTES[1])
    while i + 16 <= stop:
        a = fold_128(a, fold_16, load_128(buf, i))
        i += 16
    if i < stop:
        # Treat `a` and the last 1 to 15 bytes as one message: fold its first bytes, zero-extended, over its last 16.
        rest_bits = 8 * (stop - i)
        tail = shift_right_128(load_128(buf, stop - 16), 128 - rest_bits)
        last = xor_128(shift_right_128(a, rest_bits), shift_left_128(tail, 128 - rest_bits))
        a = fold_128(shift_left_128(a, 128 - rest_bits), fold_16, last)
    # Reduce 128 bits to 96, then to 64; Barrett reduction leaves the remainder in the upper half of 64 bits.
    wide = xor_128(multiply_64(low_64(a), FOLD_16_BYTES[1]), pair_128(high_64(a), 0))
    wide = xor_128(multiply_64(low_64(wide) & MASK_32, FOLD_TO_64_BITS), shift_right_128(wide, 32))
    quotient = low_64(multiply_64(low_64(wide) & MASK_32, POLYNOMIAL_INVERSE)) & MASK_32
    remainder = low_64(wide) ^ low_64(multiply_64(quotient, POLYNOMIAL_REFLECTED))
    return remainder >> 32 & MASK_32 ^ MASK_32


@inlined
def crc32_clmul(crc: int, buf: Bytes, start: int, stop: int) -> int:
    """`crc32_update` with carry-less multiplication; requires HAS_CLMUL."""
    if stop - start < 16:
        return crc32_table(crc, buf, start, stop)
    fold_16 = pair_128(FOLD_16_BYTES[0], FOLD_16_BYTES[1])
    a = xor_128(load_128(buf, start), pair_128(crc ^ MASK_32, 0))
    i = start + 16
    if stop - start >= 64:
        fold_64 = pair_128(FOLD_64_BYTES[0], FOLD_64_BYTES[1])
        b = load_128(buf, start + 16)
        c = load_128(buf, start + 32)
        d = load_128(buf, start + 48)
        i = start + 64
        while i + 64 <= stop:
            a = fold_128(a, fold_64, load_128(buf, i))
            b = fold_128(b, fold_64, load_128(buf, i + 16))
            c = fold_128(c, fold_64, load_128(buf, i + 32))
            d = fold_128(d, fold_64, load_128(buf, i + 48))
            i += 64
        a = fold_128(fold_128(fold_128(a, fold_16, b), fold_16, c), fold_16, d)
    return reduce_folded(a, buf, i, stop)


@inlined
def crc32_vpclmul(crc: int, buf: Bytes, start: int, stop: int) -> int:
    """`crc32_update` with carry-less multiplication of four parts at once; requires HAS_VPCLMUL."""
    if stop - start < 2 * 64:
        return crc32_clmul(crc, buf, start, stop)
    keys = pair_128(FOLD_64_BYTES[0], FOLD_64_BYTES[1])
    fold_64 = join_512(keys, keys, keys, keys)
    none = pair_128(0, 0)
    a = xor_512(load_512(buf, start), join_512(pair_128(crc ^ MASK_32, 0), none, none, none))
    i = start + 64
    if stop - start >= 2 * 256:
        keys = pair_128(FOLD_256_BYTES[0], FOLD_256_BYTES[1])
        fold_256 = join_512(keys, keys, keys, keys)
        b = load_512(buf, start + 64)
        c = load_512(buf, start + 128)
        d = load_512(buf, start + 192)
        i = start + 256
        while i + 256 <= stop:
            a = fold_512(a, fold_256, load_512(buf, i))
            b = fold_512(b, fold_256, load_512(buf, i + 64))
            c = fold_512(c, fold_256, load_512(buf, i + 128))
            d = fold_512(d, fold_256, load_512(buf, i + 192))
            i += 256
        a = fold_512(fold_512(fold_512(a, fold_64, b), fold_64, c), fold_64, d)
    while i + 64 <= stop:
        a = fold_512(a, fold_64, load_512(buf, i))
        i += 64
    # Fold the four 128-bit parts into the last one.
    last = fold_128(part_2(a), pair_128(FOLD_16_BYTES[0], FOLD_16_BYTES[1]), part_3(a))
    last = fold_128(part_1(a), pair_128(FOLD_32_BYTES[0], FOLD_32_BYTES[1]), last)
    last = fold_128(part_0(a), pair_128(FOLD_48_BYTES[0], FOLD_48_BYTES[1]), last)
    return reduce_folded(last, buf, i, stop)


def crc32_zlib(crc: int, buf: Bytes, start: int, stop: int) -> int:
    """`crc32_update` with zlib, for uncompiled runs."""
    return zlib.crc32(buf[start:stop].data, crc)


_compiled = crc32_vpclmul if HAS_VPCLMUL else crc32_clmul if HAS_CLMUL else crc32_table
crc32_update = _compiled if COMPILED else crc32_zlib
"""(crc, buf, start, stop) → CRC-32 of buf[start:stop], continuing `crc` (0 = start). Unsigned, in an int64."""


@inlined
def crc32(buf: Bytes, start: int, stop: int) -> int:
    """CRC-32 of buf[start:stop], 0…2³²−1."""
    return crc32_update(0, buf, start, stop)


@kernel
def crc31(buf: Bytes, start: int, stop: int) -> int:
    """CRC-32 without its highest bit, the form of RocketMQ's bodyCRC."""
    return crc32_update(0, buf, start, stop) & MASK_31


# The `__CRC32#` property, the last pair of a record's properties: ten decimal digits, the least significant first.
#
# Eight digits are converted at once in the lanes of a word: a number below 10⁸ is split into two below 10⁴, four below
# 100, eight below 10. Each split divides all lanes with one multiplication by a reciprocal (Granlund and Montgomery,
# "Division by Invariant Integers using Multiplication", 1994). Digit by digit this would cost as much as the CRC
# itself.


_CRC_NAME = np.frombuffer(record.CRC_NAME + b"\x01", np.uint8).copy()
_NAME_SIZE = record.CRC_TAIL_SIZE - record.CRC_DIGITS - 1
assert record.CRC_DIGITS == 10

_EIGHT_DIGITS = 10**8
# n // d = n × ceil(2^k / d) >> k. Exact for the values that occur: 31 bits, and below 10⁸, 10⁴ and 100.
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
# Added to a byte '0' to '?', carries beyond '?' if the byte is above '9'.
_SIXES = 0x0606_0606_0606_0606


@inlined
def store_digits(buf: Bytes, at: int, value: int) -> None:
    """Store a 31-bit number as ten decimal digits, lowest first, and the pair separator."""
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
    """Parse ten decimal digits, the least significant first; −1 for other characters."""
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
    """Append the CRC property of [start, at) at `at`."""
    value = crc32(staging, start, at) & MASK_31
    copy_bytes(staging, at, _CRC_NAME, 0, _NAME_SIZE)
    store_digits(staging, at + _NAME_SIZE, value)


def warm() -> None:
    """Compile or load these kernels."""
    buf = np.zeros(1, np.uint8)
    crc32_update(0, buf, 0, 1)
    crc32(buf, 0, 1)
    crc31(buf, 0, 1)
