"""Decode single CommitLog records in Python, for clients and dump tools.

Offsets come from `mqproc.layout.record`. Message ids are RocketMQ's offset message ids: store host and physical offset
in upper-case hexadecimal.
"""

from __future__ import annotations

import functools
import ipaddress
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.layout import properties as property_string
from mqproc.layout import record as at
from mqproc.layout.record import (
    BLANK_SIZE,
    BODY,
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
from mqproc.types import DraftMessage, StoredMessage

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
_MASK64: Final = (1 << 64) - 1

ID_SIZES: Final = (HOST_V4_SIZE + 8, HOST_V6_SIZE + 8)


Fixed = tuple[int, int, int, int, int, int, int, int, int, bytes, int, bytes, int, int, int]
"""Size, magic, body CRC, queue id, flag, queue offset, physical offset, system flag, born time, born host, store time,
store host, reconsume times, prepared transaction offset, body length."""


def decode_record(buffer: ReadableBuffer, offset: int = 0) -> StoredMessage:
    """Decode the record at `offset`, checked when it was read. Raises CorruptStoreError."""
    data = buffer if type(buffer) is bytes else bytes(memoryview(buffer).cast("B"))
    try:
        return _decode(data, offset, RecordNames())[0]
    except (struct.error, KeyError, IndexError):
        raise CorruptStoreError(f"no record at byte {offset} of {len(data)}") from None


def decode_records(buffer: ReadableBuffer) -> list[StoredMessage]:
    """Decode consecutive records of an answer, whose CRCs were checked when they were read.

    Raises CorruptStoreError if the bytes are not complete records.
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


class RecordNames:
    """Cache of decoded topics and hosts, which most records repeat."""

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
        # Stored last: a thread that finds the host also needs the id.
        self.hosts[host] = text
        return text


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


def _decode(data: bytes, offset: int, names: RecordNames) -> tuple[StoredMessage, int]:
    """Decode a record without checks; returns it and its end.

    Raises struct.error, KeyError, IndexError.
    """
    fixed = _FIXED_V4.unpack_from(data, offset)
    body_start = offset + BODY
    if fixed[7] & _HOST_BITS:
        layout = _FIXED[fixed[7] & _HOST_BITS]
        fixed = layout.unpack_from(data, offset)
        body_start = offset + layout.size
    message: Any = DraftMessage()
    (
        size,
        magic,
        message.body_crc,
        message.queue_id,
        message.flag,
        message.queue_offset,
        physical_offset,
        message.sys_flag,
        message.born_timestamp_ms,
        born_host,
        message.store_timestamp_ms,
        store_host,
        message.reconsume_times,
        message.prepared_transaction_offset,
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
    message.size = size
    message.physical_offset = physical_offset
    message.topic = message.stored_topic = names.topics.get(topic) or names.add_topic(topic)
    message.tag = pairs.get("TAGS", "")
    message.keys = () if keys is None else split_keys(keys) if " " in keys else (keys,)
    message.properties = pairs
    message.born_host = names.hosts.get(born_host) or names.add_host(born_host)
    message.store_host = names.hosts.get(store_host) or names.add_host(store_host)
    message.body = data[body_start:body_end]
    message.message_id = "%s%016X" % (names.ids[store_host], physical_offset & _MASK64)  # noqa: UP031 -- twice as fast
    message.__class__ = StoredMessage
    return message, end


def split_keys(keys: str) -> tuple[str, ...]:
    """Split the value of a KEYS property."""
    return tuple(key for key in keys.split(property_string.KEY_SEPARATOR) if key)


@functools.lru_cache(4096)
def host_text(host: bytes) -> str:
    """A host as `address:port`, an IPv6 address in brackets."""
    address, port = ipaddress.ip_address(host[:-4]), _PORT.unpack(host[-4:])[0]
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


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


# Lazy decoding, for pulled messages.
#
# Creating all fields takes some microseconds, most of them for properties, hosts and ids, which many consumers do not
# use. A message is created with its queue, queue offset and body. The other fields are decoded at the first access to
# one of their group, from the bytes before and after the body, which the message keeps.


# Size, queue id, queue offset, system flag, and the body length if both hosts are IPv4.
_PLACES: Final = struct.Struct(
    f">i{at.QUEUE_ID - 4}xi{at.QUEUE_OFFSET - at.QUEUE_ID - 4}xq{at.SYS_FLAG - at.QUEUE_OFFSET - 8}xi"
    f"{at.BODY_LENGTH - at.SYS_FLAG - 4}xi"
)
assert _PLACES.size == at.BODY
_LENGTH: Final = struct.Struct(">i")
_TEXTS: Final = frozenset({"topic", "stored_topic", "properties", "tag", "keys"})
_HOSTS: Final = frozenset({"message_id", "born_host", "store_host"})


def _setter(name: str) -> Any:
    """Return the slot setter of a frozen message's field."""
    return getattr(StoredMessage, name).__set__


_set_properties, _set_tag, _set_keys = _setter("properties"), _setter("tag"), _setter("keys")
_set_message_id, _set_born_host, _set_store_host = _setter("message_id"), _setter("born_host"), _setter("store_host")
_set_physical_offset, _set_size, _set_topic = _setter("physical_offset"), _setter("size"), _setter("topic")
_set_stored_topic = _setter("stored_topic")
_set_flag, _set_sys_flag = _setter("flag"), _setter("sys_flag")
_set_born_timestamp_ms, _set_store_timestamp_ms = _setter("born_timestamp_ms"), _setter("store_timestamp_ms")
_set_reconsume_times, _set_body_crc = _setter("reconsume_times"), _setter("body_crc")
_set_prepared = _setter("prepared_transaction_offset")


def as_redelivered(message: StoredMessage, topic: str = "") -> StoredMessage:
    """A message of a retry topic with its original topic, as RocketMQ's clients show it.

    `topic` is for a message that does not name it.
    """
    topic = message.properties.get(property_string.RETRY_TOPIC) or topic
    return replace(message, topic=topic) if topic else message


class UnreadRecords:
    """Undecoded records of an answer, converted to messages in batches.

    Messages are created just before use: few exist at a time, in memory that is still cached, and too few to make the
    garbage collector traverse them.
    """

    __slots__ = ("_are_retries", "_count", "_data", "_fields", "_place", "_taken", "_taken_place")

    def __init__(self, buffer: ReadableBuffer, count: int, *, are_retries: bool = False) -> None:
        """Decode `count` checked records; `are_retries`: they are of a group's retry topic."""
        self._are_retries = are_retries
        self._data = bytes(memoryview(buffer).cast("B"))
        self._count = count
        self._fields = _Fields()
        self._place = 0
        # Start position and size of the last batch.
        self._taken_place = 0
        self._taken = 0

    def __len__(self) -> int:
        """Number of remaining records."""
        return self._count

    @property
    def next_queue_offset(self) -> int:
        """Queue offset of the next record, which must exist. Raises CorruptStoreError."""
        try:
            return int(_PLACES.unpack_from(self._data, self._place)[2])
        except struct.error:
            raise self._no_record() from None

    def take(self, most: int) -> list[StoredMessage]:
        """Decode the next messages, at most `most`. Raises CorruptStoreError for invalid bytes."""
        place = self._place
        messages, self._place = _messages(self._data, place, min(most, self._count), self._fields)
        self._taken_place, self._taken = place, len(messages)
        self._count -= len(messages)
        if not messages and (self._count or self._place != len(self._data)):
            raise self._no_record()
        return list(map(as_redelivered, messages)) if self._are_retries else messages

    def put_back(self, queue_offset: int) -> None:
        """Return the messages of the last batch from a queue offset on to the buffer."""
        end, self._place = self._place, self._taken_place
        self._count += self._taken
        self._taken = 0
        while self._place < end and self.next_queue_offset < queue_offset:
            self._place += int(_PLACES.unpack_from(self._data, self._place)[0])
            self._count -= 1

    def _no_record(self) -> CorruptStoreError:
        return CorruptStoreError(f"no record at byte {self._place} of {len(self._data)}")


def lazy_records(buffer: ReadableBuffer) -> list[StoredMessage]:
    """Decode all messages of an answer lazily; CRCs were checked when the records were read.

    Raises CorruptStoreError if the sizes are inconsistent; access to a field raises it for other faults.
    """
    data = bytes(memoryview(buffer).cast("B"))
    messages, end = _messages(data, 0, len(data), _Fields())
    if end != len(data):
        raise CorruptStoreError(f"no record at byte {end} of {len(data)}")
    return messages


def _messages(data: bytes, place: int, most: int, fields: _Fields) -> tuple[list[StoredMessage], int]:
    """Create messages for the records from `place` on, at most `most`.

    Returns them and the end position.
    """
    messages: list[StoredMessage] = []
    append = messages.append
    read = _PLACES.unpack_from
    end = len(data)
    try:
        for _ in range(most):
            if place == end:
                break
            size, queue_id, queue_offset, sys_flag, body_size = read(data, place)
            body = place + at.BODY
            if sys_flag & _HOST_BITS:
                body += _more_of_hosts(sys_flag)
                (body_size,) = _LENGTH.unpack_from(data, body - 4)
            record_end = place + size
            body_end = body + body_size if body_size > 0 else body
            if not body_end < record_end <= end:
                break
            message: Any = DraftMessage()
            message._fields = fields
            message._head = data[place:body]
            message._tail = data[body_end:record_end]
            message.queue_id = queue_id
            message.queue_offset = queue_offset
            message.body = data[body:body_end]
            message.__class__ = StoredMessage
            append(message)
            place = record_end
    except struct.error:
        pass
    return messages, place


def _more_of_hosts(sys_flag: int) -> int:
    """Bytes that the hosts are longer than two IPv4 hosts."""
    return at.IPV6_EXTRA * (bool(sys_flag & at.SYS_FLAG_BORN_HOST_V6) + bool(sys_flag & at.SYS_FLAG_STORE_HOST_V6))


class _Fields:
    """Decode fields of one answer's records; equal topics and hosts share one string."""

    # Created on demand. None instead of an unset slot, since an AttributeError would take longer.
    _names: RecordNames | None = None

    def fill(self, message: StoredMessage, head: bytes, tail: bytes, name: str) -> None:
        """Set a field and the others of its group. Raises CorruptStoreError."""
        names = self._names
        if names is None:
            names = self._names = RecordNames()
        try:
            fixed = fixed_of(head)
            if name in _TEXTS:
                _fill_texts(message, fixed, tail, names)
            elif name in _HOSTS:
                _fill_hosts(message, fixed, names)
            else:
                _fill_numbers(message, fixed)
        except (struct.error, KeyError, IndexError):
            raise CorruptStoreError(f"{name} of the record at {_physical_offset(head)} cannot be read") from None


def _fill_texts(message: StoredMessage, fixed: Fixed, tail: bytes, names: RecordNames) -> None:
    topic_start, topic_end = topic_places(tail, 0, fixed[1])
    if topic_end + 2 > len(tail):
        raise IndexError
    topic = tail[topic_start:topic_end]
    pairs = property_string.decode(tail[topic_end + 2 :].decode("utf-8", "replace"))
    keys = pairs.get(property_string.KEYS)
    name = names.topics.get(topic) or names.add_topic(topic)
    _set_topic(message, name)
    _set_stored_topic(message, name)
    _set_tag(message, pairs.get(property_string.TAGS, ""))
    _set_keys(message, () if keys is None else split_keys(keys))
    _set_properties(message, pairs)


def _fill_hosts(message: StoredMessage, fixed: Fixed, names: RecordNames) -> None:
    born_host, store_host = fixed[9], fixed[11]
    _set_born_host(message, names.hosts.get(born_host) or names.add_host(born_host))
    _set_store_host(message, names.hosts.get(store_host) or names.add_host(store_host))
    _set_message_id(message, f"{names.ids[store_host]}{fixed[6] & _MASK64:016X}")


def _fill_numbers(message: StoredMessage, fixed: Fixed) -> None:
    _set_size(message, fixed[0])
    _set_body_crc(message, fixed[2])
    _set_flag(message, fixed[4])
    _set_physical_offset(message, fixed[6])
    _set_sys_flag(message, fixed[7])
    _set_born_timestamp_ms(message, fixed[8])
    _set_store_timestamp_ms(message, fixed[10])
    _set_reconsume_times(message, fixed[12])
    _set_prepared(message, fixed[13])


def _physical_offset(head: bytes) -> int:
    return int.from_bytes(head[at.PHYSICAL_OFFSET : at.PHYSICAL_OFFSET + 8], "big", signed=True)
