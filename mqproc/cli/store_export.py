"""`mqproc store export`: topics of any store as Parquet, as JSON lines, or as a store of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.cli.commands import MOMENT, PATH, Command
from mqproc.cli.completing import complete_topic
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.output import Column, Output, format_bytes
from mqproc.cli.progress import Progress
from mqproc.cli.store_options import options_for, store_of
from mqproc.config import MIB
from mqproc.errors import CorruptStoreError, TopicNotFoundError
from mqproc.io import StoreIO
from mqproc.paths import StorePaths, is_text
from mqproc.quantities import counted

if TYPE_CHECKING:
    from mqproc.store.export import Selection, Taken
    from mqproc.store.topics import TopicConfig
    from mqproc.store.verify.inventory import Inventory
    from mqproc.store.verify.picture import Positions

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
@click.option("--begin", type=MOMENT, help="Only messages stored from then on.")
@click.option("--end", type=MOMENT, help="Only messages stored before then.")
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
    from mqproc.cli.export_sinks import naming, sink_for
    from mqproc.kernels.gather import TIME_MAX, TIME_MIN
    from mqproc.store.export import Selection, Taken
    from mqproc.store.verify.deletions import read_deleted
    from mqproc.store.verify.inventory import take_inventory
    from mqproc.store.verify.verifier import positions_of, sizes_of

    if begin is not None and end is not None and begin >= end:
        raise click.UsageError("--end is not after --begin: no message lies between them")
    io = StoreIO()
    paths = store_of(invocation, io, folder)
    options = options_for(invocation, io, paths)
    for topic in topics:
        if not is_text(topic):
            raise TopicNotFoundError(f"{paths.root}: no topic {topic!r} there")
    inventory = take_inventory(io, paths, sizes_of(io, paths, options))
    positions = positions_of(io, paths)
    selection = Selection(
        list(dict.fromkeys(topics)),
        TIME_MIN if begin is None else begin,
        TIME_MAX if end is None else end,
        read_deleted(io, paths, running=positions.end is not None),
    )
    started_s = time.monotonic()
    taken = Taken()
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
    io: StoreIO, inventory: Inventory, positions: Positions, selection: Selection, taken: Taken, progress: Progress
) -> Iterator[NDArray[np.uint8]]:
    """Buffers of selected records, with a bar for how far the log is read."""
    from mqproc.store.export import Selector
    from mqproc.store.intact_records import IntactRecords

    begin = positions.begin
    total = sum(inventory.segments.values()) if positions.end is None else positions.end - begin
    log = IntactRecords(io, inventory, begin, positions.end)

    def show(position: int) -> None:
        progress.update(position - begin, total, (position - begin) // MIB)

    try:
        yield from Selector(selection).buffers(log.pieces(show), taken)
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


def _tell(out: Output, paths: StorePaths, target: Path, taken: Taken, seconds: float) -> None:
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
