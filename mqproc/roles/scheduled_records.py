"""Records of scheduled messages as columns, and the messages to deliver when they are due.

As in RocketMQ, a message is delivered to its original topic and queue with the same body, flag, born data, reconsume
times and sys flag. After a delay level it keeps the whole properties string, including `DELAY`, `REAL_TOPIC` and
`REAL_QID`; after the timer it loses the last two. In addition `preparedTransactionOffset` holds the mark of the
scheduled record, by which a restarted keeper recognises deliveries that are in the log already.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.kernels import record_decode
from mqproc.kernels.record_fields import PLACES_SIZE
from mqproc.layout import record
from mqproc.layout.properties import NAME_END, PAIR_END, REAL_QID, REAL_TOPIC, TIMER_ROLL_TIMES
from mqproc.roles.internal_producer import AppendColumns
from mqproc.store.schedule.delivery_marks import marks_of
from mqproc.topic_names import TIMER_TOPIC

DIGITS_MAX: Final = 18
_NAME_END: Final = ord(NAME_END)
_PAIR_END: Final = ord(PAIR_END)
_ZERO: Final = np.uint8(ord("0"))
_POWERS: Final = 10 ** np.arange(DIGITS_MAX - 1, -1, -1, dtype=np.int64)

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]
_NO_PLACES: Final = np.empty(0, np.int64)
_HOST_BITS: Final = record.SYS_FLAG_BORN_HOST_V6 | record.SYS_FLAG_STORE_HOST_V6
_INT32_MAX: Final = (1 << 31) - 1
_ROWS: Final = record_decode.rows_of(record_decode.ALL_COLUMNS) & ~record_decode.rows_of(["tag", "keys"])


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of one name, ascending: message, begin, begin and end of the value; int64[k] each."""

    messages: Places
    begins: Places
    values: Places
    ends: Places

    def last_of_each(self) -> Pairs:
        """Keep the last pair of each message."""
        if len(self.messages) < 2:
            return self
        last = np.append(self.messages[1:] != self.messages[:-1], True)
        return self if last.all() else self.chosen(last)

    def chosen(self, which: NDArray[np.bool_]) -> Pairs:
        return Pairs(self.messages[which], self.begins[which], self.values[which], self.ends[which])


class PropertyColumns:
    """Properties of many messages: values by name as columns, strings without some names.

        data     uint8[m]      all strings, concatenated: name 0x01 value 0x02 …
        offsets  int64[n + 1]  begin of each message's string

    The last pair of a name counts. Everything except extracting single texts is vectorised.
    """

    def __init__(self, offsets: NDArray[np.integer], data: Bytes) -> None:
        self.offsets: Places = offsets.astype(np.int64)
        self.data = data[: int(offsets[-1])]
        self._found: dict[str, Pairs] = {}

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property
    def _name_ends(self) -> Places:
        ends = np.flatnonzero(self.data == _NAME_END)
        return ends if not len(ends) or ends[0] else ends[1:]

    @functools.cached_property
    def _last_letters(self) -> Bytes:
        return self.data[self._name_ends - 1]

    @functools.cached_property
    def _pair_ends(self) -> Places:
        """Ends of pairs, plus the end of the data: the last pair may lack its separator."""
        return np.append(np.flatnonzero(self.data == _PAIR_END), len(self.data))

    def pairs(self, name: str) -> Pairs:
        found = self._found.get(name)
        if found is None:
            found = self._found[name] = self._find(name.encode())
        return found

    def numbers(self, name: str) -> Places:
        """Values of a property, int64[n]; −1 if missing or not a number of up to 18 digits."""
        pairs = self.pairs(name).last_of_each()
        numbers = np.full(len(self), -1, np.int64)
        sizes = pairs.ends - pairs.values
        # Usually all have one size.
        for size in set(sizes.tolist()):
            if 1 <= size <= DIGITS_MAX:
                some = pairs.chosen(sizes == size)
                digits = self._texts_at(some.values, size).view(np.uint8).reshape(-1, size)
                digits = digits - _ZERO  # Wraps: bytes below "0" become larger than 9.
                values = digits @ _POWERS[-size:]
                if digits.max() > 9:
                    values[(digits > 9).any(axis=1)] = -1
                numbers[some.messages] = values
        return numbers

    def texts(self, name: str) -> list[bytes]:
        """Values of a property, b"" if missing."""
        texts = [b""] * len(self)
        pairs = self.pairs(name).last_of_each()
        if len(pairs.messages):
            sizes = pairs.ends - pairs.values
            size = int(sizes[0])
            if size and len(pairs.messages) == len(self) and (sizes == size).all():
                # Usually all are equal.
                found = self._texts_at(pairs.values, size)
                text: bytes = found[0].tobytes()
                if (found.view(np.uint8).reshape(-1, size) == np.frombuffer(text, np.uint8)).all():
                    return [text] * len(self)
            data = self.data.tobytes()
            for message, begin, end in zip(
                pairs.messages.tolist(), pairs.values.tolist(), pairs.ends.tolist(), strict=True
            ):
                texts[message] = data[begin:end]
        return texts

    def strings(self) -> list[bytes]:
        data, offsets = self.data.tobytes(), self.offsets.tolist()
        return [data[begin:end] for begin, end in itertools.pairwise(offsets)]

    def without(self, *names: str) -> PropertyColumns:
        """Copy without the pairs of some names."""
        gone = [self.pairs(name) for name in names]
        begins = np.concatenate([pairs.begins for pairs in gone])
        if not len(begins):
            return self
        messages = np.concatenate([pairs.messages for pairs in gone])
        # Including the separator after the pair, which the last one of a message may lack.
        stops = np.minimum(np.concatenate([pairs.ends for pairs in gone]) + 1, self.offsets[messages + 1])
        steps = np.zeros(len(self.data) + 1, np.int8)
        steps[begins] += 1
        steps[stops] -= 1
        kept = self.data[np.cumsum(steps[:-1], dtype=np.int8) == 0]
        taken = np.bincount(messages + 1, stops - begins, len(self) + 1).astype(np.int64)
        return PropertyColumns(self.offsets - np.cumsum(taken), kept)

    def _texts_at(self, places: Places, size: int) -> NDArray[np.void]:
        """`size` bytes of the data from each of these places, void[k]."""
        every = np.ndarray((len(self.data) - size + 1,), f"V{size}", self.data, strides=(1,))
        found: NDArray[np.void] = every[places]
        return found

    def _find(self, name: bytes) -> Pairs:
        """Find a name: compare its last byte, then its first, then all bytes."""
        size = len(name)
        begins = self._name_ends[self._last_letters == name[-1]] - size
        if len(begins) and begins[0] < 0:
            begins = begins[begins >= 0]
        begins = begins[self.data[begins] == name[0]]
        if not len(begins):
            return _NO_PAIRS
        begins = begins[self._texts_at(begins, size).view(f"S{size}") == name]
        ends = begins + size
        messages = np.searchsorted(self.offsets, ends, "right") - 1
        firsts = self.offsets[messages]
        # A name begins the string or follows the end of another pair.
        whole = (begins == firsts) | ((begins > firsts) & (self.data[begins - 1] == _PAIR_END))
        if not whole.all():
            ends, begins, messages = ends[whole], begins[whole], messages[whole]
        stops = np.minimum(self._pair_ends[np.searchsorted(self._pair_ends, ends)], self.offsets[messages + 1])
        return Pairs(messages, begins, ends + 1, stops)


_NO_PAIRS: Final = Pairs(_NO_PLACES, _NO_PLACES, _NO_PLACES, _NO_PLACES)


class ScheduledRecords:
    """Whole records of scheduled messages, consecutive in uint8[m]."""

    def __init__(self, records: NDArray[np.uint8], count: int) -> None:
        """Raises CorruptStoreError when the bytes do not begin with `count` records."""
        places = np.empty(record_decode.PLACE_ROWS * count, np.int64)
        failed = np.zeros(1 + PLACES_SIZE, np.int64)
        if record_decode.locate_records(records, count, _ROWS, places, failed):
            raise CorruptStoreError(f"no record at byte {failed[0]:,} of {len(records):,}")
        self._records = records
        self._places = places.reshape(record_decode.PLACE_ROWS, count)
        self.properties = self._properties_of(self._places)

    def __len__(self) -> int:
        return self._places.shape[1]

    def column(self, name: str) -> NDArray[Any]:
        """Column of numbers, by its name in `kernels.record_decode`."""
        found: NDArray[Any] = self._column(self._places, name)
        return found

    def in_topic(self, topic: str) -> NDArray[np.bool_]:
        """Mask of the records in a topic, bool[n]."""
        name = np.frombuffer(topic.encode(), np.uint8)
        found: NDArray[np.bool_] = self._places[record_decode.TOPIC_SIZE] == len(name)
        begins = self._places[record_decode.TOPIC][found]
        found[found] = (self._records[begins[:, None] + np.arange(len(name))] == name).all(axis=1)
        return found

    @functools.cached_property
    def real_topics(self) -> list[str]:
        """Target topics, "" if missing."""
        found = self.properties.texts(REAL_TOPIC)
        topics = {name: name.decode("utf-8", "replace") for name in set(found)}
        return [topics[name] for name in found]

    @property
    def has_topic(self) -> NDArray[np.bool_]:
        """Mask of the records with a target topic, bool[n]."""
        return np.fromiter(map(bool, self.real_topics), np.bool_, len(self))

    def to_deliver(self, which: NDArray[np.bool_], *, keeps_real: bool) -> list[AppendColumns]:
        """Messages for their target topics, in order, of the records selected by the mask `which`."""
        queue_ids = np.clip(self.properties.numbers(REAL_QID), 0, _INT32_MAX).astype(np.int32)
        gone = () if keeps_real else (REAL_TOPIC, REAL_QID)
        return self._build(which, self.real_topics, queue_ids, gone, "")

    def to_roll(self, which: NDArray[np.bool_]) -> list[AppendColumns]:
        """Messages that go back to the timer's queue, with their roll count incremented."""
        queue_ids = np.zeros(len(self), np.int32)
        return self._build(which, [TIMER_TOPIC] * len(self), queue_ids, (TIMER_ROLL_TIMES,), TIMER_ROLL_TIMES)

    def _build(
        self,
        which: NDArray[np.bool_],
        topics: Sequence[str],
        queue_ids: NDArray[np.int32],
        gone: tuple[str, ...],
        counted: str,
    ) -> list[AppendColumns]:
        """Build messages without the properties `gone` and with the counter `counted` incremented."""
        rows = np.flatnonzero(which)
        if not len(rows):
            return []
        rows, edges, keys = self._group_rows(rows, topics)
        places = self._places[:, rows]
        properties = self.properties if len(rows) == len(self) and len(keys) == 1 else self._properties_of(places)
        numbers = properties.numbers(counted) if counted else None
        properties = properties.without(*gone) if gone else properties
        if numbers is not None:
            properties = _with_number(properties, counted, np.maximum(numbers, 0) + 1)
        body_offsets, bodies = self._column(places, "body")
        topic, sys_flag, times, host = keys[0]
        columns = AppendColumns(
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

    def _group_rows(
        self, rows: NDArray[np.intp], topics: Sequence[str]
    ) -> tuple[NDArray[np.intp], list[int], list[tuple[str, int, int, bytes]]]:
        """Group rows by the fields that a frame shares: rows, edges between groups, keys."""
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
        """Stored address and port of each producer."""
        begins, sizes = self._places[record_decode.BORN_HOST], self._places[record_decode.BORN_HOST_SIZE]
        if (sizes == sizes[0]).all():
            size = int(sizes[0])
            hosts = self._records[begins[:, None] + np.arange(size)].tobytes()
            return [hosts[at : at + size] for at in range(0, len(hosts), size)]
        pairs = zip(begins.tolist(), sizes.tolist(), strict=True)
        return [self._records[begin : begin + size].tobytes() for begin, size in pairs]

    def _properties_of(self, places: NDArray[np.int64]) -> PropertyColumns:
        return PropertyColumns(*self._column(places, "properties"))

    def _column(self, places: NDArray[np.int64], name: str) -> Any:
        return record_decode.copy_column(self._records, np.ascontiguousarray(places).reshape(-1), places.shape[1], name)


def append_pairs(string: bytes, pairs: Mapping[str, object], optional: Mapping[str, object]) -> bytes:
    """Append pairs to a properties string; `optional` pairs only if there is room.

    A message whose properties are too long would be refused for ever and block later messages.
    """
    end = PAIR_END if string and not string.endswith(PAIR_END.encode()) else ""
    encoded = end + "".join(f"{name}{NAME_END}{value}{PAIR_END}" for name, value in pairs.items())
    with_optional = encoded + "".join(f"{name}{NAME_END}{value}{PAIR_END}" for name, value in optional.items())
    longer = string + with_optional.encode()
    if len(longer) <= record.PROPERTIES_SIZE_SURE:
        return longer
    return string + encoded.encode() if pairs else string


def _with_number(properties: PropertyColumns, name: str, numbers: NDArray[np.int64]) -> PropertyColumns:
    """Append a pair to each string that has room for it. The pair is informational."""
    pairs = zip(properties.strings(), numbers.tolist(), strict=True)
    strings = [append_pairs(string, {}, {name: number}) for string, number in pairs]
    offsets = np.cumsum([0, *map(len, strings)])
    return PropertyColumns(offsets, np.frombuffer(b"".join(strings), np.uint8))
