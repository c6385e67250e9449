"""Input of `mqproc import`: files and streams as chunks of bodies with selected fields.

    file, compressed or not, stdin ──bytes──▶ CSV │ JSON lines │ Parquet │ plain lines ──▶ Chunk, Chunk, …

A record of CSV or Parquet becomes a JSON object; a line of the other formats is the body unchanged. Records are counted
from 0 in the order of the input, so that an import can be resumed at a record number.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import datetime
import gzip
import io
import itertools
import json
import lzma
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self, TypeVar, cast

import click
import msgspec

from mqproc.client.connection import FRAME_BYTES_MAX
from mqproc.errors import BadMessageError, BadRequestError
from mqproc.util.units import counted

# Formats by file name


FORMATS = ("csv", "jsonl", "parquet", "lines")
_SUFFIXES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
# Unsupported formats: read as lines, they would be garbage.
_UNSUPPORTED = frozenset(
    ".tar .tgz .tbz2 .txz .zst .lz4 .lzma .z .7z .rar .br .xls .xlsx .orc .avro .feather .arrow".split()
)


def is_compressed(name: str) -> bool:
    """Whether a file is decompressed while it is read."""
    return Path(name).suffix.lower() in _COMPRESSED


def guess_kind(name: str) -> str:
    """The format by a file's name, or lines. Raises a usage error for an unsupported one."""
    path = Path(name)
    if is_compressed(name):
        path = path.with_suffix("")
    if path.suffix.lower() in _UNSUPPORTED:
        raise click.UsageError(
            f"{name}: {path.suffix} is not supported; decompress or convert it, or name the format with --format"
        )
    return _SUFFIXES.get(path.suffix.lower(), "lines")


def kind_of_member(name: str, member: str) -> str:
    """The format of a file inside a .zip: by the archive's name, else by the member's.

    Raises a usage error for an unsupported one.
    """
    if Path(Path(name).stem).suffix.lower() in _SUFFIXES:
        return guess_kind(name)
    if is_compressed(member):
        raise click.UsageError(f"{name}: {member} is compressed itself, which is not supported; decompress it")
    return guess_kind(member)


# Parquet values that JSON or Python lack


def not_finite(values: Any) -> int:
    """Count NaN and infinite numbers in a record batch or an array, also in nested values."""
    import pyarrow
    import pyarrow.compute as compute

    if isinstance(values, pyarrow.RecordBatch):
        return sum(map(not_finite, values.columns))
    if pyarrow.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = values.type
    if pyarrow.types.is_floating(kind):
        wide = values.cast("float32") if pyarrow.types.is_float16(kind) else values
        finite: int = compute.sum(compute.is_finite(wide)).as_py() or 0
        return len(wide) - int(wide.null_count) - finite
    if pyarrow.types.is_struct(kind):
        return sum(map(not_finite, values.flatten()))
    if pyarrow.types.is_map(kind):
        values = pyarrow.ListArray.from_arrays(values.offsets, values.items)
    return not_finite(values.flatten()) if pyarrow.types.is_nested(kind) else 0


def without_pandas(value: Any) -> Any:
    """Convert pandas times, which pyarrow returns if pandas is installed, to Python's types.

    A value with nanoseconds becomes text, as Python's types cannot hold them.
    """
    if isinstance(value, dict):
        return {name: without_pandas(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return list(map(without_pandas, value))
    if isinstance(value, datetime.datetime) and type(value) is not datetime.datetime:
        moment: Any = value
        return moment.isoformat().replace("+00:00", "Z") if moment.nanosecond else moment.to_pydatetime()
    if isinstance(value, datetime.timedelta) and type(value) is not datetime.timedelta:
        span: Any = value
        return span.isoformat() if span.nanoseconds else span.to_pytimedelta()
    return value


STDIN = "-"
_DECOMPRESSORS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {
    ".gz": cast(Callable[[IO[bytes]], IO[bytes]], gzip.open),
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
_BUFFER_BYTES = 1 << 20
# Records are read in steps of this size until a chunk has this many bytes: a thousand large records would be gigabytes.
_STEP_ROWS = 16
_CHUNK_BYTES = 16 << 20
_NAMES_SHOWN = 8
# Bytes of text that are counted line by line. After that the decoder's position is accurate enough.
_COUNTED_BYTES = 1 << 17
_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_OBJECT = msgspec.json.Decoder(dict[str, Any]).decode
_VALUE = msgspec.json.Decoder().decode
_AHEAD_BYTES = 1 << 16
# A column of identifiers has as many values as rows: the memory for known values is bounded.
_KNOWN_VALUES_MAX = 100_000
# A line after the end of CSV, not valid UTF-8. It is a record of its own unless a quote was left open.
_END = "\ud800"
# A JSON number. "007" and "+1" do not match, so codes with leading zeros remain text.
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
# Errors of an input that is truncated or not in the format of its name.
_DECOMPRESSION_ERRORS = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, zipfile.BadZipFile)
_READ_ERRORS = (*_DECOMPRESSION_ERRORS, csv.Error, UnicodeDecodeError)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read an input. `fields` are returned next to the bodies.

    `typed`: convert numbers, true, false and empty values of CSV to JSON values. `nulls`: texts that mean no value.
    `delimiter` "": a tab for .tsv, else a comma. `skip`: first record to return.
    """

    fields: tuple[str, ...] = ()
    typed: bool = False
    nulls: tuple[str, ...] = ("",)
    delimiter: str = ""
    chunk_rows: int = 1000
    skip: int = 0


class WrittenNumber(float):
    """A JSON number with its `text`, which differs between `1e3` and `1000.0`."""

    __slots__ = ("text",)

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


@dataclass(slots=True)
class Chunk:
    """Records [first, end): bodies, and the values of the selected fields, None if missing.

    `taken`: lower bound of the bytes of decompressed text up to its end, 0 if unknown.
    """

    first: int
    bodies: list[bytes]
    fields: dict[str, list[Any]] = field(default_factory=dict)
    taken: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.bodies)


class CountingStream(io.RawIOBase):
    """A binary stream that counts the bytes read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.count = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.count

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self.count += len(data)
        return len(data)


class Source:
    """An opened input. `total` and `done()` are bytes or records; `total` is 0 if unknown."""

    def __init__(self, name: str, kind: str = "", member: str = "") -> None:
        """Open a path, or stdin for `-`. Raises OSError, or a usage error for the format."""
        self.name = name
        self.suffixes = Path(name.lower()).suffixes
        self._given_kind = kind
        self.kind = kind or guess_kind(name)
        self.total = 0
        # NaN and infinite numbers in the records read.
        self.not_finite = 0
        self.done: Callable[[], int] = lambda: 0
        self._stack = ExitStack()
        try:
            self.stream = self._open(member)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    @property
    def compressed(self) -> bool:
        return is_compressed(self.name)

    @property
    def may_grow(self) -> bool:
        """Whether records may be appended to the input."""
        return not self.compressed and self.kind != "parquet"

    def chunks(self, reading: Reading) -> Iterator[Chunk]:
        """The records from `reading.skip` on."""
        return _READERS[self.kind](self, reading)

    def _open(self, member: str) -> IO[bytes]:
        if self.name == STDIN:
            if sys.stdin is None:
                raise click.UsageError("stdin is closed: name a file, or redirect stdin")
            return self._counted(sys.stdin.buffer)
        path = Path(self.name)
        suffix = path.suffix.lower()
        if suffix == ".zip":
            return self._open_zip(path, member)
        file = self._stack.enter_context(path.open("rb"))
        self.total = path.stat().st_size
        if suffix in _DECOMPRESSORS:
            return self._stack.enter_context(_DECOMPRESSORS[suffix](self._counted(file)))
        return file if self.kind == "parquet" else self._counted(file)

    def _counted(self, stream: IO[bytes]) -> IO[bytes]:
        counted = CountingStream(stream)
        self.done = lambda: counted.count
        return io.BufferedReader(counted, _BUFFER_BYTES)

    def _open_zip(self, path: Path, member: str) -> IO[bytes]:
        try:
            # The directory of a .zip is at its end, so one from a pipe is read whole.
            archive = zipfile.ZipFile(path if path.is_file() else io.BytesIO(path.read_bytes()))
            self._stack.enter_context(archive)
            info = archive.getinfo(_member(archive, path, member))
            if not self._given_kind:
                self.kind = kind_of_member(self.name, info.filename)
                self.suffixes += Path(info.filename.lower()).suffixes
            stream = self._stack.enter_context(archive.open(info))
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise BadRequestError(f"{path} cannot be decompressed: {error}") from None
        self.total = info.file_size
        return self._counted(stream)


def _member(archive: zipfile.ZipFile, path: Path, member: str) -> str:
    """The name of the given member or of the only file. Raises a usage error."""
    names = [info.filename for info in archive.infolist() if not info.is_dir()]
    if not names:
        raise click.UsageError(f"{path} contains no file")
    if member and member not in names:
        raise click.UsageError(f"{path} has no member {member!r}; there are {', '.join(names[:_NAMES_SHOWN])}")
    if not member and len(names) > 1:
        content = f"{path} contains {counted(len(names), 'file')}"
        raise click.UsageError(f"{content}; choose one with --member: {', '.join(names[:_NAMES_SHOWN])}")
    return member or names[0]


def _parts(records: Iterator[_T], reading: Reading, source: Source) -> Iterator[tuple[int, list[_T]]]:
    """Records from `reading.skip` on, in lists, each with the number of its first record."""
    first = 0
    while part := _read_records(records, reading, source, first):
        if first >= reading.skip:
            yield first, part
        first += len(part)


def _read_records(records: Iterator[_T], reading: Reading, source: Source, first: int) -> list[_T]:
    """The records from number `first` on. Raises BadMessageError for an unreadable one."""
    count = reading.chunk_rows
    if first < reading.skip:
        count = min(count, reading.skip - first)
    taken: list[_T] = []
    end = source.stream.tell() + _CHUNK_BYTES
    try:
        # After an error the list's length is the number of the record that failed.
        while len(taken) < count and source.stream.tell() < end:
            before = len(taken)
            # Begin with few records, in case they are large.
            taken.extend(itertools.islice(records, min(_STEP_ROWS, before + 1, count - before)))
            if len(taken) == before:
                break
    except (*_READ_ERRORS, OSError) as error:
        if _is_system_error(error):
            raise
        raise BadMessageError(f"{source.name}: record {first + len(taken) + 1:,} cannot be read: {error}") from None
    return taken


def _is_system_error(error: Exception) -> bool:
    """Whether an error is from the system; those of bz2 have no errno."""
    return isinstance(error, OSError) and error.errno is not None


# CSV


class _Values(dict[str, bytes]):
    """Cache from CSV text to encoded JSON value, as most columns repeat their values."""

    def __init__(self, reading: Reading) -> None:
        self._nulls = frozenset(reading.nulls)
        self._typed = reading.typed

    def __missing__(self, text: str) -> bytes:
        value = self._encoded(text)
        if len(self) < _KNOWN_VALUES_MAX:
            self[text] = value
        return value

    def _encoded(self, text: str) -> bytes:
        if self._typed and text in self._nulls:
            return b"null"
        if self._typed and (text in ("true", "false") or _NUMBER.fullmatch(text)):
            return text.encode()
        return msgspec.json.encode(text)


class _Lines:
    """Lines of text, with a lower bound of the bytes consumed: the decoder reads ahead."""

    def __init__(self, stream: IO[bytes], text: IO[str]) -> None:
        self._stream = stream
        self._text = text
        self._counted = 0

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self._first(), self._text)

    def _first(self) -> Iterator[str]:
        """The first lines, which are counted; counting all would slow reading by a tenth."""
        for line in self._text:
            self._counted += len(line) if line.isascii() else len(line.encode(errors="surrogateescape"))
            yield line
            if self._counted >= _COUNTED_BYTES:
                return

    @property
    def taken(self) -> int:
        return max(self._counted, self._stream.tell() - _AHEAD_BYTES)


def _object_template(names: Sequence[str]) -> bytes:
    """A JSON object with placeholders for values: filling it is faster than encoding."""
    return b"{" + b",".join(msgspec.json.encode(name).replace(b"%", b"%%") + b":%b" for name in names) + b"}"


def _read_csv(source: Source, reading: Reading) -> Iterator[Chunk]:
    # Invalid UTF-8 becomes surrogates, which are reported with their record: the decoder reads far ahead.
    text = io.TextIOWrapper(source.stream, "utf-8-sig", "surrogateescape", newline="")
    delimiter = reading.delimiter or ("\t" if ".tsv" in source.suffixes else ",")
    # Python's default limit is far below the size limit of a message.
    csv.field_size_limit(FRAME_BYTES_MAX)
    lines = _Lines(source.stream, text)
    rows = csv.reader(itertools.chain(lines, (_END,)), delimiter=delimiter)
    header = _header(rows, source.name)
    if header == [_END]:
        return
    _check_names(header, source.name)
    _check_columns(header, reading, source.name)
    places = _places(header, reading.fields, source.name)
    template = _object_template(header)
    encoded = _Values(reading).__getitem__
    for first, part in _parts(filter(None, rows), reading, source):
        if not _without_end_line(part, source.name, first):
            return
        _check_widths(part, len(header), source.name, first)
        try:
            bodies = [template % tuple(map(encoded, row)) for row in part]
        except UnicodeEncodeError:
            wrong = next(index for index, row in enumerate(part) if not _is_utf8(row))
            raise BadMessageError(f"{source.name}: record {first + wrong + 1:,} is not valid UTF-8") from None
        fields = {name: _column(part, place, reading.nulls) for name, place in places.items()}
        yield Chunk(first, bodies, fields, lines.taken)


def _check_columns(header: Sequence[str], reading: Reading, name: str) -> None:
    """Raise BadMessageError for an unclosed quote or a column of another delimiter."""
    if len(header) == 1 and not reading.delimiter and (other := next(filter(header[0].count, ";\t|,"), "")):
        shown = "'\\t'" if other == "\t" else repr(other)
        raise BadMessageError(
            f"{name}: the header {header[0]!r} is one column; --delimiter {shown} divides it, "
            "--delimiter , leaves it so"
        )
    if header[-1:] and header[-1].endswith(_END):
        raise BadMessageError(f"{name}: the header has an unclosed quote")


def _header(rows: Iterator[list[str]], name: str) -> list[str]:
    try:
        header = next(rows)
    except (*_READ_ERRORS, OSError) as error:
        if _is_system_error(error):
            raise
        raise BadMessageError(f"{name}: the header cannot be read: {error}") from None
    if header != [_END] and not _is_utf8(header):
        raise BadMessageError(f"{name}: the header is not valid UTF-8")
    return header


def _is_utf8(row: Sequence[str]) -> bool:
    return not any("\udc80" <= character <= "\udcff" for character in "".join(row))


def _check_names(names: Sequence[str], name: str) -> None:
    """Raise a usage error if two fields have the same name, which JSON objects cannot have."""
    if len(set(names)) < len(names):
        raise click.UsageError(f"{name}: the header names a field twice: {', '.join(names)}")


def _places(header: Sequence[str], fields: Sequence[str], name: str) -> dict[str, int]:
    for field_name in fields:
        if field_name not in header:
            raise click.UsageError(f"{name} has no field {field_name!r}; there are {', '.join(header)}")
    return {field_name: header.index(field_name) for field_name in fields}


def _without_end_line(rows: list[list[str]], name: str, first: int) -> list[list[str]]:
    """Remove the end line from the rows. Raises BadMessageError for an unclosed quote."""
    if rows[-1][-1].endswith(_END) and rows.pop() != [_END]:
        raise BadMessageError(f"{name}: record {first + len(rows) + 1:,} has an unclosed quote")
    return rows


def _check_widths(rows: Sequence[list[str]], width: int, name: str, first: int) -> None:
    if set(map(len, rows)) != {width}:
        wrong = next(index for index, row in enumerate(rows) if len(row) != width)
        raise BadMessageError(f"{name}: record {first + wrong + 1:,} has {len(rows[wrong])} fields, the header {width}")


def _column(rows: Sequence[list[str]], place: int, nulls: Sequence[str]) -> list[Any]:
    values: list[Any] = [row[place] for row in rows]
    if any(null in values for null in nulls):
        return [None if value in nulls else value for value in values]
    return values


# Lines


def _read_lines(source: Source, reading: Reading) -> Iterator[Chunk]:
    if reading.fields:
        raise click.UsageError(f"{source.name}: plain lines have no fields; --format csv or jsonl has them")
    for first, bodies in _parts(map(_strip_newline, _lines_of(source.stream)), reading, source):
        yield Chunk(first, bodies, taken=source.stream.tell())


def _lines_of(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a stream, without a UTF-8 byte order mark."""
    first = (line.removeprefix(codecs.BOM_UTF8) for line in itertools.islice(stream, 1))
    return itertools.chain(filter(None, first), stream)


def _strip_newline(line: bytes) -> bytes:
    return line.removesuffix(b"\n").removesuffix(b"\r")


def _read_json_lines(source: Source, reading: Reading) -> Iterator[Chunk]:
    for first, bodies in _parts(filter(None, map(bytes.strip, _lines_of(source.stream))), reading, source):
        if not first:
            _check_json(bodies[0], source.name)
        fields = _json_fields(bodies, reading, source.name, first) if reading.fields else {}
        yield Chunk(first, bodies, fields, source.stream.tell())


def _check_json(line: bytes, name: str) -> None:
    """Raise BadMessageError if the first line is not JSON, as in a document of several lines."""
    try:
        # json accepts NaN, which Python writes. The text is decoded here, as json would accept UTF-16 bytes.
        json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise BadMessageError(
            f"{name}: record 1 is not JSON, one value per line: {error}; --format lines imports lines unchanged"
        ) from None


def _json_fields(bodies: Sequence[bytes], reading: Reading, name: str, first: int) -> dict[str, list[Any]]:
    fields: dict[str, list[Any]] = {selected: [] for selected in reading.fields}
    for index, body in enumerate(bodies):
        try:
            try:
                found = _OBJECT(body)
            except msgspec.MsgspecError:  # Another field may hold a number beyond the range of floats.
                found = {field: _VALUE(raw) for field, raw in _RAW(body).items() if field in fields}
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadMessageError(f"{name}: record {first + index + 1:,} is not a JSON object: {error}") from None
        for selected, values in fields.items():
            value = found.get(selected)
            # -0 is an integer in JSON, but Python has no such integer.
            if (kind := type(value)) is float or (kind is int and not value):
                value = WrittenNumber(bytes(_RAW(body)[selected]).decode())
            values.append(None if value in reading.nulls else value)
    return fields


# Parquet


def _read_parquet(source: Source, reading: Reading) -> Iterator[Chunk]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise click.UsageError("Parquet needs pyarrow: pip install 'mqproc[arrow]'") from None
    at, encode = 0, msgspec.json.Encoder().encode
    try:
        file = parquet.ParquetFile(_seekable(source))
        source.total = file.metadata.num_rows
        _check_names(file.schema_arrow.names, source.name)
        _places(file.schema_arrow.names, reading.fields, source.name)
        has_nanoseconds = any("[ns" in str(column.type) for column in file.schema_arrow)
        for batch in file.iter_batches(_rows_at_once(file.metadata, reading.chunk_rows)):
            skipped = max(0, min(batch.num_rows, reading.skip - at))
            first, end = at + skipped, at + batch.num_rows
            rows = batch.slice(skipped).to_pylist()
            if has_nanoseconds:
                rows = [{name: without_pandas(value) for name, value in row.items()} for row in rows]
            source.not_finite += not_finite(batch.slice(skipped))
            if rows:
                fields = {each: [row[each] for row in rows] for each in reading.fields}
                yield Chunk(first, list(map(encode, rows)), fields)
            at = end
            source.done = lambda at=at: at  # type: ignore[misc]
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, OverflowError, *_READ_ERRORS) as error:
        reason = " ".join(str(error).split())
        raise BadMessageError(f"{source.name}: Parquet cannot be read after record {at:,}: {reason}") from None


def _rows_at_once(metadata: Any, most: int) -> int:
    """Rows per batch, limited by the mean size of a row."""
    size: int = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    return max(1, min(most, int(metadata.num_rows) * _CHUNK_BYTES // max(1, size)))


def _seekable(source: Source) -> IO[bytes]:
    """A seekable stream, as Parquet has its footer at the end; other streams are read whole."""
    stream = source.stream
    return stream if stream.seekable() and not source.compressed else io.BytesIO(stream.read())


_READERS: dict[str, Callable[[Source, Reading], Iterator[Chunk]]] = {
    "csv": _read_csv,
    "jsonl": _read_json_lines,
    "lines": _read_lines,
    "parquet": _read_parquet,
}
