"""Decode messages: CommitLog records in Python, and the arrays that kernels make of records.

Offsets come from `mqproc.layout.record`. Message ids are RocketMQ's offset message ids: store host and physical offset
in upper-case hexadecimal.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import struct
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.layout import properties as property_string
from mqproc.layout.record import (
    BLANK_SIZE,
    BODY,
    CRC_NAME,
    CRC_TAIL_SIZE,
    HEAD,
    HOST_V4_SIZE,
    HOST_V6_SIZE,
    IPV6_EXTRA,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
    TAIL,
)
from mqproc.types import StoredMessage

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Structures of the fixed part, by the host bits of the system flag.
_FIXED = {
    born | store: struct.Struct(f"{HEAD.format}{born_size}sq{store_size}s{TAIL.format[1:]}")
    for born, born_size in ((0, HOST_V4_SIZE), (SYS_FLAG_BORN_HOST_V6, HOST_V6_SIZE))
    for store, store_size in ((0, HOST_V4_SIZE), (SYS_FLAG_STORE_HOST_V6, HOST_V6_SIZE))
}
_HOST_BITS: Final = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6
assert _FIXED[0].size == BODY
assert _FIXED[_HOST_BITS].size == BODY + 2 * IPV6_EXTRA
_FIXED_V4 = _FIXED[0]

_BLANK = struct.Struct(">2i")
assert _BLANK.size == BLANK_SIZE
_TOPIC_SIZE = {MAGIC_V2: struct.Struct(">h")}
_PORT = struct.Struct(">i")
_PHYSICAL_OFFSET = struct.Struct(">q")
_decode_array: Final = msgspec.msgpack.Decoder(list[StoredMessage]).decode
_ARRAY: Final = 0x80
"""The first byte of an array of messages is above it, that of a record below."""
_CRC_BEGIN: Final = CRC_NAME + b"\x01"

ID_SIZES: Final = (HOST_V4_SIZE + 8, HOST_V6_SIZE + 8)


Fixed = tuple[int, int, int, int, int, int, int, int, int, bytes, int, bytes, int, int, int]
"""Size, magic, body CRC, queue id, flag, queue offset, physical offset, system flag, born time, born host, store time,
store host, reconsume times, prepared transaction offset, body length."""


def decode_record(buffer: ReadableBuffer, offset: int = 0) -> StoredMessage:
    """Decode the record at `offset`, checked when it was read. Raises CorruptStoreError."""
    data = buffer if type(buffer) is bytes else bytes(memoryview(buffer).cast("B"))
    try:
        return _decode(data, offset)[0]
    except (struct.error, KeyError, IndexError):
        raise CorruptStoreError(f"no record at byte {offset} of {len(data)}") from None


def decode_records(buffer: ReadableBuffer) -> list[StoredMessage]:
    """Decode consecutive records of an answer, whose CRCs were checked when they were read.

    Raises CorruptStoreError if the bytes are not complete records.
    """
    data = bytes(memoryview(buffer).cast("B"))
    messages = []
    offset = 0
    try:
        while offset < len(data):
            message, offset = _decode(data, offset)
            messages.append(message)
    except (struct.error, KeyError, IndexError):
        raise CorruptStoreError(f"no record at byte {offset} of {len(data)}") from None
    if offset != len(data):
        raise CorruptStoreError(f"records end at byte {offset}, not at {len(data)}")
    return messages


class _Reading(threading.local):
    """The class of the messages that this thread decodes now."""

    kind: type[StoredMessage] = StoredMessage


_reading = _Reading()


@contextlib.contextmanager
def messages_as(kind: type[StoredMessage]) -> Iterator[None]:
    """Within the block `messages_of` makes messages of this class, see `message_type`."""
    before, _reading.kind = _reading.kind, kind
    try:
        yield
    finally:
        _reading.kind = before


def current_kind() -> type[StoredMessage]:
    """The class of messages that `messages_of` makes now."""
    return _reading.kind


def messages_of(payload: bytes | memoryview) -> list[StoredMessage]:
    """Decode an array of messages (`kernels/pack.py`), or whole records.

    Raises CorruptStoreError for invalid bytes, such as those of a damaged record that was not checked.
    """
    kind = _reading.kind
    if not payload or payload[0] < _ARRAY:
        messages = decode_records(payload)
        return messages if kind is StoredMessage else [kind(*msgspec.structs.astuple(each)) for each in messages]
    try:
        return _decode_array(payload) if kind is StoredMessage else _decoder_of(kind).decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptStoreError(f"no record, and no array of messages: {error}") from None


@functools.lru_cache(maxsize=16)
def _decoder_of(kind: type[StoredMessage]) -> msgspec.msgpack.Decoder[list[StoredMessage]]:
    return msgspec.msgpack.Decoder(list[kind])  # type: ignore[valid-type]


def fixed_of(head: bytes) -> Fixed:
    """Unpack the fields before the body. Raises struct.error."""
    fixed = _FIXED_V4.unpack_from(head)
    return _FIXED[fixed[7] & _HOST_BITS].unpack_from(head) if fixed[7] & _HOST_BITS else fixed


def topic_places(data: bytes, body_end: int, magic: int) -> tuple[int, int]:
    """Start and end of the topic after a body. Raises struct.error, KeyError, IndexError."""
    if magic == MAGIC_V1:
        return body_end + 1, body_end + 1 + data[body_end]
    (topic_size,) = _TOPIC_SIZE[magic].unpack_from(data, body_end)
    return body_end + 2, body_end + 2 + topic_size


def _decode(data: bytes, offset: int) -> tuple[StoredMessage, int]:
    """Decode a record without checks; returns it and its end.

    Raises struct.error, KeyError, IndexError.
    """
    fixed = _FIXED_V4.unpack_from(data, offset)
    body_start = offset + BODY
    if fixed[7] & _HOST_BITS:
        layout = _FIXED[fixed[7] & _HOST_BITS]
        fixed = layout.unpack_from(data, offset)
        body_start = offset + layout.size
    size, magic, body_crc, queue_id, flag, queue_offset, physical_offset, sys_flag = fixed[:8]
    born_timestamp_ms, born_host, store_timestamp_ms, store_host, reconsume_times, prepared, body_length = fixed[8:]
    body_end = body_start + body_length if body_length > 0 else body_start
    topic_start, topic_end = topic_places(data, body_end, magic)
    end = offset + size
    if not topic_end + 2 <= end <= len(data):
        raise IndexError
    stored = data[topic_end + 2 : end]
    if stored[-CRC_TAIL_SIZE:].startswith(_CRC_BEGIN) and stored.endswith(b"\x02"):
        stored = stored[:-CRC_TAIL_SIZE]
    pairs = property_string.decode(stored.decode("utf-8", "replace"))
    keys = pairs.get(property_string.KEYS)
    message = StoredMessage(
        physical_offset,
        size,
        data[topic_start:topic_end].decode("utf-8", "replace"),
        queue_id,
        queue_offset,
        pairs.get(property_string.TAGS, ""),
        () if keys is None else split_keys(keys) if " " in keys else (keys,),
        flag,
        sys_flag,
        born_timestamp_ms,
        store_timestamp_ms,
        reconsume_times,
        prepared,
        body_crc,
        data[body_start:body_end],
        stored,
        born_host + store_host,
    )
    return message, end


def split_keys(keys: str) -> tuple[str, ...]:
    """Split the value of a KEYS property."""
    return tuple(key for key in keys.split(property_string.KEY_SEPARATOR) if key)


@functools.lru_cache(4096)
def host_hex(host: bytes) -> str:
    """The store host's part of an offset message id."""
    return host.hex().upper()


def host_bytes(address: str, port: int) -> bytes:
    """Encode a host: 4 or 16 bytes of address, then the port."""
    return ipaddress.ip_address(address).packed + _PORT.pack(port)


# Offset message ids.


def decode_message_id(message_id: str) -> tuple[bytes, int]:
    """Decode an offset message id to store host and physical offset. Raises BadRequestError."""
    try:
        data = bytes.fromhex(message_id)
    except ValueError:
        raise BadRequestError(f"message id {message_id[:64]!r} is not hexadecimal") from None
    if len(data) not in ID_SIZES or len(message_id) != 2 * len(data):
        raise BadRequestError(f"message id {message_id[:64]!r} has {len(message_id)} characters, not 32 or 56")
    return data[:-8], _PHYSICAL_OFFSET.unpack(data[-8:])[0]


def encode_blank(size: int) -> bytes:
    """The 8 bytes that end a segment with `size` bytes left."""
    return _BLANK.pack(size, MAGIC_BLANK)


# Messages from values, and changed messages


def stored_message(message_id: str, pairs: Mapping[str, str], *, sys_flag: int, **fields: Any) -> StoredMessage:
    """A message with an offset id, properties and other fields. Raises BadRequestError."""
    store_host, physical_offset = decode_message_id(message_id)
    born_host = bytes(HOST_V6_SIZE if sys_flag & SYS_FLAG_BORN_HOST_V6 else HOST_V4_SIZE)
    texts: dict[str, Any] = {"_properties": property_string.joined(pairs).encode(), "_hosts": born_host + store_host}
    return StoredMessage(physical_offset=physical_offset, sys_flag=sys_flag, **texts, **fields)


def with_properties(message: StoredMessage, pairs: Mapping[str, str], **fields: Any) -> StoredMessage:
    """A message with added properties and other `fields`."""
    stored = property_string.joined({**message.properties, **pairs}).encode()
    return msgspec.structs.replace(message, _properties=stored, **fields)


def as_redelivered(message: StoredMessage, topic: str = "") -> StoredMessage:
    """A message of a retry topic with its original topic, as RocketMQ's clients show it.

    `topic` is for a message that does not name it.
    """
    topic = message.properties.get(property_string.RETRY_TOPIC) or topic
    if not topic:
        return message
    return msgspec.structs.replace(message, topic=topic, _stored_topic=message.stored_topic)
