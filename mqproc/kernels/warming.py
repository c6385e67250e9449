"""Compiling or loading kernels before roles are forked: they then find the code ready, and share its memory.

Clients on this machine find ready what a first batch of Arrow's needs: five seconds of compiling.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

from mqproc.kernels import (
    append,
    append_counts,
    append_frame,
    append_options,
    append_run,
    arrow_body,
    crc,
    decode,
    derived,
    dispatch_alone,
    dispatch_buffers,
    dispatched,
    fences,
    frames,
    gather,
    hashing,
    index,
    index_verify,
    keyed,
    made_from,
    match,
    numbers,
    publish,
    record_check,
    repeats,
    scan,
    select,
    sql,
    verify,
)

WARMED: Final[tuple[ModuleType, ...]] = (
    record_check,
    append_run,
    append,
    gather,
    append_frame,
    sql,
    dispatch_buffers,
    dispatch_alone,
    scan,
    index_verify,
    arrow_body,
    decode,
    derived,
    numbers,
    repeats,
    match,
    crc,
    hashing,
    index,
    verify,
    select,
    keyed,
    publish,
    append_counts,
    append_options,
    dispatched,
    fences,
    frames,
    made_from,
)
"""Every module with kernels, those first that take longest to compile."""


def warm_all() -> None:
    """Call every kernel once. The first time on a machine this compiles, later it loads the cache."""
    for module in WARMED:
        module.warm()
