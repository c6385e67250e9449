"""Telling the processor what will be read soon: it sees by itself only what lies near what is read now.

Hints: they read nothing, change nothing and cannot fail, wherever they point. Records lie apart by their bodies, which
most loops pass over, so each of them, and in it what lies behind the body, is waited for when nothing was said.

    prefetch_alike(log, at, size, size_before)   a walk: as if records went on being as long as the last two
    prefetch_record(log, at, like)               the record at a place that is known
    prefetch_bytes(buf, at, size)                so many bytes
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from mqproc.kernels.jit import inlined
from mqproc.kernels.primitive import Bytes, lowering
from mqproc.kernels.record_check import topic_length_at

RECORDS_AHEAD: Final = 4
"""How far a walk looks ahead. (With messages of 1 KiB: 2 saves half of what 3 to 8 do.)"""

_LINE = 64
# What is read of a record beside its body: two lines at its begin; its topic and properties, most often, in three.
_HEAD_LINES = 2
_TAIL_LINES = 3
_TAIL_BYTES = _TAIL_LINES * _LINE
# Shorter records lie so near that the processor sees the next ones by itself: hints changed nothing there.
_FAR_BYTES = 512


def prefetch(buf: Bytes, i: int) -> None:
    """Have the cache line of byte `i` loaded, which will be read."""


def prefetch_for_writing(buf: Bytes, i: int) -> None:
    """Have the cache line of byte `i` loaded, which will be written."""


def _hint(builder: Any, buf: Any, i: Any, is_written: int) -> None:
    int32 = ir.IntType(32)
    pointer = builder.gep(buf, [i])
    signature = ir.FunctionType(ir.VoidType(), [pointer.type, int32, int32, int32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], signature)
    in_all_caches, data = int32(3), int32(1)
    builder.call(function, [pointer, int32(is_written), in_all_caches, data])


@lowering(prefetch)
def _(builder: Any, buf: Any, i: Any) -> None:
    _hint(builder, buf, i, 0)


@lowering(prefetch_for_writing)
def _(builder: Any, buf: Any, i: Any) -> None:
    _hint(builder, buf, i, 1)


@inlined
def prefetch_bytes(buf: Bytes, at: int, size: int) -> None:
    """Load the lines of buf[at:at + size], if the buffer has them."""
    if 0 <= at < buf.size - size:
        for line in range(0, size, _LINE):
            prefetch(buf, at + line)


@inlined
def prefetch_record(log: Bytes, at: int, like: int) -> None:
    """Load what is read beside the body of the record at `at`, if its parts lie as those of the one at `like` do.

    The sizes of the latter hold.
    """
    topic = topic_length_at(log, like) - like
    if 0 <= at < log.size - topic - _TAIL_BYTES:
        for line in range(_HEAD_LINES):
            prefetch(log, at + _LINE * line)
        for line in range(_TAIL_LINES):
            prefetch(log, at + topic + _LINE * line)


@inlined
def prefetch_alike(log: Bytes, at: int, size: int, size_before: int) -> None:
    """Load what is read of a record some records on from the one at `at`, if that has the size of the one before it."""
    if size == size_before and size >= _FAR_BYTES:
        prefetch_record(log, at + RECORDS_AHEAD * size, at)
