"""Write Arrow batches as Parquet files, a folder for each value of partition columns.

    batches ──enough of them──▶ a table ──one stable take──▶ a slice per folder ──the largest──▶ a row group each
                                  ▲────────────────small slices wait for more rows──────────┘

Folders are named as Spark and Hive name them.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mqproc.errors import DiskFullError, MqprocError
from mqproc.io.store_io import reason_of

_WAITING_BYTES: Final = 64 << 20
_OPEN_MAX: Final = 256
_NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
_ESCAPES: Final = {ord(each): f"%{ord(each):02X}" for each in (*map(chr, range(1, 32)), *"\"#%'*/:=?[\\]^{\x7f")}
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns of the files, columns that name the folders, and compression."""

    columns: Sequence[str]
    by: Sequence[str] = ()
    compression: str = "zstd"

    def file_name(self, name: str) -> str:
        """A file name with the extension that readers expect for the compression."""
        packed = "" if self.compression == "none" else f".{self.compression}"
        return f"{name}{packed}.parquet"

    def in_files(self) -> list[str]:
        """The columns in the files, without those that name folders."""
        return [name for name in self.columns if name not in self.by]


class ParquetFiles:
    """Files below an existing folder, with names that begin with `name`.

    At most `waiting_bytes` of rows wait for more rows of their folders; sorting them takes three times that memory.
    With more than `open_max` open files, the one that was idle longest is closed; its folder gets another file.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        name: str,
        *,
        waiting_bytes: int = _WAITING_BYTES,
        open_max: int = _OPEN_MAX,
    ) -> None:
        self._folder = folder
        self._layout = layout
        self._name = name
        self._waiting_bytes = waiting_bytes
        self._open_max = open_max
        self._waiting: list[pa.RecordBatch] = []
        self._size = 0
        self._open: OrderedDict[str, _File] = OrderedDict()
        self.files = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._open.values():
            file.discard()

    def add(self, batch: pa.RecordBatch) -> None:
        """Add a batch. Raises DiskFullError, and MqprocError for other disk errors."""
        if batch.num_rows == 0:
            return
        self._waiting.append(batch)
        self._size += batch.get_total_buffer_size()
        if self._size >= self._waiting_bytes:
            self._write(self._waiting_bytes // 2)

    def finish(self) -> None:
        """Write waiting rows and close all files. Raises as `add`."""
        if self._waiting:
            self._write(0)
        while self._open:
            self._close_oldest()

    def _write(self, wait_bytes: int) -> None:
        """Write waiting rows, but keep the smallest folders of `wait_bytes` in total."""
        parts = _parts(pa.Table.from_batches(self._waiting), self._layout.by)
        self._waiting.clear()
        self._size = sum(part.nbytes for _folder, part in parts)
        small: list[pa.Table] = []
        for folder, part in sorted(parts, key=lambda each: each[1].nbytes, reverse=True):
            if self._size > wait_bytes:
                self._write_to(folder, part)
                self._size -= part.nbytes
            else:
                small.append(part)
        if small:
            # A copy, which `combine_chunks` skips for a single chunk: slices would keep all written rows in memory.
            copied = [pa.concat_arrays(column.chunks) for column in pa.concat_tables(small).columns]
            self._waiting = [pa.RecordBatch.from_arrays(copied, schema=small[0].schema)]

    def _write_to(self, folder: str, part: pa.Table) -> None:
        if folder in self._open:
            self._open.move_to_end(folder)
        else:
            if len(self._open) >= self._open_max:
                self._close_oldest()
            self._open[folder] = self._new_file(folder, part.schema)
        self._open[folder].write(part)

    def _close_oldest(self) -> None:
        _folder, file = next(iter(self._open.items()))
        file.close()
        self._open.popitem(last=False)

    def _new_file(self, folder: str, schema: pa.Schema) -> _File:
        path = self._folder
        for name in filter(None, folder.split("/")):
            path /= name
            with file_errors(path):
                # Without parents: a late attempt must not create the job's folder again.
                path.mkdir(exist_ok=True)
        made = _File(path / self._layout.file_name(f"{self._name}-{self.files:05d}"), schema, self._layout)
        self.files += 1
        return made


class _File:
    def __init__(self, path: Path, schema: pa.Schema, layout: Layout) -> None:
        self._path = path
        self._columns = layout.in_files()
        with file_errors(path):
            self._sink = pa.OSFile(os.fspath(path), "wb")
            kept = pa.schema([schema.field(name) for name in self._columns])
            self._writer = pq.ParquetWriter(self._sink, kept, compression=layout.compression)

    def write(self, part: pa.Table) -> None:
        """Write rows as a row group."""
        with file_errors(self._path):
            self._writer.write_table(part.select(self._columns), row_group_size=part.num_rows)

    def close(self) -> None:
        with file_errors(self._path):
            self._writer.close()
            self._sink.close()

    def discard(self) -> None:
        """Close an unfinished file."""
        # Otherwise the writer tries again to write the footer, and prints the error.
        self._writer.is_open = False
        with suppress(OSError):
            self._sink.close()


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn OSError into DiskFullError or MqprocError with the path."""
    try:
        yield
    except OSError as error:
        number = error.errno or errno.EIO
        kind = DiskFullError if number in _NO_ROOM else MqprocError
        raise kind(f"{path}: {reason_of(OSError(number, os.strerror(number)))}") from error


def _parts(table: pa.Table, by: Sequence[str]) -> list[tuple[str, pa.Table]]:
    """(folder, rows) of a table, in the rows' order. A table of one folder is not copied."""
    folders, numbers = [""], np.zeros(table.num_rows, np.int64)
    for name in by:
        encoded = table.column(name).combine_chunks().dictionary_encode(null_encoding="encode")
        own = [folder_name(name, each) for each in _texts(encoded.dictionary)]
        found, numbers = np.unique(numbers * len(own) + encoded.indices.to_numpy(), return_inverse=True)
        folders = [f"{folders[each // len(own)]}/{own[each % len(own)]}" for each in found.tolist()]
    if len(folders) == 1:
        return [(folders[0], table)]
    ordered = table.combine_chunks().take(pa.array(np.argsort(numbers, kind="stable")))
    counts = np.bincount(numbers)
    starts = np.cumsum(counts) - counts
    return [
        (folder, ordered.slice(start, count))
        for folder, start, count in zip(folders, starts.tolist(), counts.tolist(), strict=True)
    ]


def _texts(values: pa.Array) -> list[str | None]:
    """Values as folder names show them; days also outside the years of Python's dates."""
    if not pa.types.is_date32(values.type):
        return list(values.to_pylist())
    return [None if day is None else _day_text(day) for day in values.cast(pa.int32()).to_pylist()]


def _day_text(number: int) -> str:
    text = str(np.datetime64(number, "D"))
    year = int(text[:-6])
    sign = "-" if year < 0 else "+" if year > 9999 else ""
    return f"{sign}{abs(year):04d}{text[-6:]}"


def folder_name(column: str, value: str | None) -> str:
    """Folder name for a column's value, as Spark and Hive write it."""
    return f"{column.translate(_ESCAPES)}={value.translate(_ESCAPES) if value else _NO_VALUE}"
