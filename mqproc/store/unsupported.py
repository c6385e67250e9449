"""Traces of RocketMQ's unsupported features in a store (`config.rocketmq_features`).

consumequeue/CURRENT, consumequeue_rocksdb/CURRENT   storeType = defaultRocksDB: no queues in files
config/*/CURRENT                                     topics and offsets in RocksDB
dledger-*/                                           enableDLegerCommitLog
kvStore/                                             popConsumerKVServiceEnable, unless empty
rocksdbstore/                                        timerRocksDBEnable: entries of its column family. RocketMQ 5.5
                                                     makes an empty one in every store
consumequeue/RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC/       transRocksDBEnable without transWriteOriginTransHalfEnable
consumequeue/%RETRY%GROUP+TOPIC/                     enableRetryTopicV2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqproc.config import rocketmq_features as features
from mqproc.config.rocketmq_features import Feature
from mqproc.errors import StartError
from mqproc.io.store_io import Kind, StoreIO
from mqproc.paths import StorePaths
from mqproc.store.consumequeue.files import has_rocksdb_queues, is_topic, rocksdb_config
from mqproc.topic_names import RETRY_PREFIX, ROCKSDB_HALF_TOPIC

_ROCKSDB_TABLE: Final = ".sst"
_ROCKSDB_LOG: Final = ".log"
# A table's properties are near its end, the keys of a log's first write near its begin.
_READ_BYTES: Final = 64 * 1024
# The name of a table's column family as its properties have it, and a key that each write of the timer contains.
_TIMER_FAMILY: Final = b"nametimer"
_TIMER_KEY: Final = b"sys_topic_scan_offset_checkpoint"


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A feature that a store uses, and the file or folder that shows it."""

    feature: Feature
    path: Path

    def __str__(self) -> str:
        return f"{self.path}: {self.feature.what} ({self.feature.option}), which mqproc does not read"


def find_unsupported(io: StoreIO, paths: StorePaths) -> list[Unsupported]:
    """The unsupported features that a store uses."""
    return [Unsupported(feature, path) for feature, find in _FINDERS for path in find(io, paths)]


def refuse_unreadable(io: StoreIO, paths: StorePaths) -> None:
    """Raise StartError if log, queues or settings are where mqproc does not read them."""
    _refuse([each for each in find_unsupported(io, paths) if not each.feature.ignorable])


def refuse_unsupported(io: StoreIO, paths: StorePaths, report: Callable[[str], None], *, ignore: bool) -> None:
    """Raise StartError for a state of consumption elsewhere, or with `ignore` report it."""
    found = [each for each in find_unsupported(io, paths) if each.feature.ignorable]
    if not ignore:
        _refuse(found)
    for each in found:
        report(f"{each}; ignored: {each.feature.effect}")


def _refuse(found: list[Unsupported]) -> None:
    if found:
        texts = [f"{each}: {each.feature.effect}" for each in found]
        remedies = dict.fromkeys(each.feature.remedy for each in found)
        raise StartError("; ".join([*texts, "nothing was changed", *remedies]))


def _rocksdb_queues(io: StoreIO, paths: StorePaths) -> Iterator[Path]:
    if has_rocksdb_queues(io, paths.consume_queue):
        yield paths.consume_queue
    separate = paths.root / "consumequeue_rocksdb"
    if _has_entries(io, separate) and not any(map(is_topic, io.entries(paths.consume_queue))):
        yield separate


def _rocksdb_config(io: StoreIO, paths: StorePaths) -> Iterator[Path]:
    if (found := rocksdb_config(io, paths.config)) is not None:
        yield found


def _dledger(io: StoreIO, paths: StorePaths) -> Iterator[Path]:
    for entry in io.entries(paths.root):
        if entry.kind is Kind.FOLDER and entry.name.startswith("dledger-"):
            yield paths.root / entry.name


def _kvstore(io: StoreIO, paths: StorePaths) -> Iterator[Path]:
    folder = paths.root / "kvStore"
    if _has_entries(io, folder):
        yield folder


def _has_entries(io: StoreIO, folder: Path) -> bool:
    """Whether a RocksDB contains anything: an empty one has no table, and an empty log."""
    return any(_is_table(entry.name) or (_is_log(entry.name) and entry.size) for entry in io.entries(folder))


def _is_table(name: str) -> bool:
    return name.endswith(_ROCKSDB_TABLE)


def _is_log(name: str) -> bool:
    return name.endswith(_ROCKSDB_LOG)


def _timer(io: StoreIO, paths: StorePaths) -> Iterator[Path]:
    folder = paths.root / "rocksdbstore"
    for entry in io.entries(folder):
        if entry.kind is not Kind.FILE or not (_is_table(entry.name) or _is_log(entry.name)):
            continue
        place = folder / entry.name
        at = max(0, entry.size - _READ_BYTES) if _is_table(entry.name) else 0
        with io.opened(place) as fd:
            data = io.pread(fd, min(entry.size, _READ_BYTES), at)
        if (_TIMER_FAMILY if _is_table(entry.name) else _TIMER_KEY) in data:
            yield folder
            return


def _half_topic(io: StoreIO, paths: StorePaths) -> Iterator[Path]:
    folder = paths.consume_queue / ROCKSDB_HALF_TOPIC
    if io.entries(folder):
        yield folder


def _retry_topics(io: StoreIO, paths: StorePaths) -> Iterator[Path]:
    """Retry topics of version 2; names of groups and topics have no '+'."""
    for entry in io.entries(paths.consume_queue):
        if is_topic(entry) and entry.name.startswith(RETRY_PREFIX) and "+" in entry.name:
            yield paths.consume_queue / entry.name


_FINDERS: Final[tuple[tuple[Feature, Callable[[StoreIO, StorePaths], Iterator[Path]]], ...]] = (
    (features.QUEUES_IN_ROCKSDB, _rocksdb_queues),
    (features.CONFIG_IN_ROCKSDB, _rocksdb_config),
    (features.DLEDGER, _dledger),
    (features.POP_IN_ROCKSDB, _kvstore),
    (features.TRANSACTIONS_IN_ROCKSDB, _half_topic),
    (features.TIMER_IN_ROCKSDB, _timer),
    (features.RETRY_TOPICS_V2, _retry_topics),
)
