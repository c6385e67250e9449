"""Array views: one type for all memory, no copies, the owner stays alive."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numba import typeof as numba_typeof

from mqproc.kernels.jit.lowering import as_kernel_array

typeof: Callable[[object], object] = numba_typeof


def test_memory_of_every_kind_has_one_type(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(range(64)))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 64, access=mmap.ACCESS_READ)
    for memory in (mapped, bytes(64), bytearray(64), memoryview(bytes(64)), np.zeros(64, np.uint8), np.zeros(8)):
        array = as_kernel_array(memory)
        assert array.size == 64
        assert typeof(array) == typeof(np.zeros(1, np.uint8))
    assert as_kernel_array(mapped, 10).tolist() == list(range(10))


def test_views_are_not_copies() -> None:
    content = bytearray(16)
    array = as_kernel_array(content)
    content[3] = 9
    array[4] = 8
    assert (array[3], content[4]) == (9, 8)
    assert as_kernel_array(array.ctypes.data, 16, owner=content)[3] == 9
    words = array[:8].view(np.int64)
    words[0] = -1
    assert content[:8] == b"\xff" * 8


def test_map_with_arrays_cannot_be_closed() -> None:
    mapped = mmap.mmap(-1, 4096)
    array = as_kernel_array(mapped)[10:20].view()
    with pytest.raises(BufferError):
        mapped.close()
    del array
    gc.collect()
    mapped.close()


def test_owner_of_address_lives_as_long_as_array() -> None:
    owner = np.arange(32, dtype=np.uint8)
    watched = weakref.ref(owner)
    array = as_kernel_array(owner.ctypes.data, 32, owner=owner)
    del owner
    gc.collect()
    assert watched() is not None
    assert array.tolist() == list(range(32))
    del array
    gc.collect()
    assert watched() is None


def test_size_out_of_range_raises() -> None:
    assert as_kernel_array(b"", 0).size == 0
    assert as_kernel_array(b"abc", 0).size == 0
    for size in (-1, 4):
        with pytest.raises(ValueError, match="of a buffer of 3"):
            as_kernel_array(b"abc", size)
    with pytest.raises(ValueError, match="needs a size"):
        as_kernel_array(4096)
