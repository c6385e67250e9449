"""Pulls as Arrow: a compiled kernel makes columns of records.

Importing this module needs pyarrow (`pip install mqproc[arrow]`).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mqproc.client.message_fields import plain_text
from mqproc.errors import BadRequestError
from mqproc.kernels import arrow, record_decode
from mqproc.kernels.record_decode import ALL_COLUMNS
from mqproc.layout.record_codec import as_redelivered, lazy_records
from mqproc.types import PullStatus
from mqproc.util.arguments import each_of

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
        self._head = head_of(self.schema)

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
        )
        batch = pa.ipc.read_record_batch(pa.py_buffer(words), self.schema)
        return self._valid_utf8(batch, beyond) if beyond else batch

    def _valid_utf8(self, batch: pa.RecordBatch, beyond: int) -> pa.RecordBatch:
        """The batch with valid UTF-8 in the columns whose bit is in `beyond`."""
        arrays = [_valid_utf8(array) if beyond >> number & 1 else array for number, array in enumerate(batch.columns)]
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


_WIDE: Final = 8


@dataclass(frozen=True, slots=True)
class ArrowPullResult:
    """One pull's answer with the messages as columns; otherwise as PullResult."""

    status: PullStatus
    batch: pa.RecordBatch
    next_offset: int
    min_offset: int
    max_offset: int
    detail: str = ""

    def __len__(self) -> int:
        return int(self.batch.num_rows)


def parser(
    columns: Sequence[str] | None, status_of: Callable[[Any], PullStatus]
) -> Callable[[Any, memoryview], ArrowPullResult]:
    """A parser of pulls into Arrow. Raises BadRequestError for an unknown column."""
    if isinstance(columns, str | bytes):
        raise BadRequestError(f"columns = {columns!r}: give a list of names")
    names = tuple(map(plain_text, ALL_COLUMNS if columns is None else each_of("columns", columns)))
    for name in names:
        if not isinstance(name, str) or name not in ALL_COLUMNS:
            raise BadRequestError(f"no column is called {name!r}; there are {', '.join(ALL_COLUMNS)}")
    if len(set(names)) < len(names):
        raise BadRequestError(f"columns = {list(names)!r} has a name more than once")

    def parse(answer: Any, payload: memoryview) -> ArrowPullResult:
        return ArrowPullResult(
            status_of(answer),
            record_batch(payload, answer.count, names),
            answer.next_offset,
            answer.min_offset,
            answer.max_offset,
            answer.detail,
        )

    return parse


def redelivered_parser(
    parse: Callable[[Any, memoryview], ArrowPullResult],
) -> Callable[[Any, memoryview], ArrowPullResult]:
    """A parser for a group's retry topic: the column `topic` has the original topics."""

    def parse_retries(answer: Any, payload: memoryview) -> ArrowPullResult:
        found = parse(answer, payload)
        if not len(found) or "topic" not in (names := found.batch.schema.names):
            return found
        columns = found.batch.columns
        topics = [as_redelivered(message).topic for message in lazy_records(payload)]
        columns[names.index("topic")] = pa.array(topics, pa.string())
        return replace(found, batch=pa.RecordBatch.from_arrays(columns, schema=found.batch.schema))

    return parse_retries


def record_batch(records: memoryview, count: int, columns: Sequence[str]) -> pa.RecordBatch:
    """Make a batch of the named columns of `count` whole records (−1: all).

    It shares no memory with `records`.

    Raises CorruptStoreError when the bytes are not exactly that many records.
    """
    if not columns:  # Without columns Arrow takes the number of rows from a struct array.
        return pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), count, [None]))
    makes = _columns(tuple(columns))
    buf, places, count = record_decode.locate(records, count, makes.rows)
    return makes.batch(buf, places, count)


@functools.lru_cache(maxsize=64)
def _columns(names: tuple[str, ...]) -> ArrowColumns:
    return ArrowColumns([_column(name) for name in names])


def _column(name: str) -> ArrowColumn:
    """A stored column; properties are bytes, since invalid UTF-8 must not fail a pull."""
    if name in record_decode.FIXED_COLUMNS:
        wide = record_decode.width_of(name) == _WIDE
        return ArrowColumn(name, pa.int64() if wide else pa.int32(), arrow.INT64 if wide else arrow.INT32, name)
    if name in ("body", "properties"):
        return ArrowColumn(name, pa.binary(), arrow.BYTES, name)
    return ArrowColumn(name, pa.string(), arrow.HOST if name.endswith("_host") else arrow.TEXT, name)


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
