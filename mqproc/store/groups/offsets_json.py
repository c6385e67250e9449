"""`config/consumerOffset.json`, RocketMQ's file of consumer progress. This module is all that knows its shape.

    {"dataVersion": …, "groupTopicMap": {"GROUP": ["TOPIC"]}, "offsetTable": {"TOPIC@GROUP": {0:24,1:16}}}

The offset is that of the next message to consume; of the revive service in the revive topic that of the last one that
it is done with, and nothing before the first. It is written as RocketMQ's fastjson writes it, with unquoted integer
keys, and replaced atomically; the one before it stays as `.bak`.
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
from mqproc.io import StoreIO
from mqproc.names import REVIVE_GROUP, REVIVE_TOPIC
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json
from mqproc.store.final_syncs import Syncing

NO_FINGERPRINT: Final = 0
_TABLE: Final = "offsetTable"
_VERSION: Final = "dataVersion"
_TOPICS: Final = "groupTopicMap"
_SEPARATOR: Final = "@"
# Python may refuse to convert more digits than these.
_INTEGER: Final = re.compile(r"-?\d{1,640}")
_CRC_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class Progress:
    """A group has consumed a queue's messages below `offset`."""

    group: str
    topic: str
    queue_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """Messages [offset, minimum) of a queue went before the group had consumed them."""

    group: str
    topic: str
    queue_id: int
    offset: int
    minimum: int

    @property
    def messages(self) -> int:
        return self.minimum - self.offset


MinimumOf = Callable[[str, int], int | None]
"""A queue's first readable offset by topic and queue id; None for a queue that is not there."""


def skipped(progress: Iterable[Progress], minimum_of: MinimumOf) -> list[Skipped]:
    """What lies below the minima of what groups have not consumed."""
    found = []
    for at in progress:
        minimum = minimum_of(at.topic, at.queue_id)
        if minimum is not None and at.offset < minimum:
            found.append(Skipped(at.group, at.topic, at.queue_id, at.offset, minimum))
    return found


@dataclass(slots=True)
class OffsetsJson:
    """What the file says. `fingerprint` tells its bytes from others; `remark` says what was wrong with it."""

    progress: list[Progress] = field(default_factory=list)
    version: int = 0
    other: dict[str, Any] = field(default_factory=dict)
    """Fields that are none of ours, written back as they were."""
    fingerprint: int = NO_FINGERPRINT
    remark: str = ""


def fingerprint(text: bytes) -> int:
    """A number that tells a file's bytes from others, never NO_FINGERPRINT; fits a signed word."""
    return (((len(text) & 0x3FFFFFFF) << _CRC_BITS) | zlib.crc32(text)) + 1


def load(io: StoreIO, paths: StorePaths) -> OffsetsJson:
    """The file, or its `.bak` as in RocketMQ; nothing when neither is there.

    Raises CorruptStoreError when one is there and none can be read, OSError.
    """
    remarks: list[str] = []
    path = paths.consumer_offsets
    for candidate in (path, _copy_of(path)):
        try:
            text = io.read_file(candidate)
        except FileNotFoundError:
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
    return OffsetsJson(remark="; ".join(remarks))


def _read(text: bytes, path: Path) -> OffsetsJson:
    try:
        value = rocketmq_json.parse(text.decode())
        table = rocketmq_json.table_in(value, _TABLE)
    except (UnicodeDecodeError, ValueError) as error:
        raise CorruptStoreError(f"{path}: {error}") from None
    version = value.get(_VERSION)
    counter = version.get("counter", 0) if isinstance(version, dict) else 0
    other = {name: of for name, of in value.items() if name not in (_TABLE, _VERSION, _TOPICS)}
    progress = list(_progress_in(table, path))
    return OffsetsJson(progress, counter if isinstance(counter, int) else 0, other)


def _progress_in(table: Mapping[str, Any], path: Path) -> Iterator[Progress]:
    for name, queues in table.items():
        topic, separator, group = name.partition(_SEPARATOR)
        if not separator or not isinstance(queues, dict):
            raise CorruptStoreError(f"{path}: {_TABLE}: {name!r}: {queues!r}; expected TOPIC@GROUP: offsets")
        for queue_id, offset in queues.items():
            if not _INTEGER.fullmatch(queue_id) or type(offset) is not int:
                place = f"{path}: {_TABLE}: {name!r}"
                raise CorruptStoreError(f"{place}: {queue_id!r}: {offset!r}; expected queue id and offset")
            yield Progress(group, topic, int(queue_id), offset + _consumed_last(group, topic))


Table = tuple[str, str, list[tuple[int, int]]]
"""A group, a topic, and the queues of it that something is known of, with what is consumed next."""


def encode(tables: Iterable[Table], version: int, time_ms: int, other: Mapping[str, Any]) -> bytes:
    """The file's text of tables in order of group and topic, and of queues in each."""
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
    """How far what the file says of a queue lies below the next message to consume."""
    return int((group, topic) == (REVIVE_GROUP, REVIVE_TOPIC))


def _object(lines: list[str]) -> str:
    return "{\n" + ",\n".join(lines) + "\n\t}" if lines else "{}"


def _text(value: str) -> str:
    return msgspec.json.encode(value).decode()


def replace(io: StoreIO, syncs: Syncing, paths: StorePaths, text: bytes, *, keeps_old: bool = True) -> None:
    """Make `text` the file, durably and at once; what was there becomes `.bak`. Raises OSError, FailedSyncError.

    After an error the file is the old one or the new one. One that could not be read replaces no `.bak` (`keeps_old`).
    """
    path = paths.consumer_offsets
    temporary, copy = path.with_name(path.name + ".tmp"), _copy_of(path)
    io.make_folder(path.parent)
    io.unlink(temporary)
    fd = io.open(temporary, write=True, create=True)
    try:
        io.pwrite(fd, text, 0)
        syncs.sync(fd)
    finally:
        io.close(fd)
    io.crash_point("offsets.tmp")
    if keeps_old and io.exists(path):
        # The name stays all the time: it is replaced by the rename.
        io.unlink(copy)
        io.keep_link(path, copy)
    syncs.rename(temporary, path, lambda: io.crash_point("offsets.renamed"))
    io.crash_point("offsets.dirsynced")


def _copy_of(path: Path) -> Path:
    return path.with_name(path.name + ".bak")
