"""A record's host (layout/record.py) as `address:port` text; IPv6 as RFC 5952 writes it, in brackets."""

from __future__ import annotations

from mqproc.kernels.intrinsics import load_be16, load_be32, load_u8
from mqproc.kernels.jit import kernel
from mqproc.kernels.primitive import Bytes
from mqproc.layout import record

HOST_TEXT_MAX = len("[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:-2147483648")
"""Longest text of a host: the port is an i32."""

_HOST_V6 = record.HOST_V6_SIZE
_GROUPS = 8
_COLON, _DOT, _OPEN, _CLOSE, _MINUS, _ZERO, _SMALL_A = (ord(character) for character in ":.[]-0a")


@kernel
def decimal_text(value: int, out: Bytes, at: int) -> int:
    """Write a number in decimal at out[at]; returns the position behind it. |value| < 10¹⁸."""
    if value < 0:
        out[at] = _MINUS
        at += 1
        value = -value
    scale = 1
    while value // scale >= 10:
        scale *= 10
    while scale > 0:
        out[at] = _ZERO + value // scale % 10
        at += 1
        scale //= 10
    return at


@kernel
def hex_text(value: int, out: Bytes, at: int) -> int:
    """Write a u16 in hexadecimal without leading zeros; returns the position behind it."""
    shift = 12
    while shift > 0 and value >> shift == 0:
        shift -= 4
    while shift >= 0:
        digit = value >> shift & 15
        out[at] = _ZERO + digit if digit < 10 else _SMALL_A - 10 + digit
        at += 1
        shift -= 4
    return at


@kernel
def _group(buf: Bytes, host: int, index: int) -> int:
    return load_be16(buf, host + 2 * index) & 0xFFFF


@kernel
def _zeros_from(buf: Bytes, host: int, first: int) -> int:
    """How many groups from `first` on are 0."""
    count = 0
    while first + count < _GROUPS and _group(buf, host, first + count) == 0:
        count += 1
    return count


@kernel
def _v6_text(buf: Bytes, host: int, out: Bytes, at: int) -> int:
    """The address with its longest run of two or more zero groups left out, the first one of equals."""
    gap = -1
    gap_size = 1
    for first in range(_GROUPS):
        zeros = _zeros_from(buf, host, first)
        if zeros > gap_size:
            gap = first
            gap_size = zeros
    index = 0
    while index < _GROUPS:
        if index == gap:
            out[at] = _COLON
            at += 1
            index += gap_size
            if index == _GROUPS:
                out[at] = _COLON
                at += 1
            continue
        if index > 0:
            out[at] = _COLON
            at += 1
        at = hex_text(_group(buf, host, index), out, at)
        index += 1
    return at


@kernel
def host_text(buf: Bytes, host: int, size: int, out: Bytes, at: int) -> int:
    """Write the host buf[host:host + size] at out[at]; returns the position behind it.

    `size` is 8 or 20; `out` has HOST_TEXT_MAX bytes of room.
    """
    if size == _HOST_V6:
        out[at] = _OPEN
        at = _v6_text(buf, host, out, at + 1)
        out[at] = _CLOSE
        at += 1
    else:
        for part in range(4):
            if part > 0:
                out[at] = _DOT
                at += 1
            at = decimal_text(load_u8(buf, host + part), out, at)
    out[at] = _COLON
    return decimal_text(load_be32(buf, host + size - 4), out, at + 1)
