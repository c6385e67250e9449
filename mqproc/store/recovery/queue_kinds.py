"""RocketMQ's kinds of queues: which one a topic has says its attribute, and each kind lies in a folder of its own.

    config/topics.json   "queue.type": "BatchCQ", or nothing, or "SimpleCQ"
    consumequeue/        SimpleCQ: a unit a record                                  the kind that we have
    batchconsumequeue/   BatchCQ: a unit a record that holds several messages       left alone, and refused
    consumequeue/CURRENT storeType = defaultRocksDB: RocksDB has queues, topics and progress        the same
    config/rdb/CURRENT   configManagerVersion = v2: RocksDB has topics and progress                 the same

RocketMQ does not start on a store where the two contradict each other. Dispatching a batch topic's records into
`consumequeue` would make just that, so nothing is touched before this has been looked at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mqproc.errors import CorruptStoreError, StartError
from mqproc.io import StoreIO
from mqproc.paths import StorePaths
from mqproc.quantities import counted
from mqproc.store import rocketmq_json
from mqproc.store.queue_folders import has_rocksdb_queues, queues_on_disk, rocksdb_config

SIMPLE: Final = "SimpleCQ"
BATCH: Final = "BatchCQ"
ATTRIBUTE: Final = "queue.type"
BATCH_FOLDER: Final = "batchconsumequeue"


def check_queue_kinds(io: StoreIO, paths: StorePaths) -> None:
    """Look at every topic's attribute and folders; changes nothing.

    Raises CorruptStoreError where they contradict each other, StartError for batch queues, and what RocksDB has,
    which we do not have.
    """
    if has_rocksdb_queues(io, paths.consume_queue):
        raise StartError(
            f"{paths.consume_queue}: RocksDB has the queues, and in {paths.config} the progress of groups "
            "(storeType = defaultRocksDB), which mqproc does not have; nothing was changed"
        )
    if (config := rocksdb_config(io, paths.config)) is not None:
        raise StartError(
            f"{config}: RocksDB has the topics and the progress of groups, which mqproc does not have; nothing was "
            "changed. Where the files in config/*.json have all of it, move that folder out of config"
        )
    kinds = _configured(io, paths)
    for folder, actual in ((paths.consume_queue, SIMPLE), (paths.root / BATCH_FOLDER, BATCH)):
        for topic in _topics_with_queues(io, folder):
            expected = kinds.get(topic, SIMPLE)
            if expected != actual:
                place = folder / topic
                raise CorruptStoreError(f"{place}: queues of topic {topic!r} should be {expected}, but is {actual}")
    batch = sorted(topic for topic, kind in kinds.items() if kind == BATCH)
    if batch:
        raise StartError(
            f"{paths.topics}: topic {batch[0]!r} has {ATTRIBUTE} = {BATCH}, which mqproc does not have; "
            f"{counted(len(batch), 'such topic')}, nothing was changed"
        )


def _configured(io: StoreIO, paths: StorePaths) -> dict[str, str]:
    """Kinds that topics.json names; what nobody can read names none."""
    try:
        value, _remark = rocketmq_json.load(io, paths.topics)
    except (CorruptStoreError, IsADirectoryError):
        return {}
    table = value.get("topicConfigTable") if isinstance(value, dict) else None
    kinds = {}
    for topic, config in table.items() if isinstance(table, dict) else ():
        attributes = config.get("attributes") if isinstance(config, dict) else None
        if isinstance(attributes, dict) and ATTRIBUTE in attributes:
            kinds[str(topic)] = str(attributes[ATTRIBUTE])
    return kinds


def _topics_with_queues(io: StoreIO, folder: Path) -> list[str]:
    queues, _strays = queues_on_disk(io, folder)
    return sorted({topic for topic, _queue_id in queues})
