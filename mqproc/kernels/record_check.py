"""Validate records in place: sizes, magic, own offset and CRCs (layout/record.py).

Every kernel that reads records calls `record_size` first. If it accepts the record, all fields lie inside the record
and the record inside the buffer, whatever the bytes contain.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mqproc.kernels.crc import MASK_31, crc32, load_digits
from mqproc.kernels.jit.compile import inlined, kernel
from mqproc.kernels.jit.intrinsics import load_be16, load_be32, load_be64, load_u8, prefetch
from mqproc.kernels.jit.lowering import Bytes
from mqproc.layout import record

# Reasons for the end of a walk over records, and faults of a record. Returned as negative values in place of a size.
REACHED_STOP, BLANK, ZERO, BAD_MAGIC, BAD_SIZE, BAD_OFFSET, BAD_BODY_CRC, BAD_PROPERTY_CRC = range(8)
REASON_NAMES = (
    *("reached stop", "blank", "zeros", "bad magic", "bad size", "bad offset"),
    *("bad body CRC", "bad property CRC"),
)

# Bits of `verify`: which CRCs are checked in addition to the sizes.
VERIFY_NOTHING = 0
VERIFY_BODY_CRC = 1
VERIFY_PROPERTY_CRC = 2
VERIFY_CRCS = VERIFY_BODY_CRC | VERIFY_PROPERTY_CRC
# Recovery: a zero byte in place of the tail indicates a torn write, since segments are preallocated with zeros.
VERIFY_TORN_TAIL = 4
VERIFY_ALL = VERIFY_CRCS | VERIFY_TORN_TAIL

_NAME_FIRST_8 = int.from_bytes(record.CRC_NAME[:8], "big")
_NAME_END = 1
_PAIR_END = 2
# This many bytes of the name identify a damaged tail; fewer matches occur by chance in other properties.
_NAME_BYTES_LEFT = 5
assert len(record.CRC_NAME) == 8
assert _NAME_FIRST_8 < 1 << 63


@inlined
def born_host_size(sys_flag: int) -> int:
    """Bytes of the born host: 8 for IPv4, 20 for IPv6."""
    return record.HOST_V6_SIZE if sys_flag & record.SYS_FLAG_BORN_HOST_V6 != 0 else record.HOST_V4_SIZE


@inlined
def store_host_size(sys_flag: int) -> int:
    """Bytes of the store host: 8 for IPv4, 20 for IPv6."""
    return record.HOST_V6_SIZE if sys_flag & record.SYS_FLAG_STORE_HOST_V6 != 0 else record.HOST_V4_SIZE


@inlined
def body_length_at(view: Bytes, at: int) -> int:
    """Position of the body length of the record at `at`; the body follows 4 bytes later."""
    sys_flag = load_be32(view, at + record.SYS_FLAG)
    return at + record.BODY_LENGTH - 2 * record.HOST_V4_SIZE + born_host_size(sys_flag) + store_host_size(sys_flag)


@inlined
def store_timestamp_at(view: Bytes, at: int) -> int:
    """Position of the store time of the record at `at`."""
    return at + record.BORN_HOST + born_host_size(load_be32(view, at + record.SYS_FLAG))


@inlined
def topic_length_at(view: Bytes, at: int) -> int:
    """Position of the topic length of the valid record at `at`."""
    length_at = body_length_at(view, at)
    return length_at + 4 + load_be32(view, length_at)


@inlined
def topic_length_size(view: Bytes, at: int) -> int:
    """Bytes of the topic length: 1 in V1, 2 in V2."""
    return 1 if load_be32(view, at + record.MAGIC) == record.MAGIC_V1 else 2


@inlined
def signed_topic_length(view: Bytes, at: int, width: int) -> int:
    """The topic length at `at`, signed as RocketMQ reads it."""
    if width == 2:
        return load_be16(view, at)
    length = load_u8(view, at)
    return length - 256 if length > 127 else length


@inlined
def topic_of(view: Bytes, at: int) -> tuple[int, int]:
    """Position and length of the topic of the valid record at `at`."""
    width = topic_length_size(view, at)
    length_at = topic_length_at(view, at)
    return length_at + width, signed_topic_length(view, length_at, width)


@inlined
def record_size(view: Bytes, at: int, limit: int) -> int:
    """Size of the record at `at` if magic, sizes and end ≤ `limit` are valid, else −reason.

    `view` uint8[≥ limit]. Reads nothing at or beyond `limit`.
    """
    if at < 0 or limit - at < record.BLANK_SIZE:
        return -BAD_SIZE
    total = load_be32(view, at + record.TOTAL_SIZE)
    magic = load_be32(view, at + record.MAGIC)
    if magic == record.MAGIC_BLANK:
        return -BLANK
    if magic != record.MAGIC_V1 and magic != record.MAGIC_V2:
        return -ZERO if total == 0 and magic == 0 else -BAD_MAGIC
    width = 1 if magic == record.MAGIC_V1 else 2
    if total < record.FIXED_SIZE_V4 or total > limit - at:
        return -BAD_SIZE
    length_at = body_length_at(view, at)
    # Bytes left for body, topic and properties.
    room = total - (length_at - at) - 4 - width - 2
    if room < 0:
        return -BAD_SIZE
    body_length = load_be32(view, length_at)
    if body_length < 0 or body_length > room:
        return -BAD_SIZE
    room -= body_length
    topic_at = length_at + 4 + body_length
    topic_length = signed_topic_length(view, topic_at, width)
    if topic_length < 0 or topic_length > room:
        return -BAD_SIZE
    room -= topic_length
    properties_length = load_be16(view, topic_at + width + topic_length)
    return total if max(properties_length, 0) == room else -BAD_SIZE


@inlined
def has_crc_tail(view: Bytes, at: int, total: int) -> bool:
    """Whether the properties of a valid record end with a `__CRC32#` pair."""
    topic, topic_size = topic_of(view, at)
    properties_at = topic + topic_size + 2
    tail = at + total - record.CRC_TAIL_SIZE
    if tail < properties_at:
        return False
    named = load_be64(view, tail) == _NAME_FIRST_8 and load_u8(view, tail + 8) == _NAME_END
    return named and load_u8(view, at + total - 1) == _PAIR_END


@kernel
def has_broken_tail(view: Bytes, at: int, total: int, verify: int) -> bool:
    """Whether a record without a CRC tail seems to have lost it.

    Most of the name, or zero bytes, are in its place. Without this check, damage to the tail would pass for a record
    that never had one.
    """
    topic, topic_size = topic_of(view, at)
    properties_at = topic + topic_size + 2
    tail = at + total - record.CRC_TAIL_SIZE
    if tail < properties_at:
        return False
    equal = 0
    for place in range(8):
        equal += 1 if load_u8(view, tail + place) == (_NAME_FIRST_8 >> (56 - 8 * place)) & 0xFF else 0
    if equal >= _NAME_BYTES_LEFT:
        return True
    if verify & VERIFY_TORN_TAIL != 0:
        for place in range(record.CRC_TAIL_SIZE):
            if load_u8(view, tail + place) == 0:
                return True
    return False


@inlined
def crc_reason(view: Bytes, at: int, total: int, verify: int) -> int:
    """0, BAD_BODY_CRC or BAD_PROPERTY_CRC for a record with valid sizes.

    The property CRC covers the body too, so the body CRC is checked only without one, or to determine the damaged part.
    """
    if verify & VERIFY_PROPERTY_CRC != 0 and has_crc_tail(view, at, total):
        end = at + total
        if load_digits(view, end - 1 - record.CRC_DIGITS) == crc32(view, at, end - record.CRC_TAIL_SIZE) & MASK_31:
            return 0
        return BAD_PROPERTY_CRC if body_crc_matches(view, at) else BAD_BODY_CRC
    if verify & VERIFY_PROPERTY_CRC != 0 and has_broken_tail(view, at, total, verify):
        return BAD_PROPERTY_CRC
    if verify & VERIFY_BODY_CRC != 0 and not body_crc_matches(view, at):
        return BAD_BODY_CRC
    return 0


@inlined
def body_crc_matches(view: Bytes, at: int) -> bool:
    """Whether the body matches its stored CRC, which RocketMQ ignores for an empty body."""
    length_at = body_length_at(view, at)
    body_length = load_be32(view, length_at)
    if body_length == 0:
        return True
    stored = load_be32(view, at + record.BODY_CRC)
    return crc32(view, length_at + 4, length_at + 4 + body_length) & MASK_31 == stored


@inlined
def checked_size(view: Bytes, at: int, limit: int, physical_offset: int, verify: int) -> int:
    """Size of a record that passes all checks, among them its own physical offset, else −reason."""
    total = record_size(view, at, limit)
    if total < 0:
        return total
    if load_be64(view, at + record.PHYSICAL_OFFSET) != physical_offset:
        return -BAD_OFFSET
    reason = crc_reason(view, at, total, verify)
    return -reason if reason != 0 else total


@kernel
def stored_at_ms(view: Bytes, at: int, limit: int, physical_offset: int) -> int:
    """Store time of the record at `at`, −1 if its sizes or its own offset are invalid."""
    if record_size(view, at, limit) < 0 or load_be64(view, at + record.PHYSICAL_OFFSET) != physical_offset:
        return -1
    return load_be64(view, store_timestamp_at(view, at))


# Prefetching.
#
# Walks over records skip the bodies, so hardware prefetchers do not predict the next access. These hints have no effect
# but on caches and cannot fail, whatever address they point to.


RECORDS_AHEAD: Final = 4
"""Prefetch distance of a walk, in records. (With messages of 1 KiB, 3 to 8 perform alike; 2 gains half as much.)"""

_LINE = 64
# Lines read outside the body: usually two at the start of the record and three for topic and properties.
_HEAD_LINES = 2
_TAIL_LINES = 3
_TAIL_BYTES = _TAIL_LINES * _LINE
# Hardware prefetching covers shorter records; hints had no effect there.
_FAR_BYTES = 512


@inlined
def prefetch_bytes(buf: Bytes, at: int, size: int) -> None:
    """Prefetch the cache lines of buf[at:at + size] if they lie in the buffer."""
    if 0 <= at < buf.size - size:
        for line in range(0, size, _LINE):
            prefetch(buf, at + line)


@inlined
def prefetch_record(log: Bytes, at: int, like: int) -> None:
    """Prefetch the record at `at` except its body, assumed to be laid out like that at `like`."""
    topic = topic_length_at(log, like) - like
    if 0 <= at < log.size - topic - _TAIL_BYTES:
        for line in range(_HEAD_LINES):
            prefetch(log, at + _LINE * line)
        for line in range(_TAIL_LINES):
            prefetch(log, at + topic + _LINE * line)


@inlined
def prefetch_stride(log: Bytes, at: int, size: int, size_before: int) -> None:
    """Prefetch RECORDS_AHEAD records ahead of `at` if the last two records have equal sizes."""
    if size == size_before and size >= _FAR_BYTES:
        prefetch_record(log, at + RECORDS_AHEAD * size, at)


def warm() -> None:
    """Compile or load these kernels."""
    view = np.zeros(record.BLANK_SIZE, np.uint8)
    checked_size(view, 0, 0, 0, VERIFY_CRCS)
    stored_at_ms(view, 0, 0, 0)
