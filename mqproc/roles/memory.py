"""How a role's allocator treats memory that was freed."""

from __future__ import annotations

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
KEPT_BYTES: Final = 32 << 20


def keep_freed_memory() -> None:
    """Let glibc keep up to KEPT_BYTES of freed memory instead of giving it back at once.

    Answers of megabytes are made and freed hundreds of times a second; fresh pages for each of them cost more than
    filling them. Another C library has no such call and goes on as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
