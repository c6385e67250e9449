"""Any memory as an array of the one type that kernels are compiled for.

numba has a type of its own for read-only arrays and compiles each kernel again for it. `np.frombuffer` over a map made
with ACCESS_READ, or over `bytes`, is read-only and cannot be made writable. An object with `__array_interface__` can
state the same memory as writable; so kernels see one type, and the page protection still guards the file: a store
through such an array kills the process with SIGSEGV (a map) or breaks Python's promise (`bytes`). Kernels that only
read only load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]


class _Memory:
    """States `size` bytes at `address` as a writable array; keeps the owner of the memory alive."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.__array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }
        self._owner = owner


def as_kernel_array(memory: Buffer | int, size: int | None = None, *, owner: object = None) -> NDArray[np.uint8]:
    """The first `size` bytes of a buffer (all of them when None) as a uint8 array of the kernels' type, not copied.

    `memory` is any contiguous buffer (mmap, bytes, bytearray, memoryview, array), or an address, for which `size` is
    needed and `owner` is what keeps the memory alive. The array keeps the buffer exported: closing a mmap under it
    raises BufferError.
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
    return np.asarray(_Memory(exported.ctypes.data, size, exported))
