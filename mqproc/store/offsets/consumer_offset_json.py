"""RocketMQ's file of committed offsets, `config/consumerOffset.json`.

    {"dataVersion": …, "groupTopicMap": {"GROUP": ["TOPIC"]}, "offsetTable": {"TOPIC@GROUP": {0:24,1:16}}}

An offset is that of the next message to consume; the revive service's offset in the revive topic is that of the last
one processed, and absent before the first. The file is written as RocketMQ's fastjson does, with unquoted integer keys;
the previous version is kept as `.bak`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import OversizedFileError, StoreIO
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json
from mqproc.store.sync_guard import Syncing
from mqproc.topic_names import REVIVE_GROUP, REVIVE_TOPIC

NO_FINGERPRINT: Final = 0
_TABLE: Final = "offsetTable"
_VERSION: Final = "dataVersion"
_TOPICS: Final = "groupTopicMap"
_SEPARATOR: Final = "@"
# Python limits the number of digits of int().
_INTEGER: Final = re.compile(r"-?\d{1,640}")
_CRC_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """The group has consumed the queue's messages below `offset`."""

    group: str
    topic: str
    queue_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class UnconsumedRange:
    """Messages [offset, minimum) of a queue were deleted before the group consumed them."""

    group: str
    topic: str
    queue_id: int
    offset: int
    minimum: int

    @property
    def messages(self) -> int:
        return self.minimum - self.offset


MinimumOf = Callable[[str, int], int | None]
"""First readable offset of a queue by topic and queue id; None for an unknown queue."""


def skipped(progress: Iterable[CommittedOffset], minimum_of: MinimumOf) -> list[UnconsumedRange]:
    """Ranges between committed offsets and higher queue minima."""
    found = []
    for at in progress:
        minimum = minimum_of(at.topic, at.queue_id)
        if minimum is not None and at.offset < minimum:
            found.append(UnconsumedRange(at.group, at.topic, at.queue_id, at.offset, minimum))
    return found


@dataclass(slots=True)
class ConsumerOffsetJson:
    """Content of the file. `fingerprint` identifies its bytes; `remark` names its defects."""

    progress: list[CommittedOffset] = field(default_factory=list)
    version: int = 0
    other: dict[str, Any] = field(default_factory=dict)
    """Unknown fields, written back unchanged."""
    fingerprint: int = NO_FINGERPRINT
    remark: str = ""


def fingerprint(text: bytes) -> int:
    """Fingerprint of the file's bytes, never NO_FINGERPRINT; fits a signed word."""
    return (((len(text) & 0x3FFFFFFF) << _CRC_BITS) | zlib.crc32(text)) + 1


def load(io: StoreIO, paths: StorePaths) -> ConsumerOffsetJson:
    """Load the file, else its `.bak` as RocketMQ does; empty if neither exists.

    Raises CorruptStoreError if only unreadable files exist, OSError.
    """
    remarks: list[str] = []
    path = paths.consumer_offsets
    for candidate in (path, _copy_of(path)):
        try:
            text = io.read_file(candidate)
        except FileNotFoundError:
            continue
        except OversizedFileError as error:
            remarks.append(f"{candidate}: {error.strerror}")
            continue
        if not text.strip():
            remarks.append(f"{candidate}: empty")
            continue
        try:
            found = _read(text, candidate)
        except CorruptStoreError as error:
            remarks.append(str(error))
            continue
        found.fingerprint = fingerprint(text) if candidate == path else NO_FINGERPRINT
        found.remark = "; ".join(remarks)
        return found
    if any(not remark.endswith(": empty") for remark in remarks):
        raise CorruptStoreError("; ".join(remarks))
    return ConsumerOffsetJson(remark="; ".join(remarks))


def _read(text: bytes, path: Path) -> ConsumerOffsetJson:
    try:
        value = rocketmq_json.parse(text.decode())
        table = rocketmq_json.table_in(value, _TABLE)
    except (UnicodeDecodeError, ValueError) as error:
        raise CorruptStoreError(f"{path}: {error}") from None
    version = value.get(_VERSION)
    counter = version.get("counter", 0) if isinstance(version, dict) else 0
    other = {name: of for name, of in value.items() if name not in (_TABLE, _VERSION, _TOPICS)}
    progress = list(_progress_in(table, path))
    return ConsumerOffsetJson(progress, counter if isinstance(counter, int) else 0, other)


def _progress_in(table: Mapping[str, Any], path: Path) -> Iterator[CommittedOffset]:
    for name, queues in table.items():
        topic, separator, group = name.partition(_SEPARATOR)
        if not separator or not isinstance(queues, dict):
            raise CorruptStoreError(f"{path}: {_TABLE}: {name!r}: {queues!r}; expected TOPIC@GROUP: offsets")
        for queue_id, offset in queues.items():
            if not _INTEGER.fullmatch(queue_id) or type(offset) is not int:
                place = f"{path}: {_TABLE}: {name!r}"
                raise CorruptStoreError(f"{place}: {queue_id!r}: {offset!r}; expected queue id and offset")
            yield CommittedOffset(group, topic, int(queue_id), offset + _consumed_last(group, topic))


Table = tuple[str, str, list[tuple[int, int]]]
"""Group, topic, and (queue id, next offset) of its queues."""


def encode(tables: Iterable[Table], version: int, time_ms: int, other: Mapping[str, Any]) -> bytes:
    """Encode the file. Tables are sorted by group and topic, their queues by id."""
    topics: dict[str, list[str]] = {}
    lines = []
    for group, topic, queues in tables:
        if consumed_last := _consumed_last(group, topic):
            queues = [(queue_id, at - consumed_last) for queue_id, at in queues if at >= consumed_last]
        if queues:
            topics.setdefault(group, []).append(topic)
            pairs = ",".join([f"{queue_id}:{offset}" for queue_id, offset in queues])
            lines.append(f"\t\t{_text(topic + _SEPARATOR + group)}:{{{pairs}\n\t\t}}")
    named = [f"\t\t{_text(group)}:[{','.join(map(_text, names))}]" for group, names in topics.items()]
    parts = {
        _VERSION: f'{{\n\t\t"counter":{version},\n\t\t"stateVersion":0,\n\t\t"timestamp":{time_ms}\n\t}}',
        _TOPICS: _object(named),
        _TABLE: _object(lines),
    }
    parts |= {name: msgspec.json.encode(value).decode() for name, value in other.items()}
    body = ",\n".join(f"\t{_text(name)}:{parts[name]}" for name in sorted(parts))
    return f"{{\n{body}\n}}".encode()


def _consumed_last(group: str, topic: str) -> int:
    """Difference between the next offset and the file's value."""
    return int((group, topic) == (REVIVE_GROUP, REVIVE_TOPIC))


def _object(lines: list[str]) -> str:
    return "{\n" + ",\n".join(lines) + "\n\t}" if lines else "{}"


def _text(value: str) -> str:
    return msgspec.json.encode(value).decode()


def replace(io: StoreIO, syncs: Syncing, paths: StorePaths, text: bytes, *, keeps_old: bool = True) -> None:
    """Replace the file durably; the old one becomes `.bak`. Raises OSError, FailedSyncError.

    After an error the file is the old or the new one. With `keeps_old` false, an unreadable file does not replace
    `.bak`.
    """
    path = paths.consumer_offsets
    temporary, copy = path.with_name(path.name + ".tmp"), _copy_of(path)
    io.make_folder(path.parent)
    io.unlink(temporary)
    with io.opened(temporary, write=True, create=True) as fd:
        io.pwrite(fd, text, 0)
        syncs.sync(fd)
    io.crash_point("offsets.tmp")
    if keeps_old and io.exists(path):
        # A link keeps the name present until the rename replaces it.
        io.unlink(copy)
        io.keep_link(path, copy)
    syncs.rename(temporary, path, lambda: io.crash_point("offsets.renamed"))
    io.crash_point("offsets.dirsynced")


def _copy_of(path: Path) -> Path:
    return path.with_name(path.name + ".bak")
