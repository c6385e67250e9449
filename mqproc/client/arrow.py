"""Pulls as Arrow. Importing this module needs pyarrow (`pip install mqproc[arrow]`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from mqproc.arrow.batches import record_batch
from mqproc.arrow.columns import Columns, column_names
from mqproc.layout.record_codec import as_redelivered, decode_records
from mqproc.types import PullStatus


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

    def __repr__(self) -> str:
        ends = f"next_offset={self.next_offset}, min_offset={self.min_offset}, max_offset={self.max_offset}"
        columns = ", ".join(self.batch.schema.names)
        return f"<ArrowPullResult {self.status}: {len(self):,} messages, columns {columns}; {ends}>"


def parser(columns: Columns, status_of: Callable[[Any], PullStatus]) -> Callable[[Any, memoryview], ArrowPullResult]:
    """A parser of pulls into Arrow. Raises BadRequestError for an unknown column."""
    names = column_names(columns)

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
        topics = [as_redelivered(message).topic for message in decode_records(payload)]
        columns[names.index("topic")] = pa.array(topics, pa.string()).dictionary_encode()
        return replace(found, batch=pa.RecordBatch.from_arrays(columns, schema=found.batch.schema))

    return parse_retries
