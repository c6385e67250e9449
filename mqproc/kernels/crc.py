"""CRC-32 as zlib's (reflected polynomial 0xEDB88320), of ranges of a buffer.

By carry-less multiplication where the processor has it: the message is folded 64 bytes a step into 128 bits that have
the same remainder, and those are reduced to 32 (Gopal and others, "Fast CRC Computation for Generic Polynomials Using
PCLMULQDQ Instruction", Intel 2009, with its constants for this polynomial). Where registers of 512 bits can do it, four
parts are folded by one instruction, and long ranges 256 bytes a step. Elsewhere by sixteen tables, 16 bytes a step
(Kounavis and Berry, "Novel Table Lookup-Based Algorithms for High-Performance CRC Generation", 2008). Where nothing is
compiled, zlib itself.
"""

from __future__ import annotations

import zlib

import numpy as np

from mqproc.kernels.intrinsics import load_le32, load_le64, load_u8
from mqproc.kernels.jit import COMPILED, inlined, kernel
from mqproc.kernels.primitive import Bytes, Wide
from mqproc.kernels.wide import (
    HAS_BROAD_CLMUL,
    HAS_CLMUL,
    fold_128,
    fold_512,
    four_512,
    high_64,
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

POLYNOMIAL = 0xEDB88320
MASK_31 = 0x7FFFFFFF
MASK_32 = 0xFFFFFFFF


def _power(exponent: int) -> int:
    """x^exponent modulo the polynomial, bit-reflected and one bit up, as the folds need it."""
    power = 1 << 31  # x^0
    for _ in range(exponent):
        power = power >> 1 ^ (POLYNOMIAL if power & 1 else 0)
    return power << 1


def _fold_keys(distance_bytes: int) -> tuple[int, int]:
    """What moves the two lanes of 128 bits so many bytes on."""
    bits = 8 * distance_bytes
    return _power(bits + 32), _power(bits - 32)


FOLD_256_BYTES = _fold_keys(256)
FOLD_64_BYTES = _fold_keys(64)
FOLD_48_BYTES = _fold_keys(48)
FOLD_32_BYTES = _fold_keys(32)
FOLD_16_BYTES = _fold_keys(16)
# As the paper has them.
assert FOLD_64_BYTES == (0x1_5444_2BD4, 0x1_C6E4_1596)
assert FOLD_16_BYTES == (0x1_7519_97D0, 0x0_CCAA_009E)
FOLD_TO_64_BITS = 0x1_63CD_6124
POLYNOMIAL_REFLECTED = 0x1_DB71_0641
POLYNOMIAL_INVERSE = 0x1_F701_1641


def _make_tables() -> Bytes:
    """Sixteen tables of 256 u32 as bytes: table k, at 0x400 × k, holds the CRC of a byte followed by k zero bytes."""
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
    """`crc32_update` by sixteen tables."""
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
def _reduced(a: Wide, buf: Bytes, i: int, stop: int) -> int:
    """The CRC of what has been folded into `a`, at least 16 bytes that end at `i`, and of buf[i:stop] behind it."""
    fold_16 = pair_128(FOLD_16_BYTES[0], FOLD_16_BYTES[1])
    while i + 16 <= stop:
        a = fold_128(a, fold_16, load_128(buf, i))
        i += 16
    if i < stop:
        # `a` and the last 1…15 bytes are one message: its first bytes, with zeros before them, fold over its last 16.
        rest_bits = 8 * (stop - i)
        tail = shift_right_128(load_128(buf, stop - 16), 128 - rest_bits)
        last = xor_128(shift_right_128(a, rest_bits), shift_left_128(tail, 128 - rest_bits))
        a = fold_128(shift_left_128(a, 128 - rest_bits), fold_16, last)
    # 128 bits to 96, to 64, then Barrett's division leaves the remainder in the upper half of 64.
    wide = xor_128(multiply_64(low_64(a), FOLD_16_BYTES[1]), pair_128(high_64(a), 0))
    wide = xor_128(multiply_64(low_64(wide) & MASK_32, FOLD_TO_64_BITS), shift_right_128(wide, 32))
    quotient = low_64(multiply_64(low_64(wide) & MASK_32, POLYNOMIAL_INVERSE)) & MASK_32
    remainder = low_64(wide) ^ low_64(multiply_64(quotient, POLYNOMIAL_REFLECTED))
    return remainder >> 32 & MASK_32 ^ MASK_32


@inlined
def crc32_clmul(crc: int, buf: Bytes, start: int, stop: int) -> int:
    """`crc32_update` by carry-less multiplication; needs HAS_CLMUL."""
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
    return _reduced(a, buf, i, stop)


@inlined
def crc32_broad(crc: int, buf: Bytes, start: int, stop: int) -> int:
    """`crc32_update` by carry-less multiplication of four parts at once; needs HAS_BROAD_CLMUL."""
    if stop - start < 2 * 64:
        return crc32_clmul(crc, buf, start, stop)
    keys = pair_128(FOLD_64_BYTES[0], FOLD_64_BYTES[1])
    fold_64 = four_512(keys, keys, keys, keys)
    none = pair_128(0, 0)
    a = xor_512(load_512(buf, start), four_512(pair_128(crc ^ MASK_32, 0), none, none, none))
    i = start + 64
    if stop - start >= 2 * 256:
        keys = pair_128(FOLD_256_BYTES[0], FOLD_256_BYTES[1])
        fold_256 = four_512(keys, keys, keys, keys)
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
    # The four parts become one: each is moved to where the last one lies.
    last = fold_128(part_2(a), pair_128(FOLD_16_BYTES[0], FOLD_16_BYTES[1]), part_3(a))
    last = fold_128(part_1(a), pair_128(FOLD_32_BYTES[0], FOLD_32_BYTES[1]), last)
    last = fold_128(part_0(a), pair_128(FOLD_48_BYTES[0], FOLD_48_BYTES[1]), last)
    return _reduced(last, buf, i, stop)


def crc32_zlib(crc: int, buf: Bytes, start: int, stop: int) -> int:
    """`crc32_update` by zlib, for uncompiled runs."""
    return zlib.crc32(buf[start:stop].data, crc)


_compiled = crc32_broad if HAS_BROAD_CLMUL else crc32_clmul if HAS_CLMUL else crc32_table
crc32_update = _compiled if COMPILED else crc32_zlib
"""(crc, buf, start, stop) → the CRC-32 that continues `crc` with buf[start:stop]; 0 begins one. Unsigned, in int64."""


@inlined
def crc32(buf: Bytes, start: int, stop: int) -> int:
    """CRC-32 of buf[start:stop], 0…2³²−1."""
    return crc32_update(0, buf, start, stop)


@kernel
def crc31(buf: Bytes, start: int, stop: int) -> int:
    """RocketMQ's form, the low 31 bits: what a record's bodyCRC holds."""
    return crc32_update(0, buf, start, stop) & MASK_31


def warm() -> None:
    """Compile or load these kernels."""
    buf = np.zeros(1, np.uint8)
    crc32_update(0, buf, 0, 1)
    crc32(buf, 0, 1)
    crc31(buf, 0, 1)
