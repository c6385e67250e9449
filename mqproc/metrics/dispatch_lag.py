"""How late dispatch is: the age of the oldest message that is not in queues and index yet.

The record at which dispatch stands is looked up in the log, so the figure begins at the message's own age, whatever the
pause before it, and grows while dispatch stands still. Files only: it is the same with the group dead. Neither numpy
nor options are needed, for tools that must start at once.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Mapping

from mqproc.io import StoreIO
from mqproc.layout import record
from mqproc.paths import StorePaths, segment_name, segment_start

_TIME_SIZE = 8
_HEAD_SIZE = record.BORN_HOST + record.HOST_V6_SIZE + _TIME_SIZE


def dispatch_behind_ms(io: StoreIO, paths: StorePaths, words: Mapping[str, int]) -> int:
    """Age of the oldest message that is not dispatched, 0 when there is none.

    Where its record cannot be read, in a damaged range, the newest message's age: the oldest one's is no less.
    """
    at, end = words["dispatched"], words["written"]
    if at >= end:
        return 0
    try:
        stored_ms = _stored_ms(io, paths, at, end)
    except OSError:
        stored_ms = None
    if stored_ms is None:
        stored_ms = words["written_store_timestamp_ms"]
    return max(0, round(time.time() * 1000) - stored_ms) if stored_ms else 0


def _stored_ms(io: StoreIO, paths: StorePaths, at: int, end: int) -> int | None:
    """Store time of the record at an offset, or of the one behind the segment's end; 0 without any before `end`.

    None when no record is there.
    """
    starts = sorted(start for name in io.names(paths.commit_log) if (start := segment_start(name)) is not None)
    number = bisect.bisect_right(starts, at) - 1
    while 0 <= number < len(starts):
        start = starts[number]
        head = _read(io, paths, start, at)
        if len(head) < record.BLANK_SIZE:
            return None
        if int.from_bytes(head[record.MAGIC : record.MAGIC + 4], "big", signed=True) != record.MAGIC_BLANK:
            return _store_time(head, at)
        number += 1
        at = starts[number] if number < len(starts) else end
        if at >= end:
            return 0
    return None


def _read(io: StoreIO, paths: StorePaths, start: int, at: int) -> bytes:
    fd = io.open(paths.commit_log / segment_name(start))
    try:
        return io.pread(fd, _HEAD_SIZE, at - start)
    finally:
        io.close(fd)


def _store_time(head: bytes, at: int) -> int | None:
    if len(head) < record.BORN_HOST:
        return None
    _size, magic, _crc, _queue, _flag, _offset, place, sys_flag, _born = record.HEAD.unpack_from(head)
    if magic not in (record.MAGIC_V1, record.MAGIC_V2) or place != at:
        return None
    position = record.STORE_TIMESTAMP + (record.IPV6_EXTRA if sys_flag & record.SYS_FLAG_BORN_HOST_V6 else 0)
    if len(head) < position + _TIME_SIZE:
        return None
    found = int.from_bytes(head[position : position + _TIME_SIZE], "big", signed=True)
    return found if found > 0 else None
