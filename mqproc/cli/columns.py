"""From a record's fields to a message's columns: keys, tag, born time, queue."""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from mqproc.cli.sources import Chunk, WrittenNumber
from mqproc.cli.times import EPOCH_MS_MAX, EPOCH_MS_MIN, datetime_ms
from mqproc.errors import BadMessageError

TIME_FORMATS = ("auto", "iso", "s", "ms", "us", "ns")
_KNOWN_TIMES_MAX = 100_000
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_INT64_MAX = (1 << 63) - 1
_PER_MS = {"ms": 1, "us": 1000, "ns": 1_000_000}


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Which fields become what. `time_format`: one of TIME_FORMATS, or a strptime format."""

    keys: tuple[str, ...] = ()
    tag: str = ""
    time: str = ""
    queue: str = ""
    time_format: str = "auto"

    @property
    def wanted(self) -> tuple[str, ...]:
        """Every field that a source must give, once."""
        named = (*self.keys, self.tag, self.time, self.queue)
        return tuple(dict.fromkeys(name for name in named if name))


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a chunk; None where a column was not asked for."""

    keys: list[Any] | None
    tags: list[str] | None
    born_timestamps_ms: list[int] | None
    queue_ids: list[int] | None


class ColumnMaker:
    """Makes columns of chunks of an input, which errors name. Times already parsed are remembered."""

    def __init__(self, names: FieldNames, now_ms: int, source: str) -> None:
        self._names = names
        self._now_ms = now_ms
        self._source = source
        self._times: dict[Any, int] = {}

    def columns(self, chunk: Chunk) -> Columns:
        """A chunk's columns. Raises BadMessageError naming input, record, field and value."""
        names = self._names
        return Columns(
            keys=self._keys(chunk),
            tags=[_text(value) for value in chunk.fields[names.tag]] if names.tag else None,
            born_timestamps_ms=self._born(chunk) if names.time else None,
            queue_ids=self._queues(chunk) if names.queue else None,
        )

    def _keys(self, chunk: Chunk) -> list[Any] | None:
        """One text for each message, or a list of texts where several fields are keys; "" is none."""
        columns = [[_key(value) for value in chunk.fields[name]] for name in self._names.keys]
        if len(columns) < 2:
            return columns[0] if columns else None
        return [list(dict.fromkeys(filter(None, keys))) for keys in zip(*columns, strict=True)]

    def _born(self, chunk: Chunk) -> list[int]:
        known = self._times
        values = chunk.fields[self._names.time]
        try:
            return [known[value] for value in values]
        except (KeyError, TypeError):
            return [self._time(chunk, index, value) for index, value in enumerate(values)]

    def _time(self, chunk: Chunk, index: int, value: Any) -> int:
        try:
            found = self._times.get(value)
            if found is not None:
                return found
            found = self._now_ms if value is None else parse_field_time(value, self._names.time_format)
        except (ValueError, TypeError, OverflowError) as error:
            # A list of values cannot even be looked up among the times that are known.
            raise self._wrong(chunk, index, self._names.time, f"is no time: {error}") from None
        if len(self._times) < _KNOWN_TIMES_MAX:
            self._times[value] = found
        return found

    def _queues(self, chunk: Chunk) -> list[int]:
        queues = []
        for index, value in enumerate(chunk.fields[self._names.queue]):
            try:
                queues.append(_queue_id(value))
            except (TypeError, ValueError, OverflowError):
                raise self._wrong(chunk, index, self._names.queue, "is no queue id") from None
        return queues

    def _wrong(self, chunk: Chunk, index: int, name: str, what: str) -> BadMessageError:
        value = chunk.fields[name][index]
        return BadMessageError(f"{self._source}: record {chunk.first + index + 1:,}: field {name!r} = {value!r} {what}")


def _queue_id(value: Any) -> int:
    """A field's queue id; a whole number with a fraction of 0 is one. Raises TypeError, ValueError, OverflowError."""
    found = int(value)
    if isinstance(value, bool) or (not isinstance(value, str) and found != value):
        raise ValueError("no whole number")
    if abs(found) > _INT64_MAX:
        raise OverflowError("no 64-bit number")
    return found


def parse_field_time(value: Any, time_format: str = "auto") -> int:
    """A field's time as Unix ms: ISO 8601 (local when it names no zone), epoch s, ms, us or ns, or a strptime format.

    `auto` takes numbers from 100,000,000,000 on as milliseconds, smaller ones as seconds. Raises ValueError, also for
    a number that is beyond the year 9999: it is in another unit.
    """
    if isinstance(value, datetime.datetime):
        return datetime_ms(value)
    if isinstance(value, datetime.date):
        return datetime_ms(datetime.datetime(value.year, value.month, value.day))
    text = str(value).strip()
    if time_format in ("auto", "s", *_PER_MS) and _NUMBER.fullmatch(text):
        return _number_ms(text, time_format)
    if time_format in ("auto", "iso"):
        return datetime_ms(datetime.datetime.fromisoformat(text))
    if time_format in ("s", *_PER_MS):
        raise ValueError("not a number")
    return datetime_ms(datetime.datetime.strptime(text, time_format))


def _number_ms(text: str, unit: str) -> int:
    if unit == "auto":
        unit = "ms" if abs(float(text)) >= EPOCH_MS_MIN else "s"
    if unit == "s":
        found = round(float(text) * 1000)
    else:
        found = (int(float(text)) if "." in text else int(text)) // _PER_MS[unit]
    if found < -_INT64_MAX:
        raise OverflowError("no 64-bit number")
    if found > EPOCH_MS_MAX:
        raise ValueError(f"beyond the year 9999 in {unit}; --time-format says if it is in ms, us or ns")
    return found


def _text(value: Any) -> str:
    """A field's text: what the JSON of a body has for it, which is what one sees who looks for the message."""
    if value is None or type(value) is str:
        return value or ""
    if type(value) is WrittenNumber:
        return value.text
    encoded = msgspec.json.encode(value)
    if encoded.startswith(b'"'):
        return msgspec.json.decode(encoded, type=str)
    return "" if encoded == b"null" else encoded.decode()


def _key(value: Any) -> str:
    """RocketMQ separates keys by spaces, so one with a space would become two."""
    text = _text(value)
    return text.replace(" ", "_") if " " in text else text


def without(chunk: Chunk, stored: Collection[int]) -> list[Chunk]:
    """A chunk without the records `stored`, as chunks of records that follow one another."""
    gone = {record - chunk.first for record in stored if chunk.first <= record < chunk.end}
    if not gone:
        return [chunk]
    parts = []
    start = 0
    for stop in [*sorted(gone), len(chunk.bodies)]:
        if start < stop:
            parts.append(part(chunk, start, stop))
        start = stop + 1
    return parts


def part(chunk: Chunk, start: int, stop: int) -> Chunk:
    """Records [start, stop) of a chunk, counted from its first."""
    fields = {name: values[start:stop] for name, values in chunk.fields.items()}
    taken = chunk.taken if stop == len(chunk.bodies) else 0
    return Chunk(chunk.first + start, chunk.bodies[start:stop], fields, taken)
