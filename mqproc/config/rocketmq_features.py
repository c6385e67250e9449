"""Features of RocketMQ whose data mqproc does not read, and their options in broker.conf.

`mqproc.store.unsupported` finds their traces in a store. A start on such a store would lose or repeat messages without
an error, so it is refused. If only the state of consumption is elsewhere, `ignore_kvstore` permits the start.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature: the data that it stores elsewhere, and the effect of a start without it.

    `option`: its name in broker.conf; any value that is not in `off` turns it on.
    """

    what: str
    effect: str
    option: str
    off: tuple[str, ...] = ("", "false")
    ignorable: bool = True
    remedy: str = "finish their work with RocketMQ and start with --ignore-kvstore (ignore_kvstore = true)"


QUEUES_IN_ROCKSDB = Feature(
    "RocksDB has the queues, and the topics and offsets of groups",
    "groups would start over",
    "storeType",
    off=("", "default"),
    ignorable=False,
    remedy="only RocketMQ can use this store",
)
CONFIG_IN_ROCKSDB = Feature(
    "RocksDB has the topics and the progress of groups",
    "groups would start over, or at old offsets",
    "configManagerVersion",
    off=("", "v1"),
    ignorable=False,
    remedy="where the files in config/*.json have all of it, move that folder out of config",
)
DLEDGER = Feature(
    "DLedger has the log",
    "none of its messages would be found",
    "enableDLegerCommitLog",
    ignorable=False,
    remedy="only RocketMQ can use this store",
)
POP_IN_ROCKSDB = Feature(
    "RocksDB has the check points of POP consumers",
    "messages that they acknowledged may be delivered again, and delivery counts would be lost",
    "popConsumerKVServiceEnable",
)
TRANSACTIONS_IN_ROCKSDB = Feature(
    "RocksDB has the open transactions",
    "their producers would never be asked for the outcome",
    "transRocksDBEnable",
)
TIMER_IN_ROCKSDB = Feature(
    "RocksDB has the state of timed messages",
    "messages that were delivered may be delivered again",
    "timerRocksDBEnable",
)
RETRY_TOPICS_V2 = Feature(
    "messages of POP consumers wait in retry topics of version 2",
    "they would never be redelivered",
    "enableRetryTopicV2",
)
TIERED_STORE = Feature(
    "tiered storage has the older messages",
    "they would not be found",
    "messageStorePlugIn",
    off=("",),
)
FEATURES = (
    QUEUES_IN_ROCKSDB,
    CONFIG_IN_ROCKSDB,
    DLEDGER,
    POP_IN_ROCKSDB,
    TRANSACTIONS_IN_ROCKSDB,
    TIMER_IN_ROCKSDB,
    RETRY_TOPICS_V2,
    TIERED_STORE,
)
