"""Results of many sent messages, each made from the answer's columns when it is asked for."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from mqproc.client.message_fields import unique_id, unique_ids
from mqproc.layout.record_codec import host_hex
from mqproc.types import SendResult
from mqproc.wire.operations import AppendAnswer

_SHOWN_RESULTS = 3
_MASK64 = (1 << 64) - 1


class _Results(Sequence[SendResult]):
    """A sequence that is equal to a list of the same results."""

    __slots__ = ()

    @abstractmethod
    def _at(self, place: int) -> SendResult:
        """The result at a place from 0 on."""

    @overload
    def __getitem__(self, place: int) -> SendResult: ...
    @overload
    def __getitem__(self, place: slice) -> list[SendResult]: ...
    def __getitem__(self, place: int | slice) -> SendResult | list[SendResult]:
        places = range(len(self))[place]
        return self._at(places) if isinstance(places, int) else list(map(self._at, places))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, list | _Results) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:_SHOWN_RESULTS]))
        return f"[{shown}{f', … ({len(self):,})' if len(self) > _SHOWN_RESULTS else ''}]"


class FrameResults(_Results):
    """Results of one frame: columns of physical offsets, queue offsets and queue ids."""

    __slots__ = ("_columns", "_counter", "_host", "_prefix", "_store_timestamp_ms")

    def __init__(self, answer: AppendAnswer, columns: tuple[Any, Any, Any], prefix: str, counter: int) -> None:
        """`prefix` and first `counter` of the unique ids."""
        self._host, self._store_timestamp_ms = host_hex(answer.store_host), answer.store_timestamp_ms
        self._columns, self._prefix, self._counter = columns, prefix, counter

    def __len__(self) -> int:
        return len(self._columns[0])

    def _at(self, place: int) -> SendResult:
        physical_offset, queue_offset, queue_id = (column.item(place) for column in self._columns)
        return SendResult(
            f"{self._host}{physical_offset & _MASK64:016X}",
            unique_id(self._prefix, self._counter + place),
            queue_id,
            queue_offset,
            physical_offset,
            self._store_timestamp_ms,
        )

    def __iter__(self) -> Iterator[SendResult]:
        physical_offsets, queue_offsets, queue_ids = self._columns
        message_ids = map(f"{self._host}%016X".__mod__, physical_offsets.view("<u8").tolist())
        ids = unique_ids(self._prefix, self._counter, len(self))
        columns = message_ids, ids, queue_ids.tolist(), queue_offsets.tolist(), physical_offsets.tolist()
        return map(SendResult, *columns, itertools.repeat(self._store_timestamp_ms))


class SentPart(NamedTuple):
    """Results of one frame of a stream, with the places of its messages, ascending."""

    places: Sequence[int]
    results: Sequence[SendResult]


class SendResults(_Results):
    """Results of `send_many`, a read-only sequence in the order of its messages."""

    __slots__ = ("_order", "_parts", "_starts")

    def __init__(self, parts: Sequence[SentPart]) -> None:
        parts = sorted(parts, key=lambda part: part.places[0])
        self._parts = [part.results for part in parts]
        self._starts = [0, *itertools.accumulate(map(len, self._parts))]
        # Index of each message among the joined parts; None when they follow one another.
        self._order: NDArray[np.int64] | None = None
        if any(part.places[-1] - start >= len(part.places) for part, start in zip(parts, self._starts, strict=False)):
            self._order = np.argsort(np.concatenate([part.places for part in parts]))

    def __len__(self) -> int:
        return self._starts[-1]

    def _at(self, place: int) -> SendResult:
        if self._order is not None:
            place = self._order.item(place)
        part = bisect_right(self._starts, place) - 1
        return self._parts[part][place - self._starts[part]]

    def __iter__(self) -> Iterator[SendResult]:
        joined = itertools.chain.from_iterable(self._parts)
        return joined if self._order is None else map(list(joined).__getitem__, self._order.tolist())
