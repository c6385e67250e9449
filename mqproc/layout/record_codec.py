"""One CommitLog record at a time, in plain Python: for clients' objects, dump tools, and as the tests' reference.

Checking follows RocketMQ's `checkMessageAndReturnSize`; its answer is a `RecordCheck`. Offsets come from
`mqproc.layout.record`, ids are the offset message ids of RocketMQ: store host and physical offset in upper-case hex.
"""

from __future__ import annotations

import enum
import functools
import ipaddress
import re
import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mqproc.errors import BadRequestError, CorruptStoreError, MessageTooLargeError, PropertiesTooLargeError
from mqproc.layout import properties as property_string
from mqproc.layout.record import (
    BLANK_SIZE,
    BODY,
    BORN_HOST,
    CRC_DIGITS,
    CRC_NAME,
    CRC_TAIL_SIZE,
    HOST_V4_SIZE,
    HOST_V6_SIZE,
    IPV6_EXTRA,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    PROPERTIES_SIZE_MAX,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
    TOPIC_V1_CHARACTERS_MAX,
)
from mqproc.message import DraftMessage, StoredMessage

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# total, magic, body CRC, queue id, flag, queue offset, physical offset, system flag, born time
_HEAD = ">5i2qiq"
# reconsume times, prepared transaction offset, body length
_TAIL = "iqi"
_HEAD_FIELDS = struct.Struct(_HEAD)
assert _HEAD_FIELDS.size == BORN_HOST
# The whole fixed part, by what the host bits of the system flag say.
_FIXED = {
    born | store: struct.Struct(f"{_HEAD}{born_size}sq{store_size}s{_TAIL}")
    for born, born_size in ((0, HOST_V4_SIZE), (SYS_FLAG_BORN_HOST_V6, HOST_V6_SIZE))
    for store, store_size in ((0, HOST_V4_SIZE), (SYS_FLAG_STORE_HOST_V6, HOST_V6_SIZE))
}
_HOST_BITS: Final = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6
assert _FIXED[0].size == BODY
assert _FIXED[_HOST_BITS].size == BODY + 2 * IPV6_EXTRA
_FIXED_V4 = _FIXED[0]

_BLANK = struct.Struct(">2i")
assert _BLANK.size == BLANK_SIZE
_TOPIC_SIZE = {MAGIC_V1: struct.Struct(">b"), MAGIC_V2: struct.Struct(">h")}
_PROPERTIES_SIZE = struct.Struct(">h")
_PORT = struct.Struct(">i")
_PHYSICAL_OFFSET = struct.Struct(">q")
_CRC_MASK: Final = 0x7FFFFFFF
_MASK64: Final = (1 << 64) - 1

# At the start or behind another pair, so that the name inside a value stays.
_CRC_PAIR: Final = re.compile(rf"(?:^|(?<=\x02)){property_string.CRC32}\x01[^\x02]*\x02?")

ID_SIZES: Final = (HOST_V4_SIZE + 8, HOST_V6_SIZE + 8)


class RecordFault(enum.StrEnum):
    """Why bytes are no record."""

    NO_MAGIC = "no record's magic"
    CUT_SHORT = "lengths reach past the end"
    BODY_CRC = "the body's CRC differs"
    PROPERTY_CRC = "the record's CRC differs"
    LENGTHS_DIFFER = "the total size is not the sum of its parts"


class RecordCheck(NamedTuple):
    """RocketMQ's answer about the bytes at a place: size and success.

    (0, True): a BLANK, the segment ends here. (−1, False): no record. (size, False): the lengths contradict each other.
    (size, True): a record.
    """

    size: int
    success: bool
    fault: RecordFault | None = None


Fixed = tuple[int, int, int, int, int, int, int, int, int, bytes, int, bytes, int, int, int]
"""Size, magic, body CRC, queue id, flag, queue offset, physical offset, system flag, born time, born host, store time,
store host, reconsume times, prepared transaction offset, body length."""


class _Parts(NamedTuple):
    """Places inside one record whose lengths hold."""

    fixed: Fixed
    body_start: int
    topic_start: int
    topic_end: int
    properties_start: int
    end: int


def _parts(data: bytes, offset: int) -> _Parts | RecordFault:
    """Follow the lengths. They may disagree with the total size: the caller compares `end` with it."""
    try:
        magic, sys_flag = _BLANK.unpack_from(data, offset)[1], 0
        topic_size_field = _TOPIC_SIZE.get(magic)
        if topic_size_field is None:
            return RecordFault.NO_MAGIC
        sys_flag = _HEAD_FIELDS.unpack_from(data, offset)[7]
        layout = _FIXED[sys_flag & _HOST_BITS]
        fixed = layout.unpack_from(data, offset)
        body_start = offset + layout.size
        body_end = body_start + max(fixed[14], 0)
        (topic_size,) = topic_size_field.unpack_from(data, body_end)
        topic_start = body_end + topic_size_field.size
        topic_end = topic_start + topic_size
        (properties_size,) = _PROPERTIES_SIZE.unpack_from(data, topic_end)
    except struct.error:
        return RecordFault.CUT_SHORT
    properties_start = topic_end + _PROPERTIES_SIZE.size
    end = properties_start + max(properties_size, 0)
    if topic_size < 0 or fixed[0] < 0 or body_end - body_start > fixed[0] or end > len(data):
        return RecordFault.CUT_SHORT
    return _Parts(fixed, body_start, topic_start, topic_end, properties_start, end)


def check_record(
    buffer: ReadableBuffer, offset: int = 0, *, check_crc: bool = True, check_property_crc: bool = False
) -> RecordCheck:
    """What lies at `offset`. With `check_property_crc` the record's own CRC is demanded instead of the body's."""
    data = buffer if type(buffer) is bytes else bytes(memoryview(buffer).cast("B"))
    if offset < 0 or len(data) - offset < BLANK_SIZE:
        return RecordCheck(-1, False, RecordFault.CUT_SHORT)
    if _BLANK.unpack_from(data, offset)[1] == MAGIC_BLANK:
        return RecordCheck(0, True)
    parts = _parts(data, offset)
    if isinstance(parts, RecordFault):
        return RecordCheck(-1, False, parts)
    total, body_crc, body_length = parts.fixed[0], parts.fixed[2], parts.fixed[14]
    if check_crc and not check_property_crc and body_length > 0 and crc31(_body(data, parts)) != body_crc:
        return RecordCheck(-1, False, RecordFault.BODY_CRC)
    if check_property_crc and property_crc(data[parts.properties_start : parts.end]) != record_crc(
        data[offset : parts.end]
    ):
        return RecordCheck(-1, False, RecordFault.PROPERTY_CRC)
    if parts.end - offset != total:
        return RecordCheck(total, False, RecordFault.LENGTHS_DIFFER)
    return RecordCheck(total, True)


def _body(data: bytes, parts: _Parts) -> bytes:
    return data[parts.body_start : parts.body_start + max(parts.fixed[14], 0)]


def crc31(data: ReadableBuffer) -> int:
    """RocketMQ's CRC: CRC-32 without its highest bit, 0 for nothing."""
    return zlib.crc32(data) & _CRC_MASK


def record_crc(record: bytes) -> int:
    """The CRC over a whole record but the tail that holds it."""
    return crc31(record[:-CRC_TAIL_SIZE])


def property_crc(properties: bytes) -> int | None:
    """The CRC in a properties string's tail, None when there is none."""
    tail = properties[-CRC_TAIL_SIZE:]
    digits = tail[len(CRC_NAME) + 1 : -1]
    if len(tail) < CRC_TAIL_SIZE or not tail.startswith(CRC_NAME + b"\x01") or tail[-1:] != b"\x02":
        return None
    return int(digits[::-1]) if digits.isdigit() else None


def crc_tail(crc: int) -> bytes:
    """The property that holds a record's CRC: ten digits, the least significant first."""
    return CRC_NAME + b"\x01" + f"{crc:0{CRC_DIGITS}d}"[::-1].encode() + b"\x02"


# Decoding


def decode_record(buffer: ReadableBuffer, offset: int = 0, *, check_crc: bool = True) -> StoredMessage:
    """The record at `offset` as an object. Raises CorruptStoreError when there is none, a BLANK included."""
    data = buffer if type(buffer) is bytes else bytes(memoryview(buffer).cast("B"))
    check = check_record(data, offset, check_crc=check_crc)
    if not check.success:
        raise CorruptStoreError(f"no record at byte {offset}: {check.fault}")
    if check.size == 0:
        raise CorruptStoreError(f"no record at byte {offset}: the segment ends here (BLANK)")
    return _decode(data, offset, RecordNames())[0]


def decode_records(buffer: ReadableBuffer) -> list[StoredMessage]:
    """Whole records one after the other, as an answer holds them; CRCs were checked where they were read.

    Raises CorruptStoreError when the bytes are not that.
    """
    data = bytes(memoryview(buffer).cast("B"))
    messages = []
    offset = 0
    names = RecordNames()
    try:
        while offset < len(data):
            message, offset = _decode(data, offset, names)
            messages.append(message)
    except (struct.error, KeyError, IndexError):
        raise CorruptStoreError(f"no record at byte {offset} of {len(data)}") from None
    if offset != len(data):
        raise CorruptStoreError(f"records end at byte {offset}, not at {len(data)}")
    return messages


def iterate_records(buffer: ReadableBuffer, offset: int = 0) -> Iterator[tuple[int, StoredMessage]]:
    """Records of a segment with their places, up to its BLANK or to the first bytes that are none."""
    data = bytes(memoryview(buffer).cast("B"))
    names = RecordNames()
    while (check := check_record(data, offset)).success and check.size:
        yield offset, _decode(data, offset, names)[0]
        offset += check.size


class RecordNames:
    """Texts of topics and hosts already met: most records repeat them."""

    __slots__ = ("hosts", "ids", "topics")

    def __init__(self) -> None:
        self.topics: dict[bytes, str] = {}
        self.hosts: dict[bytes, str] = {}
        self.ids: dict[bytes, str] = {}  # store host → first part of an offset message id

    def add_topic(self, topic: bytes) -> str:
        text = self.topics[topic] = topic.decode("utf-8", "replace")
        return text

    def add_host(self, host: bytes) -> str:
        text = host_text(host)
        self.ids[host] = host_hex(host)
        # Last: another thread that finds the host takes its id to be there.
        self.hosts[host] = text
        return text


class _Draft(DraftMessage):
    __slots__ = ()

    def __init__(
        self: Any,
        message_id: str,
        physical_offset: int,
        size: int,
        topic: str,
        queue_id: int,
        queue_offset: int,
        tag: str,
        keys: tuple[str, ...],
        properties: dict[str, str],
        flag: int,
        sys_flag: int,
        born_timestamp_ms: int,
        born_host: str,
        store_timestamp_ms: int,
        store_host: str,
        reconsume_times: int,
        prepared_transaction_offset: int,
        body_crc: int,
        body: bytes,
    ) -> None:
        self.message_id = message_id
        self.physical_offset = physical_offset
        self.size = size
        self.topic = topic
        self.queue_id = queue_id
        self.queue_offset = queue_offset
        self.tag = tag
        self.keys = keys
        self.properties = properties
        self.flag = flag
        self.sys_flag = sys_flag
        self.born_timestamp_ms = born_timestamp_ms
        self.born_host = born_host
        self.store_timestamp_ms = store_timestamp_ms
        self.store_host = store_host
        self.reconsume_times = reconsume_times
        self.prepared_transaction_offset = prepared_transaction_offset
        self.body_crc = body_crc
        self.body = body


def fixed_of(head: bytes) -> Fixed:
    """The fields before the body. Raises struct.error."""
    fixed = _FIXED_V4.unpack_from(head)
    return _FIXED[fixed[7] & _HOST_BITS].unpack_from(head) if fixed[7] & _HOST_BITS else fixed


def topic_places(data: bytes, body_end: int, magic: int) -> tuple[int, int]:
    """Where the topic behind a body begins and ends. Raises struct.error, KeyError, IndexError."""
    if magic == MAGIC_V1:
        return body_end + 1, body_end + 1 + data[body_end]
    (topic_size,) = _TOPIC_SIZE[magic].unpack_from(data, body_end)
    return body_end + 2, body_end + 2 + topic_size


def _decode(data: bytes, offset: int, names: RecordNames) -> tuple[StoredMessage, int]:
    """The record at `offset` and where the next begins. Lengths are believed: struct.error, KeyError, IndexError."""
    fixed = _FIXED_V4.unpack_from(data, offset)
    body_start = offset + BODY
    if fixed[7] & _HOST_BITS:
        layout = _FIXED[fixed[7] & _HOST_BITS]
        fixed = layout.unpack_from(data, offset)
        body_start = offset + layout.size
    (
        size,
        magic,
        body_crc,
        queue_id,
        flag,
        queue_offset,
        physical_offset,
        sys_flag,
        born_timestamp_ms,
        born_host,
        store_timestamp_ms,
        store_host,
        reconsume_times,
        prepared_transaction_offset,
        body_length,
    ) = fixed
    body_end = body_start + body_length if body_length > 0 else body_start
    topic_start, topic_end = topic_places(data, body_end, magic)
    end = offset + size
    if not topic_end + 2 <= end <= len(data):
        raise IndexError
    pairs = {}
    for part in data[topic_end + 2 : end].decode("utf-8", "replace").split("\x02"):
        name, _, value = part.partition("\x01")
        if value and name:
            pairs[name] = value
    pairs.pop("__CRC32#", None)
    keys = pairs.get("KEYS")
    topic = data[topic_start:topic_end]
    message: Any = _Draft(
        "",
        physical_offset,
        size,
        names.topics.get(topic) or names.add_topic(topic),
        queue_id,
        queue_offset,
        pairs.get("TAGS", ""),
        () if keys is None else split_keys(keys) if " " in keys else (keys,),
        pairs,
        flag,
        sys_flag,
        born_timestamp_ms,
        names.hosts.get(born_host) or names.add_host(born_host),
        store_timestamp_ms,
        names.hosts.get(store_host) or names.add_host(store_host),
        reconsume_times,
        prepared_transaction_offset,
        body_crc,
        data[body_start:body_end],
    )
    message.message_id = "%s%016X" % (names.ids[store_host], physical_offset & _MASK64)  # noqa: UP031 -- twice as fast
    message.__class__ = StoredMessage
    return message, end


def split_keys(keys: str) -> tuple[str, ...]:
    """The keys of a KEYS property."""
    return tuple(key for key in keys.split(property_string.KEY_SEPARATOR) if key)


@functools.lru_cache(4096)
def host_text(host: bytes) -> str:
    """A record's host as `address:port`, an IPv6 address in brackets."""
    address, port = ipaddress.ip_address(host[:-4]), _PORT.unpack(host[-4:])[0]
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


@functools.lru_cache(4096)
def host_hex(host: bytes) -> str:
    """The part of an offset message id that comes from the store host."""
    return host.hex().upper()


def host_bytes(address: str, port: int) -> bytes:
    """A host as it is stored: 4 or 16 bytes of address, then the port."""
    return ipaddress.ip_address(address).packed + _PORT.pack(port)


# Offset message ids


def encode_message_id(store_host: bytes, physical_offset: int) -> str:
    """RocketMQ's offset message id: 32 characters for an IPv4 store host, 56 for IPv6."""
    return host_hex(bytes(store_host)) + _PHYSICAL_OFFSET.pack(physical_offset).hex().upper()


def decode_message_id(message_id: str) -> tuple[bytes, int]:
    """Store host and physical offset of an offset message id. Raises BadRequestError when it is none."""
    try:
        data = bytes.fromhex(message_id)
    except ValueError:
        raise BadRequestError(f"message id {message_id[:64]!r} is not hexadecimal") from None
    if len(data) not in ID_SIZES or len(message_id) != 2 * len(data):
        raise BadRequestError(f"message id {message_id[:64]!r} has {len(message_id)} characters, not 32 or 56")
    return data[:-8], _PHYSICAL_OFFSET.unpack(data[-8:])[0]


# Encoding


def encode_record(
    *,
    topic: str,
    body: bytes,
    properties: str = "",
    queue_id: int = 0,
    flag: int = 0,
    queue_offset: int = 0,
    physical_offset: int = 0,
    sys_flag: int = 0,
    born_timestamp_ms: int = 0,
    born_host: bytes = b"\x7f\0\0\x01\0\0\0\0",
    store_timestamp_ms: int = 0,
    store_host: bytes = b"\x7f\0\0\x01\0\0\0\0",
    reconsume_times: int = 0,
    prepared_transaction_offset: int = 0,
    append_crc: bool = False,
) -> bytes:
    """A whole record. `properties` is the encoded string; with `append_crc` the record's CRC becomes its last pair.

    The host bits of the system flag follow the hosts; V2 is chosen as RocketMQ does, by the topic's characters.
    """
    sys_flag = _with_host_bits(sys_flag, born_host, store_host)
    magic = MAGIC_V2 if len(topic.encode("utf-16-le")) // 2 > TOPIC_V1_CHARACTERS_MAX else MAGIC_V1
    property_bytes = without_crc(properties).encode()
    if append_crc:
        if property_bytes and not property_bytes.endswith(b"\x02"):
            property_bytes += b"\x02"
        property_bytes += bytes(CRC_TAIL_SIZE)
    if len(property_bytes) > PROPERTIES_SIZE_MAX:
        raise PropertiesTooLargeError(f"properties of {len(property_bytes):,} bytes exceed {PROPERTIES_SIZE_MAX:,}")
    variable = _variable_part(magic, body, topic.encode(), property_bytes)
    layout = _FIXED[sys_flag & _HOST_BITS]
    head = layout.pack(
        layout.size + len(variable),
        magic,
        crc31(body),
        queue_id,
        flag,
        queue_offset,
        physical_offset,
        sys_flag,
        born_timestamp_ms,
        born_host,
        store_timestamp_ms,
        store_host,
        reconsume_times,
        prepared_transaction_offset,
        len(body),
    )
    record = head + variable
    return record[:-CRC_TAIL_SIZE] + crc_tail(record_crc(record)) if append_crc else record


def _with_host_bits(sys_flag: int, born_host: bytes, store_host: bytes) -> int:
    born = SYS_FLAG_BORN_HOST_V6 if len(born_host) == HOST_V6_SIZE else 0
    store = SYS_FLAG_STORE_HOST_V6 if len(store_host) == HOST_V6_SIZE else 0
    return sys_flag & ~_HOST_BITS | born | store


def _variable_part(magic: int, body: bytes, topic: bytes, properties: bytes) -> bytes:
    try:
        topic_size = _TOPIC_SIZE[magic].pack(len(topic))
    except struct.error:
        raise MessageTooLargeError(f"topic of {len(topic)} bytes does not fit its length field") from None
    return b"".join((body, topic_size, topic, _PROPERTIES_SIZE.pack(len(properties)), properties))


def encode_blank(size: int) -> bytes:
    """The 8 bytes that end a segment of which `size` bytes are left."""
    return _BLANK.pack(size, MAGIC_BLANK)


def without_crc(properties: str) -> str:
    """An encoded string without CRC pairs: a record's CRC is made anew, never taken over."""
    return _CRC_PAIR.sub("", properties) if property_string.CRC32 in properties else properties
