"""A parked record as the message that is delivered when its time has come.

As RocketMQ delivers it: the original topic and queue, same body, flag, born data, reconsume times and sys flag, and the
whole properties string, `DELAY`, `REAL_TOPIC`, `REAL_QID` included. What it adds is in `preparedTransactionOffset`: the
mark of the parked record, by which the keeper finds out which deliveries a killed one had made.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from mqproc.layout import record
from mqproc.layout.properties import NAME_END, PAIR_END, REAL_QID, REAL_TOPIC
from mqproc.process.appender import NewMessage
from mqproc.store.delays.made_from import mark_of

_HEAD: Final = struct.Struct(">iiiiiqqiq")  # total size … born time
_TAIL: Final = struct.Struct(">iqi")  # reconsume times, prepared offset, body length
_SHORT: Final = struct.Struct(">H")
_HOST_BITS: Final = record.SYS_FLAG_BORN_HOST_V6 | record.SYS_FLAG_STORE_HOST_V6
_PAIR_END: Final = PAIR_END.encode()
_REAL_TOPIC: Final = f"{PAIR_END}{REAL_TOPIC}{NAME_END}".encode()
_REAL_QID: Final = f"{PAIR_END}{REAL_QID}{NAME_END}".encode()
_CRC_START: Final = record.CRC_NAME + NAME_END.encode()


def released(records: bytes) -> Iterator[NewMessage | None]:
    """The messages of whole records that lie one after the other; None for one that names no topic to go to."""
    at = 0
    while at < len(records):
        size, message = _released(records, at)
        yield message
        at += size


def _released(data: bytes, at: int) -> tuple[int, NewMessage | None]:
    total, magic, _crc, _queue, flag, _offset, physical_offset, sys_flag, born_ms = _HEAD.unpack_from(data, at)
    born_size = record.HOST_V6_SIZE if sys_flag & record.SYS_FLAG_BORN_HOST_V6 else record.HOST_V4_SIZE
    store_size = record.HOST_V6_SIZE if sys_flag & record.SYS_FLAG_STORE_HOST_V6 else record.HOST_V4_SIZE
    host_at = at + record.BORN_HOST
    tail_at = host_at + born_size + 8 + store_size
    reconsume_times, _prepared, body_size = _TAIL.unpack_from(data, tail_at)
    body_at = tail_at + _TAIL.size
    topic_at = body_at + body_size
    if magic == record.MAGIC_V1:
        topic_end = topic_at + 1 + data[topic_at]
    else:
        topic_end = topic_at + 2 + _SHORT.unpack_from(data, topic_at)[0]
    properties = data[topic_end + 2 : at + total]
    if properties[-record.CRC_TAIL_SIZE :].startswith(_CRC_START):
        properties = properties[: -record.CRC_TAIL_SIZE]
    topic, queue_id = _value(properties, _REAL_TOPIC), _value(properties, _REAL_QID)
    if not topic or not queue_id.isdigit():
        return total, None
    return total, NewMessage(
        topic.decode(),
        data[body_at:topic_at],
        properties,
        int(queue_id),
        flag,
        sys_flag & ~_HOST_BITS,
        born_ms,
        data[host_at : host_at + born_size],
        reconsume_times,
        mark_of(physical_offset),
    )


def _value(properties: bytes, name: bytes) -> bytes:
    """A property's value; `name` has the end of the pair before it in front. The last of a name counts."""
    at = properties.rfind(name)
    if at >= 0:
        at += len(name)
    elif properties.startswith(name[1:]):
        at = len(name) - 1
    else:
        return b""
    end = properties.find(_PAIR_END, at)
    return properties[at:end] if end >= 0 else properties[at:]
