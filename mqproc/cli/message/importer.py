"""Importing with no record twice and none missed, whoever is killed: importer, writer, or the group.

    position      records below it are acknowledged; written to the journal after each answer
    under way     at most IN_FLIGHT frames behind it, answered in order
    unique ids    record n of an import has an id made of import and n, which the store indexes

An acknowledged record is stored. Of those under way at a kill or a lost answer nobody knows, so before anything is sent
again the importer settles them:

    1. ping the writer DRAIN_PINGS times: each answer is a step of the writer's, and each step reads every connection
       that has bytes, so what a dead importer left in a socket has been taken or is lost
    2. wait until dispatch has reached what is written then: from here on the index knows every record
    3. look up the ids from the position on, a window at a time, until a whole window is missing

What was found is left out, the rest is sent. The ids do not depend on the journal: without one, the position is
searched for by the ids themselves.
"""

from __future__ import annotations

import datetime
import hashlib
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import click
import msgspec

from mqproc.cli.message.journal import Entry, Journal, unique_id_of, unique_id_prefix
from mqproc.cli.message.sources import Chunk, WrittenNumber
from mqproc.cli.times import EPOCH_MS_MAX, EPOCH_MS_MIN, datetime_ms
from mqproc.client import Client
from mqproc.client import requests as core
from mqproc.client.batch import Batch
from mqproc.client.connection import FRAME_BYTES_MAX
from mqproc.client.dispatch_barrier import PATIENCE_S, UNSETTLED, Patience, check_index, settle
from mqproc.client.encoding import AppendFrame, encode_batch
from mqproc.errors import BadMessageError, BadRequestError, FrameTooLargeError, MqprocError
from mqproc.wire.operations import Operation
from mqproc.wire.operations.log import AppendRequest

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# --- columns ---
# From a record's fields to a message's columns: keys, tag, born time, queue.


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


IN_FLIGHT = 4
CHUNK_ROWS = 1000
# Records that may be stored although the position does not say so, and a margin.
WINDOW = (IN_FLIGHT + 1) * CHUNK_ROWS
_LOOKUPS_IN_FLIGHT = 64
# Unique ids of one frame share all but their last four digits.
_IDS_PER_PREFIX = 1 << 16

# What cannot be made into a frame.
_UNSENDABLE = (BadRequestError, FrameTooLargeError)
# The writer counts the messages of a frame from 0.
_MESSAGE = re.compile(r"message (\d+): (.*)", re.DOTALL)

Stored: TypeAlias = Mapping[int, bytes]
"""Records that are stored, with digests of their bodies."""

_decode_append = msgspec.msgpack.Decoder(AppendRequest).decode
_encode = msgspec.msgpack.Encoder().encode


class Importer:
    """One import into one topic. `acknowledged` is told after each answer."""

    def __init__(
        self,
        client: Client,
        journal: Journal,
        topic: str,
        columns: ColumnMaker,
        source: str,
        acknowledged: Callable[[int], None],
        note: Callable[[str], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        assert journal.entry is not None
        self._client = client
        self._journal = journal
        self._entry: Entry = journal.entry
        self._topic = topic
        self._columns = columns
        self._source = source
        self._acknowledged = acknowledged
        self._note = note
        self._patience = Patience(seconds=patience_s, told=note)
        self._pending: deque[Chunk] = deque()
        # The first records of the frames under way.
        self._under_way: deque[int] = deque()
        self._failure: Exception | None = None
        self.position = journal.position
        # Bytes of the input that the acknowledged records have, as far as this run knows.
        self.taken = 0
        self.found = 0

    # Where to begin

    def begin(self) -> Stored:
        """Settle what an earlier run left: sets `position`, returns the records at or above it that are stored."""
        settle(self._client, self._patience)
        if self.position and not self._is_stored(self.position - 1):
            self._note(f"record {self.position:,} was acknowledged but is not in the store: looking for the last one")
            self.position = self._search()
            if self.position == 0:
                raise BadRequestError(
                    "records of this import were stored and are gone; --restart imports everything again"
                )
        elif self.position == 0:
            self.position = self._search()
        stored = self._settle()
        self.found = len(stored)
        return stored

    def _search(self) -> int:
        """About how many records are stored, by their ids alone: they are the input's beginning, but for a window."""
        if not self._is_stored(0):
            return 0
        low, high = 0, WINDOW
        while self._is_stored(high):
            low, high = high, high * 2
        while high - low > WINDOW:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_stored(middle) else (low, middle)
        return max(0, low - WINDOW) + 1

    def _settle(self) -> Stored:
        stored: dict[int, bytes] = {}
        at = self.position
        while found := self._stored_in(range(at, at + WINDOW)):
            stored |= found
            at += WINDOW
        return stored

    def _is_stored(self, record: int) -> bool:
        return bool(self._stored_in(range(record, record + 1)))

    def _stored_in(self, records: range) -> Stored:
        """Which of these records the store holds."""
        name, generation = self._journal.name, self._entry.generation
        calls = (
            core.by_key(self._topic, unique_id_of(name, generation, record), None, None, 1, True, "store")
            for record in records
        )
        answers = self._client.run_all(calls, _LOOKUPS_IN_FLIGHT)
        return {
            record: _digest(messages[0].body) for record, messages in zip(records, answers, strict=True) if messages
        }

    # Sending

    def send(self, chunks: Iterator[Chunk], stored: Stored) -> None:
        """Send all records but those stored. Raises what cannot be settled; the position then is right."""
        left: Iterable[Chunk] = chunks
        failed_at, failed_s = -1, 0.0
        while True:
            try:
                self._send(left, stored)
                return
            except UNSETTLED as error:
                if failed_at != self.position:
                    failed_at, failed_s = self.position, time.monotonic()
                elif time.monotonic() - failed_s > self._patience.seconds:
                    raise
                self._note(f"at record {self.position:,}: {error}; asking the store what it has")
                stored = self._settle_again(failed_s)
            left = self._unsent(chunks)

    def _settle_again(self, since_s: float) -> Stored:
        """After a lost answer: the same as at the beginning, as soon as the group answers again.

        Raises BadRequestError when the store has no index to say by what it has.
        """
        check_index(self._client.store)
        while True:
            try:
                settle(self._client, self._patience)
                return self._settle()
            except MqprocError as error:
                if not isinstance(error, UNSETTLED) or time.monotonic() - since_s > self._patience.seconds:
                    raise
                time.sleep(0.1)

    def _unsent(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """What was under way and not acknowledged, then the rest of the input."""
        under_way = list(self._pending)
        self._pending.clear()
        for chunk in under_way:
            yield part(chunk, max(0, self.position - chunk.first), len(chunk.bodies))
        yield from chunks

    def _send(self, chunks: Iterable[Chunk], stored: Stored) -> None:
        self._under_way.clear()
        try:
            for end in self._client.run_all(self._until_failure(chunks, stored), IN_FLIGHT):
                self._under_way.popleft()
                self._pass(end)
        except BadRequestError as error:
            raise self._refused(error) from None
        if self._failure is not None:
            raise self._failure
        # Records at the end may have been stored all, so that no answer told of them.
        while self._pending:
            self._pass(self._pending[0].end)

    def _until_failure(self, chunks: Iterable[Chunk], stored: Stored) -> Iterator[core.Call[int]]:
        """All calls up to a record that is wrong: what is under way then is answered before anybody is told of it."""
        try:
            yield from self._calls(chunks, stored)
        except (MqprocError, click.ClickException, OSError) as error:
            self._failure = error

    def _refused(self, error: BadRequestError) -> BadRequestError:
        """The writer's error about the oldest frame under way, which counts messages in that, with the record."""
        found = _MESSAGE.match(str(error))
        if found is None:
            return error
        record = self._under_way[0] + int(found[1])
        return type(error)(f"{self._source}: record {record + 1:,}: {found[2]}")

    def _pass(self, end: int) -> None:
        """Everything below `end` is stored."""
        while self._pending and self._pending[0].end <= end:
            self.taken = max(self.taken, self._pending.popleft().taken)
        self.position = end
        self._journal.advance(end)
        self._acknowledged(end)

    def _calls(self, chunks: Iterable[Chunk], stored: Stored) -> Iterator[core.Call[int]]:
        for chunk in chunks:
            self._pending.append(chunk)
            self._check_stored(chunk, stored)
            for piece in without(chunk, stored) if stored else (chunk,):
                for aligned in _within_prefixes(piece):
                    yield from self._frames(aligned)

    def _check_stored(self, chunk: Chunk, stored: Stored) -> None:
        """Raise BadRequestError when a record is stored with another body: what is before it has other records now."""
        for record in filter(stored.__contains__, range(chunk.first, chunk.end)) if stored else ():
            if stored[record] != _digest(chunk.bodies[record - chunk.first]):
                raise BadRequestError(
                    f"{self._source}: record {record + 1:,} is stored with another body, so the input has changed; "
                    "--restart imports everything again"
                )

    def _frames(self, chunk: Chunk) -> Iterator[core.Call[int]]:
        columns = self._columns.columns(chunk)
        batch = Batch(
            self._topic,
            chunk.bodies,
            keys=columns.keys,
            tags=columns.tags,
            queue_ids=columns.queue_ids,
            born_timestamps_ms=columns.born_timestamps_ms,
        )
        at = chunk.first
        try:
            for frame in encode_batch(batch, FRAME_BYTES_MAX):
                options = self._with_ids(frame, at)
                self._under_way.append(at)
                at += frame.count
                yield core.Call(core.WRITER, Operation.APPEND, options, frame.payload, _ended_at(at), repeatable=False)
        except _UNSENDABLE as error:
            raise self._unsendable(batch, chunk.first, error) from None

    def _unsendable(self, batch: Batch, first: int, error: MqprocError) -> MqprocError:
        """The error with the first record, counted from `first`, that cannot be sent by itself either."""
        for index in range(len(batch)):
            try:
                list(encode_batch(batch.part(index, index + 1), FRAME_BYTES_MAX))
            except _UNSENDABLE as found:
                return type(found)(f"{self._source}: record {first + index + 1:,}: {found}")
        return type(error)(f"{self._source}: records {first + 1:,} to {first + len(batch):,}: {error}")

    def _with_ids(self, frame: AppendFrame, first: int) -> bytes:
        """A frame's options with the unique ids of the records from `first` on."""
        prefix = unique_id_prefix(self._journal.name, self._entry.generation, first)
        return _encode(
            msgspec.structs.replace(
                _decode_append(frame.options), unique_prefix=prefix, unique_counter=first % _IDS_PER_PREFIX
            )
        )


def _digest(body: ReadableBuffer) -> bytes:
    return hashlib.sha256(body).digest()


def _ended_at(record: int) -> Callable[[memoryview, memoryview], int]:
    return lambda options, payload: record


def _within_prefixes(chunk: Chunk) -> list[Chunk]:
    """A chunk in parts whose unique ids have one prefix each."""
    first_block, last_block = chunk.first // _IDS_PER_PREFIX, (chunk.end - 1) // _IDS_PER_PREFIX
    if first_block == last_block:
        return [chunk]
    cut = (first_block + 1) * _IDS_PER_PREFIX - chunk.first
    return [part(chunk, 0, cut), *_within_prefixes(part(chunk, cut, len(chunk.bodies)))]
