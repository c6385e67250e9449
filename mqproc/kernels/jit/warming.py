"""Compile or load every kernel before the roles are forked, so that they share the code.

The list includes the kernels that decode pulled records into Arrow batches: the first batch of a client on this machine
would otherwise wait some five seconds for the compiler.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

from mqproc.kernels import (
    append_frame,
    append_run,
    arrow,
    crc,
    dedupe,
    dispatch,
    dispatch_step,
    gather,
    hashing,
    index,
    log_match,
    record_check,
    record_decode,
    scan,
    sql,
    verify,
)
from mqproc.kernels.jit import intrinsics as fences

WARMED: Final[tuple[ModuleType, ...]] = (
    record_check,
    append_run,
    append_frame,
    gather,
    sql,
    index,
    dispatch,
    arrow,
    dispatch_step,
    scan,
    record_decode,
    dedupe,
    log_match,
    crc,
    hashing,
    verify,
    fences,
)
"""Modules with kernels, in descending order of their compile time."""


def warm_all() -> None:
    """Call every kernel once: compiles at first, later loads the cache."""
    for module in WARMED:
        module.warm()
