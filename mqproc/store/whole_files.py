"""Whole files as arrays, for tools that only read them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mqproc.io import StoreIO
from mqproc.kernels.views import as_kernel_array


def view_of(io: StoreIO, fd: int, size: int) -> NDArray[np.uint8]:
    """The first `size` bytes of a file, mapped; as they are now where holes of a map would take room."""
    if not io.holes_take_room(fd):
        return as_kernel_array(io.map(fd, size))
    view = np.zeros(size, np.uint8)
    at = 0
    while at < size and (data := io.next_data(fd, at)) is not None and data < size:
        at = min(io.next_hole(fd, data), size)
        io.pread_into(fd, view[data:at].data, data)
    return as_kernel_array(view.data)
