"""CRC-32 by each method against `zlib.crc32`; its primitives against Python integers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.kernels import crc
from mqproc.kernels.jit import simd128
from mqproc.kernels.jit.compile import COMPILED, kernel, plain
from mqproc.kernels.jit.lowering import Bytes

ROOT = Path(__file__).resolve().parents[2]
CONTENT = np.random.default_rng(7).integers(0, 256, 70_000, np.uint8)
SIZES = [*range(300), 511, 512, 513, 575, 767, 768, 1023, 1024, 1202, 4096, 65_536, 65_551]

RECORD_V1 = bytes.fromhex(
    "0000007bdaa320a73610a686000000030000000700000000000000050000000000000000000000000000018bcfe568007f000001000013880000"
    "018bcfe56801c0a8010200002a9f0000000000000000000000000000000568656c6c6f09546f7069635465737400124b455953016b3102544147"
    "53015461674102"
)

Update = Callable[[int, Bytes, int, int], int]
METHODS: list[Update] = [
    crc.crc32_table,
    *([crc.crc32_clmul] if simd128.HAS_CLMUL or not COMPILED else []),
    *([crc.crc32_vpclmul] if simd128.HAS_VPCLMUL or not COMPILED else []),
]
PLAIN: list[Update] = [plain(crc.crc32_table), plain(crc.crc32_clmul), plain(crc.crc32_vpclmul), crc.crc32_zlib]

each_method = pytest.mark.parametrize("update", METHODS, ids=lambda method: method.__name__)
each_plain = pytest.mark.parametrize("update", PLAIN, ids=lambda method: f"{method.__name__}-plain")


@each_method
def test_all_sizes_and_alignments_agree_with_zlib(update: Update) -> None:
    for size in SIZES:
        for start in (0, 1, 7, 16):
            expected = zlib.crc32(CONTENT[start : start + size].data)
            assert update(0, CONTENT, start, start + size) == expected, (start, size)


@each_plain
def test_the_plain_twins_agree_with_zlib(update: Update, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crc, "reduce_folded", plain(crc.reduce_folded))
    for size in (*range(34), 63, 64, 65, 80, 127, 128, 129, 200, 511, 512, 600, 1039):
        assert update(77, CONTENT, 3, 3 + size) == zlib.crc32(CONTENT[3 : 3 + size].data, 77), size


@each_method
@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.binary(max_size=400))
def test_update_continues_any_crc(update: Update, before: int, content: bytes) -> None:
    assert update(before, np.frombuffer(bytearray(content), np.uint8), 0, len(content)) == zlib.crc32(content, before)


@each_method
@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=6))
def test_update_in_parts_matches_whole(update: Update, cuts: list[int]) -> None:
    value = 0
    bounds = [0, *sorted(cuts), 1000]
    for start, stop in itertools.pairwise(bounds):
        value = update(value, CONTENT, start, stop)
    assert value == zlib.crc32(CONTENT[:1000].data)


def test_short_names_use_chosen_method() -> None:
    expected = zlib.crc32(CONTENT[5:2005].data)
    assert crc.crc32_update(0, CONTENT, 5, 2005) == crc.crc32(CONTENT, 5, 2005) == expected
    assert crc.crc31(CONTENT, 5, 2005) == expected & 0x7FFFFFFF
    assert crc.crc32(CONTENT, 9, 9) == 0 == crc.crc31(CONTENT, 9, 9)


def test_rocketmq_vectors() -> None:
    hello = np.frombuffer(bytearray(b"hello"), np.uint8)
    assert crc.crc31(hello, 0, 5) == 907060870 == 0x3610A686
    record = np.frombuffer(bytearray(RECORD_V1), np.uint8)
    assert crc.crc31(record, 88, 93) == int.from_bytes(RECORD_V1[8:12], "big")


def test_tables_match_polynomial() -> None:
    words = crc.TABLES.view(np.uint32)
    for byte in (0, 1, 0x80, 0xFF):
        for k in range(16):
            message = bytes([byte]) + bytes(k)
            # Remove the initial and final inversion, which the tables do not include.
            linear = zlib.crc32(message) ^ zlib.crc32(bytes(k + 1))
            assert words[256 * k + byte] == linear, (byte, k)


@kernel
def wide_arithmetic(buf: Bytes, i: int, bits: int, a: int, b: int) -> tuple[int, int, int, int, int, int, int, int]:
    value = simd128.load_128(buf, i)
    left = simd128.shift_left_128(value, bits)
    right = simd128.shift_right_128(value, bits)
    mixed = simd128.xor_128(simd128.pair_128(a, b), value)
    return (
        simd128.low_64(value),
        simd128.high_64(value),
        simd128.low_64(left),
        simd128.high_64(left),
        simd128.low_64(right),
        simd128.high_64(right),
        simd128.low_64(mixed),
        simd128.high_64(mixed),
    )


@kernel
def wide_products(buf: Bytes, a: int, b: int) -> tuple[int, int, int, int]:
    product = simd128.multiply_64(a, b)
    folded = simd128.fold_128(simd128.load_128(buf, 0), simd128.pair_128(a, b), simd128.load_128(buf, 16))
    return simd128.low_64(product), simd128.high_64(product), simd128.low_64(folded), simd128.high_64(folded)


@kernel
def broad_parts(buf: Bytes, a: int, b: int) -> tuple[int, int, int, int, int, int, int, int]:
    keys = simd128.pair_128(a, b)
    four = simd128.join_512(keys, simd128.load_128(buf, 0), simd128.load_128(buf, 16), simd128.load_128(buf, 32))
    mixed = simd128.xor_512(four, simd128.load_512(buf, 1))
    first, second, third, last = (
        simd128.part_0(mixed),
        simd128.part_1(mixed),
        simd128.part_2(mixed),
        simd128.part_3(mixed),
    )
    return (
        simd128.low_64(first),
        simd128.high_64(first),
        simd128.low_64(second),
        simd128.high_64(second),
        simd128.low_64(third),
        simd128.high_64(third),
        simd128.low_64(last),
        simd128.high_64(last),
    )


@kernel
def broad_products(buf: Bytes, a: int, b: int) -> tuple[int, int, int, int]:
    keys = simd128.join_512(
        simd128.pair_128(a, b), simd128.load_128(buf, 3), simd128.pair_128(b, a), simd128.load_128(buf, 5)
    )
    folded = simd128.fold_512(simd128.load_512(buf, 0), keys, simd128.load_512(buf, 9))
    one = simd128.xor_128(simd128.part_0(folded), simd128.part_2(folded))
    other = simd128.xor_128(simd128.part_1(folded), simd128.part_3(folded))
    return simd128.low_64(one), simd128.high_64(one), simd128.low_64(other), simd128.high_64(other)


INT64 = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=20, max_size=20), st.integers(0, 4), st.integers(0, 127), INT64, INT64)
def test_wide_values_agree_with_their_twins(content: bytes, i: int, bits: int, a: int, b: int) -> None:
    buf = np.frombuffer(bytearray(content), np.uint8)
    assert wide_arithmetic(buf, i, bits, a, b) == plain(wide_arithmetic)(buf, i, bits, a, b)


@pytest.mark.skipif(COMPILED and not simd128.HAS_CLMUL, reason="the processor has no carry-less multiplication")
@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=32, max_size=32), INT64, INT64)
def test_carry_less_products_agree_with_their_twins(content: bytes, a: int, b: int) -> None:
    buf = np.frombuffer(bytearray(content), np.uint8)
    assert wide_products(buf, a, b) == plain(wide_products)(buf, a, b)


@pytest.mark.skipif(COMPILED and not simd128.HAS_VPCLMUL, reason="the processor does not multiply four at once")
@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=80, max_size=80), INT64, INT64)
def test_broad_values_agree_with_their_twins(content: bytes, a: int, b: int) -> None:
    buf = np.frombuffer(bytearray(content), np.uint8)
    assert broad_parts(buf, a, b) == plain(broad_parts)(buf, a, b)
    assert broad_products(buf, a, b) == plain(broad_products)(buf, a, b)


def test_plain_wide_loads_check_bounds() -> None:
    with pytest.raises(IndexError):
        simd128.load_128(np.zeros(16, np.uint8), 1)
    with pytest.raises(IndexError):
        simd128.load_512(np.zeros(80, np.uint8), 17)


def _run(code: str, **environment: str) -> str:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


CHECK = """
import numpy as np
from mqproc.kernels import crc, hashing
buf = np.frombuffer(bytearray(b"hello T#k1 " * 9), np.uint8)
print(crc.crc32_update.__name__, crc.crc32(buf, 1, 99), crc.crc32_table(0, buf, 1, 99),
      hashing.java_hash_utf8(buf, 6, 10, 0), hasattr(crc.crc32, "py_func"))
"""


def test_without_the_compiler_the_same_code_runs_plain() -> None:
    expected = zlib.crc32((b"hello T#k1 " * 9)[1:99])
    assert _run(CHECK, NUMBA_DISABLE_JIT="1") == f"crc32_zlib {expected} {expected} 2539445 False"


@pytest.mark.skipif(not COMPILED, reason="nothing is compiled")
def test_cpu_without_carry_less_multiplication_uses_tables(tmp_path: Path) -> None:
    expected = zlib.crc32((b"hello T#k1 " * 9)[1:99])
    printed = _run(CHECK, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="", NUMBA_CACHE_DIR=str(tmp_path))
    assert printed == f"crc32_table {expected} {expected} 2539445 True"


@pytest.mark.skipif(not COMPILED or not simd128.HAS_CLMUL, reason="needs carry-less multiplication")
def test_cpu_with_128_bit_multiplication_uses_clmul(tmp_path: Path) -> None:
    expected = zlib.crc32((b"hello T#k1 " * 9)[1:99])
    printed = _run(CHECK, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="+pclmul,+ssse3", NUMBA_CACHE_DIR=str(tmp_path))
    assert printed == f"crc32_clmul {expected} {expected} 2539445 True"
