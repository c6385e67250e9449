"""Decode consecutive records into columns: locate their fields, then copy each column.

    locate(buffer, count, rows_of(columns)) ──▶ places ──▶ copy_column(buf, places, count, name)
                                                       └─▶ kernels/arrow.py: all columns of an Arrow batch at once

`columns` are names from FIXED_COLUMNS and VARIABLE_COLUMNS, or ALL_COLUMNS. A fixed column is int64[n] or int32[n]; a
variable one is (offsets int32[n + 1], data uint8[m]), with value i at data[offsets[i]:offsets[i + 1]]: UTF-8 for topic,
tag, keys (joined by a space, as stored), properties (the raw string without the CRC pair), born_host and store_host
(`address:port`, an IPv6 address in brackets), bytes for body. An absent tag or key is empty. Columns share no memory
with `buffer`. CRCs are not checked; they are checked where records are read from the log.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.kernels.jit.compile import inlined, kernel
from mqproc.kernels.jit.intrinsics import copy_bytes, load_be16, load_be32, load_be64, load_u8
from mqproc.kernels.jit.lowering import Bytes, Int32s, Words, as_kernel_array
from mqproc.kernels.record_check import (
    REASON_NAMES,
    body_length_at,
    born_host_size,
    has_crc_tail,
    prefetch_record,
    record_size,
    signed_topic_length,
    store_host_size,
    topic_length_size,
)
from mqproc.kernels.record_fields import (
    KEYS_AT,
    KEYS_SIZE,
    PLACES_SIZE,
    TAG_AT,
    TAG_SIZE,
    find_tags_and_keys,
    same_bytes,
)
from mqproc.layout import record

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]

# Hosts as `address:port` text; IPv6 addresses in brackets, formatted by RFC 5952.


HOST_TEXT_MAX = len("[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:-2147483648")
"""Longest text of a host; the port is an i32."""

_HOST_V6 = record.HOST_V6_SIZE
_GROUPS = 8
_COLON, _DOT, _OPEN, _CLOSE, _MINUS, _ZERO, _SMALL_A = (ord(character) for character in ":.[]-0a")


@kernel
def decimal_text(value: int, out: Bytes, at: int) -> int:
    """Write a number, |value| < 10¹⁸, in decimal at out[at]; returns the end position."""
    if value < 0:
        out[at] = _MINUS
        at += 1
        value = -value
    scale = 1
    while value // scale >= 10:
        scale *= 10
    while scale > 0:
        out[at] = _ZERO + value // scale % 10
        at += 1
        scale //= 10
    return at


@kernel
def hex_text(value: int, out: Bytes, at: int) -> int:
    """Write a u16 in hexadecimal without leading zeros; returns the end position."""
    shift = 12
    while shift > 0 and value >> shift == 0:
        shift -= 4
    while shift >= 0:
        digit = value >> shift & 15
        out[at] = _ZERO + digit if digit < 10 else _SMALL_A - 10 + digit
        at += 1
        shift -= 4
    return at


@kernel
def _group(buf: Bytes, host: int, index: int) -> int:
    return load_be16(buf, host + 2 * index) & 0xFFFF


@kernel
def _zeros_from(buf: Bytes, host: int, first: int) -> int:
    """Number of zero groups from `first` on."""
    count = 0
    while first + count < _GROUPS and _group(buf, host, first + count) == 0:
        count += 1
    return count


@kernel
def _v6_text(buf: Bytes, host: int, out: Bytes, at: int) -> int:
    """Write an IPv6 address, replacing the first longest run of two or more zero groups by `::`."""
    gap = -1
    gap_size = 1
    for first in range(_GROUPS):
        zeros = _zeros_from(buf, host, first)
        if zeros > gap_size:
            gap = first
            gap_size = zeros
    index = 0
    while index < _GROUPS:
        if index == gap:
            out[at] = _COLON
            at += 1
            index += gap_size
            if index == _GROUPS:
                out[at] = _COLON
                at += 1
            continue
        if index > 0:
            out[at] = _COLON
            at += 1
        at = hex_text(_group(buf, host, index), out, at)
        index += 1
    return at


@kernel
def host_text(buf: Bytes, host: int, size: int, out: Bytes, at: int) -> int:
    """Write the host buf[host:host + size] at out[at]; returns the end position.

    `size` is 8 or 20; `out` needs HOST_TEXT_MAX bytes.
    """
    if size == _HOST_V6:
        out[at] = _OPEN
        at = _v6_text(buf, host, out, at + 1)
        out[at] = _CLOSE
        at += 1
    else:
        for part in range(4):
            if part > 0:
                out[at] = _DOT
                at += 1
            at = decimal_text(load_u8(buf, host + part), out, at)
    out[at] = _COLON
    return decimal_text(load_be32(buf, host + size - 4), out, at + 1)


# Rows of the places, int64[PLACE_ROWS × n]: row r of record i is word r × n + i. Positions and sizes in bytes. The row
# of a size is written with the row before it, and tags with keys.
(
    RECORD,
    STORE_TIMESTAMP,
    TAIL,  # reconsume times, prepared transaction offset, body length
    BODY,
    BODY_SIZE,
    TOPIC,
    TOPIC_SIZE,
    PROPERTIES,
    PROPERTIES_SIZE,
    BORN_HOST,
    BORN_HOST_SIZE,
    STORE_HOST,
    STORE_HOST_SIZE,
    TAG,
    TAG_LENGTH,
    KEYS,
    KEYS_LENGTH,
) = range(17)
PLACE_ROWS: Final = 17
_TAIL_SIZE = record.BODY_LENGTH - record.RECONSUME_TIMES
_PREPARED = record.PREPARED_TRANSACTION_OFFSET - record.RECONSUME_TIMES

# Fixed columns: row that the position refers to, distance from it, width in bytes.
_FIXED: Final[dict[str, tuple[int, int, int]]] = {
    "physical_offset": (RECORD, record.PHYSICAL_OFFSET, 8),
    "size": (RECORD, record.TOTAL_SIZE, 4),
    "queue_id": (RECORD, record.QUEUE_ID, 4),
    "queue_offset": (RECORD, record.QUEUE_OFFSET, 8),
    "flag": (RECORD, record.FLAG, 4),
    "sys_flag": (RECORD, record.SYS_FLAG, 4),
    "born_timestamp_ms": (RECORD, record.BORN_TIMESTAMP, 8),
    "store_timestamp_ms": (STORE_TIMESTAMP, 0, 8),
    "reconsume_times": (TAIL, 0, 4),
    "prepared_transaction_offset": (TAIL, _PREPARED, 8),
    "body_crc": (RECORD, record.BODY_CRC, 4),
}
# Variable columns: row of the position; the next row holds the size.
_VARIABLE: Final[dict[str, int]] = {
    "topic": TOPIC,
    "tag": TAG,
    "keys": KEYS,
    "properties": PROPERTIES,
    "born_host": BORN_HOST,
    "store_host": STORE_HOST,
    "body": BODY,
}
_OF_PROPERTIES: Final = 1 << PROPERTIES | 1 << TAG | 1 << KEYS
_AFTER_THE_BODY: Final = 1 << TOPIC | _OF_PROPERTIES
_HOST_COLUMNS: Final = frozenset({"born_host", "store_host"})
FIXED_COLUMNS: Final = tuple(_FIXED)
VARIABLE_COLUMNS: Final = tuple(_VARIABLE)
ALL_COLUMNS: Final = (
    *("physical_offset", "size", "topic", "queue_id", "queue_offset", "tag", "keys", "properties", "flag", "sys_flag"),
    *("born_timestamp_ms", "born_host", "store_timestamp_ms", "store_host", "reconsume_times"),
    *("prepared_transaction_offset", "body_crc", "body"),
)
assert sorted(ALL_COLUMNS) == sorted(FIXED_COLUMNS + VARIABLE_COLUMNS)
_INT32_MAX = 2**31 - 1
# Prefetch distance, in records, if the positions are given.
_AHEAD: Final = 8

Column = NDArray[Any] | tuple[NDArray[np.int32], NDArray[np.uint8]]


@kernel
def count_records(buf: Bytes, failed: Words) -> int:
    """Number of complete consecutive records in `buf`; failed[0] receives their end."""
    count = 0
    at = 0
    while at < buf.size:
        total = record_size(buf, at, buf.size)
        if total < 0:
            break
        count += 1
        at += total
    failed[0] = at
    return count


@inlined
def _locate(buf: Bytes, at: int, total: int, i: int, count: int, rows: int, places: Words, scratch: Words) -> None:
    """Locate the fields of the valid record at `at`: column i of the places, limited to `rows`."""
    places[RECORD * count + i] = at
    sys_flag = load_be32(buf, at + record.SYS_FLAG)
    store_at = at + record.BORN_HOST + born_host_size(sys_flag)
    if rows & 1 << STORE_TIMESTAMP != 0:
        places[STORE_TIMESTAMP * count + i] = store_at
    if rows & 1 << BORN_HOST != 0:
        places[BORN_HOST * count + i] = at + record.BORN_HOST
        places[BORN_HOST_SIZE * count + i] = born_host_size(sys_flag)
    if rows & 1 << STORE_HOST != 0:
        places[STORE_HOST * count + i] = store_at + 8
        places[STORE_HOST_SIZE * count + i] = store_host_size(sys_flag)
    length_at = body_length_at(buf, at)
    body_size = load_be32(buf, length_at)
    if rows & 1 << TAIL != 0:
        places[TAIL * count + i] = length_at - _TAIL_SIZE
    if rows & 1 << BODY != 0:
        places[BODY * count + i] = length_at + 4
        places[BODY_SIZE * count + i] = body_size
    if rows & _AFTER_THE_BODY == 0:
        return
    topic_length = length_at + 4 + body_size
    width = topic_length_size(buf, at)
    topic_size = signed_topic_length(buf, topic_length, width)
    if rows & 1 << TOPIC != 0:
        places[TOPIC * count + i] = topic_length + width
        places[TOPIC_SIZE * count + i] = topic_size
    if rows & _OF_PROPERTIES == 0:
        return
    first = topic_length + width + topic_size + 2
    end = at + total
    if has_crc_tail(buf, at, total):
        end -= record.CRC_TAIL_SIZE
    if rows & 1 << PROPERTIES != 0:
        places[PROPERTIES * count + i] = first
        places[PROPERTIES_SIZE * count + i] = end - first
    if rows & (1 << TAG | 1 << KEYS) != 0:
        find_tags_and_keys(buf, first, end, scratch, 1)
        places[TAG * count + i] = scratch[1 + TAG_AT]
        places[TAG_LENGTH * count + i] = scratch[1 + TAG_SIZE]
        places[KEYS * count + i] = scratch[1 + KEYS_AT]
        places[KEYS_LENGTH * count + i] = scratch[1 + KEYS_SIZE]


@kernel
def locate_records(buf: Bytes, count: int, rows: int, places: Words, failed: Words) -> int:
    """Locate `count` records' fields: writes `rows` of `places` int64[PLACE_ROWS × count].

    `rows` is a sum of 1 << row (`rows_of`). Returns 0, or the reason (record_check) why failed[0] is not the position
    of a valid record. `failed` int64[1 + PLACES_SIZE] also serves as scratch.
    """
    at = 0
    for i in range(count):
        total = record_size(buf, at, buf.size)
        if total < 0:
            failed[0] = at
            return -total
        _locate(buf, at, total, i, count, rows, places, failed)
        at += total
    failed[0] = at
    return 0


@kernel
def locate_at(buf: Bytes, positions: Words, rows: int, places: Words, failed: Words) -> int:
    """`locate_records` for the records that begin at `positions` int64[count] of `buf`."""
    count = positions.size
    for i in range(count):
        at = int(positions[i])
        total = record_size(buf, at, buf.size)
        if total < 0:
            failed[0] = at
            return -total
        if i + _AHEAD < count:
            prefetch_record(buf, int(positions[i + _AHEAD]), at)
        _locate(buf, at, total, i, count, rows, places, failed)
    failed[0] = buf.size
    return 0


@kernel
def copy_int64(buf: Bytes, places: Words, row: int, delta: int, values: Words, first: int, count: int) -> None:
    """Copy the big-endian i64 at each position in `row`, plus `delta`, to values[first] on."""
    for i in range(count):
        values[first + i] = load_be64(buf, int(places[row * count + i]) + delta)


@kernel
def copy_int32(buf: Bytes, places: Words, row: int, delta: int, values: Int32s, first: int, count: int) -> None:
    """Copy the big-endian i32 at each position in `row`, plus `delta`, to values[first] on."""
    for i in range(count):
        values[first + i] = load_be32(buf, int(places[row * count + i]) + delta)


@kernel
def copy_values(
    buf: Bytes, places: Words, row: int, count: int, offsets: Int32s, first: int, data: Bytes, begin: int
) -> int:
    """Copy the values located by `row`, whose sizes are in the next row.

    Returns their total size. `offsets` receives int32[count + 1] at `first`; `data` receives the bytes at `begin`,
    which is offset 0.
    """
    end = 0
    offsets[first] = 0
    for i in range(count):
        size = int(places[(row + 1) * count + i])
        copy_bytes(data, begin + end, buf, int(places[row * count + i]), size)
        end += size
        offsets[first + i + 1] = end
    return end


@kernel
def write_hosts(
    buf: Bytes, places: Words, row: int, count: int, offsets: Int32s, first: int, data: Bytes, begin: int
) -> int:
    """Write the hosts located by `row` as text; `data` needs HOST_TEXT_MAX × count bytes."""
    end = begin
    host_before = 0
    size_before = 0
    offsets[first] = 0
    for i in range(count):
        host = int(places[row * count + i])
        size = int(places[(row + 1) * count + i])
        # Most messages have the host of the previous one: copy its text.
        if size == size_before and same_bytes(buf, host, buf, host_before, size):
            text = begin + int(offsets[first + i - 1])
            copy_bytes(data, end, data, text, end - text)
            end += end - text
        else:
            end = host_text(buf, host, size, data, end)
        host_before = host
        size_before = size
        offsets[first + i + 1] = end - begin
    return end - begin


def rows_of(columns: Iterable[str]) -> int:
    """Rows of the places that these columns need, as a bit mask for `locate_records`.

    Raises ValueError for an unknown column.
    """
    rows = 0
    for name in columns:
        rows |= 1 << place_of(name)[0]
    return rows


def place_of(name: str) -> tuple[int, int]:
    """Row of the places that locates a column, and the distance from it.

    Raises ValueError for an unknown column.
    """
    if name in _FIXED:
        row, delta, _width = _FIXED[name]
        return row, delta
    if name not in _VARIABLE:
        raise ValueError(f"no column is called {name!r}")
    return _VARIABLE[name], 0


def width_of(name: str) -> int:
    """Bytes of a value of a fixed column."""
    return _FIXED[name][2]


def locate(buffer: Buffer, count: int, rows: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], int]:
    """Locate `count` records (−1: all) of a buffer.

    Returns its bytes, the places (see `places_at`), and the count. Raises CorruptStoreError if the bytes are not
    exactly that many records.
    """
    buf = as_kernel_array(buffer)
    failed = np.zeros(1 + PLACES_SIZE, np.int64)
    if count < 0:
        count = count_records(buf, failed)
    # A record is at least as large as its fixed part, which bounds the allocation for a wrong count.
    if count > buf.size // record.FIXED_SIZE_V4:
        raise CorruptStoreError(f"{buf.size:,} bytes are not {count:,} records")
    places = np.empty(PLACE_ROWS * count, np.int64)
    reason = locate_records(buf, count, rows, places, failed)
    if reason != 0:
        raise CorruptStoreError(f"no record at byte {failed[0]:,} of {buf.size:,}: {REASON_NAMES[reason]}")
    if failed[0] != buf.size and (count or buf.size):
        raise CorruptStoreError(f"{count:,} records end at byte {failed[0]:,} of {buf.size:,}")
    return buf, places, count


def places_at(buf: NDArray[np.uint8], positions: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Locate the records that begin at `positions` int64[n] of `buf` uint8[m].

    Places int64[PLACE_ROWS × n]. Only `rows`, a result of `rows_of`, are written. Raises CorruptStoreError if one of
    them is not a valid record.
    """
    failed = np.empty(1 + PLACES_SIZE, np.int64)
    places = np.empty(PLACE_ROWS * len(positions), np.int64)
    reason = locate_at(buf, positions, rows, places, failed)
    if reason != 0:
        raise CorruptStoreError(f"no record at byte {failed[0]:,} of {buf.size:,}: {REASON_NAMES[reason]}")
    return places


def copy_column(buf: NDArray[np.uint8], places: NDArray[np.int64], count: int, name: str) -> Column:
    """Copy one column of the `count` records located by `places`; see the module's docstring."""
    if name in _VARIABLE:
        return _variable(buf, places, count, name)
    row, delta, width = _FIXED[name]
    if width == 8:
        values = np.empty(count, np.int64)
        copy_int64(buf, places, row, delta, values, 0, count)
        return values
    narrow = np.empty(count, np.int32)
    copy_int32(buf, places, row, delta, narrow, 0, count)
    return narrow


def _variable(
    buf: NDArray[np.uint8], places: NDArray[np.int64], count: int, name: str
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    row = _VARIABLE[name]
    offsets = np.empty(count + 1, np.int32)
    if name in _HOST_COLUMNS:
        text = np.empty(HOST_TEXT_MAX * count, np.uint8)
        return offsets, text[: write_hosts(buf, places, row, count, offsets, 0, text, 0)].copy()
    size = int(places[(row + 1) * count : (row + 2) * count].sum())
    if size > _INT32_MAX:
        raise ValueError(f"column {name} of {size:,} bytes exceeds {_INT32_MAX:,}")
    data = np.empty(size, np.uint8)
    copy_values(buf, places, row, count, offsets, 0, data, 0)
    return offsets, data


def warm() -> None:
    """Compile or load these kernels."""
    places = np.zeros(PLACE_ROWS, np.int64)
    buf = np.zeros(128, np.uint8)
    offsets = np.zeros(2, np.int32)
    count_records(buf, places)
    locate_records(buf, 0, 1, places, places)
    locate_at(buf, places[:0], 1, places, places.copy())
    copy_int64(buf, places, 0, 0, places, 0, 1)
    copy_int32(buf, places, 0, 0, offsets, 0, 1)
    copy_values(buf, places, 0, 1, offsets, 0, buf, 0)
    places[1] = record.HOST_V4_SIZE
    write_hosts(buf, places, 0, 1, offsets, 0, np.zeros(HOST_TEXT_MAX, np.uint8), 0)
