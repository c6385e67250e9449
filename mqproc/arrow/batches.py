"""Record batches of messages: a compiled kernel makes columns of records.

Importing this module needs pyarrow (`pip install mqproc[arrow]`).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mqproc.arrow.columns import MESSAGE_COLUMNS
from mqproc.errors import BadMessageError, BadRequestError
from mqproc.kernels import arrow, record_decode
from mqproc.layout import record
from mqproc.util.compression import plain_body

# Columns
#
#     records ──places──▶ room ──▶ head │ body, written by one kernel ──▶ batch
#
# One run of memory has all buffers. The number of Python calls does not depend on columns and records: a pull of one
# message takes a fifth of the time of an array per column, and batches may be small enough for a processor's cache.


@dataclass(frozen=True, slots=True)
class ArrowColumn:
    """A column: name, type, `kind` of `arrow_body`, and the decoder's column that it is made of.

    With kind SAME each row has `text` instead. With `nulls` an empty text is a null.
    """

    name: str
    type: pa.DataType
    kind: int
    of: str = ""
    text: bytes = b""
    nulls: bool = False


class ArrowColumns:
    """Maker of batches with these columns. Thread-safe."""

    def __init__(self, columns: Sequence[ArrowColumn]) -> None:
        self.schema = pa.schema([(column.name, column.type) for column in columns])
        self.rows = record_decode.rows_of(column.of for column in columns if column.of)
        """Decoder rows that the batches need."""
        texts, steps = bytearray(), []
        for column in columns:
            where = record_decode.place_of(column.of) if column.of else (len(texts), len(column.text))
            steps.append([column.kind, *where, column.nulls])
            texts += column.text
        self._count = len(columns)
        self._steps = np.array(steps, np.int64).reshape(-1)
        self._same = np.frombuffer(texts, np.uint8)
        self._dictionaries = [number for number, each in enumerate(columns) if each.kind == arrow.DICTIONARY]
        # The message has the indices of a dictionary column; its texts follow.
        types = [pa.int32() if column.kind == arrow.DICTIONARY else column.type for column in columns]
        self._written = pa.schema(list(zip(self.schema.names, types, strict=True)))
        self._head = head_of(self._written)

    def batch(self, buf: NDArray[np.uint8], places: NDArray[np.int64], count: int) -> pa.RecordBatch:
        """Make a batch of the `count` records of `buf` at `places`. It shares no memory with them.

        Raises BadRequestError for more text than a batch can have.
        """
        size = int(arrow.body_size_max(places, count, self._steps, self._count))
        if size < 0:
            name = self.schema.names[-1 - size]
            raise BadRequestError(f"column {name}: texts of {count:,} rows may exceed {arrow.DATA_MAX:,} bytes")
        head = self._head
        words = np.empty(len(head.words) + -(-size // 8), np.int64)
        words[: len(head.words)] = head.words
        dictionaries = np.empty(arrow.DICTIONARY_WORDS * self._count, np.int64)
        beyond = arrow.write_columns(
            buf,
            places,
            count,
            self._steps,
            self._count,
            self._same,
            head.places,
            words.view(np.uint8),
            words.view(np.int32),
            words,
            np.empty(arrow.STATE_WORDS, np.int64),
            np.empty(arrow.table_words(count) if self._dictionaries else 0, np.int32),
            dictionaries,
        )
        message = pa.py_buffer(words)
        batch = pa.ipc.read_record_batch(message, self._written)
        if not beyond and not self._dictionaries:
            return batch
        arrays = batch.columns
        body = message.slice(8 * len(head.words))
        found = dictionaries.tolist()
        for number in self._dictionaries:
            texts, ends, begin = found[arrow.DICTIONARY_WORDS * number :][: arrow.DICTIONARY_WORDS]
            values = pa.StringArray.from_buffers(texts, body.slice(ends), body.slice(begin))
            if beyond >> number & 1:  # Two invalid texts may become the same valid one.
                arrays[number] = _valid_utf8(values).take(arrays[number]).dictionary_encode()
                beyond &= ~(1 << number)
            else:
                arrays[number] = pa.DictionaryArray.from_arrays(arrays[number], values, safe=False)
        if beyond:
            arrays = [_valid_utf8(each) if beyond >> number & 1 else each for number, each in enumerate(arrays)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _valid_utf8(array: pa.Array) -> pa.Array:
    """Replace invalid UTF-8 in an array of texts, or of lists or maps of texts.

    Stored texts may be invalid; Arrow's must be valid, or other readers fail.
    """
    kind, buffers = array.type, array.buffers()
    if pa.types.is_string(kind):
        return _as_texts(pa.Array.from_buffers(pa.binary(), len(array), buffers))
    if pa.types.is_struct(kind):
        fields = [_valid_utf8(array.field(number)) for number in range(kind.num_fields)]
        return pa.StructArray.from_arrays(fields, fields=list(kind))
    items = array.values
    if pa.types.is_map(kind):
        items = pa.StructArray.from_arrays([array.keys, array.items], fields=list(kind.field(0).type))
    return pa.Array.from_buffers(kind, len(array), buffers[:2], children=[_valid_utf8(items)])


def _as_texts(bytes_: pa.Array) -> pa.Array:
    try:
        return bytes_.cast(pa.string())  # Shares the buffers, and validates the bytes.
    except pa.ArrowInvalid:
        plain = [None if text is None else text.decode("utf-8", "replace") for text in bytes_.to_pylist()]
        return pa.array(plain, pa.string())


# Columns of messages

ARROW_TYPES: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("ms", "UTC"),
    "array<string>": pa.list_(pa.string()),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
}
"""Arrow's types by those of `MESSAGE_COLUMNS`."""
_KINDS: Final = {
    pa.int32(): arrow.INT32,
    pa.int64(): arrow.INT64,
    pa.string(): arrow.TEXT,
    pa.binary(): arrow.BYTES,
    ARROW_TYPES["timestamp"]: arrow.INT64,
    pa.timestamp("us", "UTC"): arrow.TIME,
    ARROW_TYPES["dictionary"]: arrow.DICTIONARY,
}
# Columns whose kind does not follow from their type: the kind, and the decoder's column.
_MADE: Final[dict[str, tuple[int, str]]] = {
    "born_host": (arrow.HOST, "born_host"),
    "store_host": (arrow.HOST, "store_host"),
    "message_id": (arrow.ID, "store_host"),
    "keys": (arrow.WORDS, "keys"),
    "properties": (arrow.PAIRS, "properties"),
    "properties_json": (arrow.JSON, "properties"),
}
_DECODED: Final = {"born_timestamp": "born_timestamp_ms", "store_timestamp": "store_timestamp_ms"}


def message_column(name: str, source: str, type_: pa.DataType) -> ArrowColumn:
    """The column `name`, made of the message column `source`, or of `properties_json`."""
    kind, of = _MADE.get(source) or (_KINDS[type_], _DECODED.get(source, source))
    return ArrowColumn(name, type_, kind, of, nulls=source == "tag")


@functools.lru_cache(maxsize=64)
def message_columns(names: tuple[str, ...]) -> ArrowColumns:
    """Maker of batches of the named message columns."""
    return ArrowColumns([message_column(name, name, ARROW_TYPES[MESSAGE_COLUMNS[name]]) for name in names])


def record_batch(records: memoryview | NDArray[np.uint8], count: int, names: tuple[str, ...]) -> pa.RecordBatch:
    """Make a batch of the named columns of `count` whole records (−1: all).

    It shares no memory with `records`.

    Raises CorruptStoreError when the bytes are not exactly that many records.
    """
    if not names:  # Without columns Arrow takes the number of rows from a struct array.
        return pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), count, [None]))
    columns = message_columns(names)
    buf, places, count = record_decode.locate(records, count, columns.rows)
    return columns.batch(buf, places, count)


# Bodies as they were sent

PLAIN_BYTES: Final = 64 << 20
"""Limit on decompressed bodies in a batch of more than one row."""
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlainBodies:
    """Decompresses the bodies in batches, and clears the compression bits of their sys_flags.

    `sources` are the message columns that the batches' columns are made of. `store` and `advice` are for errors.
    """

    sources: Sequence[str]
    store: str
    advice: str

    def unpack(
        self, batch: pa.RecordBatch, view: NDArray[np.uint8], places: Places, count: int
    ) -> Iterator[pa.RecordBatch]:
        """The batch, or several if decompressed bodies are large.

        Raises BadMessageError for a body that cannot be decompressed.
        """
        flags: Any = record_decode.copy_column(view, places, count, "sys_flag")
        packed = (flags & record.SYS_FLAG_COMPRESSED) != 0
        if not packed.any():
            yield batch
            return
        plain_flags = pa.array(np.where(packed, flags & ~record.SYS_FLAG_BODY, flags), pa.int32())
        batch = self._with("sys_flag", plain_flags, batch)
        if "body" not in self.sources:
            yield batch
            return
        offsets: Any = record_decode.copy_column(view, places, count, "physical_offset")
        at = 0
        for bodies in self._plain(batch.column(self.sources.index("body")), flags, offsets):
            yield self._with("body", bodies, batch.slice(at, len(bodies)))
            at += len(bodies)

    def _with(self, source: str, array: pa.Array, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with `array` as the column made of `source`, if it has that column."""
        named = zip(self.sources, batch.columns, strict=True)
        arrays = [array if name == source else column for name, column in named]
        return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)

    def _plain(self, bodies: pa.Array, flags: NDArray[np.int32], offsets: NDArray[np.int64]) -> Iterator[pa.Array]:
        """Decompress bodies in arrays of bounded size: a few bytes may expand to any length."""
        found: list[bytes] = []
        size = 0
        for body, flag, offset in zip(bodies.to_pylist(), flags.tolist(), offsets.tolist(), strict=True):
            try:
                plain = plain_body(body, flag)
            except BadMessageError as error:
                raise BadMessageError(f"{self.store}: log position {offset:,}: {error}; {self.advice}") from None
            if found and size + len(plain) > PLAIN_BYTES:
                yield pa.array(found, pa.binary())
                found, size = [], 0
            found.append(plain)
            size += len(plain)
        yield pa.array(found, pa.binary())


def sent_batches(
    names: tuple[str, ...], buf: NDArray[np.uint8], places: Places, count: int, store: str
) -> Iterator[pa.RecordBatch]:
    """Batches of located records, with bodies as they were sent.

    They are as stored if `sys_flag` is named, which says whether they are compressed.

    Raises BadMessageError for a body that cannot be decompressed.
    """
    batch = message_columns(names).batch(buf, places, count)
    if "body" not in names or "sys_flag" in names:
        yield batch
    else:
        advice = "all columns, or sys_flag among them, give bodies as they are stored"
        yield from PlainBodies(names, store, advice).unpack(batch, buf, places, count)


# Message heads
#
#     ┌ words ───────────────────────────────────────────────────┬──────────────────────────────────────────┐
#     │ continuation, size │ flatbuffer: Message { RecordBatch }  │ body: buffers, each at a multiple of 64  │
#     └──────────────────────────────────────────────────────────┴──────────────────────────────────────────┘
#
# All messages of a schema differ in numbers only: rows, nodes (length, nulls), buffers (offset, size), and the length
# of the body. Arrow makes one message, which shows their positions. Formats: Apache Arrow, *IPC format* (Message.fbs,
# Schema.fbs); FlatBuffers, *Internals*: a table begins with the distance back to its vtable, which has
# the distance of each field from the table's beginning; a field that is a table or a vector is a distance to it.

_PREFIX_SIZE: Final = 8
# Field numbers of Message, and of RecordBatch.
_HEADER, _BODY_LENGTH = 2, 3
_LENGTH, _NODES, _BUFFERS = 0, 1, 2
_WORD: Final = 8


@dataclass(frozen=True, slots=True)
class MessageHead:
    """`words` int64[n], before the body; `places` int64[HEAD_WORDS], of the variable numbers."""

    words: NDArray[np.int64]
    places: NDArray[np.int64]


def head_of(schema: pa.Schema) -> MessageHead:
    """Make the head of a schema's messages."""
    # FlatBuffers omit a number that is 0.
    one_row = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema)
    message = one_row.serialize().to_pybytes()
    size = _PREFIX_SIZE + struct.unpack_from("<i", message, 4)[0]
    table = _PREFIX_SIZE + _u32(message, _PREFIX_SIZE)
    batch = _follow(message, _field(message, table, _HEADER))
    # A vector begins with its length.
    nodes, buffers = (_follow(message, _field(message, batch, field)) + 4 for field in (_NODES, _BUFFERS))
    places = np.zeros(arrow.HEAD_WORDS, np.int64)
    places[arrow.BODY_AT] = size // _WORD
    places[arrow.LENGTH_AT] = _field(message, batch, _LENGTH) // _WORD
    places[arrow.BODY_LENGTH_AT] = _field(message, table, _BODY_LENGTH) // _WORD
    places[arrow.NODES_AT] = nodes // _WORD
    places[arrow.BUFFERS_AT] = buffers // _WORD
    return MessageHead(np.frombuffer(message[:size], np.int64), places)


def _u32(message: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", message, at)[0])


def _follow(message: bytes, at: int) -> int:
    """The position to which the offset at `at` points."""
    return at + _u32(message, at)


def _field(message: bytes, table: int, number: int) -> int:
    """Position of a table's field, which must be present."""
    vtable = table - int(struct.unpack_from("<i", message, table)[0])
    return table + int(struct.unpack_from("<H", message, vtable + 4 + 2 * number)[0])
