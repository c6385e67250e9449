"""How this process's allocator gets large blocks, where the arrays of many roles and recoveries are made in one."""

from __future__ import annotations

import ctypes
from typing import Final

_M_MMAP_THRESHOLD: Final = -3
_MAPPED_FROM_BYTES: Final = 128 << 10


def map_large_blocks() -> None:
    """Have glibc map each large block anew, as it does for the first one: pages of it that nobody touches cost nothing.

    By itself it keeps what was freed and clears it for the next array of zeros, megabytes for each recovery and role:
    a fifth of a story of crashes went into that. A process of the product makes such arrays once.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
