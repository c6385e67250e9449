"""Records as messages that are decoded no further than they are looked at: what clients get of a pull.

Making an object of every field of a record takes some microseconds, most of them for properties, hosts and ids that
many consumers never look at. Here a message is made with its place in its queue and its body. The other fields are
read when one of their group is asked for first, out of the bytes before and behind the body, which the message keeps.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

from mqproc.errors import CorruptStoreError
from mqproc.layout import properties as property_string
from mqproc.layout import record as at
from mqproc.layout.record_codec import Fixed, RecordNames, fixed_of, split_keys, topic_places
from mqproc.message import DraftMessage, StoredMessage

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# size, queue id, queue offset, system flag, and the body's length if both hosts are IPv4
_PLACES: Final = struct.Struct(
    f">i{at.QUEUE_ID - 4}xi{at.QUEUE_OFFSET - at.QUEUE_ID - 4}xq{at.SYS_FLAG - at.QUEUE_OFFSET - 8}xi"
    f"{at.BODY_LENGTH - at.SYS_FLAG - 4}xi"
)
assert _PLACES.size == at.BODY
_HOST_BITS: Final = at.SYS_FLAG_BORN_HOST_V6 | at.SYS_FLAG_STORE_HOST_V6
_LENGTH: Final = struct.Struct(">i")
_TEXTS: Final = frozenset({"topic", "properties", "tag", "keys"})
_HOSTS: Final = frozenset({"message_id", "born_host", "store_host"})
_MASK64: Final = (1 << 64) - 1


def _setter(name: str) -> Any:
    """Sets a field of a frozen message."""
    return getattr(StoredMessage, name).__set__


_set_properties, _set_tag, _set_keys = _setter("properties"), _setter("tag"), _setter("keys")
_set_message_id, _set_born_host, _set_store_host = _setter("message_id"), _setter("born_host"), _setter("store_host")
_set_physical_offset, _set_size, _set_topic = _setter("physical_offset"), _setter("size"), _setter("topic")
_set_flag, _set_sys_flag = _setter("flag"), _setter("sys_flag")
_set_born_timestamp_ms, _set_store_timestamp_ms = _setter("born_timestamp_ms"), _setter("store_timestamp_ms")
_set_reconsume_times, _set_body_crc = _setter("reconsume_times"), _setter("body_crc")
_set_prepared = _setter("prepared_transaction_offset")


class UnreadRecords:
    """Whole records one after the other, as an answer holds them, which become messages some at a time.

    So messages are made just before they are used: few of them live at once, in memory that is still in the
    processor's caches, and too few for Python's garbage collector to go over them.
    """

    __slots__ = ("_count", "_data", "_fields", "_place", "_taken", "_taken_place")

    def __init__(self, buffer: ReadableBuffer, count: int) -> None:
        """`count` records, checked where they were read."""
        self._data = bytes(memoryview(buffer).cast("B"))
        self._count = count
        self._fields = _Fields()
        self._place = 0
        # The last `take`: where it began, and how many it gave.
        self._taken_place = 0
        self._taken = 0

    def __len__(self) -> int:
        """How many are left."""
        return self._count

    @property
    def next_queue_offset(self) -> int:
        """The queue offset of the next one; there is one. Raises CorruptStoreError."""
        try:
            return int(_PLACES.unpack_from(self._data, self._place)[2])
        except struct.error:
            raise self._no_record() from None

    def take(self, most: int) -> list[StoredMessage]:
        """The next messages, at most so many; none behind the last one. Raises CorruptStoreError where no record is."""
        place = self._place
        messages, self._place = _messages(self._data, place, min(most, self._count), self._fields)
        self._taken_place, self._taken = place, len(messages)
        self._count -= len(messages)
        if not messages and (self._count or self._place != len(self._data)):
            raise self._no_record()
        return messages

    def put_back(self, queue_offset: int) -> None:
        """What the last `take` gave from a queue offset on comes again."""
        end, self._place = self._place, self._taken_place
        self._count += self._taken
        self._taken = 0
        while self._place < end and self.next_queue_offset < queue_offset:
            self._place += int(_PLACES.unpack_from(self._data, self._place)[0])
            self._count -= 1

    def _no_record(self) -> CorruptStoreError:
        return CorruptStoreError(f"no record at byte {self._place} of {len(self._data)}")


def lazy_records(buffer: ReadableBuffer) -> list[StoredMessage]:
    """All messages of whole records one after the other, as an answer holds them; checked where they were read.

    Raises CorruptStoreError when the sizes are not theirs; what else is wrong with one is raised by its fields.
    """
    data = bytes(memoryview(buffer).cast("B"))
    messages, end = _messages(data, 0, len(data), _Fields())
    if end != len(data):
        raise CorruptStoreError(f"no record at byte {end} of {len(data)}")
    return messages


def _messages(data: bytes, place: int, most: int, fields: _Fields) -> tuple[list[StoredMessage], int]:
    """Messages of the records from `place` on, up to so many or to the first bytes that are none; and where that is."""
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
    """By how many bytes the hosts are longer than two of IPv4."""
    return at.IPV6_EXTRA * (bool(sys_flag & at.SYS_FLAG_BORN_HOST_V6) + bool(sys_flag & at.SYS_FLAG_STORE_HOST_V6))


class _Fields:
    """Reads the fields of one answer's records; topics and hosts that repeat become the same text."""

    # Made when a field is asked for first. A slot that is not set would tell that by an error, which takes longer.
    _names: RecordNames | None = None

    def fill(self, message: StoredMessage, head: bytes, tail: bytes, name: str) -> None:
        """Set a field and its group. Raises CorruptStoreError."""
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
    _set_topic(message, names.topics.get(topic) or names.add_topic(topic))
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
