"""Types of kernel arguments, and the mechanism that gives plain functions a compiled body.

A primitive has two forms. The plain function runs where nothing is compiled, and its annotations state the types.
`lowering` attaches a function that emits LLVM instructions directly into the calling kernel. Unlike numba's
`@overload`, nothing is compiled separately, so a primitive costs no compile time beyond its own instructions.

| annotation | compiled as | the lowering receives |
|---|---|---|
| `Bytes` | uint8, 1-D, C-contiguous, read-only or not | pointer to the first byte |
| `Words` | int64, the same | pointer to the first word |
| `int` | int64 | i64 |
| `np.uint64` | uint64 | i64 |
| `Vector128` | two 64-bit lanes in one register | vector of 2 × i64 |
| `Vector512` | eight 64-bit lanes in one register | vector of 8 × i64 |
"""

# mypy: allow-untyped-calls, allow-subclassing-any

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NewType, get_type_hints

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import signature
from numba.extending import lower_builtin, models, register_model, type_callable
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]

# Lowerings assume little-endian byte order; a big-endian machine needs the swaps reversed.
assert sys.byteorder == "little"

Bytes = NDArray[np.uint8]
"""A C-contiguous buffer of bytes."""

Int32s = NDArray[np.int32]
"""32-bit words in native byte order. Kernels index them directly; no primitive takes them."""

Words = NDArray[np.int64]
"""Aligned 8-byte words in native byte order."""

Vector128 = NewType("Vector128", int)
"""128 bits; byte 0 of memory is the lowest. A Python int where nothing is compiled."""

Vector512 = NewType("Vector512", int)
"""512 bits, otherwise as `Vector128`."""


class VectorType(types.Type):
    """numba's type for `Vector128` and `Vector512`; it never crosses into Python."""

    def __init__(self, name: str, lanes: int) -> None:
        super().__init__(name=name)
        self.vector = ir.VectorType(ir.IntType(64), lanes)


VECTOR_128 = VectorType("Vector128", 2)
VECTOR_512 = VectorType("Vector512", 8)
LANES = VECTOR_128.vector


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    """LLVM vector, so that a value stays in one register through a loop."""

    def __init__(self, manager: Any, wide_type: VectorType) -> None:
        super().__init__(manager, wide_type, wide_type.vector)


_ARRAYS: dict[Any, types.Type] = {Bytes: types.uint8, Words: types.int64}
_REGISTERS: dict[Any, types.Type] = {Vector128: VECTOR_128, Vector512: VECTOR_512}
_VALUES: dict[Any, types.Type] = {int: types.int64, np.uint64: types.uint64, type(None): types.none, **_REGISTERS}

Emit = Callable[..., Any]


def lowering(plain: Callable[..., Any], *, stores: bool = False) -> Callable[[Emit], Emit]:
    """Attach `emit(builder, *arguments)` as the compiled body of a plain function.

    With `stores` the first array must be writable. `emit` returns the LLVM value of the result, or nothing.
    """
    hints = get_type_hints(plain)
    result = _VALUES[hints.pop("return")]
    kinds = tuple(hints.values())

    def accepts(kind: Any, argument: types.Type, writable: bool) -> bool:
        if kind in _ARRAYS:
            return (
                isinstance(argument, types.Array)
                and argument.dtype == _ARRAYS[kind]
                and argument.ndim == 1
                and argument.layout == "C"
                and (argument.mutable or not writable)
            )
        # Reject floats, which numba would truncate silently: the sum of a uint64 and an int64 is a float.
        if kind in _REGISTERS:
            return argument == _REGISTERS[kind]
        return isinstance(argument, types.Integer | types.Boolean)

    def typer(*arguments: types.Type) -> Any:
        for position, (kind, argument) in enumerate(zip(kinds, arguments, strict=True)):
            if not accepts(kind, argument, writable=stores and position == 0):
                return None
        parameters = [
            argument if kind in _ARRAYS else _VALUES[kind] for kind, argument in zip(kinds, arguments, strict=True)
        ]
        return signature(result, *parameters)

    typer.pysig = typer.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    type_callable(plain)(lambda context: typer)

    def attach(emit: Emit) -> Emit:
        def lower(context: Any, builder: Any, call: Any, values: tuple[Any, ...]) -> Any:
            arguments = [
                context.make_array(argument)(context, builder, value).data
                if isinstance(argument, types.Array)
                else value
                for argument, value in zip(call.args, values, strict=True)
            ]
            emitted = emit(builder, *arguments)
            return context.get_dummy_value() if result is types.none else emitted

        lower_builtin(plain, *(types.Array if kind in _ARRAYS else _VALUES[kind] for kind in kinds))(lower)
        return emit

    return attach


# Arrays over any memory, of the one type that kernels are compiled for.
#
# numba types read-only arrays differently and would compile each kernel again for them. `np.frombuffer` over a map made
# with ACCESS_READ, or over `bytes`, is read-only and cannot be made writable. An object with `__array_interface__` can
# declare the same memory writable, so kernels see one type, and page protection still guards the file. A store through
# such an array kills the process with SIGSEGV (a map) or breaks Python's promise (`bytes`); kernels for reading only
# load.


class _Memory:
    """Declare `size` bytes at `address` a writable array; keeps the owner of the memory alive."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, address: int, size: int, owner: object) -> None:
        data = (address, False)  # writable
        self.__array_interface__: dict[str, Any] = {"data": data, "shape": (size,), "typestr": "|u1", "version": 3}
        self._owner = owner


def as_kernel_array(memory: Buffer | int, size: int | None = None, *, owner: object = None) -> NDArray[np.uint8]:
    """View the first `size` bytes of a buffer (all by default) as a uint8 array, without a copy.

    `memory` is a contiguous buffer (mmap, bytes, bytearray, memoryview, array), or an address, which requires `size`
    and an `owner` that keeps the memory alive. The array exports the buffer: closing its mmap raises BufferError.
    Raises ValueError for a size outside the buffer.
    """
    if isinstance(memory, int):
        if size is None:
            raise ValueError("an address needs a size")
        return np.asarray(_Memory(memory, size, owner))
    exported = np.frombuffer(memory, np.uint8)
    if size is None:
        size = exported.size
    elif not 0 <= size <= exported.size:
        raise ValueError(f"{size} bytes of a buffer of {exported.size}")
    if exported.flags.writeable:
        return exported[:size]
    return np.asarray(_Memory(exported.__array_interface__["data"][0], size, exported))
