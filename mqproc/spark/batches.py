"""Records as Arrow batches of exactly the types that Spark has for its columns.

Spark takes `binary` and `string` with offsets into one run of bytes, so each body is copied once, from the map of the
log into its batch; views into the log are refused there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mqproc.client.arrow_columns import ArrowColumns, Column
from mqproc.errors import BadMessageError, BadRequestError
from mqproc.kernels import arrow_body, decode
from mqproc.layout import record
from mqproc.packing import plain_body
from mqproc.spark.columns import sources_of, types_of
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
_INT32_MAX: Final = 2**31 - 1
# The decoder's columns that are numbers, by what they are made into; those of other names than ours.
_NUMBERS: Final = {"int": arrow_body.INT32, "bigint": arrow_body.INT64, "timestamp": arrow_body.TIME}
_DECODED: Final = {"born_timestamp": "born_timestamp_ms", "store_timestamp": "store_timestamp_ms"}
# How the other columns are made, and of which of the decoder's.
_MADE: Final[dict[str, tuple[int, str]]] = {
    "topic": (arrow_body.TEXT, "topic"),
    "tag": (arrow_body.TEXT, "tag"),
    "body": (arrow_body.BYTES, "body"),
    "born_host": (arrow_body.HOST, "born_host"),
    "store_host": (arrow_body.HOST, "store_host"),
    "message_id": (arrow_body.ID, "store_host"),
    "keys": (arrow_body.WORDS, "keys"),
    "properties": (arrow_body.PAIRS, "properties"),
    "properties_json": (arrow_body.JSON, "properties"),
}
# Columns that are the same in all rows.
_SAME: Final = frozenset({"store", "store_name"})


class BatchMaker:
    """Makes batches of the named columns for the records of one store."""

    def __init__(self, naming: str, names: Sequence[str], store: str, *, plain_bodies: bool = False) -> None:
        types = types_of(naming)
        self._sources = [source for _name, source in sources_of(naming, names)]
        self._unpacks = plain_bodies and bool({"body", "sys_flag"} & set(self._sources))
        self._store = store
        columns = zip(names, self._sources, strict=True)
        self._columns = ArrowColumns([_column(name, types[name], source, store) for name, source in columns])
        self.schema = self._columns.schema

    @property
    def reads_body(self) -> bool:
        """Whether the body is one of the columns."""
        return "body" in self._sources

    def batch(self, found: Found) -> pa.RecordBatch:
        """The found records; shares nothing with them. Raises BadRequestError for more than a batch can have."""
        count = len(found.positions)
        places = decode.places_at(found.view, found.positions, self._columns.rows)
        try:
            batch = self._columns.batch(found.view, places, count)
        except BadRequestError as error:
            raise BadRequestError(f"{error}: read with less batchRows or batchBytes") from None
        return self._unpacked(batch, found.view, places, count) if self._unpacks else batch

    def _unpacked(self, batch: pa.RecordBatch, view: NDArray[np.uint8], places: Places, count: int) -> pa.RecordBatch:
        """The batch with bodies as they were before their producers compressed them, and flags that say so.

        Raises BadMessageError for one that cannot be unpacked.
        """
        flags: Any = decode.take_column(view, places, count, "sys_flag")
        packed = (flags & record.SYS_FLAG_COMPRESSED) != 0
        if not packed.any():
            return batch
        arrays = batch.columns
        for number, source in enumerate(self._sources):
            if source == "sys_flag":
                arrays[number] = pa.array(np.where(packed, flags & ~record.SYS_FLAG_BODY, flags), pa.int32())
            elif source == "body":
                offsets: Any = decode.take_column(view, places, count, "physical_offset")
                arrays[number] = _plain(arrays[number], flags, offsets, self._store)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _column(name: str, kind: str, source: str, store: str) -> Column:
    """How a column of a store is made that has the type `kind` in Spark's short word."""
    if source in _SAME:
        return Column(
            name, ARROW[kind], arrow_body.SAME, text=(store if source == "store" else store.rsplit("/", 1)[-1]).encode()
        )
    if source in _MADE:
        how, of = _MADE[source]
        return Column(name, ARROW[kind], how, of, nulls=source == "tag")
    return Column(name, ARROW[kind], _NUMBERS[kind], _DECODED.get(source, source))


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
