"""The options of an append frame (wire/operations.py: AppendRequest) read in place.

They are a MessagePack array. Some of its items differ from frame to frame of one producer: sizes, ids, times. The rest
is the frame's shape, and stays the same byte for byte: it is its key, under which what was made of it once is found.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.intrinsics import copy_bytes, load_be16, load_be32, load_be64, load_u8
from mqproc.kernels.jit import inlined, kernel
from mqproc.kernels.primitive import Bytes, Words

ITEMS = 31
"""Fields of AppendRequest. Its order is the wire's; a test holds these places against it."""
(COUNT_ITEM, BODIES_ITEM, KEYS_ITEM, TAGS_ITEM, PROPERTIES_ITEM) = (1, 3, 4, 5, 6)
PREFIX_ITEM, COUNTER_ITEM, BORN_ITEM, SHARDING_ITEM = 11, 12, 13, 30
VARYING_ITEMS = (
    *(COUNT_ITEM, BODIES_ITEM, KEYS_ITEM, TAGS_ITEM, PROPERTIES_ITEM),
    *(PREFIX_ITEM, COUNTER_ITEM, BORN_ITEM, SHARDING_ITEM),
)
"""Items that are no part of a shape; of some of them whether they are there is."""
PREFIX_DIGITS = 28
COUNTERS = 1 << 16
"""Counters of unique ids under one prefix: a frame's first one is below."""
KEY_BYTES_MAX = 2048
"""A key takes no more; options with a longer one are not read here."""

_VARYING = sum(1 << item for item in VARYING_ITEMS)
_ARRAY_HEAD = 3
_ARRAY16 = 0xDC
_FALSE, _TRUE = 0xC2, 0xC3
_UINT8, _INT8 = 0xCC, 0xD0
_TEXT8, _TEXT16 = 0xD9, 0xDA
_BYTES8, _BYTES16 = 0xC4, 0xC5
NOT_READ = -1


@inlined
def _number(buffer: Bytes, at: int, width: int, signed: int) -> int:
    """A big-endian number of 1, 2, 4 or 8 bytes."""
    if width == 1:
        value = load_u8(buffer, at)
        return value - ((value & 0x80) << 1) if signed else value
    if width == 2:
        value = load_be16(buffer, at) & 0xFFFF
        return value - ((value & 0x8000) << 1) if signed else value
    if width == 4:
        value = load_be32(buffer, at) & 0xFFFF_FFFF
        return value - ((value & 0x8000_0000) << 1) if signed else value
    return load_be64(buffer, at)


@inlined
def _are_hex_digits(buffer: Bytes, at: int) -> bool:
    """Whether a prefix of unique ids stands here: upper-case hex digits."""
    wrong = 0
    for place in range(PREFIX_DIGITS):
        digit = load_u8(buffer, at + place)
        wrong |= int(not (48 <= digit <= 57 or 65 <= digit <= 70))
    return wrong == 0


@kernel
def read_options(buffer: Bytes, at: int, end: int, found: Words, found_at: int, key: Bytes) -> int:
    """Read the options in [at, end) of `buffer`; returns the size of their key in `key` uint8[KEY_BYTES_MAX].

    `found[found_at + item]` becomes the number of each item that differs, or where in the buffer a prefix of unique ids
    begins, −1 without one. NOT_READ for what is no such array, item by item as the wire has it, and for a key too long:
    whoever decodes it in full says what is wrong, or that nothing is.
    """
    if end - at < _ARRAY_HEAD or load_u8(buffer, at) != _ARRAY16 or load_be16(buffer, at + 1) != ITEMS:
        return NOT_READ
    at += _ARRAY_HEAD
    size = 0
    for item in range(ITEMS):
        if at >= end:
            return NOT_READ
        first = load_u8(buffer, at)
        varies = (_VARYING >> item) & 1 != 0
        head, width, value = 1, 0, first
        is_number = first < 0x80 or first >= 0xE0
        if first >= 0xE0:
            value = first - 0x100
        elif _UINT8 <= first < _UINT8 + 4 or _INT8 <= first < _INT8 + 4:
            signed = int(first >= _INT8)
            width = 1 << (first - (_INT8 if signed else _UINT8))
            if at + 1 + width > end:
                return NOT_READ
            value = _number(buffer, at + 1, width, signed)
            if signed == 0 and value < 0:
                return NOT_READ
            is_number = True
        elif 0xA0 <= first < 0xC0:
            width = first & 0x1F
        elif first in (_TEXT8, _BYTES8):
            head = 2
            if at + head > end:
                return NOT_READ
            width = load_u8(buffer, at + 1)
        elif first in (_TEXT16, _BYTES16):
            head = 3
            if at + head > end:
                return NOT_READ
            width = load_be16(buffer, at + 1) & 0xFFFF
        elif not is_number and first != _FALSE and first != _TRUE:
            return NOT_READ
        stop = at + head + width
        if stop > end:
            return NOT_READ
        if not varies:
            if size + head + width >= KEY_BYTES_MAX:
                return NOT_READ
            copy_bytes(key, size, buffer, at, head + width)
            size += head + width
        elif item == PREFIX_ITEM:
            found[found_at + item] = -1
            if is_number or first < 0xA0 or first >= 0xC0 or (width != 0 and width != PREFIX_DIGITS):
                return NOT_READ
            if width != 0:
                if not _are_hex_digits(buffer, at + head):
                    return NOT_READ
                found[found_at + item] = at + head
        elif is_number:
            found[found_at + item] = value
        else:
            return NOT_READ
        at = stop
    if at != end:
        return NOT_READ
    key[size] = (
        int(found[found_at + PREFIX_ITEM] >= 0)
        | int(found[found_at + KEYS_ITEM] >= 0) << 1
        | int(found[found_at + TAGS_ITEM] >= 0) << 2
        | int(found[found_at + PROPERTIES_ITEM] >= 0) << 3
        | int(found[found_at + SHARDING_ITEM] >= 0) << 4
    )
    return size + 1


def warm() -> None:
    """Compile or load this kernel."""
    read_options(np.zeros(1, np.uint8), 0, 0, np.zeros(ITEMS, np.int64), 0, np.zeros(KEY_BYTES_MAX, np.uint8))
