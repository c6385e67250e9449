"""Java's `String.hashCode` over UTF-8 in a buffer.

H = 31 h + u for each UTF-16 code unit, as an i32. ASCII is processed eight bytes a step: the bytes of a word are
combined pairwise in lanes of 16, 32 and 64 bits, and one multiplication by 31⁸ applies the previous hash.
`mqproc.layout.properties.java_hash` does the same for Python strings.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.crc import MASK_32
from mqproc.kernels.jit.compile import inlined, kernel
from mqproc.kernels.jit.intrinsics import load_le64, load_u8
from mqproc.kernels.jit.lowering import Bytes
from mqproc.layout import index_file, properties

SIGN_32 = 0x80000000
REPLACEMENT = 0xFFFD

# Signed: an unsigned constant would turn the arithmetic of a kernel into uint64, and its sums into floats.
NON_ASCII = -0x7F7F_7F7F_7F7F_7F80  # 0x8080808080808080
EVEN_BYTES = 0x00FF_00FF_00FF_00FF
EVEN_PAIRS = 0x0000_FFFF_0000_FFFF

POWERS_OF_31 = np.array([31**n & MASK_32 for n in range(9)], np.int64)
POWER_8 = int(POWERS_OF_31[8])


@inlined
def hash_of_8(word: int) -> int:
    """Σ byte k × 31^(7−k) < 2⁴² of eight ASCII bytes, byte 0 lowest; zeros add nothing."""
    pairs = (word & EVEN_BYTES) * 31 + (word >> 8 & EVEN_BYTES)
    quads = (pairs & EVEN_PAIRS) * 961 + (pairs >> 16 & EVEN_PAIRS)
    return (quads & MASK_32) * 923_521 + (quads >> 32)


@kernel
def java_hash_decoding(buf: Bytes, start: int, stop: int, seed: int) -> int:
    """`java_hash_utf8` one code point at a time.

    Malformed bytes count as U+FFFD as often as in Java's decoder: once for each longest valid prefix of a sequence, and
    once for an encoded surrogate.
    """
    h = seed & MASK_32
    i = start
    while i < stop:
        lead = load_u8(buf, i)
        i += 1
        code = REPLACEMENT
        missing = 0
        low = 0x80
        high = 0xBF
        if lead < 0x80:
            code = lead
        elif 0xC2 <= lead < 0xE0:
            missing = 1
            code = lead & 0x1F
        elif 0xE0 <= lead < 0xF0:
            missing = 2
            code = lead & 0x0F
            if lead == 0xE0:
                low = 0xA0
        elif 0xF0 <= lead <= 0xF4:
            missing = 3
            code = lead & 0x07
            if lead == 0xF0:
                low = 0x90
            elif lead == 0xF4:
                high = 0x8F
        while missing > 0:
            following = load_u8(buf, i) if i < stop else 0
            if following < low or following > high:
                code = REPLACEMENT
                break
            code = code << 6 | following & 0x3F
            i += 1
            missing -= 1
            low = 0x80
            high = 0xBF
        if 0xD800 <= code < 0xE000:
            code = REPLACEMENT
        if code > 0xFFFF:
            h = (31 * h + (0xD800 + (code - 0x10000 >> 10))) & MASK_32
            code = 0xDC00 + (code & 0x3FF)
        h = (31 * h + code) & MASK_32
    return (h ^ SIGN_32) - SIGN_32


@inlined
def java_hash_utf8(buf: Bytes, start: int, stop: int, seed: int) -> int:
    """`String.hashCode`, an i32, of the UTF-8 in buf[start:stop], continuing `seed` (0 = start)."""
    h = seed & MASK_32
    i = start
    while i + 8 <= stop:
        word = load_le64(buf, i)
        if word & NON_ASCII != 0:
            return java_hash_decoding(buf, i, stop, h)
        h = (h * POWER_8 + hash_of_8(word)) & MASK_32
        i += 8
    rest = stop - i
    if rest > 0 and stop - start >= 8:
        # Load the last eight bytes and clear those already hashed, which then add nothing.
        word = load_le64(buf, stop - 8) & -1 << 64 - 8 * rest
        if word & NON_ASCII != 0:
            return java_hash_decoding(buf, i, stop, h)
        h = (h * int(POWERS_OF_31[rest]) + hash_of_8(word)) & MASK_32
        i = stop
    while i < stop:
        byte = load_u8(buf, i)
        if byte >= 0x80:
            return java_hash_decoding(buf, i, stop, h)
        h = (31 * h + byte) & MASK_32
        i += 1
    return (h ^ SIGN_32) - SIGN_32


_TAG_KEY_HASH = properties.java_hash(index_file.tag_key(""))
_TAG_KEY_POWER = int(POWERS_OF_31[len(index_file.tag_key(""))])


@inlined
def tag_seed(prefix_hash: int) -> int:
    """Hash of `topic#T#` from that of `topic#`, as a seed of `java_hash_utf8`."""
    return (prefix_hash & MASK_32) * _TAG_KEY_POWER + _TAG_KEY_HASH


index_key_hash = inlined(index_file.index_key_hash)
"""`mqproc.layout.index_file.index_key_hash`, compiled."""
queue_of_hash = inlined(properties.queue_of_hash)
"""`mqproc.layout.properties.queue_of_hash`, compiled."""


def warm() -> None:
    """Compile or load these kernels."""
    hashed = java_hash_utf8(np.zeros(1, np.uint8), 0, 1, 0)
    index_key_hash(hashed)
    queue_of_hash(hashed, 1)
