"""Pulls as Arrow: records become columns in the compiled kernel, with no Python object for each message.

Importing this module needs pyarrow (`pip install mqproc[arrow]`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from mqproc.errors import BadRequestError
from mqproc.kernels.decode import ALL_COLUMNS, decode_to_columns
from mqproc.message import PullStatus

# The properties are the stored string, so bytes that are no UTF-8 cannot make a pull fail.
_BINARY = frozenset({"body", "properties"})


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
    names = tuple(ALL_COLUMNS if columns is None else columns)
    for name in names:
        if name not in ALL_COLUMNS:
            raise BadRequestError(f"no column is called {name!r}; there are {', '.join(ALL_COLUMNS)}")

    def parse(answer: Any, payload: memoryview) -> ArrowPullResult:
        return ArrowPullResult(
            PullStatus(answer.status),
            record_batch(payload, answer.count, names),
            answer.next_offset,
            answer.min_offset,
            answer.max_offset,
            answer.detail,
        )

    return parse


def record_batch(records: memoryview, count: int, columns: Sequence[str]) -> pa.RecordBatch:
    """`count` whole records as a batch of the named columns. Nothing is shared with `records`."""
    found = decode_to_columns(records, count, columns)
    arrays = [_array(name, found[name]) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _array(name: str, column: Any) -> pa.Array:
    if isinstance(column, np.ndarray):
        return pa.array(column)
    offsets, data = column
    kind = pa.binary() if name in _BINARY else pa.string()
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
