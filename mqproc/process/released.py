"""Parked records, and the messages that are delivered when their time has come.

A message is delivered as RocketMQ does it: to its original topic and queue, with the same body, flag, born data,
reconsume times and sys flag. After a delay level it keeps the whole properties string, `DELAY`, `REAL_TOPIC` and
`REAL_QID` included; after the timer it loses the last two. What we add is in `preparedTransactionOffset`: the mark of
the parked record, by which the keeper finds out which deliveries a killed one had made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final

from mqproc.layout import record
from mqproc.layout.properties import NAME_END, PAIR_END, REAL_QID, REAL_TOPIC, TIMER_ROLL_TIMES
from mqproc.names import TIMER_TOPIC
from mqproc.process.appender import NewMessage
from mqproc.store.delays.made_from import mark_of

_HOST_BITS: Final = record.SYS_FLAG_BORN_HOST_V6 | record.SYS_FLAG_STORE_HOST_V6
_PAIR_END: Final = PAIR_END.encode()
_CRC_START: Final = record.CRC_NAME + NAME_END.encode()


class Parked:
    """One record of a topic in which messages wait."""

    __slots__ = (
        "_properties",
        "body",
        "born_host",
        "born_timestamp_ms",
        "flag",
        "physical_offset",
        "queue_offset",
        "reconsume_times",
        "size",
        "sys_flag",
        "topic",
    )

    def __init__(self, data: bytes, at: int) -> None:
        """The record at `at`, whose sizes hold."""
        (
            self.size,
            magic,
            _crc,
            _queue,
            self.flag,
            self.queue_offset,
            self.physical_offset,
            sys_flag,
            self.born_timestamp_ms,
        ) = record.HEAD.unpack_from(data, at)
        born_size = record.HOST_V6_SIZE if sys_flag & record.SYS_FLAG_BORN_HOST_V6 else record.HOST_V4_SIZE
        store_size = record.HOST_V6_SIZE if sys_flag & record.SYS_FLAG_STORE_HOST_V6 else record.HOST_V4_SIZE
        host_at = at + record.BORN_HOST
        tail_at = host_at + born_size + 8 + store_size
        self.reconsume_times, _prepared, body_size = record.TAIL.unpack_from(data, tail_at)
        body_at = tail_at + record.TAIL.size
        topic_at = body_at + body_size
        width = 1 if magic == record.MAGIC_V1 else 2
        name_size = data[topic_at] if width == 1 else record.LENGTH_V2.unpack_from(data, topic_at)[0]
        name_end = topic_at + width + name_size
        properties = data[name_end + 2 : at + self.size]
        if properties[-record.CRC_TAIL_SIZE :].startswith(_CRC_START):
            properties = properties[: -record.CRC_TAIL_SIZE]
        self._properties = properties
        self.sys_flag = sys_flag & ~_HOST_BITS
        self.born_host = data[host_at : host_at + born_size]
        self.body = data[body_at:topic_at]
        self.topic = data[topic_at + width : name_end].decode("utf-8", "replace")

    @property
    def real_topic(self) -> str:
        """Where the message goes, "" when it does not say."""
        return _value(self._properties, _key(REAL_TOPIC)).decode("utf-8", "replace")

    @property
    def real_queue_id(self) -> int:
        """The queue that it goes to, 0 when it does not say."""
        queue_id = _value(self._properties, _key(REAL_QID))
        return int(queue_id) if queue_id.isdigit() else 0

    def text(self, name: str) -> str:
        """A property's value, "" for none."""
        return _value(self._properties, _key(name)).decode("utf-8", "replace")

    def number(self, name: str) -> int | None:
        """A property's value as a number, None when it is none."""
        text = _value(self._properties, _key(name))
        return int(text) if text.isdigit() else None

    def released(self, *, keeps_real: bool) -> NewMessage:
        """The message for its own topic."""
        properties = self._properties
        if not keeps_real:
            properties = _without(_without(properties, _key(REAL_TOPIC)), _key(REAL_QID))
        return self._made(self.real_topic, self.real_queue_id, properties)

    def rolled(self) -> NewMessage:
        """The same message for the timer's queue once more."""
        times = str((self.number(TIMER_ROLL_TIMES) or 0) + 1)
        properties = _without(self._properties, _key(TIMER_ROLL_TIMES))
        if properties and not properties.endswith(_PAIR_END):
            properties += _PAIR_END
        return self._made(TIMER_TOPIC, 0, properties + f"{TIMER_ROLL_TIMES}{NAME_END}{times}{PAIR_END}".encode())

    def _made(self, topic: str, queue_id: int, properties: bytes) -> NewMessage:
        return NewMessage(
            topic,
            self.body,
            properties,
            queue_id,
            self.flag,
            self.sys_flag,
            self.born_timestamp_ms,
            self.born_host,
            self.reconsume_times,
            mark_of(self.physical_offset),
        )


def parked_records(records: bytes) -> Iterator[Parked]:
    """Whole records that lie one after the other."""
    at = 0
    while at < len(records):
        parked = Parked(records, at)
        yield parked
        at += parked.size


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


def _without(properties: bytes, name: bytes) -> bytes:
    """The properties without those of a name, given as for `_value`."""
    while True:
        at = properties.rfind(name) + 1
        if at == 0 and not properties.startswith(name[1:]):
            return properties
        end = properties.find(_PAIR_END, at)
        properties = properties[:at] + (properties[end + 1 :] if end >= 0 else b"")


@functools.cache
def _key(name: str) -> bytes:
    """A property's name as it stands between the end of the pair before it and its value."""
    return f"{PAIR_END}{name}{NAME_END}".encode()
