"""How a plain function gets a compiled body: the machinery under `intrinsics` and `wide`.

A primitive is written twice. The plain function runs where nothing is compiled and states, in its annotations, the
types; `lowering` attaches LLVM instructions that numba puts in its place, directly into the calling kernel. Unlike
numba's `@overload` nothing is compiled for itself, so a primitive costs no compile time but its own instructions.

| annotation | compiled as | what the lowering gets |
|---|---|---|
| `Bytes` | uint8, 1-D, C-contiguous, read-only or not | pointer to the first byte |
| `Words` | int64, the same | pointer to the first word |
| `int` | int64 | i64 |
| `np.uint64` | uint64 | i64 |
| `Wide` | two 64-bit lanes in one register | vector of 2 × i64 |
| `Broad` | eight 64-bit lanes in one register | vector of 8 × i64 |
"""

# mypy: allow-untyped-calls, allow-subclassing-any

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, NewType, get_type_hints

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import signature
from numba.extending import lower_builtin, models, register_model, type_callable
from numpy.typing import NDArray

# Byte orders are compiled in for the machines we know; a big-endian one needs its swaps turned round.
assert sys.byteorder == "little"

Bytes = NDArray[np.uint8]
"""A C-contiguous buffer of bytes."""

Words = NDArray[np.int64]
"""Aligned 8-byte words in the machine's byte order."""

Wide = NewType("Wide", int)
"""128 bits: byte 0 of memory is the lowest. A Python int where nothing is compiled."""

Broad = NewType("Broad", int)
"""512 bits, otherwise as `Wide`."""


class WideType(types.Type):
    """numba's type for `Wide` and `Broad`; it never crosses into Python."""

    def __init__(self, name: str, lanes: int) -> None:
        super().__init__(name=name)
        self.vector = ir.VectorType(ir.IntType(64), lanes)


WIDE = WideType("Wide", 2)
BROAD = WideType("Broad", 8)
LANES = WIDE.vector


@register_model(WideType)
class _WideModel(models.PrimitiveModel):
    """A vector, so that a value stays in one register through a loop."""

    def __init__(self, manager: Any, wide_type: WideType) -> None:
        super().__init__(manager, wide_type, wide_type.vector)


_ARRAYS: dict[Any, types.Type] = {Bytes: types.uint8, Words: types.int64}
_REGISTERS: dict[Any, types.Type] = {Wide: WIDE, Broad: BROAD}
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
        # A float is refused here, since numba would silently truncate it: the sum of a uint64 and an int64 is one.
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
