"""Settings files and other JSON of a store: what each is, whether its reader takes it, and its content as rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from mqproc.cli.dump import Dump
from mqproc.cli.output import Column
from mqproc.cli.store.file_fields import text_fields
from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json
from mqproc.store.verify.state import config_fault
from mqproc.util.json_text import decode_json

_Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _File:
    """What a file holds. With `rows` its content is told as rows of `columns`."""

    about: str
    columns: tuple[Column, ...] = ()
    rows: Callable[[dict[str, Any]], _Rows] | None = None


def _topics(value: dict[str, Any]) -> _Rows:
    for topic, entry in value.get("topicConfigTable", {}).items():
        names = ("readQueueNums", "writeQueueNums", "perm", "order", "attributes")
        yield {"topic": topic} | {name: entry.get(name) for name in names}


def _groups(value: dict[str, Any]) -> _Rows:
    for group, entry in value.get("subscriptionGroupTable", {}).items():
        names = ("consumeEnable", "consumeMessageOrderly", "retryMaxTimes", "retryQueueNums")
        yield {"group": group} | {name: entry.get(name) for name in names}


def _offsets(value: dict[str, Any]) -> _Rows:
    for name, queues in value.get("offsetTable", {}).items():
        topic, _, group = name.partition("@")
        for queue_id, offset in queues.items():
            yield {"group": group, "topic": topic, "queue_id": int(queue_id), "next_offset": offset}


def _levels(value: dict[str, Any]) -> _Rows:
    for level, offset in value.get("offsetTable", {}).items():
        yield {"level": int(level), "next_offset": offset}


def _deletions(value: dict[str, Any]) -> _Rows:
    for topic, entry in next(iter(value.values()), {}).items():
        yield {"topic": topic} | entry


def _number(name: str) -> Column:
    return Column(name, kind="number")


_FILES: Final = {
    "topics.json": _File(
        "RocketMQ's: topics, their queues, permissions (4 read, 2 write, 1 inherit) and attributes",
        (Column("topic"), _number("readQueueNums"), _number("writeQueueNums"), _number("perm"), Column("order"),
         Column("attributes")),
        _topics,
    ),
    "subscriptionGroup.json": _File(
        "RocketMQ's: consumer groups and how they retry",
        (Column("group"), Column("consumeEnable"), Column("consumeMessageOrderly"), _number("retryMaxTimes"),
         _number("retryQueueNums")),
        _groups,
    ),
    "consumerOffset.json": _File(
        "RocketMQ's: the queue offset that each group consumes next",
        (Column("group"), Column("topic"), _number("queue_id"), _number("next_offset")),
        _offsets,
    ),
    "delayOffset.json": _File(
        "RocketMQ's: by delay level the queue offset that is delivered next",
        (_number("level"), _number("next_offset")),
        _levels,
    ),
    "deletedTopics.json": _File(
        "mqproc's: where log and queues ended when topics were deleted",
        (Column("topic"), _number("physicalOffset"), Column("nextOffsets")),
        _deletions,
    ),
    "consumerFilter.json": _File("RocketMQ's: filters of consumers; mqproc leaves it as it is"),
    "consumerOrderInfo.json": _File("RocketMQ's: orderly pop consumption; mqproc leaves it as it is"),
    "lmqConsumerOffset.json": _File("RocketMQ's: progress in light queues; mqproc leaves it as it is"),
    "messageRequestMode.json": _File("RocketMQ's: pull or pop by group; mqproc leaves it as it is"),
    "topicQueueMapping.json": _File("RocketMQ's: static topics; mqproc leaves it as it is"),
    "timermetrics": _File("RocketMQ's: timed messages by topic; mqproc leaves it as it is"),
    "transactionMetrics": _File("RocketMQ's: open transactions by topic; mqproc leaves it as it is"),
    "settings.json": _File("mqproc's: the options that the group ran with last"),
    "opened.json": _File("mqproc's: which lock file was ours"),
    "damage.json": _File("mqproc's: damaged ranges of the log, which are served around"),
    "retention.json": _File("mqproc's: what retention deleted last"),
    "unconsumed.json": _File("mqproc's: messages that went before groups had consumed them"),
    "repair.json": _File("mqproc's: what a repair found, did and changed"),
}  # fmt: skip
_JOURNALS: Final = {
    "imports": _File("mqproc's: how far an import has come"),
    "replays": _File("mqproc's: how far a replay has come"),
}
_COPY: Final = ".bak"


def is_config(path: Path) -> bool:
    """Whether the name is one of a file with JSON."""
    name = path.name.removesuffix(_COPY)
    return name.endswith(".json") or (path.parent.name == "config" and name in _FILES)


def dump_config(io: StoreIO, path: Path) -> Dump:
    """What the file is and holds. Raises CorruptStoreError when it holds no JSON."""
    data = io.read_file(path)
    try:
        value = rocketmq_json.parse(data.decode())
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise CorruptStoreError(f"{path}: {error}") from None
    name = path.name.removesuffix(_COPY)
    known = _FILES.get(name) or _JOURNALS.get(path.parent.name) or _File("settings that mqproc does not know")
    fault = config_fault(io, StorePaths(path.parent.parent), path)
    copy = "; the copy before the last change" if path.suffix == _COPY else ""
    head = {"about": known.about + copy, "fault": fault or None}
    layout = list(text_fields(data))
    if known.rows is None or fault:
        return Dump("config", {**head, "content": value}, [], iter(()), layout, is_damaged=bool(fault))
    rest = {key: of for key, of in value.items() if not isinstance(of, dict) or key in ("dataVersion", "mqproc")}
    return Dump("config", {**head, "content": rest}, list(known.columns), known.rows(value), layout)


def dump_log(io: StoreIO, path: Path) -> Dump:
    """The group's log: a JSON object a line."""
    data = io.read_file(path)
    columns = [Column("offset", kind="number"), Column("ts"), Column("level"), Column("role"), Column("event")]
    return Dump("log", {"size": len(data)}, columns, _log_rows(data), list(text_fields(data)))


def _log_rows(data: bytes) -> _Rows:
    lines = data.splitlines(keepends=True)
    offsets = itertools.accumulate(map(len, lines), initial=0)
    for offset, line in zip(offsets, lines, strict=False):
        try:
            found = decode_json(line, object)
        except msgspec.DecodeError:
            found = line.decode("utf-8", "replace").rstrip("\n")
        yield {"offset": offset, **(found if isinstance(found, dict) else {"event": found})}
