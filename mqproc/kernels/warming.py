"""Compiling or loading every kernel, before roles are forked: they then find the code ready, and share its memory."""

from __future__ import annotations

from mqproc.kernels import (
    append,
    crc,
    decode,
    dispatch_buffers,
    fences,
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


def warm_all() -> None:
    """Call every kernel once. The first time on a machine this compiles, later it loads the cache."""
    writing = (crc, hashing, record_check, fences, append, scan, dispatch_buffers, publish, index, keyed, repeats)
    reading = (numbers, sql, gather, match, decode, made_from)
    for module in (*writing, *reading, verify, index_verify, select):
        module.warm()
