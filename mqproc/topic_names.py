"""Names of topics and groups, tags in filters: RocketMQ's system topics, and its rules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from mqproc.errors import BadPropertyError, BadRequestError, BadTopicError, FilterSyntaxError
from mqproc.util.units import DELAY_LEVELS

RETRY_PREFIX: Final = "%RETRY%"
DEAD_LETTER_PREFIX: Final = "%DLQ%"
MULTI_DISPATCH_PREFIX: Final = "%LMQ%"
"""Light message queues: their units refer to records of other topics, and topics.json omits them."""
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
"""Messages with a delay level, in queue level − 1."""
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
"""Messages with a delivery time."""
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
"""Half messages of open transactions."""
OP_HALF_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
"""Op messages: half messages that were committed or rolled back."""
ROCKSDB_HALF_TOPIC: Final = "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC"
"""Half messages of open transactions where RocketMQ 5.5 keeps their state in RocksDB."""
ROCKSDB_OP_HALF_TOPIC: Final = "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC"
"""Their op messages."""
CHECK_MAX_TIME_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
"""Half messages given up after too many checks."""
REVIVE_TOPIC: Final = "rmq_sys_REVIVE_LOG_DefaultCluster"
"""Check points of messages received by simple consumers (pop)."""
REVIVE_QUEUES: Final = 8
SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"
"""System groups: their offsets bound the transactions and check points that may be open."""
CHECK_POINT_MESSAGES: Final = 32
"""Most messages of a check point: RocketMQ stores acknowledgements in as many bits."""
REVIVE_GROUP: Final = "CID_RMQ_SYS_REVIVE_GROUP"
"""Its offset in the revive topic is the first check point that may be open."""
SINGLE_QUEUE_TOPICS: Final = frozenset({TIMER_TOPIC, HALF_TOPIC, OP_HALF_TOPIC, CHECK_MAX_TIME_TOPIC})
TOPIC_BYTES_MAX: Final = 127
RETRY_TOPIC_BYTES_MAX: Final = 255
FILTER_BYTES_MAX: Final = 4096
"""Longest filter expression, by tags or SQL92."""

_FOREIGN = re.compile(rb"[^%|A-Za-z0-9_-]")


def queues_of_own(topic: str, default: int) -> int:
    """Number of queues of a system topic; `default` for others."""
    if topic == SCHEDULE_TOPIC:
        return DELAY_LEVELS
    if topic == REVIVE_TOPIC:
        return REVIVE_QUEUES
    single = topic in SINGLE_QUEUE_TOPICS or topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX))
    return 1 if single else default


def check_topic(topic: str) -> None:
    """Raise BadTopicError unless RocketMQ accepts the topic name; names the invalid byte in hex."""
    if not isinstance(topic, str) or not topic:
        raise BadTopicError("topic is empty" if isinstance(topic, str) else f"topic is {topic!r}, not text")
    data = topic.encode("utf-8", "surrogatepass")
    if foreign := _FOREIGN.search(data):
        place = foreign.start()
        raise BadTopicError(f"topic {topic[:64]!r} has byte 0x{data[place]:02X} at {place}; allowed are A-Za-z0-9_%|-")
    is_of_group = topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX))
    limit = RETRY_TOPIC_BYTES_MAX if is_of_group else TOPIC_BYTES_MAX
    if len(data) > limit:
        raise BadTopicError(f"topic of {len(data)} bytes exceeds {limit}: {topic[:64]!r}…")


# Groups

GROUP_BYTES_MAX: Final = TOPIC_BYTES_MAX - len(RETRY_PREFIX)
"""Longest name of a new group: its retry and dead-letter topics fit a record of RocketMQ's first version."""
STORED_GROUP_BYTES_MAX: Final = 255
"""Longest name of a group in a store of RocketMQ."""
RETRY_MAX_TIMES: Final = 16
_FOREIGN_IN_GROUP: Final = re.compile(r"[^%|A-Za-z0-9_-]")


def check_group(group: str) -> None:
    """Raise BadRequestError unless the name may be that of a group in a store."""
    if not isinstance(group, str) or not group:
        empty = isinstance(group, str)
        raise BadRequestError("the group's name is empty" if empty else f"group is {group!r}, not text")
    if found := _FOREIGN_IN_GROUP.search(group):
        raise BadRequestError(f"group {group[:64]!r} has {found[0]!r} at {found.start()}; allowed are A-Za-z0-9_%|-")
    if len(group) > STORED_GROUP_BYTES_MAX:
        raise BadRequestError(f"group of {len(group)} bytes exceeds {STORED_GROUP_BYTES_MAX}: {group[:64]!r}…")
    reject_system_group(group)


def check_new_group(group: str) -> None:
    """Raise BadRequestError unless RocketMQ accepts the name for a new group."""
    check_group(group)
    if len(group) > GROUP_BYTES_MAX:
        shown = f"{group[:64]!r}… does not exist"
        raise BadRequestError(f"group of {len(group)} bytes exceeds {GROUP_BYTES_MAX}, the limit of new ones: {shown}")


def reject_system_group(group: str) -> None:
    """Raise BadRequestError for a group that RocketMQ reserves for itself."""
    if group.startswith(SYSTEM_GROUP_PREFIX):
        raise BadRequestError(f"group {group[:64]!r} is a system group: it cannot be joined, moved or deleted")


def retry_topic(group: str) -> str:
    """Topic from which messages are redelivered to a group."""
    return RETRY_PREFIX + group


def pop_retry_topic(group: str, topic: str) -> str:
    """Retry topic for messages of `topic` that were received and not acknowledged in time."""
    return f"{RETRY_PREFIX}{group}_{topic}"


# Redeliveries to simple consumers of topic `b_c` of group `a`, to those of topic `c` of group `a_b`, and to members of
# group `a_b_c` share the topic `%RETRY%a_b_c`. Each copy names its group where the topic alone does not. RocketMQ's
# copies for simple consumers do not, nor do they name their original topic.

RETRY_GROUP: Final = "RETRY_GROUP"
"""Property of a redelivery with its group."""


def retry_owner(group: str) -> dict[str, str]:
    """Properties by which members of a group recognise their redeliveries."""
    return {RETRY_GROUP: group} if "_" in group else {}


def retries_of_group(group: str) -> str:
    """SQL92 condition of the messages of a group in its retry topic, "" for all."""
    return f"{RETRY_GROUP} IS NULL OR {RETRY_GROUP} = '{group}'" if "_" in group else ""


def retries_of_topic(group: str, topic: str) -> str:
    """SQL92 condition of the messages of a group in a topic's retry topic for simple consumers."""
    unnamed = f"{RETRY_GROUP} IS NULL AND (RETRY_TOPIC IS NULL OR RETRY_TOPIC = '{topic}')"
    return f"{RETRY_GROUP} = '{group}' OR ({unnamed})"


def check_retry_topic(name: str) -> None:
    """Raise BadRequestError for a retry topic whose name is too long to exist."""
    if len(name) > RETRY_TOPIC_BYTES_MAX:
        limit = f"has {len(name)} bytes, {RETRY_TOPIC_BYTES_MAX} at most: use a group with a shorter name"
        raise BadRequestError(f"nothing can be redelivered: {name[:64]!r}… {limit}")


def dead_letter_topic(group: str) -> str:
    """Topic for messages with exhausted retries. Raises BadRequestError if not text."""
    if not isinstance(group, str):
        raise BadRequestError(f"group is {group!r}, not text")
    return DEAD_LETTER_PREFIX + group


# Filter expressions


_TAG_SEPARATOR = re.compile("[\x01\x02]")


def parse_tags(expression: str) -> list[str]:
    """Parse a filter `a || b` into tags; empty and `*` give none, which means all.

    Raises FilterSyntaxError with the position of an invalid character.
    """
    _check_filter_size(expression)
    if separator := _TAG_SEPARATOR.search(expression):
        place = separator.start()
        text = f"filter, character {place + 1} (the first is 1): a tag cannot contain byte 0x{ord(separator[0]):02X}"
        raise FilterSyntaxError(text, position=place)
    if expression.strip() in ("", "*"):
        return []
    tags = [tag for part in expression.split("||") if (tag := part.strip())]
    if not tags:
        raise FilterSyntaxError(f"filter {expression[:64]!r} names no tag", position=0)
    return [] if "*" in tags else tags


def check_matchable(tag: str) -> None:
    """Raise BadPropertyError for a tag that no filter can match."""
    if tag and (tag == "*" or "||" in tag or tag != tag.strip()):
        limits = "it may not be *, hold ||, or begin or end with white space"
        raise BadPropertyError(f"no filter can match tag {tag[:64]!r}: {limits}")


def filter_text(tags: Iterable[str], sql: str) -> str:
    """The text of a parsed filter, equal for filters by the same tags."""
    return f"SQL92: {sql.strip()}" if sql.strip() else " || ".join(sorted(set(tags))) or "*"


def check_sql(expression: str) -> str:
    """Check a SQL92 filter. Raises FilterSyntaxError if empty or too long; servers parse it."""
    _check_filter_size(expression)
    if not expression.strip():
        raise FilterSyntaxError("the SQL92 filter is empty")
    return expression


def _check_filter_size(expression: str) -> None:
    if not isinstance(expression, str):
        raise FilterSyntaxError(f"filter {repr(expression)[:64]} is not text")
    size = len(expression.encode("utf-8", "surrogatepass"))
    if size > FILTER_BYTES_MAX:
        raise FilterSyntaxError(f"filter of {size:,} bytes exceeds {FILTER_BYTES_MAX:,}", position=FILTER_BYTES_MAX)
