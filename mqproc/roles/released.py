"""Parked records as columns, and the messages that are delivered when their time has come.

A message is delivered as RocketMQ does it: to its original topic and queue, with the same body, flag, born data,
reconsume times and sys flag. After a delay level it keeps the whole properties string, `DELAY`, `REAL_TOPIC` and
`REAL_QID` included; after the timer it loses the last two. What we add is in `preparedTransactionOffset`: the mark of
the parked record, by which the keeper finds out which deliveries a killed one had made.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.kernels import decode
from mqproc.kernels.fields import PLACES_SIZE
from mqproc.layout import record
from mqproc.layout.properties import NAME_END, PAIR_END, REAL_QID, REAL_TOPIC, TIMER_ROLL_TIMES
from mqproc.names import TIMER_TOPIC
from mqproc.roles.message_columns import MessageColumns
from mqproc.roles.property_columns import PropertyColumns
from mqproc.store.delays.made_from import marks_of

_HOST_BITS: Final = record.SYS_FLAG_BORN_HOST_V6 | record.SYS_FLAG_STORE_HOST_V6
_INT32_MAX: Final = (1 << 31) - 1
_ROWS: Final = decode.rows_of(decode.ALL_COLUMNS) & ~decode.rows_of(["tag", "keys"])


class ParkedRecords:
    """Whole records of topics in which messages wait, one after the other in uint8[m]."""

    def __init__(self, records: NDArray[np.uint8], count: int) -> None:
        """Raises CorruptStoreError when the bytes do not begin with so many records."""
        places = np.empty(decode.PLACE_ROWS * count, np.int64)
        failed = np.zeros(1 + PLACES_SIZE, np.int64)
        if decode.locate_records(records, count, _ROWS, places, failed):
            raise CorruptStoreError(f"no record at byte {failed[0]:,} of {len(records):,}")
        self._records = records
        self._places = places.reshape(decode.PLACE_ROWS, count)
        self.properties = self._properties_of(self._places)

    def __len__(self) -> int:
        return self._places.shape[1]

    def column(self, name: str) -> NDArray[Any]:
        """A column of numbers, by its name in `kernels.decode`."""
        found: NDArray[Any] = self._column(self._places, name)
        return found

    def is_of(self, topic: str) -> NDArray[np.bool_]:
        """Which of the records lie in this topic, bool[n]."""
        name = np.frombuffer(topic.encode(), np.uint8)
        found: NDArray[np.bool_] = self._places[decode.TOPIC_SIZE] == len(name)
        begins = self._places[decode.TOPIC][found]
        found[found] = (self._records[begins[:, None] + np.arange(len(name))] == name).all(axis=1)
        return found

    @functools.cached_property
    def real_topics(self) -> list[str]:
        """Where the messages go, "" where it is not said."""
        found = self.properties.texts(REAL_TOPIC)
        topics = {name: name.decode("utf-8", "replace") for name in set(found)}
        return [topics[name] for name in found]

    @property
    def names_topic(self) -> NDArray[np.bool_]:
        """Which say where they go, bool[n]."""
        return np.fromiter(map(bool, self.real_topics), np.bool_, len(self))

    def released(self, which: NDArray[np.bool_], *, keeps_real: bool) -> list[MessageColumns]:
        """The messages for their own topics, in their order; `which` of them, bool[n]."""
        queue_ids = np.clip(self.properties.numbers(REAL_QID), 0, _INT32_MAX).astype(np.int32)
        gone = () if keeps_real else (REAL_TOPIC, REAL_QID)
        return self._made(which, self.real_topics, queue_ids, gone, "")

    def rolled(self, which: NDArray[np.bool_]) -> list[MessageColumns]:
        """The same messages for the timer's queue once more."""
        queue_ids = np.zeros(len(self), np.int32)
        return self._made(which, [TIMER_TOPIC] * len(self), queue_ids, (TIMER_ROLL_TIMES,), TIMER_ROLL_TIMES)

    def _made(
        self,
        which: NDArray[np.bool_],
        topics: Sequence[str],
        queue_ids: NDArray[np.int32],
        gone: tuple[str, ...],
        counted: str,
    ) -> list[MessageColumns]:
        """Without the properties `gone`, and with one that counts in the place of the old one."""
        rows = np.flatnonzero(which)
        if not len(rows):
            return []
        rows, edges, keys = self._grouped(rows, topics)
        places = self._places[:, rows]
        properties = self.properties if len(rows) == len(self) and len(keys) == 1 else self._properties_of(places)
        numbers = properties.numbers(counted) if counted else None
        properties = properties.without(*gone) if gone else properties
        if numbers is not None:
            properties = _with_number(properties, counted, np.maximum(numbers, 0) + 1)
        body_offsets, bodies = self._column(places, "body")
        topic, sys_flag, times, host = keys[0]
        columns = MessageColumns(
            topic,
            sys_flag,
            times,
            host,
            np.diff(body_offsets).astype(np.uint32),
            bodies[: int(body_offsets[-1])],
            np.diff(properties.offsets).astype(np.uint16),
            properties.data,
            self._column(places, "born_timestamp_ms"),
            queue_ids[rows],
            self._column(places, "flag"),
            marks_of(self._column(places, "physical_offset")),
        )
        if len(keys) == 1:
            return [columns]
        return [
            replace(part, topic=topic, sys_flag=sys_flag, reconsume_times=times, born_host=host)
            for part, (topic, sys_flag, times, host) in zip(columns.parts(edges), keys, strict=True)
        ]

    def _grouped(
        self, rows: NDArray[np.intp], topics: Sequence[str]
    ) -> tuple[NDArray[np.intp], list[int], list[tuple[str, int, int, bytes]]]:
        """Rows by what a frame's messages have in common, each group's in their order; edges between groups; groups."""
        sys_flags = (self.column("sys_flag") & ~_HOST_BITS).tolist()
        times, hosts = self.column("reconsume_times").tolist(), self._born_hosts()
        if all(len(set(each)) == 1 for each in (sys_flags, times, hosts, topics)):
            return rows, [0, len(rows)], [(topics[0], sys_flags[0], times[0], hosts[0])]
        numbers: dict[Hashable, int] = {}
        keys: list[tuple[str, int, int, bytes]] = []
        groups = np.empty(len(rows), np.intp)
        for place, row in enumerate(rows.tolist()):
            key = topics[row], sys_flags[row], times[row], hosts[row]
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(keys)
                keys.append(key)
            groups[place] = number
        if len(keys) == 1:
            return rows, [0, len(rows)], keys
        order = np.argsort(groups, kind="stable")
        edges = np.searchsorted(groups[order], np.arange(len(keys) + 1)).tolist()
        return rows[order], edges, keys

    def _born_hosts(self) -> list[bytes]:
        """Address and port of each producer as they are stored."""
        begins, sizes = self._places[decode.BORN_HOST], self._places[decode.BORN_HOST_SIZE]
        if (sizes == sizes[0]).all():
            size = int(sizes[0])
            hosts = self._records[begins[:, None] + np.arange(size)].tobytes()
            return [hosts[at : at + size] for at in range(0, len(hosts), size)]
        pairs = zip(begins.tolist(), sizes.tolist(), strict=True)
        return [self._records[begin : begin + size].tobytes() for begin, size in pairs]

    def _properties_of(self, places: NDArray[np.int64]) -> PropertyColumns:
        return PropertyColumns(*self._column(places, "properties"))

    def _column(self, places: NDArray[np.int64], name: str) -> Any:
        return decode.take_column(self._records, np.ascontiguousarray(places).reshape(-1), places.shape[1], name)


def _with_pair(string: bytes, number: int, name: str) -> bytes:
    end = PAIR_END.encode() if string and not string.endswith(PAIR_END.encode()) else b""
    longer = string + end + f"{name}{NAME_END}{number}{PAIR_END}".encode()
    # A message that is refused is tried for ever, and everything that waits behind it waits.
    return longer if len(longer) <= record.PROPERTIES_SIZE_SURE else string


def _with_number(properties: PropertyColumns, name: str, numbers: NDArray[np.int64]) -> PropertyColumns:
    """One more pair at the end of each string that has room for it: it only tells people something."""
    strings = [_with_pair(*each, name) for each in zip(properties.strings(), numbers.tolist(), strict=True)]
    offsets = np.cumsum([0, *map(len, strings)])
    return PropertyColumns(offsets, np.frombuffer(b"".join(strings), np.uint8))
