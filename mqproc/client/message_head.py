"""The metadata of an Arrow message with a batch, for memory in which a kernel writes the batch's buffers.

    ┌ words ───────────────────────────────────────────────────┬──────────────────────────────────────────┐
    │ continuation, size │ flatbuffer: Message { RecordBatch }  │ body: buffers, each at a multiple of 64  │
    └──────────────────────────────────────────────────────────┴──────────────────────────────────────────┘

All messages of a schema differ in numbers only: rows, nodes (length, nulls), buffers (offset, size), the body's
length. So Arrow makes one, and here is found where these numbers stand. Formats: Apache Arrow, *IPC format*
(Message.fbs, Schema.fbs); FlatBuffers, *Internals*: a table begins with the distance back to its vtable, which says
for each field how far behind the table's begin it lies; a field that is a table or a vector is a distance to it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mqproc.kernels import arrow_body

_PREFIX_SIZE: Final = 8
# Fields by number: of Message, and of RecordBatch.
_HEADER, _BODY_LENGTH = 2, 3
_LENGTH, _NODES, _BUFFERS = 0, 1, 2
_WORD: Final = 8


@dataclass(frozen=True, slots=True)
class MessageHead:
    """`words` int64[n], which the body follows; `places` int64[HEAD_WORDS] says where in them what is."""

    words: NDArray[np.int64]
    places: NDArray[np.int64]


def head_of(schema: pa.Schema) -> MessageHead:
    """The head of the messages of a schema."""
    # A number that is 0 would be left out.
    one_row = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema)
    message = one_row.serialize().to_pybytes()
    size = _PREFIX_SIZE + struct.unpack_from("<i", message, 4)[0]
    table = _PREFIX_SIZE + _u32(message, _PREFIX_SIZE)
    batch = _behind(message, _field(message, table, _HEADER))
    # A vector begins with how many there are.
    nodes, buffers = (_behind(message, _field(message, batch, field)) + 4 for field in (_NODES, _BUFFERS))
    places = np.zeros(arrow_body.HEAD_WORDS, np.int64)
    places[arrow_body.BODY_AT] = size // _WORD
    places[arrow_body.LENGTH_AT] = _field(message, batch, _LENGTH) // _WORD
    places[arrow_body.BODY_LENGTH_AT] = _field(message, table, _BODY_LENGTH) // _WORD
    places[arrow_body.NODES_AT] = nodes // _WORD
    places[arrow_body.BUFFERS_AT] = buffers // _WORD
    return MessageHead(np.frombuffer(message[:size], np.int64), places)


def _u32(message: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", message, at)[0])


def _behind(message: bytes, at: int) -> int:
    """What the distance at `at` leads to."""
    return at + _u32(message, at)


def _field(message: bytes, table: int, number: int) -> int:
    """Where a field of a table is; it is there."""
    vtable = table - int(struct.unpack_from("<i", message, table)[0])
    return table + int(struct.unpack_from("<H", message, vtable + 4 + 2 * number)[0])
