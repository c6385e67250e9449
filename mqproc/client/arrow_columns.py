"""Columns of records as Arrow batches: places, then one run of memory with all buffers, then the batch over it.

    records ──places──▶ room ──▶ head │ body, written by one kernel ──▶ batch

Python does the same few things for any number of columns and records: a pull of one message takes a fifth of the time
that one column after the other does, and batches may be small enough for a processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mqproc.client.message_head import head_of
from mqproc.errors import BadRequestError
from mqproc.kernels import arrow_body, decode


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name and type; `kind` of `arrow_body`, of which of the decoder's columns it is made.

    With kind SAME it has `text` in each row instead. With `nulls` an empty text is a null.
    """

    name: str
    type: pa.DataType
    kind: int
    of: str = ""
    text: bytes = b""
    nulls: bool = False


class ArrowColumns:
    """Makes batches of these columns; may be used by several threads."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.schema = pa.schema([(column.name, column.type) for column in columns])
        self.rows = decode.rows_of(column.of for column in columns if column.of)
        """The rows of the places that batches are made of."""
        texts, steps = bytearray(), []
        for column in columns:
            where = decode.place_of(column.of) if column.of else (len(texts), len(column.text))
            steps.append([column.kind, *where, column.nulls])
            texts += column.text
        self._count = len(columns)
        self._steps = np.array(steps, np.int64).reshape(-1)
        self._same = np.frombuffer(texts, np.uint8)
        self._head = head_of(self.schema)

    def batch(self, buf: NDArray[np.uint8], places: NDArray[np.int64], count: int) -> pa.RecordBatch:
        """The columns of the `count` records of `buf` that `places` tells of. Nothing is shared with them.

        Raises BadRequestError for more text than a batch can have.
        """
        size = int(arrow_body.room_for(places, count, self._steps, self._count))
        if size < 0:
            name = self.schema.names[-1 - size]
            raise BadRequestError(f"column {name}: texts of {count:,} rows may exceed {arrow_body.DATA_MAX:,} bytes")
        head = self._head
        words = np.empty(len(head.words) + -(-size // 8), np.int64)
        words[: len(head.words)] = head.words
        beyond = arrow_body.write_columns(
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
            np.empty(arrow_body.STATE_WORDS, np.int64),
        )
        batch = pa.ipc.read_record_batch(pa.py_buffer(words), self.schema)
        return self._mended(batch, beyond) if beyond else batch

    def _mended(self, batch: pa.RecordBatch, beyond: int) -> pa.RecordBatch:
        """The batch with texts that are UTF-8 in the columns whose bit is in `beyond`."""
        arrays = [_mended(array) if beyond >> number & 1 else array for number, array in enumerate(batch.columns)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _mended(array: pa.Array) -> pa.Array:
    """An array with texts, or with lists or maps of texts, in which each text is UTF-8.

    What is stored need not be, and Arrow's texts must be: readers of others fail. As in a StoredMessage, what is none
    is replaced.
    """
    kind, buffers = array.type, array.buffers()
    if pa.types.is_string(kind):
        return _as_texts(pa.Array.from_buffers(pa.binary(), len(array), buffers))
    if pa.types.is_struct(kind):
        fields = [_mended(array.field(number)) for number in range(kind.num_fields)]
        return pa.StructArray.from_arrays(fields, fields=list(kind))
    items = array.values
    if pa.types.is_map(kind):
        items = pa.StructArray.from_arrays([array.keys, array.items], fields=list(kind.field(0).type))
    return pa.Array.from_buffers(kind, len(array), buffers[:2], children=[_mended(items)])


def _as_texts(bytes_: pa.Array) -> pa.Array:
    try:
        return bytes_.cast(pa.string())  # Shares the buffers, and looks at the bytes.
    except pa.ArrowInvalid:
        plain = [None if text is None else text.decode("utf-8", "replace") for text in bytes_.to_pylist()]
        return pa.array(plain, pa.string())
