"""The properties string: `name 0x01 value 0x02` for each pair, in RocketMQ's order.

A broker stores properties in a Java HashMap of 128 buckets: they are ordered by bucket, then as inserted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mqproc.layout.java_hash import java_hash

NAME_END = "\x01"
PAIR_END = "\x02"

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
CRC32 = "__CRC32#"

KEY_SEPARATOR = " "
# Names whose values mqproc sets itself; users may not set them.
RESERVED = frozenset({KEYS, TAGS, UNIQ_KEY, WAIT, CRC32})

_BUCKETS = 128


def bucket(name: str) -> int:
    """HashMap bucket of a name, 0…127."""
    unsigned = java_hash(name) & 0xFFFFFFFF
    return (unsigned ^ (unsigned >> 16)) & (_BUCKETS - 1)


def in_rocketmq_order(names: Iterable[str]) -> list[str]:
    """Sort names in the order of a broker; names in one bucket keep their order."""
    return sorted(names, key=bucket)


def encode(properties: Mapping[str, str]) -> str:
    """Encode properties in RocketMQ's order. Names and values are not escaped: check them first."""
    return "".join(f"{name}{NAME_END}{properties[name]}{PAIR_END}" for name in in_rocketmq_order(properties))


def decode(text: str) -> dict[str, str]:
    """Decode a stored string by RocketMQ's rules.

    Pairs without name or value are ignored, and the last pair of a name wins. mqproc's CRC pair is dropped, since it
    belongs to the record and not to the message.
    """
    pairs = {}
    for part in text.split(PAIR_END):
        name, separator, value = part.partition(NAME_END)
        if separator and name and value:
            pairs[name] = value
    pairs.pop(CRC32, None)
    return pairs
