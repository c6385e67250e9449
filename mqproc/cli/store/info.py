"""`mqproc store info`: contents and state of a store, from names, sizes and headers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from mqproc.cli.options import Invocation, command, folder_argument
from mqproc.cli.output import Output, output_columns
from mqproc.config.options import PROFILES
from mqproc.errors import CorruptStoreError, MqprocError, NotRunningError
from mqproc.io.store_io import Kind, StoreIO
from mqproc.ipc.store_lock import lock_holder
from mqproc.layout import control as layout
from mqproc.layout import index_file, timer_files
from mqproc.paths import StorePaths
from mqproc.util.units import counted

if TYPE_CHECKING:
    from mqproc.config.options import Options
    from mqproc.layout.durable_marks import Mark
    from mqproc.store.read.reader import StoreReader
    from mqproc.store.verify.inventory import Inventory, Sizes
    from mqproc.types import QueueInfo

_FACTS = output_columns(
    "store, written_by:text:last written by, held_by, group, stopped_in_order, read_only:text:read-only since",
    "profile, log_begin:count, log_end:count, segments:count, segment_bytes:bytes:segment size",
    "queue_file_bytes:bytes:ConsumeQueue file size, index_slots:count:slots of an index file",
    "index_file_entries:count:entries of an index file",
    "first_store_timestamp_ms:time_ms:first message, last_store_timestamp_ms:time_ms:last message",
    "topics:count, queues:count, messages:count:messages in queues, index_entries:count",
    "physic_timestamp_ms:time_ms:log durable until, logics_timestamp_ms:time_ms:queues durable until",
    "index_timestamp_ms:time_ms:index durable until, timer_read_ms:time_ms:timer delivered until",
    "timer_filed:count:timed messages in the timer log, timer_log_end:count:timer log durable until",
    "marks:text:durable marks, holes:text:known damage, trouble",
)
_PARTS = output_columns("part", "files:count", "bytes:bytes", "on_disk:bytes")
_TOPICS = output_columns("topic", "queues:count", "messages:count", "min_offsets", "max_offsets")
_INDEX = output_columns(
    "file, entries:count, begin_timestamp_ms:time_ms:from, end_timestamp_ms:time_ms:to",
    "begin_physical_offset:count:from offset, end_physical_offset:count:to offset",
)


@command()
@folder_argument
def info(invocation: Invocation, folder: Path | None) -> None:
    """Show sizes, positions, times, topics and state of a store.

    FOLDER is any store of mqproc or RocketMQ, running or stopped. It is read-only; damage is reported.
    """
    io = StoreIO()
    paths = invocation.store_argument(io, folder)
    found = describe_store(io, paths, invocation.store_options(io, paths))
    out = invocation.out
    if out.is_json:
        out.document(found)
        return
    _print(out, found)


def _print(out: Output, found: dict[str, Any]) -> None:
    shown = {**found, "holes": [f"[{hole['start']}, {hole['stop']})" for hole in found["holes"]] or None}
    shown["marks"] = ", ".join(f"{name} {offset:,}" for name, offset in found["marks"].items()) or None
    out.fields([fact for fact in _FACTS if shown[fact.name] is not None], shown)
    out.line("")
    out.rows("parts", _PARTS, [{"part": name, **part} for name, part in found["parts"].items()])
    for name, columns in (("by_topic", _TOPICS), ("index_files", _INDEX)):
        if found[name]:
            out.line("")
            out.rows(name, columns, found[name])


def describe_store(io: StoreIO, paths: StorePaths, options: Options) -> dict[str, Any]:
    """Everything known without reading the whole store, None with the reason in `trouble`."""
    from mqproc.store.commitlog.segments import LogSegments, adopted_segment_size
    from mqproc.store.durable_marks import read_checkpoint
    from mqproc.store.verify.inventory import take_inventory
    from mqproc.store.verify.verifier import sizes_of

    holder = lock_holder(io, paths)
    checkpoint = read_checkpoint(io, paths.checkpoint)
    segment_bytes = adopted_segment_size(io, paths.commit_log, options.mapped_file_size_commit_log)
    starts = LogSegments(io, paths.commit_log, segment_bytes).starts()
    marks = _marks(io, paths)
    read_only = io.read_file(paths.read_only) if io.exists(paths.read_only) else None
    holes = _holes(io, paths)
    was_killed = holder is None and io.exists(paths.abort)
    sizes = sizes_of(io, paths, options)
    inventory = take_inventory(io, paths, sizes, was_killed=was_killed)
    index_files = _index_files(io, inventory)
    described = _describe_contents(paths, options)
    # A running group creates and deletes files; incomplete files are not damage.
    described["trouble"] = described["trouble"] or (None if holder else _damaged_files(inventory, holes))
    return {
        "store": str(paths.root),
        "held_by": str(holder) if holder else None,
        "group": _group_state(io, paths),
        "stopped_in_order": not io.exists(paths.abort),
        "read_only": read_only.decode(errors="replace").strip() if read_only is not None else None,
        "log_begin": starts[0] if starts else 0,
        **described,
        "segments": len(starts),
        "segment_bytes": segment_bytes,
        "profile": _profile_of(sizes),
        "queue_file_bytes": sizes.queue_file,
        "index_slots": sizes.slots,
        "index_file_entries": sizes.items,
        "written_by": _written_by(io, paths, segment_bytes, described["log_end"], marks.get("commitlog")),
        "index_entries": sum(each["entries"] for each in index_files),
        "physic_timestamp_ms": checkpoint.physic_timestamp_ms,
        "logics_timestamp_ms": checkpoint.logics_timestamp_ms,
        "index_timestamp_ms": checkpoint.index_timestamp_ms,
        **_timer(io, paths),
        "marks": {name: mark.offset for name, mark in marks.items()},
        "holes": holes,
        "index_files": index_files,
        "parts": {
            "commitlog": _size_of(paths.commit_log),
            "consumequeue": _size_of(paths.consume_queue),
            "index": _size_of(paths.index),
            "timerlog": _size_of(paths.timer_log),
            "timerwheel": _size_of(paths.timer_wheel),
            "config": _size_of(paths.config),
            "mqproc": _size_of(paths.own),
            # The parts of mqproc/ that only the user deletes.
            "mqproc/aside": _size_of(paths.quarantine),
            "mqproc/repaired": _size_of(paths.repaired),
        },
    }


def _profile_of(sizes: Sizes) -> str:
    """The profile that has these sizes, or "custom"."""
    found = {sizes.segment, sizes.slots, sizes.items}
    return next((str(profile) for profile, values in PROFILES.items() if found == set(values.values())), "custom")


def _describe_contents(paths: StorePaths, options: Options) -> dict[str, Any]:
    """Positions, times and topics; None with the reason if the store cannot be opened."""
    from mqproc.store.read.reader import StoreReader

    try:
        with StoreReader(paths.root, options) as reader:
            return read_contents(paths, reader)
    except MqprocError as error:
        unknown = ("log_end", "first_store_timestamp_ms", "last_store_timestamp_ms", "topics", "queues", "messages")
        return {**dict.fromkeys(unknown), "by_topic": [], "trouble": str(error)}


def read_contents(paths: StorePaths, reader: StoreReader) -> dict[str, Any]:
    """Positions, times and topics of an opened store."""
    queues = reader.queues()
    queues_of: dict[str, list[QueueInfo]] = {}
    for queue in queues:
        queues_of.setdefault(queue.topic, []).append(queue)
    by_topic = [
        {
            "topic": topic,
            "queues": len(of_topic),
            "messages": sum(queue.max_offset - queue.min_offset for queue in of_topic),
            "min_offsets": [queue.min_offset for queue in of_topic],
            "max_offsets": [queue.max_offset for queue in of_topic],
        }
        for topic, of_topic in sorted(queues_of.items())
    ]
    messages = sum(queue.max_offset - queue.min_offset for queue in queues)
    return {
        "log_end": reader.visible.end,
        "first_store_timestamp_ms": _first_ms(reader),
        "last_store_timestamp_ms": _last_ms(reader, queues),
        "topics": len(by_topic),
        "queues": len(queues),
        "messages": messages,
        "by_topic": by_topic,
        "trouble": _trouble(paths, reader.visible.end - reader.visible.begin, len(queues), messages),
    }


def _trouble(paths: StorePaths, log_bytes: int, queues: int, messages: int) -> str | None:
    from mqproc.store.unsupported import find_unsupported

    if found := find_unsupported(StoreIO(), paths):
        return "; ".join(f"{each}: {each.feature.effect}" for each in found)
    if messages and not log_bytes:
        return f"the log is empty, but its queues have {counted(messages, 'message')}"
    if log_bytes and not queues:
        return f"the log has {counted(log_bytes, 'byte')}, but there are no queues: a start rebuilds them from the log"
    return None


def _first_ms(reader: StoreReader) -> int | None:
    """Store time of the first intact record, None without one."""
    first = next(iter(reader.scan(physical_offset=reader.visible.begin)), None)
    return first.store_timestamp_ms if first is not None else None


def _last_ms(reader: StoreReader, queues: list[QueueInfo]) -> int | None:
    """The latest store time of the queues' last messages, None without records."""
    newest = (reader.store_time_ms(each.topic, each.queue_id, each.max_offset - 1) for each in queues)
    return max((time_ms for time_ms in newest if time_ms >= 0), default=None)


def _written_by(io: StoreIO, paths: StorePaths, segment_bytes: int, log_end: int | None, mark: Mark | None) -> str:
    """The last writer of the log, by mqproc's durable mark."""
    from mqproc.store.commitlog.segments import LogSegments
    from mqproc.store.durable_marks import fingerprint

    if not io.exists(paths.own):
        return "RocketMQ (there is no folder mqproc)"
    if mark is None:
        return "mqproc"
    if mark.offset and not any(entry.size for entry in io.entries(paths.commit_log)):
        return f"unknown: the log is missing; by mqproc's mark it was durable up to {mark.offset:,}"
    try:
        value = fingerprint(io, LogSegments(io, paths.commit_log, segment_bytes, static=True), mark.offset)
    except (CorruptStoreError, FileNotFoundError):
        value = None
    if value != mark.fingerprint:
        return "another program, after mqproc: the log does not match mqproc's mark"
    if log_end is not None and log_end > mark.offset and not io.exists(paths.abort):
        return "another program, after mqproc: the log continues after mqproc's mark"
    return "mqproc"


def _marks(io: StoreIO, paths: StorePaths) -> dict[str, Mark]:
    from mqproc.layout import durable_marks as marks

    files = [entry.name for entry in io.entries(paths.marks) if entry.kind is Kind.FILE]
    found = {name: marks.decode(io.read_file(paths.mark(name))) for name in files}
    return {name: mark for name, mark in found.items() if mark is not None}


def _timer(io: StoreIO, paths: StorePaths) -> dict[str, int | None]:
    """Positions of the timer, None without its checkpoint."""
    try:
        check = timer_files.decode_check(io.read_file(paths.timer_check))
    except (FileNotFoundError, IsADirectoryError):
        return dict.fromkeys(("timer_read_ms", "timer_filed", "timer_log_end"))
    return {"timer_read_ms": check.read_ms, "timer_filed": check.queue_offset, "timer_log_end": check.timer_log_flushed}


def _holes(io: StoreIO, paths: StorePaths) -> list[dict[str, Any]]:
    from mqproc.store import damage

    try:
        return [dataclasses.asdict(hole) for hole in damage.load(io, paths).holes]
    except msgspec.MsgspecError:
        return []


def _damaged_files(inventory: Inventory, holes: list[dict[str, Any]]) -> str | None:
    """New damage visible in names and sizes, None without any."""
    from mqproc.store.verify.findings import Severity

    faults = [
        f"{each.file}: {each.kind}"
        for each in inventory.findings
        if each.severity is Severity.DAMAGE
        and not any(
            hole["start"] <= (-1 if each.physical_offset is None else each.physical_offset) < hole["stop"]
            for hole in holes
        )
    ]
    if not faults:
        return None
    more = f" and {counted(len(faults) - 1, 'more file')}" if len(faults) > 1 else ""
    return f"{faults[0]}{more}; mqproc store verify shows what to do"


def _index_files(io: StoreIO, inventory: Inventory) -> list[dict[str, Any]]:
    """The header of each index file of the right size."""
    from mqproc.store.verify.snapshot import read_index_headers

    names = ("begin_timestamp_ms", "end_timestamp_ms", "begin_physical_offset", "end_physical_offset")
    return [
        {"file": file.name, "entries": file.header.count - index_file.FIRST_ITEM}
        | {name: getattr(file.header, name) for name in names}
        for file in read_index_headers(io, inventory)
    ]


def _group_state(io: StoreIO, paths: StorePaths) -> str | None:
    from mqproc.ipc.control import Control

    try:
        control = Control.open(io, paths)
    except (NotRunningError, CorruptStoreError):
        return None
    state = control.load(layout.GROUP_STATE)
    control.close()
    return layout.name_of(state, layout.GROUP_NAMES)


def _size_of(place: Path) -> dict[str, int]:
    """Size of a file or a folder, and its size on disk, which is smaller for sparse files."""
    files = [path.lstat() for path in (place, *place.rglob("*")) if path.is_file() and not path.is_symlink()]
    return {
        "files": len(files),
        "bytes": sum(found.st_size for found in files),
        "on_disk": sum(found.st_blocks * 512 for found in files),
    }
