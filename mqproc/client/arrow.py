"""Pulls as Arrow: records become columns in the compiled kernel, with no Python object for each message.

Importing this module needs pyarrow (`pip install mqproc[arrow]`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from mqproc.client.amounts import each_of
from mqproc.client.arrow_columns import ArrowColumns, Column
from mqproc.client.core import status_of
from mqproc.errors import BadRequestError
from mqproc.kernels import arrow_body, decode
from mqproc.kernels.decode import ALL_COLUMNS
from mqproc.message import PullStatus

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


def parser(columns: Sequence[str] | None) -> Callable[[Any, memoryview], ArrowPullResult]:
    """What makes a PullAnswer and its records into Arrow. Raises BadRequestError for an unknown column."""
    if isinstance(columns, str | bytes):
        raise BadRequestError(f"columns = {columns!r}: give a list of names")
    names = tuple(ALL_COLUMNS if columns is None else each_of("columns", columns))
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


def record_batch(records: memoryview, count: int, columns: Sequence[str]) -> pa.RecordBatch:
    """`count` whole records (−1: all) as a batch of the named columns. Nothing is shared with `records`.

    Raises CorruptStoreError when the bytes are not exactly that many records.
    """
    if not columns:  # Arrow takes the number of rows from the columns, or from structs, which may have no fields.
        return pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), count, [None]))
    makes = _columns(tuple(columns))
    buf, places, count = decode.locate(records, count, makes.rows)
    return makes.batch(buf, places, count)


@functools.lru_cache(maxsize=64)
def _columns(names: tuple[str, ...]) -> ArrowColumns:
    return ArrowColumns([_column(name) for name in names])


def _column(name: str) -> Column:
    """A column as it is stored: the properties are bytes, so that such as are no UTF-8 cannot make a pull fail."""
    if name in decode.FIXED_COLUMNS:
        wide = decode.width_of(name) == _WIDE
        return Column(name, pa.int64() if wide else pa.int32(), arrow_body.INT64 if wide else arrow_body.INT32, name)
    if name in ("body", "properties"):
        return Column(name, pa.binary(), arrow_body.BYTES, name)
    return Column(name, pa.string(), arrow_body.HOST if name.endswith("_host") else arrow_body.TEXT, name)
