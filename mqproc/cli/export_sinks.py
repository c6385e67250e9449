"""Where exported records go: JSON lines, Parquet, or a new store. What fails before the end leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

import click
from numpy.typing import NDArray

from mqproc.cli.output import encode_json
from mqproc.cli.times import now_ms
from mqproc.config import Options
from mqproc.errors import BadRequestError, StoreNotFoundError
from mqproc.io import StoreIO
from mqproc.paths import StorePaths, file_type
from mqproc.store.topics import TopicConfig
from mqproc.store.verify.inventory import Sizes

COMPRESSIONS: Final = ("zstd", "snappy", "gzip", "lz4", "none")
# Rows of so many bytes become one group of a Parquet file.
_GROUP_BYTES: Final = 128 << 20


class Sink(Protocol):
    """Takes records, then is finished or closed."""

    def write(self, records: NDArray[Any]) -> None:
        """Take whole records, uint8[n], which may be changed."""
        ...

    def finish(self, topics: Sequence[TopicConfig]) -> None:
        """All records have come."""
        ...

    def close(self) -> None:
        """Let go of files; what is not finished is of no use."""
        ...


class JsonLines:
    """A JSON object a line, with the fields that `store dump --json` has."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("w", encoding="utf-8")

    def write(self, records: NDArray[Any]) -> None:
        from mqproc.layout.record_codec import decode_records

        messages = decode_records(records.data)
        self._file.write("".join(encode_json(message.to_json()) + "\n" for message in messages))

    def finish(self, topics: Sequence[TopicConfig]) -> None:
        self._file.flush()

    def close(self) -> None:
        # What could not be written once is tried again, and has been told.
        with contextlib.suppress(OSError):
            self._file.close()


class Parquet:
    """A Parquet file with a column for each field of a message; properties as they are stored."""

    def __init__(self, path: Path, compression: str) -> None:
        try:
            import pyarrow.parquet
        except ImportError:
            raise click.UsageError("Parquet needs pyarrow: pip install 'mqproc[arrow]'") from None
        self._batches: list[Any] = []
        self._size = 0
        self._writer = pyarrow.parquet.ParquetWriter(path, self._batch(b"").schema, compression=compression)

    @staticmethod
    def _batch(records: Any) -> Any:
        from mqproc.client.arrow import record_batch
        from mqproc.kernels.decode import ALL_COLUMNS

        return record_batch(memoryview(records), -1 if len(records) else 0, ALL_COLUMNS)

    def write(self, records: NDArray[Any]) -> None:
        self._batches.append(self._batch(records.data))
        self._size += len(records)
        if self._size >= _GROUP_BYTES:
            self._write_group()

    def finish(self, topics: Sequence[TopicConfig]) -> None:
        self._write_group()
        self._writer.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()

    def _write_group(self) -> None:
        import pyarrow

        if self._batches:
            self._writer.write_table(pyarrow.Table.from_batches(self._batches), row_group_size=1 << 30)
        self._batches.clear()
        self._size = 0


class StoreSink:
    """A new store with files of the sizes that the old one's have."""

    def __init__(self, io: StoreIO, path: Path, options: Options, sizes: Sizes, report: Callable[[str], None]) -> None:
        from mqproc.store.export import NewStore

        own = dataclasses.replace(
            options,
            mapped_file_size_commit_log=sizes.segment,
            mapped_file_size_consume_queue=sizes.queue_file,
            max_hash_slot_num=sizes.slots,
            max_index_num=sizes.items,
        )
        self._store = NewStore(io, StorePaths(path), own)
        self._report = report

    def write(self, records: NDArray[Any]) -> None:
        self._store.append(records)

    def finish(self, topics: Sequence[TopicConfig]) -> None:
        self._store.finish(topics, now_ms(), self._report)

    def close(self) -> None:
        self._store.close()


@contextlib.contextmanager
def naming(target: Path) -> Iterator[None]:
    """Have an error of storage that names no file name this one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        number = error.errno or errno.EIO
        raise OSError(number, os.strerror(number) if error.errno else str(error), str(target)) from error


@contextlib.contextmanager
def sink_for(
    io: StoreIO, target: Path, compression: str, options: Options, sizes: Sizes, report: Callable[[str], None]
) -> Iterator[Sink]:
    """A sink by the target's name. It is made beside it and gets its name when the block has ended well.

    Raises BadRequestError when something is in the way, StoreNotFoundError without a folder to put it in,
    click.UsageError for an ending that means nothing.
    """
    target = target.absolute()
    if not stat.S_ISDIR(file_type(target.parent)):
        raise StoreNotFoundError(f"{target.parent}: no such folder")
    if target.is_dir() and any(target.iterdir()):
        raise BadRequestError(f"{target}: not empty; a new store needs a folder of its own")
    if target.exists() and not target.is_file() and not target.is_dir():
        raise BadRequestError(f"{target}: neither a file nor a folder; export makes one of them")
    if target.is_file():
        raise BadRequestError(f"{target}: there already; nothing is written over")
    partial = target.with_name(f"{target.name}.partial")
    _remove(partial)
    try:
        with naming(target):
            made = _make(io, target, partial, compression, options, sizes, report)
        with contextlib.closing(made) as sink:
            yield sink
        if target.is_dir():
            target.rmdir()
        if partial.is_file():
            fd = io.open(partial)
            try:
                io.sync(fd)
            finally:
                io.close(fd)
        io.rename(partial, target)
    finally:
        _remove(partial)


def _make(
    io: StoreIO,
    target: Path,
    partial: Path,
    compression: str,
    options: Options,
    sizes: Sizes,
    report: Callable[[str], None],
) -> Sink:
    if target.suffix == ".parquet":
        return Parquet(partial, compression)
    if target.suffix == ".jsonl":
        return JsonLines(partial)
    if target.suffix and not target.is_dir():
        raise click.UsageError(f"{target.name}: export writes .parquet, .jsonl, or a folder, whose name has no ending")
    return StoreSink(io, partial, options, sizes, report)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
