"""Records as Arrow batches of exactly the types that Spark has for its columns.

    positions ──places──▶ room ──▶ one run of memory: a message of Arrow's with all buffers ──▶ batch

Spark takes `binary` and `string` with offsets into one run of bytes, so each body is copied once, from the map of the
log into its batch; views into the log are refused there. A batch is small enough for a processor's cache, so what
counts beside copies is how much Python does for one: the same few calls for any number of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mqproc.client.arrow import mended
from mqproc.errors import BadMessageError, BadRequestError
from mqproc.kernels import arrow_body, decode
from mqproc.layout import record
from mqproc.packing import plain_body
from mqproc.spark.columns import sources_of, types_of
from mqproc.spark.message_head import head_of
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
# How the other columns are made, and of which of the decoder's; "" for what is the same in all rows.
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
    "store": (arrow_body.SAME, ""),
    "store_name": (arrow_body.SAME, ""),
}


class BatchMaker:
    """Makes batches of the named columns for the records of one store."""

    def __init__(self, naming: str, names: Sequence[str], store: str, *, plain_bodies: bool = False) -> None:
        types = types_of(naming)
        self._columns = sources_of(naming, names)
        self.schema = pa.schema([(name, ARROW[types[name]]) for name in names])
        self._store = store
        self._unpacks = plain_bodies and any(source in ("body", "sys_flag") for _name, source in self._columns)
        steps, texts, decoded = [], bytearray(), set()
        for name, source in self._columns:
            kind, of = _MADE.get(source) or (_NUMBERS[types[name]], _DECODED.get(source, source))
            if of:
                decoded.add(of)
                steps.append([kind, *decode.place_of(of), source == "tag"])
            else:
                text = (store if source == "store" else store.rsplit("/", 1)[-1]).encode()
                steps.append([kind, len(texts), len(text), 0])
                texts += text
        self._rows = decode.rows_of(decoded)
        self._steps = np.array(steps, np.int64).reshape(-1)
        self._same = np.frombuffer(texts, np.uint8)
        self._head = head_of(self.schema)
        self._state = np.zeros(arrow_body.STATE_WORDS, np.int64)

    @property
    def reads_body(self) -> bool:
        """Whether the body is one of the columns."""
        return any(source == "body" for _name, source in self._columns)

    def batch(self, found: Found) -> pa.RecordBatch:
        """The found records; shares nothing with them. Raises BadRequestError for more than a batch can have."""
        count = len(found.positions)
        places = decode.places_at(found.view, found.positions, self._rows)
        size = int(arrow_body.room_for(places, count, self._steps, len(self._columns)))
        if size < 0:
            raise BadRequestError(
                f"column {self._columns[-1 - size][0]}: texts of {count:,} rows may exceed "
                f"{arrow_body.DATA_MAX:,} bytes: read with less batchRows or batchBytes"
            )
        head = self._head
        words = np.empty(len(head.words) + -(-size // 8), np.int64)
        words[: len(head.words)] = head.words
        beyond = arrow_body.write_columns(
            found.view,
            places,
            count,
            self._steps,
            len(self._columns),
            self._same,
            head.places,
            words.view(np.uint8),
            words.view(np.int32),
            words,
            self._state,
        )
        batch = pa.ipc.read_record_batch(pa.py_buffer(words), self.schema)
        if beyond:
            batch = self._mended(batch, beyond)
        return self._unpacked(batch, found.view, places, count) if self._unpacks else batch

    def _mended(self, batch: pa.RecordBatch, beyond: int) -> pa.RecordBatch:
        """The batch with texts that are UTF-8, as Arrow's must be, in the columns whose bit is in `beyond`."""
        arrays = [mended(array) if beyond >> number & 1 else array for number, array in enumerate(batch.columns)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _unpacked(self, batch: pa.RecordBatch, view: NDArray[np.uint8], places: Places, count: int) -> pa.RecordBatch:
        """The batch with bodies as they were before their producers compressed them, and flags that say so.

        Raises BadMessageError for one that cannot be unpacked.
        """
        flags: Any = decode.take_column(view, places, count, "sys_flag")
        packed = (flags & record.SYS_FLAG_COMPRESSED) != 0
        if not packed.any():
            return batch
        arrays = batch.columns
        for number, (_name, source) in enumerate(self._columns):
            if source == "sys_flag":
                arrays[number] = pa.array(np.where(packed, flags & ~record.SYS_FLAG_BODY, flags), pa.int32())
            elif source == "body":
                offsets: Any = decode.take_column(view, places, count, "physical_offset")
                arrays[number] = _plain(arrays[number], flags, offsets, self._store)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


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
