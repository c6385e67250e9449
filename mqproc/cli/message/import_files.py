"""`mqproc import`: import files of records as messages, each exactly once."""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click
import msgspec

from mqproc.cli.message.sources import FORMATS, STDIN, Chunk, Reading, Source, WrittenNumber, guess_kind
from mqproc.cli.options import Invocation, ParsedText, command, complete_topic
from mqproc.cli.output import Output, Progress, output_columns
from mqproc.client import Client
from mqproc.client import requests as core
from mqproc.client.batch import Batch, part_of
from mqproc.client.connection import FRAME_BYTES_MAX
from mqproc.client.dispatch_barrier import (
    OUTCOME_UNKNOWN,
    PATIENCE_S,
    Patience,
    check_index,
    has_index,
    wait_for_index,
)
from mqproc.client.encoding import AppendFrame, encode_batch
from mqproc.errors import BadMessageError, BadRequestError, FrameTooLargeError, MqprocError, StoreLockedError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.util.file_lock import try_flock
from mqproc.util.units import EPOCH_MS_MAX, EPOCH_MS_MIN, counted, datetime_ms, format_duration, format_time, now_ms
from mqproc.wire.operations import AppendRequest, Operation

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Import records exactly once, across kills of the importer, the writer or the group.
#
#     position      records below it are acknowledged; written to the journal after each answer
#     in flight     at most IN_FLIGHT frames after it, answered in order
#     unique ids    record n of an import has an id derived from import and n, which the store indexes
#
# An acknowledged record is stored. After a kill or a lost answer it is unknown which records in flight are stored, so
# the importer first settles them:
#
#     1. Ping the writer DRAIN_PINGS times. Each answer is one step of the writer, and each step reads every connection
#        with data, so bytes that a dead importer left in a socket are stored or lost by then.
#     2. Wait until dispatch has reached the log's end: now the index has every record.
#     3. Look up the ids from the position on, a window at a time, until a whole window is missing.
#
# Found records are skipped, the rest is sent. The ids do not depend on the journal: without it the position is found
# by a search for the ids.


# Journal


# The head of a file, by which it is recognised.
HEAD_BYTES = 65536
_DIGITS = 20
_SYNC_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of a file or of its acknowledged part; a file that has grown is still the same.

    Empty for a stream.

    For compressed and Parquet files, whose bytes do not map to records, the part is counted `in_records`.
    """

    size: int = 0
    head_size: int = 0
    head_sha256: str = ""
    in_records: bool = False

    @classmethod
    def of(cls, path: Path, size: int | None = None) -> Fingerprint:
        """Fingerprint of the whole file, or of its first `size` bytes."""
        size = path.stat().st_size if size is None else size
        with path.open("rb") as file:
            head = file.read(min(size, HEAD_BYTES))
        return cls(size, len(head), hashlib.sha256(head).hexdigest())

    @classmethod
    def of_records(cls, size: int, head: Sequence[bytes]) -> Fingerprint:
        """Fingerprint of `size` records, the first of which have these bodies."""
        digest = hashlib.sha256()
        for body in head:
            digest.update(b"%d:%b" % (len(body), body))
        return cls(size, len(head), digest.hexdigest(), in_records=True)

    def is_continued_by(self, path: Path, *, may_grow: bool) -> bool:
        """Whether a file begins with the same bytes, with the same size unless it may grow."""
        if not self.head_sha256:
            return True
        with path.open("rb") as file:
            head = file.read(self.head_size)
        size = path.stat().st_size
        same_size = size >= self.size if may_grow else size == self.size
        return same_size and hashlib.sha256(head).hexdigest() == self.head_sha256


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Content of the journal's JSON file. `generation` counts uses of `--restart`."""

    identity: dict[str, Any]
    fingerprint: Fingerprint
    generation: int = 0
    started_ms: int = 0
    finished_ms: int = 0
    records: int = 0


def import_id(identity: dict[str, Any]) -> str:
    """Name of an import: a hash of source, topic and all options that affect messages."""
    return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()[:16]


def _encodable(value: Any) -> Any:
    """Replace text that JSON cannot hold: file names may be invalid UTF-8."""
    if isinstance(value, dict):
        return {name: _encodable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(part) for part in value]
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        # The repr of bytes begins unlike any path, so it equals no other file's name.
        return repr(os.fsencode(value))
    return value


def unique_id_prefix(name: str, generation: int, record: int) -> str:
    """The first 28 digits of a record's unique id; the last four are its number modulo 65,536.

    They are deterministic, so that a later run can find the stored records by their ids.
    """
    family = hashlib.sha256(f"{name}/{generation}".encode()).hexdigest()[:16]
    return f"{family}{record >> 16:012x}".upper()


def unique_id_of(name: str, generation: int, record: int) -> str:
    """The unique id of record number `record`."""
    return f"{unique_id_prefix(name, generation, record)}{record & 0xFFFF:04X}"


class Journal:
    """An open and locked journal. `entry` is None for a new import."""

    def __init__(self, io: StoreIO, paths: StorePaths, identity: dict[str, Any], folder: str = "imports") -> None:
        """Raises StoreLockedError if the same import is running."""
        identity = _encodable(identity)
        self.name = import_id(identity)
        self.folder = paths.own / folder
        self._identity = identity
        self._io = io
        io.make_folder(self.folder, mode=0o700)
        self._json = self.folder / f"{self.name}.json"
        self._fd = io.open(self.folder / f"{self.name}.position", write=True, create=True, mode=0o600)
        if not try_flock(self._fd):
            io.close(self._fd)
            raise StoreLockedError(f"{identity['source']}: the same command is already running")
        self._synced_s = time.monotonic()
        self.entry = self._load()

    def _load(self) -> JournalEntry | None:
        try:
            found = self._io.read_json(self._json, JournalEntry)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise BadRequestError(f"{self._json}: {error}; remove the file to start over") from None
        return found

    @property
    def position(self) -> int:
        """Number of acknowledged records, 0 if unknown."""
        digits = self._io.pread(self._fd, _DIGITS, 0)
        return int(digits) if len(digits) == _DIGITS and digits.isdigit() else 0

    def begin(self, fingerprint: Fingerprint, generation: int, now_ms: int) -> JournalEntry:
        """Start a new import at record 0."""
        self.advance(0)
        return self._save(JournalEntry(self._identity, fingerprint, generation, now_ms))

    def resume(self, entry: JournalEntry, fingerprint: Fingerprint) -> JournalEntry:
        """Continue an import; `fingerprint` is of the grown input, or of its acknowledged part."""
        return self._save(JournalEntry(self._identity, fingerprint, entry.generation, entry.started_ms))

    def finish(self, entry: JournalEntry, records: int, now_ms: int) -> None:
        """Record that all records are stored."""
        self._save(JournalEntry(self._identity, entry.fingerprint, entry.generation, entry.started_ms, now_ms, records))

    def advance(self, position: int) -> None:
        """Record that the records below `position` are acknowledged."""
        self._io.pwrite(self._fd, b"%020d" % position, 0)
        now_s = time.monotonic()
        if now_s - self._synced_s >= _SYNC_EVERY_S:
            self._synced_s = now_s
            self._io.sync(self._fd)

    def close(self) -> None:
        """Release the lock."""
        self._io.close(self._fd)

    def _save(self, entry: JournalEntry) -> JournalEntry:
        self._io.write_file_atomically(self._json, msgspec.json.encode(asdict(entry)), mode=0o600)
        self.entry = entry
        return entry


# Columns of messages from fields of records


TIME_FORMATS = ("auto", "iso", "s", "ms", "us", "ns")
_KNOWN_TIMES_MAX = 100_000
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_INT64_MAX = (1 << 63) - 1
_PER_MS = {"ms": 1, "us": 1000, "ns": 1_000_000}


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Fields for keys, tag, time and queue; `time_format` is in TIME_FORMATS or for strptime."""

    keys: tuple[str, ...] = ()
    tag: str = ""
    time: str = ""
    queue: str = ""
    time_format: str = "auto"

    @property
    def selected(self) -> tuple[str, ...]:
        """The distinct fields that a source must provide."""
        named = (*self.keys, self.tag, self.time, self.queue)
        return tuple(dict.fromkeys(name for name in named if name))


@dataclass(frozen=True, slots=True)
class MessageColumns:
    """The columns of a chunk, None if not requested."""

    keys: list[Any] | None
    tags: list[str] | None
    born_timestamps_ms: list[int] | None
    queue_ids: list[int] | None


@dataclass
class ColumnMaker:
    """Converts chunks to columns. Errors name the input; parsed times are cached."""

    names: FieldNames
    now_ms: int
    source: str
    _times: dict[Any, int] = field(default_factory=dict, init=False)

    def columns(self, chunk: Chunk) -> MessageColumns:
        """Convert a chunk. Raises BadMessageError with input, record, field and value."""
        names = self.names
        return MessageColumns(
            keys=self._keys(chunk),
            tags=[_text(value) for value in chunk.fields[names.tag]] if names.tag else None,
            born_timestamps_ms=self._born(chunk) if names.time else None,
            queue_ids=self._queues(chunk) if names.queue else None,
        )

    def _keys(self, chunk: Chunk) -> list[Any] | None:
        """The key of each message, or its list of keys if there are several fields; "" is no key."""
        columns = [[_key(value) for value in chunk.fields[name]] for name in self.names.keys]
        if len(columns) < 2:
            return columns[0] if columns else None
        return [list(dict.fromkeys(filter(None, keys))) for keys in zip(*columns, strict=True)]

    def _born(self, chunk: Chunk) -> list[int]:
        known = self._times
        values = chunk.fields[self.names.time]
        try:
            return [known[value] for value in values]
        except (KeyError, TypeError):
            return [self._time(chunk, index, value) for index, value in enumerate(values)]

    def _time(self, chunk: Chunk, index: int, value: Any) -> int:
        try:
            found = self._times.get(value)
            if found is not None:
                return found
            found = self.now_ms if value is None else parse_field_time(value, self.names.time_format)
        except (ValueError, TypeError, OverflowError) as error:
            # TypeError: a list cannot be looked up in the cache.
            raise self._wrong(chunk, index, self.names.time, f"is not a time: {error}") from None
        if len(self._times) < _KNOWN_TIMES_MAX:
            self._times[value] = found
        return found

    def _queues(self, chunk: Chunk) -> list[int]:
        queues = []
        for index, value in enumerate(chunk.fields[self.names.queue]):
            try:
                queues.append(_queue_id(value))
            except (TypeError, ValueError, OverflowError):
                raise self._wrong(chunk, index, self.names.queue, "is not a queue id") from None
        return queues

    def _wrong(self, chunk: Chunk, index: int, name: str, what: str) -> BadMessageError:
        value = chunk.fields[name][index]
        return BadMessageError(f"{self.source}: record {chunk.first + index + 1:,}: field {name!r} = {value!r} {what}")


def _queue_id(value: Any) -> int:
    """Convert a field to a queue id; 3.0 is valid. Raises TypeError, ValueError, OverflowError."""
    found = int(value)
    if isinstance(value, bool) or (not isinstance(value, str) and found != value):
        raise ValueError("not a whole number")
    if abs(found) > _INT64_MAX:
        raise OverflowError("not a 64-bit number")
    return found


def parse_field_time(value: Any, time_format: str = "auto") -> int:
    """Convert a field to Unix ms.

    The format is ISO 8601 (local time without a zone), epoch s, ms, us or ns, or a strptime format. `auto` reads
    numbers from 100,000,000,000 on as milliseconds, smaller numbers as seconds. Raises ValueError, also for a number
    after the year 9999, which must be in another unit.
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
        raise OverflowError("not a 64-bit number")
    if found > EPOCH_MS_MAX:
        raise ValueError(f"after the year 9999 in {unit}; --time-format sets the unit: ms, us or ns")
    return found


def _text(value: Any) -> str:
    """A field as text, in the form that it has in the JSON body."""
    if value is None or type(value) is str:
        return value or ""
    if type(value) is WrittenNumber:
        return value.text
    encoded = msgspec.json.encode(value)
    if encoded.startswith(b'"'):
        return msgspec.json.decode(encoded, type=str)
    return "" if encoded == b"null" else encoded.decode()


def _key(value: Any) -> str:
    """A field as a key. RocketMQ separates keys by spaces, so they become underscores."""
    text = _text(value)
    return text.replace(" ", "_") if " " in text else text


def without(chunk: Chunk, stored: Collection[int]) -> list[Chunk]:
    """A chunk without the stored records, as chunks of consecutive records."""
    skipped = {record - chunk.first for record in stored if chunk.first <= record < chunk.end}
    if not skipped:
        return [chunk]
    parts = []
    start = 0
    for stop in [*sorted(skipped), len(chunk.bodies)]:
        if start < stop:
            parts.append(part(chunk, start, stop))
        start = stop + 1
    return parts


def part(chunk: Chunk, start: int, stop: int) -> Chunk:
    """Records [start, stop) of a chunk, relative to its first."""
    fields = {name: values[start:stop] for name, values in chunk.fields.items()}
    taken = chunk.taken if stop == len(chunk.bodies) else 0
    return Chunk(chunk.first + start, chunk.bodies[start:stop], fields, taken)


IN_FLIGHT = 4
CHUNK_ROWS = 1000
# Records that may be stored above the position, with a margin.
WINDOW = (IN_FLIGHT + 1) * CHUNK_ROWS
_LOOKUPS_IN_FLIGHT = 64
# Unique ids of one frame share all but their last four digits.
_IDS_PER_PREFIX = 1 << 16

# Errors of encoding a frame.
_UNSENDABLE = (BadRequestError, FrameTooLargeError)
# The writer counts the messages of a frame from 0.
_MESSAGE = re.compile(r"message (\d+): (.*)", re.DOTALL)

Stored: TypeAlias = Mapping[int, bytes]
"""Digests of the bodies of stored records, by record number."""

_decode_append = msgspec.msgpack.Decoder(AppendRequest).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass
class Importer:
    """Imports one input into one topic. `acknowledged` is called after each answer."""

    client: Client
    journal: Journal
    topic: str
    columns: ColumnMaker
    source: str
    acknowledged: Callable[[int], None]
    note: Callable[[str], None]
    patience_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        assert self.journal.entry is not None
        self._entry: JournalEntry = self.journal.entry
        self._patience = Patience(seconds=self.patience_s, on_delay=self.note)
        self._pending: deque[Chunk] = deque()
        # First record of each frame in flight.
        self._in_flight: deque[int] = deque()
        self._failure: Exception | None = None
        self.position = self.journal.position
        # Bytes of the input up to the acknowledged records, as far as known.
        self.taken = 0
        self.found = 0

    # Resume

    def begin(self) -> Stored:
        """Settle an earlier run: set `position`, return the records stored from there on."""
        if not has_index(self.client.store):
            return {}  # The import is new: without an index no earlier one is resumed.
        wait_for_index(self.client, self._patience)
        if self.position and not self._is_stored(self.position - 1):
            self.note(
                f"record {self.position:,} is acknowledged but not in the store; searching for the last stored one"
            )
            self.position = self._search()
            if self.position == 0:
                raise BadRequestError(
                    "records of this import were stored and have been deleted; --restart imports everything again"
                )
        elif self.position == 0:
            self.position = self._search()
        stored = self._settle()
        self.found = len(stored)
        return stored

    def _search(self) -> int:
        """Approximate number of stored records, by binary search: they are a prefix of the input."""
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
        """Look up which of these records are stored."""
        name, generation = self.journal.name, self._entry.generation
        calls = (core.by_unique_id(self.topic, unique_id_of(name, generation, record)) for record in records)
        answers = self.client.run_all(calls, _LOOKUPS_IN_FLIGHT)
        return {
            record: _digest(messages[0].body) for record, messages in zip(records, answers, strict=True) if messages
        }

    # Sending

    def send(self, chunks: Iterator[Chunk], stored: Stored) -> None:
        """Send all but the stored records. Raises errors that cannot be settled."""
        left: Iterable[Chunk] = chunks
        failed_at, failed_s = -1, 0.0
        while True:
            try:
                self._send(left, stored)
                return
            except OUTCOME_UNKNOWN as error:
                if failed_at != self.position:
                    failed_at, failed_s = self.position, time.monotonic()
                elif time.monotonic() - failed_s > self._patience.seconds:
                    raise
                self.note(f"at record {self.position:,}: {error}; looking up which records are stored")
                stored = self._settle_again(failed_s)
            left = self._unsent(chunks)

    def _settle_again(self, since_s: float) -> Stored:
        """Settle after a lost answer, as soon as the group answers again.

        Raises BadRequestError if the store has no index to look records up.
        """
        check_index(self.client.store)
        while True:
            try:
                wait_for_index(self.client, self._patience)
                return self._settle()
            except MqprocError as error:
                if not isinstance(error, OUTCOME_UNKNOWN) or time.monotonic() - since_s > self._patience.seconds:
                    raise
                time.sleep(0.1)

    def _unsent(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Records in flight that were not acknowledged, then the rest of the input."""
        in_flight = list(self._pending)
        self._pending.clear()
        for chunk in in_flight:
            yield part(chunk, max(0, self.position - chunk.first), len(chunk.bodies))
        yield from chunks

    def _send(self, chunks: Iterable[Chunk], stored: Stored) -> None:
        self._in_flight.clear()
        try:
            for end in self.client.run_all(self._until_failure(chunks, stored), IN_FLIGHT):
                self._in_flight.popleft()
                self._acknowledge(end)
        except BadRequestError as error:
            raise self._refused(error) from None
        if self._failure is not None:
            raise self._failure
        # The last records may all be stored already, so that no answer acknowledges them.
        while self._pending:
            self._acknowledge(self._pending[0].end)

    def _until_failure(self, chunks: Iterable[Chunk], stored: Stored) -> Iterator[core.Call[int]]:
        """Calls up to an invalid record; its error is kept until frames in flight are answered."""
        try:
            yield from self._calls(chunks, stored)
        except (MqprocError, click.ClickException, OSError) as error:
            self._failure = error

    def _refused(self, error: BadRequestError) -> BadRequestError:
        """Replace the message number within a frame in the writer's error by the record's number."""
        found = _MESSAGE.match(str(error))
        if found is None:
            return error
        record = self._in_flight[0] + int(found[1])
        return type(error)(f"{self.source}: record {record + 1:,}: {found[2]}")

    def _acknowledge(self, end: int) -> None:
        """Advance the position: all records below `end` are stored."""
        while self._pending and self._pending[0].end <= end:
            self.taken = max(self.taken, self._pending.popleft().taken)
        self.position = end
        self.journal.advance(end)
        self.acknowledged(end)

    def _calls(self, chunks: Iterable[Chunk], stored: Stored) -> Iterator[core.Call[int]]:
        for chunk in chunks:
            self._pending.append(chunk)
            self._check_stored(chunk, stored)
            for piece in without(chunk, stored) if stored else (chunk,):
                for aligned in _within_prefixes(piece):
                    yield from self._frames(aligned)

    def _check_stored(self, chunk: Chunk, stored: Stored) -> None:
        """Raise BadRequestError if a stored record has another body: the input has changed."""
        for record in filter(stored.__contains__, range(chunk.first, chunk.end)) if stored else ():
            if stored[record] != _digest(chunk.bodies[record - chunk.first]):
                raise BadRequestError(
                    f"{self.source}: record {record + 1:,} is stored with another body, so the input has changed; "
                    "--restart imports everything again"
                )

    def _frames(self, chunk: Chunk) -> Iterator[core.Call[int]]:
        columns = self.columns.columns(chunk)
        batch = Batch(
            self.topic,
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
                self._in_flight.append(at)
                at += frame.count
                yield core.Call(core.WRITER, Operation.APPEND, options, frame.payload, _returning(at), repeatable=False)
        except _UNSENDABLE as error:
            raise self._unsendable(batch, chunk.first, error) from None

    def _unsendable(self, batch: Batch, first: int, error: MqprocError) -> MqprocError:
        """The error of the first record, counted from `first`, that cannot be sent by itself either."""
        for index in range(len(batch)):
            try:
                list(encode_batch(part_of(batch, index, index + 1), FRAME_BYTES_MAX))
            except _UNSENDABLE as found:
                return type(found)(f"{self.source}: record {first + index + 1:,}: {found}")
        return type(error)(f"{self.source}: records {first + 1:,} to {first + len(batch):,}: {error}")

    def _with_ids(self, frame: AppendFrame, first: int) -> bytes:
        """A frame's options with the unique ids of its records, the first of which is `first`."""
        prefix = unique_id_prefix(self.journal.name, self._entry.generation, first)
        return _encode(
            msgspec.structs.replace(
                _decode_append(frame.options), unique_prefix=prefix, unique_counter=first % _IDS_PER_PREFIX
            )
        )


def _digest(body: ReadableBuffer) -> bytes:
    return hashlib.sha256(body).digest()


def _returning(record: int) -> Callable[[memoryview, memoryview], int]:
    return lambda options, payload: record


def _within_prefixes(chunk: Chunk) -> list[Chunk]:
    """Split a chunk into parts whose unique ids have one prefix each."""
    first_block, last_block = chunk.first // _IDS_PER_PREFIX, (chunk.end - 1) // _IDS_PER_PREFIX
    if first_block == last_block:
        return [chunk]
    cut = (first_block + 1) * _IDS_PER_PREFIX - chunk.first
    return [part(chunk, 0, cut), *_within_prefixes(part(chunk, cut, len(chunk.bodies)))]


_COLUMNS = output_columns("source", "records:count", "already_stored:count", "seconds:number", "per_second:count:per s")
# Bytes per read when lines are counted.
_PIECE_BYTES = 1 << 20


_FORMATS_OF = {"--typed": {"csv"}, "--delimiter": {"csv"}, "--null": {"csv", "jsonl"}}


def parse_delimiter(text: str) -> str:
    """One character that separates CSV fields; `\\t` is a tab. Raises ValueError."""
    found = "\t" if text == "\\t" else text
    if len(found) != 1 or found in '"\r\n' or "\ud800" <= found <= "\udfff":
        raise ValueError(f"{text!r} is not one character that can separate fields")
    return found


@command("import")
@click.argument("files", nargs=-1, required=True, metavar="FILE…")
@click.option(
    "--topic", required=True, shell_complete=complete_topic, help="Topic to send to; it is created if missing."
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    help="Input format.  [default: by the name of the file or .zip member, else lines]",
)
@click.option("--key-field", "keys", multiple=True, metavar="FIELD", help="Field used as key; may be repeated.")
@click.option("--tag-field", "tag", default="", metavar="FIELD", help="Field used as tag.")
@click.option("--time-field", "time", default="", metavar="FIELD", help="Field used as born time.")
@click.option(
    "--time-format", metavar="FORMAT", help=f"{', '.join(TIME_FORMATS)}, or a strptime format.  [default: auto]"
)
@click.option("--queue-field", "queue", default="", metavar="FIELD", help="Field used as queue id.")
@click.option(
    "--queues", type=click.IntRange(1, 65535), metavar="N", help="Number of queues of the topic, if it has fewer."
)
@click.option("--typed", is_flag=True, help="CSV: convert numbers, true, false and nulls to JSON values.")
@click.option(
    "--null",
    "nulls",
    multiple=True,
    metavar="TEXT",
    help="CSV, JSON: text that means no value, in addition to the empty text.",
)
@click.option(
    "--delimiter",
    type=ParsedText("character", parse_delimiter),
    help="CSV: field separator; \\t is a tab.  [default: , and a tab for .tsv]",
)
@click.option("--member", default="", metavar="NAME", help="File to read from a .zip with several files.")
@click.option("--name", default="", help="Name for the import of a stream, so that it can be resumed.")
@click.option("--restart", is_flag=True, help="Import everything again.")
def import_(
    invocation: Invocation,
    files: tuple[str, ...],
    topic: str,
    kind: str | None,
    keys: tuple[str, ...],
    tag: str,
    time: str,
    time_format: str | None,
    queue: str,
    queues: int | None,
    typed: bool,
    nulls: tuple[str, ...],
    delimiter: str | None,
    member: str,
    name: str,
    restart: bool,
) -> None:
    """Import CSV, JSON lines, Parquet or plain lines.

    FILE may be compressed (.gz, .bz2, .xz, .zip), a pipe, or - for stdin. A record of CSV or Parquet becomes a JSON
    object; a line of the other formats is the body unchanged. Spaces in keys become _, as RocketMQ separates keys by
    spaces.

    After Ctrl-C, a kill, or a corrected record the same command resumes: no record is imported twice and none is
    missed. For a file that has grown it imports the new records. --restart imports everything again.

    NaN and infinity in Parquet become null, as JSON has no such numbers; their count is printed at the end.
    """
    _check_streams(name, files)
    used = {"--typed": typed, "--delimiter": bool(delimiter), "--null": bool(nulls)}
    for option in (option for option, is_used in used.items() if is_used):
        _check_formats(option, _FORMATS_OF[option], files, kind)
    if member and not any(map(_is_zip, files)):
        raise click.UsageError(f"--member {member} is for a .zip file, but not for {', '.join(files)}")
    if time_format and not time:
        raise click.UsageError(f"--time-format {time_format} needs --time-field")
    names = FieldNames(tuple(keys), tag, time, queue, time_format or "auto")
    reading = Reading(names.selected, typed, ("", *nulls), delimiter or "", CHUNK_ROWS)
    paths = invocation.existing_paths()
    patience_s = invocation.timeout_or(PATIENCE_S)
    settings = ImportSettings(kind or "", member, name, patience_s)
    rows = []
    with invocation.client() as client:
        if queues is not None:
            client.create_topic(topic, queues)
        for file in files:
            job = ImportJob(client, paths, file, topic, names, reading, settings)
            rows.append(job.run(invocation.out, restart=restart))
    out = invocation.out
    if out.shape != "table":
        out.rows("imports", _COLUMNS, rows, topic=topic)


def _check_streams(name: str, files: Sequence[str]) -> None:
    """Raise a usage error if `--name` does not name exactly one stream."""
    streams = sum(_regular_file(file) is None for file in files)
    if name and streams > 1:
        raise click.UsageError(f"--name {name} names one stream, but there are {streams}")
    if name and not streams and all(Path(file).exists() for file in files):
        raise click.UsageError(f"--name {name} is for a stream; the import of a file resumes by the file's name")


def _is_zip(file: str) -> bool:
    return Path(file).suffix.lower() == ".zip"


def _check_formats(option: str, formats: Collection[str], files: Sequence[str], kind: str | None) -> None:
    """Raise a usage error if an option applies to no file; a .zip may contain any format."""
    kinds = {file: kind or guess_kind(file) for file in files}
    if not any(found in formats or (_is_zip(file) and not kind) for file, found in kinds.items()):
        listed = ", ".join(f"{file} is {found}" for file, found in kinds.items())
        raise click.UsageError(f"{option} is for {' and '.join(sorted(formats))}; {listed}")


def _regular_file(file: str) -> Path | None:
    """The resolved path of a file that can be read again, None for a stream."""
    path = Path(file)
    return path.resolve() if file != STDIN and path.is_file() else None


def _check_last_line(path: Path, kind: str, size: int) -> None:
    """Raise BadRequestError if the line that ended at `size` bytes has become longer."""
    ends = b"\r\n" if kind == "csv" else b"\n"
    with path.open("rb") as file:
        file.seek(max(0, size - 1))
        last, following = file.read(1), file.read(2)
    if size and last not in ends and following[:1] not in ends and following != b"\r\n":
        raise BadRequestError(
            f"{path}: line {_lines_in(path, size):,} was imported before it was complete, and has become longer; "
            "--restart imports everything again"
        )


def _lines_in(path: Path, size: int) -> int:
    """Number of lines in the first `size` bytes of a file, the last one incomplete."""
    with path.open("rb") as file:
        pieces = (file.read(min(_PIECE_BYTES, size - at)) for at in range(0, size, _PIECE_BYTES))
        return 1 + sum(piece.count(b"\n") for piece in pieces)


@dataclass(frozen=True, slots=True)
class ImportSettings:
    """Format, .zip member, name of a stream, and wait for a lost group."""

    kind: str = ""
    member: str = ""
    name: str = ""
    patience_s: float = PATIENCE_S


@dataclass(slots=True)
class ImportJob:
    """Import of one input: source, journal, sending of missing records, result."""

    client: Client
    paths: StorePaths
    file: str
    topic: str
    names: FieldNames
    reading: Reading
    settings: ImportSettings = ImportSettings()
    path: Path | None = field(init=False)
    title: str = field(init=False)
    # Acknowledged bytes of the file from earlier runs.
    _acknowledged_before: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.path = _regular_file(self.file)
        self.title = "stdin" if self.file == STDIN else Path(self.file).name if self.path else self.file

    def run(self, out: Output, *, restart: bool = False) -> dict[str, Any]:
        """Import the records that are not stored yet; returns the numbers."""
        with Source(self.file, self.settings.kind, self.settings.member) as source:
            journal = Journal(StoreIO(), self.paths, self._identity(source.kind))
            try:
                return self._run(out, source, journal, restart)
            finally:
                journal.close()

    def _run(self, out: Output, source: Source, journal: Journal, restart: bool) -> dict[str, Any]:
        entry = self._prepare(journal, source, restart)
        if entry is None:
            assert journal.entry is not None
            self._note_done(out, journal.entry)
            return self._numbers(0, journal.entry.records, 0.0)
        title = self.title
        with Progress(out, title) as progress:
            first = 0
            importer = Importer(
                self.client,
                journal,
                self.topic,
                ColumnMaker(self.names, now_ms(), self.file),
                self.file,
                lambda position: progress.update(source.done(), source.total, position - first),
                out.note,
                self.settings.patience_s,
            )
            try:
                stored = importer.begin()
                first = importer.position
                if first or stored:
                    out.note(f"{title}: continuing after record {first + len(stored):,}")
                self._send(importer, source, stored, first, out)
            except BaseException:
                self._save_acknowledged(journal, entry, importer, source)
                raise
            importer_end = importer.position
            progress.end(source.total, source.total, importer_end - first)
            # A growing file has been read to its end, which may be after its size at the start.
            journal.finish(self._up_to(source.done(), entry, source), importer_end, now_ms())
            sent = importer_end - first - importer.found
            out.note(
                f"{title}: {counted(sent, 'record')} to {self.topic} in {format_duration(progress.seconds)}, "
                f"{sent / max(progress.seconds, 1e-9):,.0f}/s"
            )
            if source.not_finite:
                numbers = counted(source.not_finite, "number")
                out.note(f"{title}: {numbers} NaN or infinite, stored as null: JSON has no such numbers")
            return self._numbers(sent, importer_end - sent, progress.seconds)

    def _send(self, importer: Importer, source: Source, stored: Stored, first: int, out: Output) -> None:
        try:
            importer.send(source.chunks(replace(self.reading, skip=first)), stored)
        except KeyboardInterrupt:
            hint = "the same command continues" if self._resumable else "without --name it cannot be resumed"
            out.note(f"\nstopped; {importer.position:,} records are acknowledged; {hint}")
            raise
        except (BadRequestError, FrameTooLargeError) as error:
            hint = "; correct it and repeat the command" if self._resumable else ""
            raise type(error)(f"{error}; records stored before it: {importer.position:,}{hint}") from None

    def _save_acknowledged(self, journal: Journal, entry: JournalEntry, importer: Importer, source: Source) -> None:
        """Save the fingerprint of the acknowledged part only: the rest may be corrected."""
        if self.path is not None and not source.may_grow:
            # The original error is reported, not a second one about the file.
            with suppress(OSError, MqprocError, click.ClickException):
                if entry.fingerprint.is_continued_by(self.path, may_grow=False):
                    journal.resume(entry, self._of_records(importer.position))
            return
        acknowledged = max(importer.taken, self._acknowledged_before)
        if acknowledged or not importer.position:
            journal.resume(entry, self._up_to(acknowledged, entry, source).fingerprint)

    def _of_records(self, size: int, head: int = CHUNK_ROWS) -> Fingerprint:
        """Fingerprint of the first `size` records of the file, by the bodies of the first `head`."""
        head = min(size, head)
        if not head:
            return Fingerprint()
        bodies: list[bytes] = []
        with Source(self.file, self.settings.kind, self.settings.member) as source:
            for chunk in source.chunks(replace(self.reading, fields=(), chunk_rows=head)):
                bodies += chunk.bodies
                if len(bodies) >= head:
                    break
        return Fingerprint.of_records(size, bodies[:head])

    def _is_continued(self, before: Fingerprint, path: Path, source: Source) -> bool:
        """Whether the file begins with its acknowledged part."""
        if before.in_records:
            return self._of_records(before.size, before.head_size) == before
        return before.is_continued_by(path, may_grow=source.may_grow)

    def _up_to(self, size: int, entry: JournalEntry, source: Source) -> JournalEntry:
        """The entry for the first `size` bytes of the file, unchanged if the file was replaced."""
        if self.path is not None and source.may_grow:
            with suppress(OSError):
                if entry.fingerprint.is_continued_by(self.path, may_grow=True):
                    return replace(entry, fingerprint=Fingerprint.of(self.path, size))
        return entry

    @property
    def _resumable(self) -> bool:
        return self.path is not None or bool(self.settings.name)

    def _identity(self, kind: str) -> dict[str, Any]:
        """Everything that affects the messages: a run with other options is another import."""
        source = str(self.path) if self.path else f"stdin:{self.settings.name}"
        if not self._resumable:
            # Streams cannot be recognised: each is an import of its own.
            source = f"stdin:{now_ms()}"
        names, reading = self.names, self.reading
        return {
            "source": source,
            "member": self.settings.member,
            "format": kind,
            "topic": self.topic,
            "fields": [list(names.keys), names.tag, names.time, names.time_format, names.queue],
            # The default delimiter is stored as in earlier versions, so that their imports can be resumed.
            "reading": [reading.typed, list(reading.nulls), reading.delimiter or ","],
        }

    def _prepare(self, journal: Journal, source: Source, restart: bool) -> JournalEntry | None:
        """The journal's entry for this run, None if there is nothing to do. Raises BadRequestError."""
        fingerprint = Fingerprint.of(self.path) if self.path else Fingerprint()
        before = journal.entry
        if before is None or restart:
            return journal.begin(fingerprint, before.generation + 1 if before else 0, now_ms())
        if self.path and not self._is_continued(before.fingerprint, self.path, source):
            raise BadRequestError(
                f"{self.path} is not the file of the last import; --restart imports it from the start"
            )
        if before.finished_ms and self.path and before.fingerprint == fingerprint:
            return None
        if before.finished_ms and self.path:
            _check_last_line(self.path, source.kind, before.fingerprint.size)
        # Only the index knows which records of an unfinished import are stored.
        check_index(self.paths.root, "; --restart imports everything again")
        self._acknowledged_before = before.fingerprint.size
        return journal.resume(before, fingerprint)

    def _note_done(self, out: Output, entry: JournalEntry) -> None:
        when = format_time(entry.finished_ms)
        out.note(f"{self.file}: all {entry.records:,} records were imported {when}; --restart imports them again")

    def _numbers(self, sent: int, before: int, seconds: float) -> dict[str, Any]:
        return {
            "source": self.file,
            "records": sent,
            "already_stored": before,
            "seconds": round(seconds, 3),
            "per_second": round(sent / seconds) if seconds else 0,
        }
