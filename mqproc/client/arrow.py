"""Pulls as Arrow: records become columns in the compiled kernel, with no Python object for each message.

Importing this module needs pyarrow (`pip install mqproc[arrow]`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mqproc.client.amounts import each_of
from mqproc.client.core import status_of
from mqproc.errors import BadRequestError
from mqproc.kernels.decode import ALL_COLUMNS, decode_to_columns
from mqproc.message import PullStatus

# The properties are the stored string, so bytes that are no UTF-8 cannot make a pull fail.
_BINARY = frozenset({"body", "properties"})
_ASCII_MAX = 0x7F


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


def parser(columns: Sequence[str] | None) -> Callable[[Any, memoryview], ArrowPullResult]:
    """What makes a PullAnswer and its records into Arrow. Raises BadRequestError for an unknown column."""
    if isinstance(columns, str | bytes):
        raise BadRequestError(f"columns = {columns!r}: give a list of names")
    names = tuple(ALL_COLUMNS if columns is None else each_of("columns", columns))
    for name in names:
        if not isinstance(name, str) or name not in ALL_COLUMNS:
            raise BadRequestError(f"no column is called {name!r}; there are {', '.join(ALL_COLUMNS)}")

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


def record_batch(records: memoryview, count: int, columns: Sequence[str]) -> pa.RecordBatch:
    """`count` whole records as a batch of the named columns. Nothing is shared with `records`."""
    if not columns:  # Arrow takes the number of rows from the columns, or from structs, which may have no fields.
        return pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), count, [None]))
    found = decode_to_columns(records, count, columns)
    arrays = [_array(name, found[name]) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _array(name: str, column: Any) -> pa.Array:
    if isinstance(column, np.ndarray):
        return pa.array(column)
    return values_array(pa.binary() if name in _BINARY else pa.string(), *column)


def values_array(kind: pa.DataType, offsets: NDArray[np.int32], data: NDArray[np.uint8]) -> pa.Array:
    """An array of texts or binaries over these buffers; texts that are no UTF-8 are `mended`."""
    array = pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    if kind == pa.string() and data[offsets[0] : offsets[-1]].max(initial=0) > _ASCII_MAX:
        return mended(array)
    return array


def mended(array: pa.Array) -> pa.Array:
    """An array with texts, or with lists or maps of texts, in which each text is UTF-8.

    What is stored need not be, and Arrow's texts must be: readers of others fail. As in a StoredMessage, what is none
    is replaced.
    """
    kind, buffers = array.type, array.buffers()
    if pa.types.is_string(kind):
        return _mended(pa.Array.from_buffers(pa.binary(), len(array), buffers))
    if pa.types.is_struct(kind):
        fields = [mended(array.field(number)) for number in range(kind.num_fields)]
        return pa.StructArray.from_arrays(fields, fields=list(kind))
    items = (
        pa.StructArray.from_arrays([array.keys, array.items], fields=list(kind.field(0).type))
        if pa.types.is_map(kind)
        else array.values
    )
    return pa.Array.from_buffers(kind, len(array), buffers[:2], children=[mended(items)])


def _mended(texts: pa.Array) -> pa.Array:
    try:
        return texts.cast(pa.string())  # Shares the buffers, and looks at the bytes.
    except pa.ArrowInvalid:
        plain = [None if text is None else text.decode("utf-8", "replace") for text in texts.to_pylist()]
        return pa.array(plain, pa.string())
