"""The properties string, `name 0x01 value 0x02` for each pair; Java's string hash.

Pairs are in RocketMQ's order: a broker stores them in a Java HashMap of 128 buckets, so they are ordered by bucket,
then as inserted. `mqproc.kernels.hashing` computes the same hash for bytes in a buffer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

from mqproc.util.record_text import CRC32 as CRC32
from mqproc.util.record_text import NAME_END as NAME_END
from mqproc.util.record_text import PAIR_END as PAIR_END
from mqproc.util.record_text import decode as decode

KEYS = "KEYS"
TAGS = "TAGS"
UNIQ_KEY = "UNIQ_KEY"
SHARDING_KEY = "__SHARDINGKEY"
WAIT = "WAIT"
DELAY = "DELAY"
REAL_TOPIC = "REAL_TOPIC"
REAL_QID = "REAL_QID"
TIMER_DELIVER_MS = "TIMER_DELIVER_MS"
TIMER_DELAY_SEC = "TIMER_DELAY_SEC"
TIMER_DELAY_MS = "TIMER_DELAY_MS"
TIMER_OUT_MS = "TIMER_OUT_MS"
TIMER_ROLL_TIMES = "TIMER_ROLL_TIMES"
TIMER_DEL_UNIQKEY = "TIMER_DEL_UNIQKEY"
TRAN_MSG = "TRAN_MSG"
PGROUP = "PGROUP"
TRANSACTION_ID = "__transactionId__"
TRANSACTION_CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
TRAN_PREPARED_QUEUE_OFFSET = "TRAN_PREPARED_QUEUE_OFFSET"
CHECK_IMMUNITY_TIME = "CHECK_IMMUNITY_TIME_IN_SECONDS"
RETRY_TOPIC = "RETRY_TOPIC"
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
POP_CK = "POP_CK"

KEY_SEPARATOR = " "
_BY_STORE: Final = "the store sets it"
_BY_CONSUMERS: Final = "the store sets it when it delivers a message again"
_BY_TRANSACTIONS: Final = "use client.transaction"
RESERVED: Final[Mapping[str, str]] = {
    KEYS: "use keys",
    TAGS: "use tag",
    UNIQ_KEY: "use unique_id",
    WAIT: "use wait of send",
    CRC32: _BY_STORE,
    DELAY: "use delay_level",
    TIMER_DELIVER_MS: "use deliver_at",
    TIMER_DELAY_SEC: "use delay",
    TIMER_DELAY_MS: "use delay",
    "TIMER_DELAY_LEVEL": "use delay_level",
    TIMER_DEL_UNIQKEY: "use client.cancel",
    **dict.fromkeys((TIMER_OUT_MS, TIMER_ROLL_TIMES, "TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS"), _BY_STORE),
    **dict.fromkeys((REAL_TOPIC, REAL_QID, "INNER_NUM", "INNER_BASE"), _BY_STORE),
    **dict.fromkeys(("INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET"), _BY_STORE),
    **dict.fromkeys((TRAN_MSG, PGROUP, TRANSACTION_ID, TRANSACTION_CHECK_TIMES), _BY_TRANSACTIONS),
    TRAN_PREPARED_QUEUE_OFFSET: _BY_TRANSACTIONS,
    CHECK_IMMUNITY_TIME: "use check_immunity_time of client.transaction",
    **dict.fromkeys((RETRY_TOPIC, "RETRY_GROUP", ORIGIN_MESSAGE_ID), _BY_CONSUMERS),
    **dict.fromkeys(("RECONSUME_TIME", "MAX_RECONSUME_TIMES"), _BY_CONSUMERS),
    **dict.fromkeys((POP_CK, "POP_CK_OFFSET", "1ST_POP_TIME"), _BY_CONSUMERS),
}
"""Names that users may not set, with what sets them instead. The store acts upon their values."""

_BUCKETS = 128
_UTF_16 = "utf-16-le" if sys.byteorder == "little" else "utf-16-be"


def java_hash(text: str) -> int:
    """`String.hashCode`: h = 31 h + u over UTF-16 code units, lone surrogates included; an i32."""
    hashed = 0
    for unit in memoryview(text.encode(_UTF_16, "surrogatepass")).cast("H"):
        hashed = (31 * hashed + unit) & 0xFFFFFFFF
    return (hashed ^ 0x80000000) - 0x80000000


def queue_of_hash(hashed: int, queues: int) -> int:
    """Queue of a sharding key: |hash mod queues|, as in RocketMQ's SelectMessageQueueByHash."""
    return abs(hashed) % queues


def bucket(name: str) -> int:
    """HashMap bucket of a name, 0…127."""
    unsigned = java_hash(name) & 0xFFFFFFFF
    return (unsigned ^ (unsigned >> 16)) & (_BUCKETS - 1)


def encode(properties: Mapping[str, str]) -> str:
    """Encode properties in a broker's order. Names and values are not escaped: check them first."""
    return joined({name: properties[name] for name in sorted(properties, key=bucket)})


def joined(properties: Mapping[str, str]) -> str:
    """Encode properties in the order given."""
    return "".join(f"{name}{NAME_END}{value}{PAIR_END}" for name, value in properties.items())
