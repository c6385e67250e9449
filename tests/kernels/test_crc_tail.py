"""The ten digits of RocketMQ's CRC property: written and read as by Python, or rejected."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.kernels import crc
from mqproc.kernels.jit.compile import plain
from mqproc.kernels.jit.lowering import Bytes
from tests.support.records import crc_tail

Write = Callable[[Bytes, int, int], None]
Read = Callable[[Bytes, int], int]
WRITERS: list[Write] = [crc.store_digits, plain(crc.store_digits)]
READERS: list[Read] = [crc.load_digits, plain(crc.load_digits)]

# First values for which a quotient by a rounded reciprocal would be off by one.
EDGES = sorted(
    {
        min(max(about + off, 0), 2**31 - 1)
        for power in range(10)
        for times in (1, 3, 7, 9, 10, 11, 21)
        for about in (times * 10**power, 2**31 - 1)
        for off in (-1, 0, 1)
    }
)

TWINS = list(zip(WRITERS, READERS, strict=True))
twins = pytest.mark.parametrize(("write", "read"), TWINS, ids=["compiled", "plain"])


def digits_of(value: int) -> bytes:
    return f"{value:010d}".encode()[::-1]


@twins
def test_numbers_at_every_edge(write: Write, read: Read) -> None:
    for value in EDGES:
        buf = np.full(14, 0xEE, np.uint8)
        write(buf, 1, value)
        assert buf.tobytes() == b"\xee" + digits_of(value) + b"\x02\xee\xee", value
        assert read(buf, 1) == value


@settings(deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_any_number_round_trips(value: int) -> None:
    for write, read in TWINS:
        buf = np.zeros(11, np.uint8)
        write(buf, 0, value)
        assert buf.tobytes() == digits_of(value) + b"\x02"
        assert read(buf, 0) == value


@twins
def test_non_digit_anywhere_is_rejected(write: Write, read: Read) -> None:
    for place in range(10):
        for byte in range(256):
            buf = np.frombuffer(bytearray(digits_of(1_234_567_890)), np.uint8)
            buf[place] = byte
            expected = int(buf[::-1].tobytes()) if ord("0") <= byte <= ord("9") else -1
            assert read(buf, 0) == expected, (place, byte)


def test_ten_digits_may_exceed_31_bits() -> None:
    for read in READERS:
        assert read(np.frombuffer(b"9" * 10, np.uint8), 0) == 9_999_999_999


def test_tail_matches_codec() -> None:
    for write in (crc.write_crc_tail, plain(crc.write_crc_tail)):
        staging = np.zeros(100, np.uint8)
        staging[:50] = np.arange(50)
        write(staging, 3, 50)
        expected = crc_tail(crc.crc32(staging, 3, 50) & 0x7FFFFFFF)
        assert staging[50 : 50 + len(expected)].tobytes() == expected
        assert not staging[50 + len(expected) :].any()
