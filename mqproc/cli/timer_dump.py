"""The timer's files told as rows: units, slots in use, the check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mqproc.cli import timer_layout as layouts
from mqproc.cli.dump import Dump, Rows
from mqproc.cli.output import Column
from mqproc.cli.store.file_fields import mapped, whole
from mqproc.io.store_io import StoreIO
from mqproc.layout import timer_check, timer_log, timer_wheel
from mqproc.paths import segment_start


def _number(name: str, title: str = "") -> Column:
    return Column(name, title, "number")


def dump_timer_log(io: StoreIO, path: Path) -> Dump:
    """A file of the timer log."""
    data, start = io.read_file(path), segment_start(path.name)
    assert start is not None
    columns = [
        _number("offset"),
        _number("position"),
        Column("slot_ms", "slot", "time_ms"),
        Column("does"),
        _number("previous"),
        _number("physical_offset"),
        _number("message_size", "size"),
        _number("topic_hash"),
        Column("due_ms", "due", "time_ms"),
    ]
    layout = list(whole(layouts.timer_log_layout(data), len(data)))
    return Dump("timer log", {"start": start, "size": len(data)}, columns, _units(data, start), layout)


def _units(data: bytes, start: int) -> Rows:
    for at in range(0, layouts.units_end(data), timer_log.UNIT_SIZE):
        _, previous, magic, enqueued_ms, delay_ms, *rest = timer_log.UNIT.unpack_from(data, at)
        physical_offset, size, topic_hash, due_ms = rest
        row: dict[str, Any] = {
            "offset": at,
            "position": start + at,
            "slot_ms": enqueued_ms + delay_ms,
            "does": _does(magic),
            "previous": previous,
            "physical_offset": physical_offset,
            "message_size": size,
            "topic_hash": topic_hash,
        }
        yield row | ({"due_ms": due_ms} if due_ms else {})


def _does(magic: int) -> str:
    does = "cancel" if magic & timer_log.MAGIC_DELETE else "deliver"
    return f"park again, then {does}" if magic & timer_log.MAGIC_ROLL else does


def dump_timer_wheel(io: StoreIO, path: Path, precision_ms: int) -> Dump:
    """The wheel, whose slots are `precision_ms` wide."""
    view = mapped(io, path)
    slots, used = layouts.used_slots(view)
    head = {"size": len(view), "slots": len(slots), "in_use": len(used), "precision_ms": precision_ms}
    columns = [
        _number("offset"),
        _number("slot"),
        Column("slot_ms", "time", "time_ms"),
        _number("first"),
        _number("last"),
        _number("messages"),
    ]
    rows = (
        {
            "offset": number * timer_wheel.SLOT_SIZE,
            "slot": number,
            "slot_ms": time * precision_ms,
            "first": first,
            "last": last,
            "messages": count,
        }
        for number, (time, first, last, count, _magic) in zip(used.tolist(), slots[used].tolist(), strict=True)
    )
    return Dump("timer wheel", head, columns, rows, list(whole(layouts.timer_wheel_layout(view), len(view))))


def dump_timer_check(io: StoreIO, path: Path) -> Dump:
    """How far the timer has come."""
    data = io.read_file(path)
    fields = list(layouts.timer_check_fields(data.ljust(timer_check.FILE_SIZE, b"\0")))
    columns = [_number("offset"), Column("name"), _number("value"), Column("help", "meaning")]
    rows = ({name: of for name, of in each.to_json().items() if name != "size"} for each in fields)
    return Dump("timer check", {"size": len(data)}, columns, rows, list(whole(fields, len(data))))
