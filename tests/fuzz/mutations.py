"""Damage to bytes, decided by a seeded random number generator."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from random import Random

PIECE_MAX = 512
NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    -0x80000000,
    0x7FFFFFFFFFFFFFFF,
    -0x8000000000000000,
    1 << 20,
    1 << 30,
    1 << 40,
)
FORMATS = ("b", "<h", ">h", "<i", ">i", "<q", ">q")


def damage(random: Random, data: bytes, others: Sequence[bytes] = (b"",), most: int = 4) -> bytes:
    """`data` with 1 to `most` damages, of pieces of `others` among them."""
    for _ in range(random.randint(1, most)):
        data = random.choice(_DAMAGES)(random, data, random.choice(others))
    return data


def _place(random: Random, data: bytes) -> tuple[int, int]:
    """A piece: where it begins and ends. Beginnings and ends of the whole are more likely than other places."""
    size = random.randint(0, min(len(data), PIECE_MAX))
    start = random.choice((0, len(data) - size, random.randint(0, len(data) - size)))
    return start, start + size


def _flip(random: Random, data: bytes, _other: bytes) -> bytes:
    if not data:
        return data
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def _number(random: Random, data: bytes, _other: bytes) -> bytes:
    form = random.choice(FORMATS)
    size = struct.calcsize(form)
    if len(data) < size:
        return data
    at = random.randrange(len(data) - size + 1)
    bits = 8 * size - 1
    value = random.choice(NUMBERS)
    value = ((value + (1 << bits)) % (1 << bits + 1)) - (1 << bits)
    return data[:at] + struct.pack(form, value) + data[at + size :]


def _nudge(random: Random, data: bytes, _other: bytes) -> bytes:
    """A number that is a little more or less than it was."""
    form = random.choice(FORMATS)
    size = struct.calcsize(form)
    if len(data) < size:
        return data
    at = random.randrange(len(data) - size + 1)
    bits = 8 * size - 1
    value = struct.unpack_from(form, data, at)[0] + random.choice((-8, -4, -1, 1, 4, 8, 20))
    value = ((value + (1 << bits)) % (1 << bits + 1)) - (1 << bits)
    return data[:at] + struct.pack(form, value) + data[at + size :]


def _cut(random: Random, data: bytes, _other: bytes) -> bytes:
    start, end = _place(random, data)
    return data[:start] + data[end:]


def _truncate(random: Random, data: bytes, _other: bytes) -> bytes:
    return data[: random.randint(0, len(data))]


def _repeat(random: Random, data: bytes, _other: bytes) -> bytes:
    start, end = _place(random, data)
    return data[:end] + data[start:end] + data[end:]


def _fill(random: Random, data: bytes, _other: bytes) -> bytes:
    start, end = _place(random, data)
    return data[:start] + bytes([random.choice((0, 0, 0xFF, 0x41))]) * (end - start) + data[end:]


def _scramble(random: Random, data: bytes, _other: bytes) -> bytes:
    start, end = _place(random, data)
    return data[:start] + random.randbytes(end - start) + data[end:]


def _move(random: Random, data: bytes, _other: bytes) -> bytes:
    """A piece over another one of the same size."""
    start, end = _place(random, data)
    to = random.randint(0, len(data) - (end - start))
    return data[:to] + data[start:end] + data[to + end - start :]


def _cross(random: Random, data: bytes, other: bytes) -> bytes:
    return data[: random.randint(0, len(data))] + other[random.randint(0, len(other)) :]


_DAMAGES: tuple[Callable[[Random, bytes, bytes], bytes], ...] = (
    _flip,
    _flip,
    _number,
    _number,
    _nudge,
    _nudge,
    _cut,
    _truncate,
    _repeat,
    _fill,
    _scramble,
    _move,
    _cross,
)
