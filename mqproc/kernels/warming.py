"""Compiling or loading every kernel, before roles are forked: they then find the code ready, and share its memory."""

from __future__ import annotations

from mqproc.kernels import (
    append,
    crc,
    decode,
    dispatch,
    fences,
    gather,
    hashing,
    index,
    match,
    record_check,
    scan,
)


def warm_all() -> None:
    """Call every kernel once. The first time on a machine this compiles, later it loads the cache."""
    for module in (crc, hashing, record_check, fences, append, scan, dispatch, index, gather, match, decode):
        module.warm()
