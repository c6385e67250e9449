"""The modules with kernels, in the order in which they are compiled.

`mqproc up` waits for `SERVING`; `LATER` follows while the group serves.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

from mqproc.kernels import (
    append_frame,
    append_messages,
    append_run,
    arrow,
    crc,
    dedupe,
    dispatch,
    dispatch_step,
    gather,
    gather_sql,
    hashing,
    index,
    index_rebuild,
    index_verify,
    log_match,
    log_range,
    pack,
    record_check,
    record_decode,
    record_fields,
    scan,
    sql,
    verify,
)
from mqproc.kernels.jit import intrinsics

SERVING: Final[tuple[ModuleType, ...]] = (
    crc, append_frame, hashing, record_check, dispatch, append_run, gather, index, scan, append_messages, record_decode,
    dispatch_step, pack, intrinsics,
)  # fmt: skip
"""Sending, dispatch, pulling, recovery and scheduled delivery.

Long ones first, and each after its callees have been begun, so that two processes seldom wait for each other.
"""
LATER: Final[tuple[ModuleType, ...]] = (
    record_fields,
    log_match,
    sql,
    gather_sql,
    dedupe,
    index_rebuild,
    index_verify,
    arrow,
    verify,
    log_range,
)
"""The others, in the order in which they are likely to be needed.

`arrow` is for clients: if it was not in the cache, a client's first batch would wait for seconds.
"""
LATER_NAMES: Final = (*(f"{each.__name__.rpartition('.')[2]}." for each in LATER), "gather.gather_sql")
"""Beginnings of the names of their kernels in the cache."""
