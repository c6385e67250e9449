"""`mqproc store export`: topics of any store as Parquet, as JSON lines, or as a store of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TextIO

import click
import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.cli.options import PATH, TIME, Command, Invocation, complete_topic, pass_invocation
from mqproc.cli.output import Column, Output, Progress, encode_json, format_bytes
from mqproc.cli.times import now_ms
from mqproc.config.options import Options
from mqproc.errors import BadRequestError, CorruptStoreError, StoreNotFoundError, TopicNotFoundError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths, file_type, is_text
from mqproc.store.topics import TopicConfig
from mqproc.store.verify.inventory import Sizes
from mqproc.util.units import MIB, counted

if TYPE_CHECKING:
    from mqproc.store.export import ExportProgress, RecordSelection
    from mqproc.store.topics import TopicConfig
    from mqproc.store.verify.inventory import Inventory
    from mqproc.store.verify.snapshot import LogPositions

# --- export_sinks ---
# Where exported records go: JSON lines, Parquet, or a new store. What fails before the end leaves nothing behind.


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
        from mqproc.kernels.record_decode import ALL_COLUMNS

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


EXIT_DAMAGE = 1
COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "none")
_COLUMNS = [Column("topic"), Column("messages", kind="count")]


@click.command(cls=Command)
@click.argument("folder", required=False, type=PATH)
@click.option(
    "--topic",
    "topics",
    multiple=True,
    required=True,
    metavar="TOPIC",
    shell_complete=complete_topic,
    help="A topic; may be repeated.",
)
@click.option(
    "--to",
    "target",
    required=True,
    type=PATH,
    metavar="FILE|DIR",
    help="FILE.parquet, FILE.jsonl, or a folder for a new store.",
)
@click.option("--begin", type=TIME, help="Only messages stored from then on.")
@click.option("--end", type=TIME, help="Only messages stored before then.")
@click.option("--compression", type=click.Choice(COMPRESSIONS), default="zstd", show_default=True, help="Of Parquet.")
@pass_invocation
def export(
    invocation: Invocation,
    folder: Path | None,
    topics: tuple[str, ...],
    target: Path,
    begin: int | None,
    end: int | None,
    compression: str,
) -> int:
    """Take topics out of a store: Parquet, JSON lines, or a new store.

    FOLDER is any store, ours or RocketMQ's, running or not, damaged or not. It is only read, its log from first to
    last, so that what its queues have lost comes along. A new store keeps queue ids and queue offsets, and RocketMQ
    opens it too. Holes of the log are told on stderr, and the exit code is then 1.
    """
    from mqproc.kernels.gather import TIME_MAX, TIME_MIN
    from mqproc.store.export import ExportProgress, RecordSelection
    from mqproc.store.verify.inventory import take_inventory
    from mqproc.store.verify.snapshot import read_deleted
    from mqproc.store.verify.verifier import positions_of, sizes_of

    if begin is not None and end is not None and begin >= end:
        raise click.UsageError("--end is not after --begin: no message lies between them")
    io = StoreIO()
    paths = invocation.store_argument(io, folder)
    options = invocation.store_options(io, paths)
    for topic in topics:
        if not is_text(topic):
            raise TopicNotFoundError(f"{paths.root}: no topic {topic!r} there")
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
    with sink_for(io, target, compression, options, inventory.sizes, lambda line: None) as sink:
        with Progress(invocation.out, "export", "MiB", rate_unit="MiB") as progress:
            for records in _records(io, inventory, positions, selection, taken, progress):
                with naming(target):
                    sink.write(records)
        configs = _configs(io, paths, inventory)
        for topic, count in taken.by_topic.items():
            if count == 0 and topic not in configs:
                raise TopicNotFoundError(f"{paths.root}: no topic {topic!r} there")
        with naming(target):
            sink.finish([configs.get(topic) or _made_up(topic) for topic in selection.topics])
    _tell(invocation.out, paths, target, taken, time.monotonic() - started_s)
    return EXIT_DAMAGE if taken.lost else 0


def _records(
    io: StoreIO,
    inventory: Inventory,
    positions: LogPositions,
    selection: RecordSelection,
    taken: ExportProgress,
    progress: Progress,
) -> Iterator[NDArray[np.uint8]]:
    """Buffers of selected records, with a bar for how far the log is read."""
    from mqproc.store.commitlog.scan import IntactRecords
    from mqproc.store.export import RecordSelector

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
    """Settings of the topics that settings or queues know."""
    from mqproc.store.topics import TopicConfig, Topics

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


def _made_up(topic: str) -> TopicConfig:
    """Settings of a topic that only the log knows; its records tell how many queues it has."""
    from mqproc.store.topics import TopicConfig

    return TopicConfig(topic, 1)


def _tell(out: Output, paths: StorePaths, target: Path, taken: ExportProgress, seconds: float) -> None:
    for lost in taken.lost:
        size = format_bytes(lost.stop - lost.start)
        out.note(f"{paths.commit_log}: hole [{lost.start}, {lost.stop}), {size}: {lost.reason}")
    rows = [{"topic": topic, "messages": count} for topic, count in taken.by_topic.items()]
    if out.shape == "json":
        holes = [{"start": lost.start, "stop": lost.stop, "reason": lost.reason} for lost in taken.lost]
        out.document(
            {
                "to": str(target),
                "messages": taken.messages,
                "bytes": taken.size,
                "seconds": round(seconds, 3),
                "holes": holes,
                "topics": rows,
            }
        )
        return
    out.rows("topics", _COLUMNS, rows)
    if out.shape == "table":
        out.line(f"{counted(taken.messages, 'message')}, {format_bytes(taken.size)}, to {target} in {seconds:.2f} s")
