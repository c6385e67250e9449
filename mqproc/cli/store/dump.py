"""`mqproc store dump`: the records of a store, or an explanation of one of its files."""

from __future__ import annotations

import itertools
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from mqproc.cli.options import PATH, Invocation, command
from mqproc.cli.output import Output, OutputColumn, encode_json, format_value, output_columns
from mqproc.cli.store import file_formats as formats
from mqproc.cli.store.file_formats import RECORD_COLUMNS, FileDump, Rows, StoreFile, fill_gaps, text_ranges
from mqproc.errors import CorruptStoreError, StoreNotFoundError
from mqproc.io.store_io import StoreIO
from mqproc.layout.record_codec import decode_records
from mqproc.paths import INDEX_NAME_DIGITS, StorePaths, file_type, segment_start
from mqproc.store import rocketmq_json
from mqproc.store.access import check_is_store
from mqproc.store.commitlog.scan import IntactRecords, LostRange
from mqproc.store.verify.inventory import take_inventory
from mqproc.store.verify.state import config_fault
from mqproc.store.verify.verifier import positions_of, sizes_of
from mqproc.types import StoredMessage
from mqproc.util.json_text import decode_json
from mqproc.util.units import format_bytes

# JSON files of a store for `mqproc store dump`: purpose, validity and content as rows.


@dataclass(frozen=True, slots=True)
class _File:
    """Purpose of a file; with `rows` its content is shown as rows of `columns`."""

    about: str
    columns: Sequence[OutputColumn] = ()
    rows: Callable[[dict[str, Any]], Rows] | None = None


def _topics(value: dict[str, Any]) -> Rows:
    for topic, entry in value.get("topicConfigTable", {}).items():
        names = ("readQueueNums", "writeQueueNums", "perm", "order", "attributes")
        yield {"topic": topic} | {name: entry.get(name) for name in names}


def _groups(value: dict[str, Any]) -> Rows:
    for group, entry in value.get("subscriptionGroupTable", {}).items():
        names = ("consumeEnable", "consumeMessageOrderly", "retryMaxTimes", "retryQueueNums")
        yield {"group": group} | {name: entry.get(name) for name in names}


def _offsets(value: dict[str, Any]) -> Rows:
    for name, queues in value.get("offsetTable", {}).items():
        topic, _, group = name.partition("@")
        for queue_id, offset in queues.items():
            yield {"group": group, "topic": topic, "queue_id": int(queue_id), "next_offset": offset}


def _levels(value: dict[str, Any]) -> Rows:
    for level, offset in value.get("offsetTable", {}).items():
        yield {"level": int(level), "next_offset": offset}


def _deletions(value: dict[str, Any]) -> Rows:
    for topic, entry in next(iter(value.values()), {}).items():
        yield {"topic": topic} | entry


_FILES: Final = {
    "topics.json": _File(
        "RocketMQ's: topics, their queues, permissions (4 read, 2 write, 1 inherit) and attributes",
        output_columns("topic, readQueueNums:number, writeQueueNums:number, perm:number, order, attributes"),
        _topics,
    ),
    "subscriptionGroup.json": _File(
        "RocketMQ's: consumer groups and how they retry",
        output_columns("group, consumeEnable, consumeMessageOrderly, retryMaxTimes:number, retryQueueNums:number"),
        _groups,
    ),
    "consumerOffset.json": _File(
        "RocketMQ's: the queue offset that each group consumes next",
        output_columns("group, topic, queue_id:number, next_offset:number"),
        _offsets,
    ),
    "delayOffset.json": _File(
        "RocketMQ's: the queue offset that is delivered next, by delay level",
        output_columns("level:number, next_offset:number"),
        _levels,
    ),
    "deletedTopics.json": _File(
        "mqproc's: ends of the log and the queues at the deletion of topics",
        output_columns("topic, physicalOffset:number, nextOffsets"),
        _deletions,
    ),
    "consumerFilter.json": _File("RocketMQ's: filters of consumers; mqproc does not change it"),
    "consumerOrderInfo.json": _File("RocketMQ's: orderly pop consumption; mqproc does not change it"),
    "lmqConsumerOffset.json": _File("RocketMQ's: offsets in light queues; mqproc does not change it"),
    "messageRequestMode.json": _File("RocketMQ's: pull or pop by group; mqproc does not change it"),
    "topicQueueMapping.json": _File("RocketMQ's: static topics; mqproc does not change it"),
    "timermetrics": _File("RocketMQ's: timed messages by topic; mqproc does not change it"),
    "transactionMetrics": _File("RocketMQ's: open transactions by topic; mqproc does not change it"),
    "settings.json": _File("mqproc's: the options of the last group"),
    "opened.json": _File("mqproc's: the identity of its lock file"),
    "damage.json": _File("mqproc's: damaged ranges of the log"),
    "retention.json": _File("mqproc's: the last deletion by retention"),
    "unconsumed.json": _File("mqproc's: messages deleted before groups had consumed them"),
    "repair.json": _File("mqproc's: findings, actions and changes of a repair"),
}
_JOURNALS: Final = {
    "imports": _File("mqproc's: position of an import"),
    "replays": _File("mqproc's: position of a replay"),
}
_COPY: Final = ".bak"


def is_json_file(path: Path) -> bool:
    """Whether it is the name of a JSON file."""
    name = path.name.removesuffix(_COPY)
    return name.endswith(".json") or (path.parent.name == "config" and name in _FILES)


def json_file(file: StoreFile) -> FileDump:
    """Explain a JSON file. Raises CorruptStoreError if it is not JSON."""
    path, data = file.path, file.data
    try:
        value = rocketmq_json.parse(data.decode())
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise CorruptStoreError(f"{path}: {error}") from None
    name = path.name.removesuffix(_COPY)
    known = _FILES.get(name) or _JOURNALS.get(path.parent.name) or _File("a file that mqproc does not know")
    fault = config_fault(file.io, StorePaths(path.parent.parent), path)
    copy = "; the copy before the last change" if path.suffix == _COPY else ""
    content: Any = value
    columns: list[OutputColumn] = []
    rows: Rows = iter(())
    if known.rows is not None and not fault:
        content = {key: of for key, of in value.items() if not isinstance(of, dict) or key in ("dataVersion", "mqproc")}
        columns, rows = list(known.columns), known.rows(value)
    head = {"about": known.about + copy, "fault": fault or None, "content": content}
    return FileDump("config", head, columns, rows, text_ranges(data), len(data), is_damaged=bool(fault))


def group_log(file: StoreFile) -> FileDump:
    """The group's log: one JSON object per line."""
    data = file.data
    columns = output_columns("offset:number, ts, level, role, event")
    return FileDump("log", {"size": len(data)}, columns, _log_rows(data), text_ranges(data), len(data))


def _log_rows(data: bytes) -> Rows:
    lines = data.splitlines(keepends=True)
    offsets = itertools.accumulate(map(len, lines), initial=0)
    for offset, line in zip(offsets, lines, strict=False):
        try:
            found = decode_json(line, object)
        except msgspec.DecodeError:
            found = line.decode("utf-8", "replace").rstrip("\n")
        yield {"offset": offset, **(found if isinstance(found, dict) else {"event": found})}


EXIT_DAMAGE: Final = 1
_LISTED_COLUMNS: Final = [*RECORD_COLUMNS, *output_columns("message_id")]
_LAYOUT_COLUMNS: Final = output_columns("offset:number, size:number, name:text:bytes, help:text:meaning")
_FIELD_COLUMNS: Final = output_columns("offset:number, size:number, name:text:bytes, value, help:text:meaning")


@command()
@click.argument("path", required=False, type=PATH)
@click.option(
    "-n",
    "--max",
    "--limit",
    "limit",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="At most N rows.  [default: all]",
)
@click.option("--topic", default="", help="For a folder: only records of this topic.")
@click.option("--fields", is_flag=True, help="For a file: each field with its bytes, value and meaning.")
def dump(invocation: Invocation, path: Path | None, limit: int, topic: str, fields: bool) -> int:
    """Print every CommitLog record of the store PATH, or explain the file PATH.

    The default for PATH is the store named by --store and the like.

    For a folder the records are printed in log order; --json prints one JSON object per line. Holes in the log are
    reported on stderr and set the exit code to 1. In a running store only published records count.

    For a file the large parts are listed from the first byte to the last, then each record, unit, item or word. The
    file may be the checkpoint, a CommitLog segment, a ConsumeQueue file, an index file, a timer file, a durable mark,
    the control file, the queue table, the committed offsets, the error list, the topics' journal, a marker or a config
    file. The exit code is 1 if a segment is damaged or a config file is invalid.
    """
    io = StoreIO()
    path = path or invocation.paths().root
    kind = file_type(path)
    if stat.S_ISDIR(kind):
        return _dump_log(invocation, io, path, limit, topic)
    if not kind:
        raise StoreNotFoundError(f"{path}: no such file or folder")
    file = StoreFile(io, path.absolute(), invocation.options_without_store())
    explain = next((explain for matches, explain in _FORMATS if matches(file.path)), None)
    if explain is None:
        raise CorruptStoreError(f"{file.path}: not a file of a store")
    found = explain(file)
    if fields:
        found.columns = _FIELD_COLUMNS
        found.rows = (each.to_json() for each in fill_gaps(found.fields(), io.size_of(path)))
    _print_file(invocation.out, found, limit)
    return EXIT_DAMAGE if found.is_damaged else 0


# The records of a store


def _dump_log(invocation: Invocation, io: StoreIO, folder: Path, limit: int, topic: str) -> int:
    """Print the records of the store in a folder, or of its commitlog folder."""
    out, folder = invocation.out, folder.absolute()
    paths = StorePaths(folder.parent if folder.name == "commitlog" else folder)
    check_is_store(io, paths)
    inventory = take_inventory(io, paths, sizes_of(io, paths, invocation.store_options(io, paths)))
    positions = positions_of(io, paths)
    log = IntactRecords(io, inventory, positions.begin, positions.end)
    try:
        return _print_records(out, _Records(log, paths.commit_log, out, limit, topic))
    finally:
        log.close()


def _print_records(out: Output, records: _Records) -> int:
    for messages in records:
        if out.is_json:
            # One write for many lines: a store has millions.
            out.stream.write("".join(encode_json(message.to_json()) + "\n" for message in messages))
            continue
        rows = [message.to_json() for message in messages]
        if out.shape == "table":
            for row in rows:
                out.line("  ".join(format_value(row[c.name], c.kind, terminal=False) for c in _LISTED_COLUMNS))
        else:
            out.rows("records", _LISTED_COLUMNS, rows)
    return EXIT_DAMAGE if records.holes else 0


@dataclass
class _Records:
    """Iterator over the selected records, in lists; counts holes and reports them on stderr."""

    log: IntactRecords
    path: Path
    out: Output
    limit: int
    topic: str
    holes: int = 0

    def __post_init__(self) -> None:
        self._left = self.limit or None

    def __iter__(self) -> Iterator[list[StoredMessage]]:
        for found in self.log.pieces():
            if isinstance(found, LostRange):
                self.holes += 1
                size = format_bytes(found.stop - found.start)
                self.out.note(f"{self.path}: hole [{found.start}, {found.stop}), {size}: {found.reason}")
                continue
            messages = decode_records(found.view[found.start : found.stop].data)
            if self.topic:
                messages = [message for message in messages if message.topic == self.topic]
            messages = messages[: self._left]
            if messages:
                yield messages
            if self._left is not None:
                self._left -= len(messages)
                if self._left == 0:
                    return


# One file


def _has_name(folder: str, *names: str) -> Callable[[Path], bool]:
    return lambda path: path.name in names and folder in ("", path.parent.name)


def _is_segment_of(folder: str) -> Callable[[Path], bool]:
    return lambda path: path.parent.name == folder and segment_start(path.name) is not None


_FORMATS: Final[tuple[tuple[Callable[[Path], bool], Callable[[StoreFile], FileDump]], ...]] = (
    (_has_name("", "checkpoint"), formats.checkpoint_file),
    (_has_name("", "topics.journal"), formats.topics_journal),
    (_has_name("", "abort", "abort.bak", "lock", "read_only"), formats.text_file),
    (lambda path: path.parent.name == "marks", formats.durable_mark),
    (_has_name("mqproc", "control"), formats.control_file),
    (_has_name("mqproc", "queues", "queues.next"), formats.queue_table_file),
    (_has_name("mqproc", "progress"), formats.committed_offsets_file),
    (_has_name("mqproc", "errors"), formats.error_list),
    (_has_name("mqproc", "log.jsonl"), group_log),
    (_has_name("", "timerwheel"), formats.timer_wheel_file),
    (_has_name("config", "timercheck"), formats.timer_check_file),
    (_is_segment_of("timerlog"), formats.timer_log_file),
    (is_json_file, json_file),
    (_is_segment_of("commitlog"), formats.commitlog_segment),
    (
        lambda path: segment_start(path.name) is not None and path.parent.parent.parent.name == "consumequeue",
        formats.consumequeue_file,
    ),
    (lambda path: len(path.name) == INDEX_NAME_DIGITS and path.name.isdigit(), formats.message_index),
)


def _print_file(out: Output, found: FileDump, limit: int) -> None:
    rows = itertools.islice(found.rows, limit) if limit else found.rows
    layout = [part.to_json() for part in found.layout]
    if out.shape == "json":
        out.document({"kind": found.kind, **found.head, "layout": layout, "rows": list(rows)})
        return
    if out.shape == "jsonl":
        out.document({"kind": found.kind, **found.head, "layout": layout})
    elif out.shape == "table":
        out.fields(
            [*output_columns("kind"), *(OutputColumn(name) for name in found.head)], {"kind": found.kind, **found.head}
        )
        out.line("")
        if layout:
            out.rows("layout", _LAYOUT_COLUMNS, layout)
            out.line("")
    if found.columns:
        out.rows("rows", found.columns, rows)
