"""JSON files of a store for `mqproc store dump`: purpose, validity and content as rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from mqproc.cli.output import OutputColumn
from mqproc.cli.store.file_formats import FileDump, Ranges, Rows, StoreFile, text_ranges
from mqproc.errors import CorruptStoreError
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json
from mqproc.store.verify.state import config_fault
from mqproc.util.json_text import decode_json


@dataclass(frozen=True, slots=True)
class _File:
    """Purpose of a file; with `rows` its content is shown as rows of `columns`."""

    about: str
    columns: tuple[OutputColumn, ...] = ()
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


def _columns(*names: str) -> tuple[OutputColumn, ...]:
    """Columns by name; a leading # marks a number."""
    return tuple(OutputColumn(name.lstrip("#"), kind="number" if name.startswith("#") else "text") for name in names)


_FILES: Final = {
    "topics.json": _File(
        "RocketMQ's: topics, their queues, permissions (4 read, 2 write, 1 inherit) and attributes",
        _columns("topic", "#readQueueNums", "#writeQueueNums", "#perm", "order", "attributes"),
        _topics,
    ),
    "subscriptionGroup.json": _File(
        "RocketMQ's: consumer groups and how they retry",
        _columns("group", "consumeEnable", "consumeMessageOrderly", "#retryMaxTimes", "#retryQueueNums"),
        _groups,
    ),
    "consumerOffset.json": _File(
        "RocketMQ's: the queue offset that each group consumes next",
        _columns("group", "topic", "#queue_id", "#next_offset"),
        _offsets,
    ),
    "delayOffset.json": _File(
        "RocketMQ's: the queue offset that is delivered next, by delay level",
        _columns("#level", "#next_offset"),
        _levels,
    ),
    "deletedTopics.json": _File(
        "mqproc's: ends of the log and the queues at the deletion of topics",
        _columns("topic", "#physicalOffset", "nextOffsets"),
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
    """Whether the name is that of a JSON file."""
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
    head = {"about": known.about + copy, "fault": fault or None}
    layout = list(text_ranges(data))

    def fields() -> Ranges:
        return text_ranges(data)

    if known.rows is None or fault:
        return FileDump("config", {**head, "content": value}, [], iter(()), fields, layout, bool(fault))
    rest = {key: of for key, of in value.items() if not isinstance(of, dict) or key in ("dataVersion", "mqproc")}
    return FileDump("config", {**head, "content": rest}, list(known.columns), known.rows(value), fields, layout)


def group_log(file: StoreFile) -> FileDump:
    """The group's log: one JSON object per line."""
    data = file.data
    columns = [
        OutputColumn("offset", kind="number"),
        OutputColumn("ts"),
        OutputColumn("level"),
        OutputColumn("role"),
        OutputColumn("event"),
    ]
    layout = list(text_ranges(data))
    return FileDump("log", {"size": len(data)}, columns, _log_rows(data), lambda: text_ranges(data), layout)


def _log_rows(data: bytes) -> Rows:
    lines = data.splitlines(keepends=True)
    offsets = itertools.accumulate(map(len, lines), initial=0)
    for offset, line in zip(offsets, lines, strict=False):
        try:
            found = decode_json(line, object)
        except msgspec.DecodeError:
            found = line.decode("utf-8", "replace").rstrip("\n")
        yield {"offset": offset, **(found if isinstance(found, dict) else {"event": found})}
