"""Records as Arrow batches of exactly the types that Spark has for its columns.

Spark takes `binary` and `string` with offsets into one run of bytes, so each body is copied once, from the map of the
log into its batch; views into the log are refused there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mqproc.client.arrow import values_array
from mqproc.errors import BadMessageError, BadRequestError
from mqproc.kernels import decode, derived
from mqproc.layout import record
from mqproc.packing import plain_body
from mqproc.spark.columns import MQPROC, sources_of, types_of
from mqproc.spark.reading import Found

Places = NDArray[np.int64]

ARROW: Final = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", "UTC"),
    "array<string>": pa.list_(pa.string()),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
}
# Spark's timestamps are i64 microseconds.
_MS_MAX: Final = (2**63 - 1) // 1000
_INT32_MAX: Final = 2**31 - 1
# Where the name of a column is not that of the decoder.
_DECODED: Final = {"born_timestamp": "born_timestamp_ms", "store_timestamp": "store_timestamp_ms"}
# What a column is made of that the decoder does not have; where a record lies is always known.
_MADE_OF: Final = {"message_id": "store_host", "properties_json": "properties"}
# Columns that are the same in all rows.
_OF_STORE: Final = frozenset({"store", "store_name"})


class BatchMaker:
    """Makes batches of the named columns for the records of one store."""

    def __init__(self, naming: str, names: Sequence[str], store: str, *, plain_bodies: bool = False) -> None:
        types = types_of(naming)
        self._columns = sources_of(naming, names)
        self.schema = pa.schema([(name, ARROW[types[name]]) for name in names])
        self._store = store
        self._unpacks = plain_bodies and any(source in ("body", "sys_flag") for _name, source in self._columns)
        self._decoded = _decoded([source for _name, source in self._columns])

    @property
    def reads_body(self) -> bool:
        """Whether the body is one of the columns."""
        return any(source == "body" for _name, source in self._columns)

    def batch(self, found: Found) -> pa.RecordBatch:
        """The found records; shares nothing with them."""
        count = len(found.positions)
        places = decode.places_at(found.view, found.positions, self._decoded)
        arrays = [self._array(source, found.view, places, count) for _name, source in self._columns]
        if self._unpacks:
            self._unpack(arrays, found.view, places, count)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _unpack(self, arrays: list[pa.Array], view: NDArray[np.uint8], places: Places, count: int) -> None:
        """Have bodies as they were before their producers compressed them, and flags that say so.

        Raises BadMessageError for one that cannot be unpacked.
        """
        flags: Any = decode.take_column(view, places, count, "sys_flag")
        packed = (flags & record.SYS_FLAG_COMPRESSED) != 0
        if not packed.any():
            return
        for number, (_name, source) in enumerate(self._columns):
            if source == "sys_flag":
                arrays[number] = pa.array(np.where(packed, flags & ~record.SYS_FLAG_BODY, flags), pa.int32())
            elif source == "body":
                offsets: Any = decode.take_column(view, places, count, "physical_offset")
                arrays[number] = _plain(arrays[number], flags, offsets, self._store)

    def _array(self, source: str, view: NDArray[np.uint8], places: Places, count: int) -> pa.Array:
        if source in _OF_STORE:
            return _constant(self._store if source == "store" else self._store.rsplit("/", 1)[-1], count)
        make = _MAKERS.get(source)
        if make is not None:
            return make(view, places, count)
        column = decode.take_column(view, places, count, _DECODED.get(source, source))
        if isinstance(column, tuple):
            return _variable(ARROW[MQPROC[source]], *column, nullable=source == "tag")
        return _timestamps(column) if source in _DECODED else _fixed(ARROW[MQPROC[source]], column)


def _decoded(sources: Iterable[str]) -> set[str]:
    """The decoder's columns that these are made of."""
    return {_DECODED.get(each) or _MADE_OF.get(each, each) for each in sources if each not in _OF_STORE}


def _plain(bodies: pa.Array, flags: NDArray[np.int32], offsets: NDArray[np.int64], store: str) -> pa.Array:
    found = []
    for body, flag, offset in zip(bodies.to_pylist(), flags.tolist(), offsets.tolist(), strict=True):
        try:
            found.append(plain_body(body, flag))
        except BadMessageError as error:
            raise BadMessageError(
                f"{store}: log position {offset:,}: {error}; plainBodies=false reads bodies as they are stored"
            ) from None
    size = sum(map(len, found))
    if size > _INT32_MAX:
        raise BadRequestError(f"bodies of {len(found):,} rows unpack to {size:,} bytes: read with less batchBytes")
    return pa.array(found, pa.binary())


def _constant(text: str, count: int) -> pa.Array:
    encoded = np.frombuffer(text.encode(), np.uint8)
    if encoded.size * count > _INT32_MAX:
        raise BadRequestError(f"batchRows = {count:,} rows of {encoded.size:,} bytes exceed {_INT32_MAX:,}")
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(encoded.size)
    return _variable(pa.string(), offsets, np.tile(encoded, count))


def _variable(
    kind: pa.DataType, offsets: NDArray[np.int32], data: NDArray[np.uint8], *, nullable: bool = False
) -> pa.Array:
    """A column of texts or bytes; with `nullable` empty ones are nulls."""
    valid = None
    if nullable:
        there = offsets[1:] != offsets[:-1]
        valid = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
    return values_array(kind, offsets, data, valid)


def _fixed(kind: pa.DataType, values: NDArray[Any]) -> pa.Array:
    """A column over these numbers. Given them alone, Arrow takes long to find what they are."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _timestamps(ms: NDArray[np.int64]) -> pa.Array:
    """Milliseconds as Spark's timestamps; those that it cannot have are nulls."""
    kind = ARROW["timestamp"]
    if ms.max(initial=0) <= _MS_MAX and ms.min(initial=0) >= -_MS_MAX:
        return _fixed(kind, ms * 1000)
    return pa.array(ms * 1000, kind, mask=(ms > _MS_MAX) | (ms < -_MS_MAX))


def _message_ids(view: NDArray[np.uint8], places: Places, count: int) -> pa.Array:
    offsets = np.empty(count + 1, np.int32)
    data = np.empty(derived.ID_TEXT_MAX * count, np.uint8)
    return _variable(pa.string(), offsets, data[: derived.take_message_ids(view, places, offsets, data)])


def _keys(view: NDArray[np.uint8], places: Places, count: int) -> pa.Array:
    room = _size_of(places, decode.KEYS_LENGTH, count)
    lists, offsets = np.empty(count + 1, np.int32), np.empty(room + count + 1, np.int32)
    data = np.empty(room, np.uint8)
    words = int(derived.take_words(view, places, decode.KEYS, lists, offsets, data))
    return _lists(ARROW["array<string>"], lists, _variable(pa.string(), offsets[: words + 1], data))


def _properties(view: NDArray[np.uint8], places: Places, count: int) -> pa.Array:
    room = _size_of(places, decode.PROPERTIES_SIZE, count)
    lists = np.empty(count + 1, np.int32)
    name_offsets, value_offsets = np.empty(room + count + 1, np.int32), np.empty(room + count + 1, np.int32)
    names, values = np.empty(room, np.uint8), np.empty(room, np.uint8)
    pairs = int(derived.take_pairs(view, places, lists, name_offsets, names, value_offsets, values))
    entries = pa.StructArray.from_arrays(
        [
            _variable(pa.string(), name_offsets[: pairs + 1], names),
            _variable(pa.string(), value_offsets[: pairs + 1], values),
        ],
        fields=list(ARROW["map<string,string>"].field(0).type),
    )
    return _lists(ARROW["map<string,string>"], lists, entries)


def _properties_json(view: NDArray[np.uint8], places: Places, count: int) -> pa.Array:
    room = derived.JSON_GROWTH * _size_of(places, decode.PROPERTIES_SIZE, count) + 2 * count
    if room > _INT32_MAX:
        raise BadRequestError(f"properties of {count:,} rows may exceed {_INT32_MAX:,} bytes: read with less batchRows")
    offsets, data = np.empty(count + 1, np.int32), np.empty(room, np.uint8)
    return _variable(pa.string(), offsets, data[: derived.take_json(view, places, offsets, data)])


def _lists(kind: pa.DataType, lists: NDArray[np.int32], items: pa.Array) -> pa.Array:
    return pa.Array.from_buffers(kind, len(lists) - 1, [None, pa.py_buffer(lists)], children=[items])


def _size_of(places: Places, row: int, count: int) -> int:
    return int(places[row * count : (row + 1) * count].sum())


_MAKERS: Final[dict[str, Callable[[NDArray[np.uint8], Places, int], pa.Array]]] = {
    "message_id": _message_ids,
    "keys": _keys,
    "properties": _properties,
    "properties_json": _properties_json,
}
