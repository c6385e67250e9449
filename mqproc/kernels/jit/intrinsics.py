"""Primitives of kernels: loads, stores, copies, memory order, prefetching.

Any alignment, no bounds checks. Each primitive is a plain function with a compiled body (`lowering`). The plain one
checks bounds and reports every store to an observer, with which crash tests count and record stores. All values are
int64, or Python ints where nothing is compiled; only the `u64` pair handles unsigned words, for kernels that compare
them as such.

Primitives know no layout: `mqproc.layout` defines the offsets.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numpy.typing import NDArray

from mqproc.kernels.jit.compile import kernel
from mqproc.kernels.jit.lowering import Bytes, Words, lowering

# mypy: allow-untyped-calls

I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
I8X16 = ir.VectorType(I8, 16)
I8X32 = ir.VectorType(I8, 32)

MEMCPY_SIZE = 256
"""From this size on the C library's memcpy is as fast as the inline loop (measured on Zen 4)."""

StoreObserver = Callable[[NDArray[Any], int, int], None]
"""Called after a store with array, byte position and size in bytes. May raise, to simulate a crash there."""

_observer: StoreObserver | None = None
_fence_lock = threading.Lock()


@contextlib.contextmanager
def observe_stores(observer: StoreObserver) -> Iterator[None]:
    """Report every store of uncompiled kernels to `observer` while the context is open."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


def _observed(array: NDArray[Any], position: int, size: int) -> None:
    if _observer is not None:
        _observer(array, position, size)


def _check(buf: Bytes, i: int, size: int) -> None:
    if i < 0 or i + size > buf.size:
        raise IndexError(f"{size} bytes at {i} of a buffer of {buf.size}")


def _load(buf: Bytes, i: int, size: int, order: Any, signed: bool) -> int:
    _check(buf, i, size)
    return int.from_bytes(buf[i : i + size].tobytes(), order, signed=signed)


def _store(buf: Bytes, i: int, v: int, size: int, order: Any) -> None:
    _check(buf, i, size)
    masked = int(v) & ((1 << 8 * size) - 1)
    buf[i : i + size] = np.frombuffer(masked.to_bytes(size, order), np.uint8)
    _observed(buf, i, size)


# Plain versions.


def load_u8(buf: Bytes, i: int) -> int:
    """The byte at `i`, 0…255; `buf[i]` is a uint8, which wraps and makes sums floats."""
    _check(buf, i, 1)
    return int(buf[i])


def load_be16(buf: Bytes, i: int) -> int:
    """Big-endian i16 at byte `i`."""
    return _load(buf, i, 2, "big", True)


def load_be32(buf: Bytes, i: int) -> int:
    """Big-endian i32 at byte `i`."""
    return _load(buf, i, 4, "big", True)


def load_be64(buf: Bytes, i: int) -> int:
    """Big-endian i64 at byte `i`."""
    return _load(buf, i, 8, "big", True)


def load_le16(buf: Bytes, i: int) -> int:
    """Little-endian u16 at byte `i`, 0…2¹⁶−1."""
    return _load(buf, i, 2, "little", False)


def load_le32(buf: Bytes, i: int) -> int:
    """Little-endian u32 at byte `i`, 0…2³²−1."""
    return _load(buf, i, 4, "little", False)


def load_le64(buf: Bytes, i: int) -> int:
    """Little-endian i64 at byte `i`."""
    return _load(buf, i, 8, "little", True)


def load_u64(buf: Bytes, i: int) -> np.uint64:
    """Little-endian u64 at byte `i`. Combine it with np.uint64 only: ints make it a float."""
    return np.uint64(_load(buf, i, 8, "little", False))


def store_be16(buf: Bytes, i: int, v: int) -> None:
    """Store the low 16 bits of `v`, big-endian."""
    _store(buf, i, v, 2, "big")


def store_be32(buf: Bytes, i: int, v: int) -> None:
    """Store the low 32 bits of `v`, big-endian."""
    _store(buf, i, v, 4, "big")


def store_be64(buf: Bytes, i: int, v: int) -> None:
    """Store `v`, big-endian."""
    _store(buf, i, v, 8, "big")


def store_le16(buf: Bytes, i: int, v: int) -> None:
    """Store the low 16 bits of `v`, little-endian."""
    _store(buf, i, v, 2, "little")


def store_le32(buf: Bytes, i: int, v: int) -> None:
    """Store the low 32 bits of `v`, little-endian."""
    _store(buf, i, v, 4, "little")


def store_le64(buf: Bytes, i: int, v: int) -> None:
    """Store `v`, little-endian."""
    _store(buf, i, v, 8, "little")


def store_u64(buf: Bytes, i: int, v: np.uint64) -> None:
    """Store an unsigned word, little-endian."""
    _store(buf, i, int(v), 8, "little")


def copy_bytes(dst: Bytes, di: int, src: Bytes, si: int, n: int) -> None:
    """Copy `n` bytes from `src[si:]` to `dst[di:]`, which do not overlap."""
    _check(dst, di, n)
    _check(src, si, n)
    dst[di : di + n] = src[si : si + n]
    _observed(dst, di, n)


def trailing_zeros(v: int) -> int:
    """Number of zero bits below the lowest one bit of a word that is not 0."""
    return (v & -v).bit_length() - 1


def leading_zeros(v: int) -> int:
    """Number of zero bits above the highest one bit of a word above 0."""
    return 64 - v.bit_length()


def load_acquire(words: Words, i: int) -> int:
    """Load word `i`; later accesses are not reordered before it."""
    return int(words[i])


def store_release(words: Words, i: int, v: int) -> None:
    """Store word `i` atomically after all earlier accesses: this publishes a position."""
    words[i] = v
    _observed(words, 8 * i, 8)


def load_acquire_be32(buf: Bytes, i: int) -> int:
    """Load a big-endian i32, 4-byte aligned; later accesses are not reordered before it."""
    return load_be32(buf, i)


def store_release_be32(buf: Bytes, i: int, v: int) -> None:
    """Store a big-endian i32 atomically, 4-byte aligned, after all earlier accesses."""
    _check(buf, i, 4)
    swapped = int.from_bytes((int(v) & 0xFFFFFFFF).to_bytes(4, "big"), "little", signed=True)
    buf[i : i + 4].view(np.int32)[0] = swapped
    _observed(buf, i, 4)


def add_at(address: int, i: int, v: int) -> None:
    """Add to word `i` of the words at an address, which the caller keeps alive and in bounds.

    Passing an array from Python costs some 100 ns; an address can be part of an array that is passed anyway.
    """
    ctypes.c_int64.from_address(address + 8 * int(i)).value += int(v)


def prefetch(buf: Bytes, i: int) -> None:
    """Prefetch the cache line of byte `i` for reading."""


def prefetch_for_writing(buf: Bytes, i: int) -> None:
    """Prefetch the cache line of byte `i` for writing."""


def fence() -> None:
    """Full fence: all earlier loads and stores precede all later ones, as seen from every core."""
    # In plain Python the locked instruction of a mutex is the full fence (x86-64).
    with _fence_lock:
        pass


# Compiled bodies.


def _pointer(builder: Any, base: Any, i: Any, to: Any) -> Any:
    return builder.bitcast(builder.gep(base, [i]), to.as_pointer())


def _lower_load(plain: Callable[..., Any], bits: int, *, swap: bool, signed: bool) -> None:
    @lowering(plain)
    def emit(builder: Any, buf: Any, i: Any) -> Any:
        value = builder.load(_pointer(builder, buf, i, ir.IntType(bits)), align=1)
        if swap:
            value = builder.bswap(value)
        if bits == 64:
            return value
        return builder.sext(value, I64) if signed else builder.zext(value, I64)


def _lower_store(plain: Callable[..., Any], bits: int, *, swap: bool) -> None:
    @lowering(plain, stores=True)
    def emit(builder: Any, buf: Any, i: Any, v: Any) -> None:
        value = v if bits == 64 else builder.trunc(v, ir.IntType(bits))
        if swap:
            value = builder.bswap(value)
        builder.store(value, _pointer(builder, buf, i, ir.IntType(bits)), align=1)


_lower_load(load_u8, 8, swap=False, signed=False)
_lower_load(load_be16, 16, swap=True, signed=True)
_lower_load(load_be32, 32, swap=True, signed=True)
_lower_load(load_be64, 64, swap=True, signed=True)
_lower_load(load_le16, 16, swap=False, signed=False)
_lower_load(load_le32, 32, swap=False, signed=False)
_lower_load(load_le64, 64, swap=False, signed=True)
_lower_load(load_u64, 64, swap=False, signed=False)
_lower_store(store_be16, 16, swap=True)
_lower_store(store_be32, 32, swap=True)
_lower_store(store_be64, 64, swap=True)
_lower_store(store_le16, 16, swap=False)
_lower_store(store_le32, 32, swap=False)
_lower_store(store_le64, 64, swap=False)
_lower_store(store_u64, 64, swap=False)


@lowering(trailing_zeros)
def _(builder: Any, v: Any) -> Any:
    return builder.cttz(v, ir.Constant(ir.IntType(1), 1))


@lowering(leading_zeros)
def _(builder: Any, v: Any) -> Any:
    return builder.ctlz(v, ir.Constant(ir.IntType(1), 1))


@lowering(load_acquire)
def _(builder: Any, words: Any, i: Any) -> Any:
    return builder.load_atomic(builder.gep(words, [i]), "acquire", 8)


@lowering(store_release, stores=True)
def _(builder: Any, words: Any, i: Any, v: Any) -> None:
    builder.store_atomic(v, builder.gep(words, [i]), "release", 8)


@lowering(load_acquire_be32)
def _(builder: Any, buf: Any, i: Any) -> Any:
    loaded = builder.load_atomic(_pointer(builder, buf, i, I32), "acquire", 4)
    return builder.sext(builder.bswap(loaded), I64)


@lowering(store_release_be32, stores=True)
def _(builder: Any, buf: Any, i: Any, v: Any) -> None:
    value = builder.bswap(builder.trunc(v, I32))
    builder.store_atomic(value, _pointer(builder, buf, i, I32), "release", 4)


@lowering(add_at)
def _(builder: Any, address: Any, i: Any, v: Any) -> None:
    pointer = builder.gep(builder.inttoptr(address, I64.as_pointer()), [i])
    builder.store(builder.add(builder.load(pointer), v), pointer)


@lowering(fence)
def _(builder: Any) -> None:
    builder.fence("seq_cst")


def _lower_prefetch(plain: Callable[[Bytes, int], None], *, is_written: bool) -> None:
    @lowering(plain)
    def emit(builder: Any, buf: Any, i: Any) -> None:
        pointer = builder.gep(buf, [i])
        signature = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], signature)
        in_all_caches, data = I32(3), I32(1)
        builder.call(function, [pointer, I32(int(is_written)), in_all_caches, data])


_lower_prefetch(prefetch, is_written=False)
_lower_prefetch(prefetch_for_writing, is_written=True)


def _copy_function(module: Any) -> Any:
    """Define the module's copy function, which avoids a libc call for small sizes.

    Each size class does two loads and two stores that may overlap but stay in the range; 33 to MEMCPY_SIZE bytes are
    copied in steps of 32.
    """
    name = "mqproc_copy_bytes"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I8.as_pointer(), I64]), name)
    function.linkage = "internal"
    destination, source, size = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))

    def load(at: Any, to: Any) -> Any:
        return builder.load(_pointer(builder, source, at, to), align=1)

    def store(at: Any, value: Any) -> None:
        builder.store(value, _pointer(builder, destination, at, value.type), align=1)

    with builder.if_then(builder.icmp_signed(">=", size, I64(MEMCPY_SIZE))):
        cgutils.raw_memcpy(builder, destination, source, size, 1)
        builder.ret_void()

    with builder.if_then(builder.icmp_signed(">", size, I64(32))):
        last = builder.sub(size, I64(32))
        before = builder.block
        loop = builder.append_basic_block("loop")
        after = builder.append_basic_block("after")
        builder.branch(loop)
        builder.position_at_end(loop)
        at = builder.phi(I64)
        at.add_incoming(I64(0), before)
        store(at, load(at, I8X32))
        following = builder.add(at, I64(32))
        at.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, last), loop, after)
        builder.position_at_end(after)
        store(last, load(last, I8X32))
        builder.ret_void()

    for width, to in ((16, I8X16), (8, I64), (4, I32), (2, I16), (1, I8)):
        with builder.if_then(builder.icmp_signed(">=", size, I64(width))):
            last = builder.sub(size, I64(width))
            first_value, last_value = load(I64(0), to), load(last, to)
            store(I64(0), first_value)
            store(last, last_value)
            builder.ret_void()
    builder.ret_void()
    return function


@lowering(copy_bytes, stores=True)
def _(builder: Any, dst: Any, di: Any, src: Any, si: Any, n: Any) -> None:
    builder.call(_copy_function(builder.module), [builder.gep(dst, [di]), builder.gep(src, [si]), n])


# Store, full fence, load: the two halves of a wake-up that cannot be lost.
#
# The sender publishes a word and then checks whether the receiver sleeps; the receiver announces that it sleeps and
# then checks the word again. Each side must store before it loads, which only a full fence guarantees. Without it
# both sides may see the other's old value, and the wake-up is lost.


@kernel
def publish_and_peek(words: Words, index: int, value: int, peek_index: int) -> int:
    """Publish `value` as word `index`, then load word `peek_index` after a full fence."""
    store_release(words, index, value)
    fence()
    return load_acquire(words, peek_index)


@kernel
def fence_and_peek(words: Words, peek_index: int) -> int:
    """Load word `peek_index` after all earlier stores of this process."""
    fence()
    return load_acquire(words, peek_index)


def warm() -> None:
    """Compile or load these kernels."""
    words = np.zeros(2, np.int64)
    publish_and_peek(words, 0, 0, 1)
    fence_and_peek(words, 1)
