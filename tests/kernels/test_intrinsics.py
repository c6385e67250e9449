"""Every primitive: the compiled body against its plain twin and against `int.from_bytes`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numba.core.errors import TypingError

from mqproc.kernels.jit import intrinsics
from mqproc.kernels.jit.compile import COMPILED, kernel, plain
from mqproc.kernels.jit.lowering import Bytes, Words

LOADS = {
    "u8": (1, "little", False),
    "be16": (2, "big", True),
    "be32": (4, "big", True),
    "be64": (8, "big", True),
    "le16": (2, "little", False),
    "le32": (4, "little", False),
    "le64": (8, "little", True),
    "u64": (8, "little", False),
}
STORES = {name: size for name, (size, _, _) in LOADS.items() if name not in ("u8", "u64")}
SIZES_COPIED = [*range(140), 255, 256, 257, 300, 1000]
INT64 = st.integers(-(2**63), 2**63 - 1)

needs_compiler = pytest.mark.skipif(not COMPILED, reason="nothing is compiled")


@kernel
def load_all(buf: Bytes, i: int) -> tuple[int, int, int, int, int, int, int, np.uint64]:
    return (
        intrinsics.load_u8(buf, i),
        intrinsics.load_be16(buf, i),
        intrinsics.load_be32(buf, i),
        intrinsics.load_be64(buf, i),
        intrinsics.load_le16(buf, i),
        intrinsics.load_le32(buf, i),
        intrinsics.load_le64(buf, i),
        intrinsics.load_u64(buf, i),
    )


@kernel
def store_all(be16: Bytes, be32: Bytes, be64: Bytes, le16: Bytes, le32: Bytes, le64: Bytes, i: int, v: int) -> None:
    intrinsics.store_be16(be16, i, v)
    intrinsics.store_be32(be32, i, v)
    intrinsics.store_be64(be64, i, v)
    intrinsics.store_le16(le16, i, v)
    intrinsics.store_le32(le32, i, v)
    intrinsics.store_le64(le64, i, v)


@kernel
def reverse_words(dst: Bytes, src: Bytes, count: int) -> None:
    for k in range(count):
        intrinsics.store_u64(dst, 8 * (count - 1 - k), intrinsics.load_u64(src, 8 * k))


@kernel
def copy(dst: Bytes, di: int, src: Bytes, si: int, n: int) -> None:
    intrinsics.copy_bytes(dst, di, src, si, n)


@kernel
def publish(words: Words, i: int, v: int) -> int:
    intrinsics.store_release(words, i, v)
    intrinsics.fence()
    return intrinsics.load_acquire(words, i)


@kernel
def publish_be32(buf: Bytes, i: int, v: int) -> int:
    intrinsics.store_release_be32(buf, i, v)
    return intrinsics.load_acquire_be32(buf, i)


@kernel
def publish_many(cells: Words, count: int) -> None:
    for v in range(1, count + 1):
        cells[8] = v
        intrinsics.store_release(cells, 0, v)


@kernel
def watch(cells: Words, count: int) -> int:
    """Wait for the last position; returns how often a cell was older than the prior position."""
    behind = 0
    position = 0
    while position < count:
        position = intrinsics.load_acquire(cells, 0)
        if cells[8] < position:
            behind += 1
    return behind


@settings(deadline=None)
@given(st.binary(min_size=8, max_size=24), st.data())
def test_load_at_any_alignment_matches_bytes(content: bytes, data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(content) - 8))
    buf = np.frombuffer(bytearray(content), np.uint8)
    compiled = load_all(buf, i)
    for value, (name, (size, order, signed)) in zip(compiled, LOADS.items(), strict=True):
        expected = int.from_bytes(content[i : i + size], order, signed=signed)  # type: ignore[arg-type]
        assert value == expected, name
        assert getattr(intrinsics, f"load_{name}")(buf, i) == expected, name


@settings(deadline=None)
@given(INT64, st.integers(0, 12))
def test_store_writes_only_its_bytes(value: int, i: int) -> None:
    compiled = np.full((6, 20), 0xA5, np.uint8)
    store_all(compiled[0], compiled[1], compiled[2], compiled[3], compiled[4], compiled[5], i, value)
    for (name, size), stored in zip(STORES.items(), compiled, strict=True):
        order: Any = "big" if name.startswith("be") else "little"
        content = (value & ((1 << 8 * size) - 1)).to_bytes(size, order)
        expected = b"\xa5" * i + content + b"\xa5" * (20 - size - i)
        twin = np.full(20, 0xA5, np.uint8)
        getattr(intrinsics, f"store_{name}")(twin, i, value)
        assert stored.tobytes() == expected == twin.tobytes(), name


def test_unsigned_words_pass_whole() -> None:
    words = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    reversed_words = np.zeros(4, np.uint64)
    reverse_words(reversed_words.view(np.uint8), words.view(np.uint8), 4)
    assert reversed_words.tolist() == words.tolist()[::-1]
    intrinsics.store_u64(reversed_words.view(np.uint8), 0, np.uint64(2**63 + 1))
    assert reversed_words[0] == 2**63 + 1


@pytest.mark.parametrize("copy_bytes", [copy, intrinsics.copy_bytes], ids=["compiled", "plain"])
def test_copy_of_any_size_stays_in_range(copy_bytes: Callable[..., None]) -> None:
    source = np.random.default_rng(5).integers(0, 256, 1100, np.uint8)
    for size in SIZES_COPIED:
        for di, si in ((0, 0), (1, 3), (7, 8), (40, 33)):
            target = np.full(1100, 0xA5, np.uint8)
            copy_bytes(target, di, source, si, size)
            assert target[di : di + size].tobytes() == source[si : si + size].tobytes(), size
            assert (target[:di] == 0xA5).all(), size
            assert (target[di + size :] == 0xA5).all(), size


@settings(deadline=None)
@given(INT64, st.integers(0, 7))
def test_published_word_reads_back(value: int, i: int) -> None:
    words = np.zeros(8, np.int64)
    assert publish(words, i, value) == value
    assert words[i] == value == intrinsics.load_acquire(words, i)
    intrinsics.store_release(words, i, 0)
    assert not words.any()


@settings(deadline=None)
@given(st.integers(-(2**31), 2**31 - 1), st.integers(0, 3))
def test_published_big_endian_word_reads_back(value: int, slot: int) -> None:
    compiled, twin = np.zeros((2, 16), np.uint8)
    assert publish_be32(compiled, 4 * slot, value) == value
    intrinsics.store_release_be32(twin, 4 * slot, value)
    assert compiled.tobytes() == twin.tobytes()
    assert intrinsics.load_acquire_be32(twin, 4 * slot) == value
    assert twin[4 * slot : 4 * slot + 4].tobytes() == value.to_bytes(4, "big", signed=True)


@needs_compiler
def test_reader_sees_positions_of_concurrent_writer() -> None:
    """The load stays in the reader's loop; data stored before a position is visible with it."""
    count = 200_000
    cells = np.zeros(16, np.int64)
    publish_many(np.zeros(16, np.int64), 1)
    watch(np.ones(16, np.int64), 1)
    behind: list[int] = []
    reader = threading.Thread(target=lambda: behind.append(watch(cells, count)))
    reader.start()
    publish_many(cells, count)
    reader.join(timeout=30)
    assert behind == [0]


@needs_compiler
def test_memory_order_reaches_the_compiler() -> None:
    def ordered(words: Words, buf: Bytes) -> int:
        intrinsics.store_release(words, 0, 1)
        intrinsics.store_release_be32(buf, 0, 1)
        intrinsics.fence()
        return intrinsics.load_acquire(words, 1) + intrinsics.load_acquire_be32(buf, 4)

    compiled: Any = njit(ordered)
    compiled(np.zeros(2, np.int64), np.zeros(8, np.uint8))
    (code,) = compiled.inspect_llvm().values()
    for instruction in ("store atomic i64", "store atomic i32", "load atomic i64", "load atomic i32", "fence seq_cst"):
        assert instruction in code, instruction
    assert code.count(" release, align") >= 2
    assert code.count(" acquire, align") >= 2


@kernel
def count_zeros(v: int) -> tuple[int, int]:
    return intrinsics.leading_zeros(v), intrinsics.trailing_zeros(v)


@given(st.integers(1, 2**63 - 1))
def test_zero_bits_above_and_below(v: int) -> None:
    bits = f"{v:064b}"
    wanted = len(bits) - len(bits.lstrip("0")), len(bits) - len(bits.rstrip("0"))
    assert count_zeros(v) == (intrinsics.leading_zeros(v), intrinsics.trailing_zeros(v)) == wanted


def test_zero_bits_below_the_sign() -> None:
    assert count_zeros(-(2**63))[1] == intrinsics.trailing_zeros(-(2**63)) == 63


@needs_compiler
def test_read_only_arrays_allow_loads_and_no_stores() -> None:
    read_only = np.frombuffer(bytes(range(8)), np.uint8)
    assert load_all(read_only, 0)[0] == 0
    with pytest.raises(TypingError):
        publish_be32(read_only, 0, 1)


@needs_compiler
@pytest.mark.parametrize("index", [1.0, None], ids=["float", "none"])
def test_index_of_other_type_does_not_compile(index: Any) -> None:
    load: Any = njit(lambda buf, i: intrinsics.load_be32(buf, i))
    with pytest.raises(TypingError):
        load(np.zeros(8, np.uint8), index)


@pytest.mark.parametrize("i", [-1, 5, 8])
def test_the_plain_twins_check_bounds(i: int) -> None:
    buf = np.zeros(8, np.uint8)
    with pytest.raises(IndexError):
        intrinsics.load_be32(buf, i)
    with pytest.raises(IndexError):
        intrinsics.store_be32(buf, i, 1)
    with pytest.raises(IndexError):
        intrinsics.store_release_be32(buf, i, 1)
    with pytest.raises(IndexError):
        intrinsics.copy_bytes(buf, i, np.zeros(8, np.uint8), 0, 4)
    assert not buf.any()


def test_observer_sees_plain_stores_and_may_raise() -> None:
    buf, words = np.zeros(16, np.uint8), np.zeros(2, np.int64)
    seen: list[tuple[Any, int, int]] = []
    with intrinsics.observe_stores(lambda array, position, size: seen.append((array, position, size))):
        intrinsics.store_be32(buf, 3, 7)
        intrinsics.copy_bytes(buf, 8, buf, 0, 5)
        intrinsics.store_release(words, 1, 9)
        intrinsics.store_release_be32(buf, 4, 1)
    intrinsics.store_be64(buf, 0, 1)
    assert [(position, size) for _, position, size in seen] == [(3, 4), (8, 5), (8, 8), (4, 4)]
    assert [array is words for array, _, _ in seen] == [False, False, True, False]

    def crash(*_: object) -> None:
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"), intrinsics.observe_stores(crash):
        intrinsics.store_be32(buf, 8, -1)
    intrinsics.store_be32(buf, 12, -1)
    assert buf[8:].tobytes() == b"\xff" * 8, "the store before the crash stays, later ones are not observed"


def test_shared_words_have_native_byte_order() -> None:
    words = np.zeros(1, np.int64)
    intrinsics.store_release(words, 0, 1)
    assert words.tobytes() == (1).to_bytes(8, sys.byteorder)


@kernel
def add_to(state: Words, i: int, v: int) -> None:
    intrinsics.add_at(int(state[0]), i, v)


@settings(deadline=None)
@given(st.lists(INT64, min_size=8, max_size=8), st.integers(0, 7), st.integers(-(2**31), 2**31))
def test_add_at_address_changes_only_its_word(before: list[int], i: int, v: int) -> None:
    for add in (add_to, plain(add_to)):
        words = np.array(before, np.int64)
        add(np.array([words.ctypes.data], np.int64), i, v)
        expected = np.array(before, np.int64)
        with np.errstate(over="ignore"):
            expected[i] += np.int64(v)
        assert words.tolist() == expected.tolist()
