"""`mqproc store export`: export topics of a store to Parquet, JSON lines or a new store."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

import click
import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.arrow.columns import ALL, column_names
from mqproc.cli.options import PATH, TIME, Invocation, command, complete_topic, folder_argument
from mqproc.cli.output import Output, Progress, encode_json, output_columns
from mqproc.config.options import Options
from mqproc.errors import BadRequestError, CorruptStoreError, StoreNotFoundError, TopicNotFoundError
from mqproc.io.store_io import StoreIO
from mqproc.kernels.gather import TIME_MAX, TIME_MIN
from mqproc.layout.record_codec import decode_records
from mqproc.paths import StorePaths, file_type, is_text
from mqproc.store.commitlog.scan import IntactRecords
from mqproc.store.export import ExportProgress, NewStore, RecordSelection, RecordSelector
from mqproc.store.lost_messages import LostMessages, lines_about, opened_search
from mqproc.store.topics import TopicConfig, Topics
from mqproc.store.verify.inventory import Inventory, Sizes, take_inventory
from mqproc.store.verify.snapshot import LogPositions, read_deleted
from mqproc.store.verify.verifier import positions_of, sizes_of
from mqproc.util.units import MIB, counted, format_bytes, now_ms

# Sinks. A failed export leaves no file.


_LOST_LISTED: Final = 100
# Bytes of a row group of a Parquet file.
_GROUP_BYTES: Final = 128 << 20


class ExportSink(Protocol):
    """Target of an export."""

    def write(self, records: NDArray[Any]) -> None:
        """Write whole records, uint8[n], whose bytes may be modified."""
        ...

    def finish(self, topics: Sequence[TopicConfig]) -> None:
        """Complete the export: all records were written."""
        ...

    def close(self) -> None:
        """Close the files. An unfinished export is useless."""
        ...


class JsonLinesSink:
    """JSON lines with the fields of `store dump --json`."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("w", encoding="utf-8")

    def write(self, records: NDArray[Any]) -> None:
        messages = decode_records(records.data)
        self._file.write("".join(encode_json(message.to_json()) + "\n" for message in messages))

    def finish(self, topics: Sequence[TopicConfig]) -> None:
        self._file.flush()

    def close(self) -> None:
        # A failed write is repeated here and fails again.
        with contextlib.suppress(OSError):
            self._file.close()


@dataclasses.dataclass(frozen=True, slots=True)
class ParquetSettings:
    """Compression and columns of a Parquet file, and the store for errors."""

    compression: str
    columns: tuple[str, ...]
    store: str


class ParquetSink:
    """A Parquet file with the columns of `read`."""

    def __init__(self, path: Path, settings: ParquetSettings) -> None:
        try:
            import pyarrow.parquet

            from mqproc.arrow.batches import message_columns
        except ImportError:
            raise click.UsageError("Parquet needs pyarrow: pip install 'mqproc[arrow]'") from None
        self._settings = settings
        self._columns = message_columns(settings.columns)
        self._batches: list[Any] = []
        self._size = 0
        self._writer = pyarrow.parquet.ParquetWriter(path, self._columns.schema, compression=settings.compression)

    def write(self, records: NDArray[Any]) -> None:
        from mqproc.arrow.batches import sent_batches
        from mqproc.kernels.record_decode import locate

        names, store = self._settings.columns, self._settings.store
        self._batches += sent_batches(names, *locate(records, -1, self._columns.rows), store)
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
    """A new store with the same file sizes."""

    def __init__(self, io: StoreIO, path: Path, options: Options, sizes: Sizes) -> None:
        own = dataclasses.replace(
            options,
            mapped_file_size_commit_log=sizes.segment,
            mapped_file_size_consume_queue=sizes.queue_file,
            max_hash_slot_num=sizes.slots,
            max_index_num=sizes.items,
        )
        self._store = NewStore(io, StorePaths(path), own)

    def write(self, records: NDArray[Any]) -> None:
        self._store.append(records)

    def finish(self, topics: Sequence[TopicConfig]) -> None:
        self._store.finish(topics, now_ms(), lambda line: None)

    def close(self) -> None:
        self._store.close()


@contextlib.contextmanager
def named_errors(target: Path) -> Iterator[None]:
    """Add the target's name to I/O errors that name no file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        number = error.errno or errno.EIO
        raise OSError(number, os.strerror(number) if error.errno else str(error), str(target)) from error


@contextlib.contextmanager
def sink_for(
    io: StoreIO, target: Path, parquet: ParquetSettings, options: Options, sizes: Sizes
) -> Iterator[ExportSink]:
    """Open a sink chosen by the target's suffix.

    It is written next to the target and renamed when the block succeeds.

    Raises BadRequestError if the target exists, StoreNotFoundError without its parent folder, click.UsageError for an
    unknown suffix.
    """
    target = target.absolute()
    if not stat.S_ISDIR(file_type(target.parent)):
        raise StoreNotFoundError(f"{target.parent}: no such folder")
    if target.is_dir() and any(target.iterdir()):
        raise BadRequestError(f"{target}: the folder is not empty; a new store needs an empty or a new one")
    if target.exists() and not target.is_file() and not target.is_dir():
        raise BadRequestError(f"{target}: neither a file nor a folder")
    if target.is_file():
        raise BadRequestError(f"{target}: already exists; export does not overwrite files")
    partial = target.with_name(f"{target.name}.partial")
    _remove(partial)
    try:
        with named_errors(target):
            made = _open_sink(io, target, partial, parquet, options, sizes)
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


def _open_sink(
    io: StoreIO, target: Path, partial: Path, parquet: ParquetSettings, options: Options, sizes: Sizes
) -> ExportSink:
    if target.suffix == ".parquet":
        return ParquetSink(partial, parquet)
    if target.suffix == ".jsonl":
        return JsonLinesSink(partial)
    if target.suffix and not target.is_dir():
        raise click.UsageError(f"{target.name}: export writes .parquet, .jsonl, or a folder, whose name has no suffix")
    return StoreSink(io, partial, options, sizes)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


EXIT_DAMAGE = 1
COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "none")
_COLUMNS = output_columns("topic", "messages:count")


@command()
@folder_argument
@click.option(
    "--topic",
    "topics",
    multiple=True,
    required=True,
    metavar="TOPIC",
    shell_complete=complete_topic,
    help="Topic to export; may be repeated.",
)
@click.option(
    "--to",
    "target",
    required=True,
    type=PATH,
    metavar="FILE|DIR",
    help="FILE.parquet, FILE.jsonl, or the folder of a new store.",
)
@click.option("--begin", type=TIME, metavar="TIME", help="Only messages stored from this time on.")
@click.option("--end", type=TIME, metavar="TIME", help="Only messages stored before this time.")
@click.option(
    "--compression", type=click.Choice(COMPRESSIONS), default="zstd", show_default=True, help="Compression of Parquet."
)
@click.option(
    "--columns",
    "names",
    metavar="NAME,…",
    help="Columns of Parquet, or all.  [default: those that are not internal to RocketMQ]",
)
def export(
    invocation: Invocation,
    folder: Path | None,
    topics: tuple[str, ...],
    target: Path,
    begin: int | None,
    end: int | None,
    compression: str,
    names: str | None,
) -> int:
    """Export topics to Parquet, JSON lines or a new store.

    FOLDER is any store of mqproc or RocketMQ, running or stopped, damaged or not. It is read-only. The whole log is
    read, so that messages missing in the queues are exported too. A new store keeps queue ids and queue offsets, and
    RocketMQ can open it. Holes in the log and the messages lost in them are reported on stderr, with exit code 1.
    """
    if begin is not None and end is not None and begin >= end:
        raise click.UsageError("--end must be after --begin")
    io = StoreIO()
    paths = invocation.store_argument(io, folder)
    options = invocation.store_options(io, paths)
    for topic in topics:
        if not is_text(topic):
            raise TopicNotFoundError(f"{paths.root}: no topic {topic!r}")
    inventory = take_inventory(io, paths, sizes_of(io, paths, options))
    positions = positions_of(io, paths)
    selection = RecordSelection(
        list(dict.fromkeys(topics)),
        TIME_MIN if begin is None else begin,
        TIME_MAX if end is None else end,
        read_deleted(io, paths, running=positions.end is not None),
    )
    started_s = time.monotonic()
    taken = ExportProgress()
    parquet = ParquetSettings(compression, _columns_of(names), str(paths.root))
    with sink_for(io, target, parquet, options, inventory.sizes) as sink:
        with Progress(invocation.out, "export", "MiB", rate_unit="MiB") as progress:
            for records in _records(io, inventory, positions, selection, taken, progress):
                with named_errors(target):
                    sink.write(records)
        configs = _configs(io, paths, inventory)
        for topic, count in taken.by_topic.items():
            if count == 0 and topic not in configs:
                raise TopicNotFoundError(f"{paths.root}: no topic {topic!r}")
        with named_errors(target):
            # The queues of a topic that only the log contains come from its records.
            sink.finish([configs.get(topic) or TopicConfig(topic, 1) for topic in selection.topics])
    lost = _lost(io, inventory, selection.topics, taken)
    _report(invocation.out, paths, target, taken, lost, time.monotonic() - started_s)
    return EXIT_DAMAGE if taken.lost else 0


def _columns_of(names: str | None) -> tuple[str, ...]:
    return column_names(names if names is None or names == ALL else names.split(","))


def _lost(io: StoreIO, inventory: Inventory, topics: Sequence[str], taken: ExportProgress) -> list[LostMessages]:
    """Messages of the topics in holes of the log."""
    holes = [(hole.start, hole.stop) for hole in taken.lost]
    queues = (queue for queue in inventory.queues if queue[0] in topics)
    with opened_search(io, inventory.paths, inventory.sizes.segment, inventory.sizes.queue_file) as search:
        return search.search(queues, holes)


def _records(
    io: StoreIO,
    inventory: Inventory,
    positions: LogPositions,
    selection: RecordSelection,
    taken: ExportProgress,
    progress: Progress,
) -> Iterator[NDArray[np.uint8]]:
    """Buffers of selected records, with a progress bar over the log."""
    begin = positions.begin
    total = sum(inventory.segments.values()) if positions.end is None else positions.end - begin
    log = IntactRecords(io, inventory, begin, positions.end)

    def show(position: int) -> None:
        progress.update(position - begin, total, (position - begin) // MIB)

    try:
        yield from RecordSelector(selection).buffers(log.pieces(show), taken)
        progress.end(total, total, total // MIB)
    finally:
        log.close()


def _configs(io: StoreIO, paths: StorePaths, inventory: Inventory) -> dict[str, TopicConfig]:
    """Settings of the topics in the settings file or the queues."""
    topics = Topics(io, paths)
    try:
        topics.load()
    except (CorruptStoreError, IsADirectoryError, msgspec.MsgspecError):
        topics = Topics(io, paths)
    found = {name: config for name in topics.names() if (config := topics.get(name)) is not None}
    for topic, queue_id in inventory.queues:
        config = found.setdefault(topic, TopicConfig(topic, 1))
        config.queues = max(config.queues, queue_id + 1)
    return found


def _report(
    out: Output, paths: StorePaths, target: Path, taken: ExportProgress, lost: list[LostMessages], seconds: float
) -> None:
    for hole in taken.lost:
        size = format_bytes(hole.stop - hole.start)
        out.note(f"{paths.commit_log}: hole [{hole.start}, {hole.stop}), {size}: {hole.reason}")
    for line in lines_about(lost, _LOST_LISTED):
        out.note(line)
    rows = [{"topic": topic, "messages": count} for topic, count in taken.by_topic.items()]
    if out.shape == "json":
        holes = [{"start": hole.start, "stop": hole.stop, "reason": hole.reason} for hole in taken.lost]
        out.document(
            {
                "to": str(target),
                "messages": taken.messages,
                "bytes": taken.size,
                "seconds": round(seconds, 3),
                "holes": holes,
                "lost_messages": [each.to_json() for each in lost],
                "topics": rows,
            }
        )
        return
    out.rows("topics", _COLUMNS, rows)
    if out.shape == "table":
        out.line(f"{counted(taken.messages, 'message')}, {format_bytes(taken.size)}, to {target} in {seconds:.2f} s")
