"""128-bit and 512-bit vectors and carry-less multiplication (x86 PCLMULQDQ) for the CRC.

A `Vector128` is one register with memory byte 0 lowest, so its low lane is the first eight bytes; a `Vector512` is one
of 512 bits. The plain versions are Python ints. Lanes are passed as int64, like every other number of a kernel.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from mqproc.kernels.jit import cache
from mqproc.kernels.jit.lowering import LANES, VECTOR_512, Bytes, Vector128, Vector512, lowering

I32 = ir.IntType(32)
I64 = ir.IntType(64)
I128 = ir.IntType(128)

_MASK_64 = (1 << 64) - 1
_MASK_128 = (1 << 128) - 1


# numba compiles for the processor's features unless NUMBA_CPU_FEATURES overrides them. They are part of the cache's
# fingerprint, so a store moved to another machine compiles again.
_FEATURES = frozenset(cache.target()[2].split(","))
HAS_CLMUL = "+pclmul" in _FEATURES
"""Whether kernels may use `multiply_64` and `fold_128`; otherwise they would not compile."""
HAS_VPCLMUL = HAS_CLMUL and {"+vpclmulqdq", "+avx512f"} <= _FEATURES
"""Whether kernels may use `fold_512`."""


# Plain versions.


def _signed_64(value: int) -> int:
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


def _carry_less(a: int, b: int) -> int:
    product = 0
    while b:
        lowest = b & -b
        product ^= a * lowest
        b ^= lowest
    return product


def _load(buf: Bytes, i: int, size: int) -> int:
    if i < 0 or i + size > buf.size:
        raise IndexError(f"{size} bytes at {i} of a buffer of {buf.size}")
    return int.from_bytes(buf[i : i + size].tobytes(), "little")


def load_128(buf: Bytes, i: int) -> Vector128:
    """The 16 bytes at `i`."""
    return Vector128(_load(buf, i, 16))


def pair_128(low: int, high: int) -> Vector128:
    """A value from its two lanes."""
    return Vector128(int(low) & _MASK_64 | (int(high) & _MASK_64) << 64)


def low_64(value: Vector128) -> int:
    """The low lane, as int64."""
    return _signed_64(value)


def high_64(value: Vector128) -> int:
    """The high lane, as int64."""
    return _signed_64(value >> 64)


def xor_128(a: Vector128, b: Vector128) -> Vector128:
    """a ^ b."""
    return Vector128(a ^ b)


def shift_left_128(value: Vector128, bits: int) -> Vector128:
    """Shift towards later bytes, 0 ≤ bits < 128."""
    return Vector128(value << int(bits) & _MASK_128)


def shift_right_128(value: Vector128, bits: int) -> Vector128:
    """Shift towards earlier bytes, 0 ≤ bits < 128; zeros are shifted in."""
    return Vector128(value >> int(bits))


def multiply_64(a: int, b: int) -> Vector128:
    """The carry-less product of two 64-bit numbers."""
    return Vector128(_carry_less(int(a) & _MASK_64, int(b) & _MASK_64))


def fold_128(value: Vector128, keys: Vector128, following: Vector128) -> Vector128:
    """low × low key ^ high × high key ^ following: moves a value over later bytes of a message."""
    low = _carry_less(value & _MASK_64, keys & _MASK_64)
    high = _carry_less(value >> 64, keys >> 64)
    return Vector128(low ^ high ^ following)


def load_512(buf: Bytes, i: int) -> Vector512:
    """The 64 bytes at `i`."""
    return Vector512(_load(buf, i, 64))


def join_512(a: Vector128, b: Vector128, c: Vector128, d: Vector128) -> Vector512:
    """Join four 128-bit parts, the first bytes first."""
    return Vector512(a | b << 128 | c << 256 | d << 384)


def xor_512(a: Vector512, b: Vector512) -> Vector512:
    """a ^ b."""
    return Vector512(a ^ b)


def part_0(value: Vector512) -> Vector128:
    """The first 128 bits."""
    return Vector128(value & _MASK_128)


def part_1(value: Vector512) -> Vector128:
    """The second 128 bits."""
    return Vector128(value >> 128 & _MASK_128)


def part_2(value: Vector512) -> Vector128:
    """The third 128 bits."""
    return Vector128(value >> 256 & _MASK_128)


def part_3(value: Vector512) -> Vector128:
    """The last 128 bits."""
    return Vector128(value >> 384)


def fold_512(value: Vector512, keys: Vector512, following: Vector512) -> Vector512:
    """`fold_128` of each of the four parts."""
    folded = 0
    for bit in range(0, 512, 128):
        parts = (Vector128(whole >> bit & _MASK_128) for whole in (value, keys, following))
        folded |= fold_128(*parts) << bit
    return Vector512(folded)


# Compiled bodies.


def _pair(builder: Any, low: Any, high: Any) -> Any:
    half = builder.insert_element(ir.Constant(LANES, ir.Undefined), low, I32(0))
    return builder.insert_element(half, high, I32(1))


def _multiply(builder: Any, a: Any, b: Any, lanes: int) -> Any:
    """`lanes`: 0x00 multiplies the low lanes of each 128 bits, 0x11 the high ones."""
    name = "llvm.x86.pclmulqdq" if a.type == LANES else "llvm.x86.pclmulqdq.512"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(a.type, [a.type, a.type, ir.IntType(8)]), name)
    return builder.call(function, [a, b, ir.IntType(8)(lanes)])


def _shuffle(builder: Any, a: Any, b: Any, lanes: range) -> Any:
    """Select lanes of two vectors, of which the second's are numbered after the first's."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def _lower_load(plain: Callable[..., Any], vector: Any) -> None:
    @lowering(plain)
    def _(builder: Any, buf: Any, i: Any) -> Any:
        return builder.load(builder.bitcast(builder.gep(buf, [i]), vector.as_pointer()), align=1)


_lower_load(load_128, LANES)
_lower_load(load_512, VECTOR_512.vector)


@lowering(join_512)
def _(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    first, second = (_shuffle(builder, *pair, range(4)) for pair in ((a, b), (c, d)))
    return _shuffle(builder, first, second, range(8))


@lowering(pair_128)
def _(builder: Any, low: Any, high: Any) -> Any:
    return _pair(builder, low, high)


@lowering(low_64)
def _(builder: Any, value: Any) -> Any:
    return builder.extract_element(value, I32(0))


@lowering(high_64)
def _(builder: Any, value: Any) -> Any:
    return builder.extract_element(value, I32(1))


@lowering(xor_128)
@lowering(xor_512)
def _(builder: Any, a: Any, b: Any) -> Any:
    return builder.xor(a, b)


def _lower_part(plain: Callable[[Vector512], Vector128], number: int) -> None:
    @lowering(plain)
    def _(builder: Any, value: Any) -> Any:
        return _shuffle(builder, value, value, range(2 * number, 2 * number + 2))


for _number, _part in enumerate((part_0, part_1, part_2, part_3)):
    _lower_part(_part, _number)


def _lower_shift(plain: Callable[[Vector128, int], Vector128], instruction: str) -> None:
    @lowering(plain)
    def _(builder: Any, value: Any, bits: Any) -> Any:
        shifted = getattr(builder, instruction)(builder.bitcast(value, I128), builder.zext(bits, I128))
        return builder.bitcast(shifted, LANES)


_lower_shift(shift_left_128, "shl")
_lower_shift(shift_right_128, "lshr")


@lowering(multiply_64)
def _(builder: Any, a: Any, b: Any) -> Any:
    zero = I64(0)
    return _multiply(builder, _pair(builder, a, zero), _pair(builder, b, zero), 0x00)


@lowering(fold_128)
@lowering(fold_512)
def _(builder: Any, value: Any, keys: Any, following: Any) -> Any:
    low = _multiply(builder, value, keys, 0x00)
    high = _multiply(builder, value, keys, 0x11)
    return builder.xor(builder.xor(low, high), following)
