"""Records as Arrow batches of exactly the types that Spark has for its columns.

Spark takes `binary` and `string` with offsets into one run of bytes, so each body is copied once, from the map of the
log into its batch; views into the log are refused there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
PLAIN_BYTES: Final = 64 << 20
"""A batch has no more of bodies that were unpacked, but for a single one."""

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

    def batches(self, found: Found) -> Iterator[pa.RecordBatch]:
        """The found records in one batch, or several where their bodies unpack to much; shares nothing with them.

        Raises BadRequestError for more than a batch can have, BadMessageError for a body that cannot be unpacked.
        """
        count = len(found.positions)
        places = decode.places_at(found.view, found.positions, self._columns.rows)
        try:
            batch = self._columns.batch(found.view, places, count)
        except BadRequestError as error:
            raise BadRequestError(f"{error}: read with less batchRows or batchBytes") from None
        if self._unpacks:
            yield from self._unpacked(batch, found.view, places, count)
        else:
            yield batch

    def _unpacked(
        self, batch: pa.RecordBatch, view: NDArray[np.uint8], places: Places, count: int
    ) -> Iterator[pa.RecordBatch]:
        """The batch with bodies as they were before their producers compressed them, and flags that say so."""
        flags: Any = decode.take_column(view, places, count, "sys_flag")
        packed = (flags & record.SYS_FLAG_COMPRESSED) != 0
        if not packed.any():
            yield batch
            return
        plain_flags = pa.array(np.where(packed, flags & ~record.SYS_FLAG_BODY, flags), pa.int32())
        batch = self._with("sys_flag", plain_flags, batch)
        if not self.reads_body:
            yield batch
            return
        offsets: Any = decode.take_column(view, places, count, "physical_offset")
        at = 0
        for bodies in _plain(batch.column(self._sources.index("body")), flags, offsets, self._store):
            yield self._with("body", bodies, batch.slice(at, len(bodies)))
            at += len(bodies)

    def _with(self, source: str, array: pa.Array, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with this in the place of what is made of `source`, if that is one of the columns."""
        named = zip(self._sources, batch.columns, strict=True)
        return pa.RecordBatch.from_arrays(
            [array if name == source else column for name, column in named], schema=self.schema
        )


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


def _plain(bodies: pa.Array, flags: NDArray[np.int32], offsets: NDArray[np.int64], store: str) -> Iterator[pa.Array]:
    """Bodies unpacked, so many at once as are not much: a few bytes may unpack to any length."""
    found: list[bytes] = []
    size = 0
    for body, flag, offset in zip(bodies.to_pylist(), flags.tolist(), offsets.tolist(), strict=True):
        try:
            plain = plain_body(body, flag)
        except BadMessageError as error:
            raise BadMessageError(
                f"{store}: log position {offset:,}: {error}; plainBodies=false reads bodies as they are stored"
            ) from None
        if found and size + len(plain) > PLAIN_BYTES:
            yield pa.array(found, pa.binary())
            found, size = [], 0
        found.append(plain)
        size += len(plain)
    yield pa.array(found, pa.binary())
