"""Run the rebuild job without Spark and read the resulting queues and index."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mqproc.layout import index_file as layout
from mqproc.layout.consume_queue import FILLER_SIZES
from mqproc.spark.jobs import rebuilding
from mqproc.spark.jobs.rebuilding import RebuildJob
from mqproc.spark.jobs.tasks import Row, batches_of
from mqproc.store.read.reader import StoreReader

_ITEM = np.dtype([("hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])


def rebuild_here(store: Path, to: Path, *, share_bytes: int = 20_000, fail_on_data_loss: bool = True) -> list[Row]:
    """Rebuild by running the job's steps in sequence; returns the rows of the queues."""
    job = RebuildJob.of(store, to, share_bytes=share_bytes, fail_on_data_loss=fail_on_data_loss)
    walked = _table(rebuilding.WALKED, (row for share in job.snapshot.shares for row in job.walk(share)))
    joined = _table(rebuilding.JOINED, job.join(walked)).to_pylist()
    files = [row for row in joined if row["file"] is not None]
    built = _table(rebuilding.BUILT, (built for row in files for built in job.build(row)))
    if len(built):
        assert len(list(job.name(built))) == len(files)
    return [row for row in joined if row["file"] is None]


def _table(schema: pa.Schema, rows: Iterable[Row]) -> pa.Table:
    return pa.Table.from_batches(list(batches_of(schema, rows)), schema)


def files_below(folder: Path) -> dict[str, bytes]:
    """Contents of all files below a folder, by relative name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def units_from(files: dict[str, bytes], log_begin: int) -> dict[tuple[str, int], bytes]:
    """Queue units by file and position, without zeros, fillers and units of expired records."""
    found = {}
    for name, data in files.items():
        for at in range(0, len(data), 20):
            unit = data[at : at + 20]
            size = int.from_bytes(unit[8:12], "big")
            if size > 0 and size not in FILLER_SIZES and int.from_bytes(unit[:8], "big") >= log_begin:
                found[name, at] = unit
    return found


def entries_of(store: Path, folder: Path, log_begin: int = 0) -> list[tuple[int, int]]:
    """(key hash, log position) of each index item in a folder; `store` gives the shape."""
    with StoreReader(store) as reader:
        slots: int = reader.options.max_hash_slot_num
    found: list[tuple[int, int]] = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        count = int.from_bytes(data[layout.ITEM_COUNT : layout.ITEM_COUNT + 4], "big")
        items: Any = np.frombuffer(data, _ITEM, max(0, count - 1), layout.item_offset(slots, layout.FIRST_ITEM))
        found += zip(items["hash"].tolist(), items["offset"].tolist(), strict=True)
    return [entry for entry in found if entry[1] >= log_begin]
