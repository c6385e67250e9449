"""Write records as a MessagePack array of messages, which clients decode into objects.

    [[fields of the first message], [fields of the second], …]        each field as in types.StoredMessage

The first byte of an array is above 0x7F and that of a record is not: a client sees which an answer holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from mqproc.kernels.jit.compile import inlined, kernel
from mqproc.kernels.jit.intrinsics import (
    copy_bytes,
    load_be32,
    load_be64,
    load_le64,
    load_u8,
    store_be16,
    store_be32,
    store_be64,
)
from mqproc.kernels.jit.lowering import Bytes, Words, as_kernel_array
from mqproc.kernels.record_check import (
    body_length_at,
    born_host_size,
    record_size,
    store_host_size,
    topic_of,
)
from mqproc.kernels.record_fields import (
    HIGH_BITS,
    KEYS_AT,
    KEYS_SIZE,
    PLACES_SIZE,
    TAG_AT,
    TAG_SIZE,
    find_byte,
    find_tags_and_keys,
    properties_end,
)
from mqproc.layout import properties, record
from mqproc.types import StoredMessage

REFUSED: Final = -1
# State, after the places of tag and keys.
COUNT: Final = PLACES_SIZE
STATE_SIZE: Final = PLACES_SIZE + 1

_SPACE = ord(properties.KEY_SEPARATOR)
# MessagePack's first bytes.
_FIXSTR, _FIXSTR_MAX, _FIXINT_MAX = 0xA0, 31, 0x7F
_BIN8, _BIN16, _BIN32, _INT32, _INT64, _STR16, _ARRAY16, _ARRAY32 = 0xC4, 0xC5, 0xC6, 0xD2, 0xD3, 0xDA, 0xDC, 0xDD
_FIELDS = 17
_FIELDS_IN_ORDER = (
    *("physical_offset", "size", "topic", "queue_id", "queue_offset", "tag", "keys", "flag", "sys_flag"),
    *("born_timestamp_ms", "store_timestamp_ms", "reconsume_times", "prepared_transaction_offset", "body_crc"),
    *("body", "_properties", "_hosts"),
)
assert StoredMessage.__struct_fields__[:_FIELDS] == _FIELDS_IN_ORDER
_EXTRA_BYTES: Final = 64
"""A message has at most so many bytes more than its record, besides tag and keys."""
HEADER_SIZE: Final = 5


@kernel
def is_utf8(buf: Bytes, at: int, stop: int) -> bool:
    """Whether buf[at:stop] is valid UTF-8, as Python's strict decoder defines it."""
    while at < stop:
        if at + 8 <= stop and load_le64(buf, at) & HIGH_BITS == 0:
            at += 8
            continue
        lead = load_u8(buf, at)
        if lead < 0x80:
            at += 1
            continue
        if lead < 0xC2 or lead > 0xF4:
            return False
        size = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        if at + size > stop:
            return False
        low = 0xA0 if lead == 0xE0 else 0x90 if lead == 0xF0 else 0x80
        high = 0x9F if lead == 0xED else 0x8F if lead == 0xF4 else 0xBF
        second = load_u8(buf, at + 1)
        if second < low or second > high:
            return False
        for place in range(at + 2, at + size):
            if load_u8(buf, place) & 0xC0 != 0x80:
                return False
        at += size
    return True


@inlined
def _put_32(out: Bytes, at: int, value: int) -> int:
    if 0 <= value <= _FIXINT_MAX:
        out[at] = value
        return at + 1
    out[at] = _INT32
    store_be32(out, at + 1, value)
    return at + 5


@inlined
def _put_64(out: Bytes, at: int, value: int) -> int:
    if 0 <= value <= _FIXINT_MAX:
        out[at] = value
        return at + 1
    out[at] = _INT64
    store_be64(out, at + 1, value)
    return at + 9


@inlined
def _put_text(out: Bytes, at: int, buf: Bytes, start: int, size: int) -> int:
    if size <= _FIXSTR_MAX:
        out[at] = _FIXSTR | size
        at += 1
    else:
        out[at] = _STR16
        store_be16(out, at + 1, size)
        at += 3
    copy_bytes(out, at, buf, start, size)
    return at + size


@inlined
def _put_keys(out: Bytes, at: int, buf: Bytes, start: int, stop: int) -> int:
    """Write the words of buf[start:stop] as an array of texts."""
    head = at
    out[head] = _ARRAY16
    at += 3
    count = 0
    while start < stop:
        end = find_byte(buf, start, stop, _SPACE)
        if end > start:
            at = _put_text(out, at, buf, start, end - start)
            count += 1
        start = end + 1
    store_be16(out, head + 1, count)
    return at


@kernel
def pack_messages(records: Bytes, out: Bytes, at: int, state: Words) -> int:
    """Write the messages of whole records into `out` from `at` on; returns the end.

    `records` and `out` uint8, `state` int64[STATE_SIZE]; adds to state[COUNT]. REFUSED if a record's sizes are wrong,
    its topic, tag or keys are not UTF-8, or `out` might be too short.
    """
    place = 0
    while place < records.size:
        total = record_size(records, place, records.size)
        if total < 0:
            return REFUSED
        length_at = body_length_at(records, place)
        body_size = load_be32(records, length_at)
        topic, topic_size = topic_of(records, place)
        start = topic + topic_size + 2
        stop = properties_end(records, place, total)
        find_tags_and_keys(records, start, stop, state, 0)
        tag, tag_size = int(state[TAG_AT]), int(state[TAG_SIZE])
        keys, keys_size = int(state[KEYS_AT]), int(state[KEYS_SIZE])
        # A key has a header of one byte up to 31 bytes, of three otherwise, in place of its separator.
        if at + total + _EXTRA_BYTES + tag_size + keys_size + keys_size // 8 > out.size:
            return REFUSED
        if not (
            is_utf8(records, topic, topic + topic_size)
            and is_utf8(records, tag, tag + tag_size)
            and is_utf8(records, keys, keys + keys_size)
        ):
            return REFUSED
        sys_flag = load_be32(records, place + record.SYS_FLAG)
        born_size, store_size = born_host_size(sys_flag), store_host_size(sys_flag)
        born_host = place + record.BORN_HOST
        stored = born_host + born_size
        store_host = stored + 8
        reconsumed = store_host + store_size
        out[at] = _ARRAY16
        store_be16(out, at + 1, _FIELDS)
        at = _put_64(out, at + 3, load_be64(records, place + record.PHYSICAL_OFFSET))
        at = _put_32(out, at, total)
        at = _put_text(out, at, records, topic, topic_size)
        at = _put_32(out, at, load_be32(records, place + record.QUEUE_ID))
        at = _put_64(out, at, load_be64(records, place + record.QUEUE_OFFSET))
        at = _put_text(out, at, records, tag, tag_size)
        at = _put_keys(out, at, records, keys, keys + keys_size)
        at = _put_32(out, at, load_be32(records, place + record.FLAG))
        at = _put_32(out, at, sys_flag)
        at = _put_64(out, at, load_be64(records, place + record.BORN_TIMESTAMP))
        at = _put_64(out, at, load_be64(records, stored))
        at = _put_32(out, at, load_be32(records, reconsumed))
        at = _put_64(out, at, load_be64(records, reconsumed + 4))
        at = _put_32(out, at, load_be32(records, place + record.BODY_CRC))
        out[at] = _BIN32
        store_be32(out, at + 1, body_size)
        copy_bytes(out, at + 5, records, length_at + 4, body_size)
        at += 5 + body_size
        out[at] = _BIN16
        store_be16(out, at + 1, stop - start)
        copy_bytes(out, at + 3, records, start, stop - start)
        at += 3 + stop - start
        out[at] = _BIN8
        out[at + 1] = born_size + store_size
        copy_bytes(out, at + 2, records, born_host, born_size)
        copy_bytes(out, at + 2 + born_size, records, store_host, store_size)
        at += 2 + born_size + store_size
        state[COUNT] += 1
        place += total
    return at


def packed(parts: Sequence[memoryview], bytes_max: int) -> memoryview | None:
    """Messages of whole records as one array; None when the records must be sent as they are.

    It has at most `bytes_max` bytes, and at most half more than the records.
    """
    size = sum(part.nbytes for part in parts)
    out = np.empty(max(HEADER_SIZE, min(size + size // 2 + _EXTRA_BYTES, bytes_max)), np.uint8)
    state = np.zeros(STATE_SIZE, np.int64)
    end = HEADER_SIZE
    for part in parts:
        records = np.frombuffer(part, np.uint8)
        end = pack_messages(as_kernel_array(records) if part.readonly else records, out, end, state)
        if end == REFUSED:
            return None
    out[:HEADER_SIZE] = np.frombuffer(bytes([_ARRAY32]) + int(state[COUNT]).to_bytes(4, "big"), np.uint8)
    return out[:end].data


def warm() -> None:
    """Compile or load these kernels."""
    empty = np.zeros(0, np.uint8)
    pack_messages(empty, empty, 0, np.zeros(STATE_SIZE, np.int64))
